"""The memory of a run, and the available memory: the process's on CPU, MindSpore's allocator's elsewhere.

On CPU, MindSpore's allocator reports nothing, and resident size never falls by as much as a run has freed. So each run
has its own process (child.py).
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import ops

from gaccum_ms.backend import no_grad
from gaccum_ms.distributed.layout import rank_and_ranks
from gaccum_ms.memory.child import Usage, run_in_child
from gaccum_ms.memory.proc import forget_peak, own, sizes_in


class ProcessMeter:
    """The process, on CPU."""

    what = "resident memory of the process"

    def __init__(self) -> None:
        try:
            forget_peak()
            if not (own("VmHWM") and sizes_in("/proc/self/smaps_rollup")["Rss"]):
                raise OSError("/proc/self has no 'VmHWM' or no 'Rss'")
        except OSError as error:
            raise RuntimeError(
                f"For 'memory_report', memory on CPU is measured by the peak of a process's resident size, which needs "
                f"/proc/self/clear_refs, /proc/self/smaps_rollup and VmHWM in /proc/self/status of Linux, but got "
                f"'{error}'. Measure outside of this sandbox, or on an accelerator."
            ) from error

    def usage(self, owner: str, limit: int, run: Callable[[], Any]) -> Usage:
        """Bytes of this process and of a copy in which `run` runs."""
        return run_in_child(owner, limit, run)

    def limit(self) -> int:
        """Bytes for this process: this rank's share of the container's limit, or of the host's free memory."""
        free = sizes_in("/proc/meminfo")["MemAvailable"]
        ranks = rank_and_ranks()[1]
        return min([own("VmRSS") + free // ranks, *(limit // ranks for limit in container_limits())])


class AllocatorMeter:
    """MindSpore's allocator, on an accelerator."""

    what = "device memory that MindSpore has allocated"

    def usage(self, owner: str, limit: int, run: Callable[[], Any]) -> Usage:
        """Bytes allocated by `run` , which runs here, weights included."""
        ms.runtime.reset_peak_memory_stats()
        run()
        ms.runtime.synchronize()
        return Usage(ms.runtime.max_memory_allocated(), ms.runtime.memory_allocated())

    def limit(self) -> int:
        """Bytes that MindSpore may allocate: its reserved memory, and the device's free memory."""
        with no_grad():
            ops.zeros((1,), ms.float32).asnumpy()  # before its first kernel, a device reports nothing
        return ms.runtime.memory_reserved() + device_memory_free(ms.get_context("device_id"))


# The vendors' libraries, with their functions to set a thread's device and to read its free memory.
_LIBRARIES = {
    "libascendcl.so": ("aclrtSetDevice", "aclrtGetMemInfo", (1,)),  # ACL_HBM_MEM
    "libcudart.so": ("cudaSetDevice", "cudaMemGetInfo", ()),
}


def device_memory_free(device: int, maps: Path = Path("/proc/self/maps")) -> int:
    """Free bytes, from the vendor's runtime that MindSpore has loaded. MindSpore itself reports them only in
    `mindspore.hal` , which is deprecated, and not on GPU."""
    for path in re.findall(r"/\S*$", maps.read_text(), re.MULTILINE):
        name = next((name for name in _LIBRARIES if Path(path).name.startswith(name)), None)
        if name is None:
            continue
        library = ctypes.CDLL(path)
        set_device, get_info, kind = _LIBRARIES[name]
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        failed = getattr(library, set_device)(device)
        failed = failed or getattr(library, get_info)(*kind, ctypes.byref(free), ctypes.byref(total))
        if not failed and free.value:
            return free.value
        raise RuntimeError(
            f"For 'memory_report', '{get_info}' must tell the free memory of device {device}, but got error {failed}, "
            f"{free.value} of {total.value} bytes free. Give 'memory_limit'."
        )
    raise RuntimeError(
        f"For 'memory_report', the free memory of device {device} must be known, but got a process without any of "
        f"{list(_LIBRARIES)}. Give 'memory_limit'."
    )


def meter() -> ProcessMeter | AllocatorMeter:
    """The meter for MindSpore's device."""
    return ProcessMeter() if ms.get_context("device_target") == "CPU" else AllocatorMeter()


def container_limits(root: Path = Path("/")) -> list[int]:
    """The memory limits, in bytes, of this process's control groups, of version 1 and 2, seen from within a container
    and from outside. Groups without limit are left out."""
    limits = []
    for line in (root / "proc/self/cgroup").read_text().splitlines() if (root / "proc/self/cgroup").exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = folder / path.lstrip("/")
        # A limit of a group holds for all groups below it.
        for place in (group, *(parent for parent in group.parents if parent == folder or folder in parent.parents)):
            text = (place / name).read_text().strip() if (place / name).exists() else "max"
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes a huge number for no limit
                limits.append(int(text))
    return limits
