"""The memory that this rank may take, if the user gives no limit."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import mindspore as ms
import psutil
from mindspore import ops

from gaccum_ms.backend import no_grad
from gaccum_ms.distributed.layout import rank_and_ranks

# The vendors' libraries, with their functions to set a thread's device and to read its free memory.
_LIBRARIES = {
    "libascendcl.so": ("aclrtSetDevice", "aclrtGetMemInfo", (1,)),  # ACL_HBM_MEM
    "libcudart.so": ("cudaSetDevice", "cudaMemGetInfo", ()),
}

# For versions 2 and 1 of control groups: a process's group in /proc/self/cgroup, where groups are, and the limit.
_GROUPS = (
    (r"^0::/(.*)$", "sys/fs/cgroup", "memory.max"),
    (r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$", "sys/fs/cgroup/memory", "memory.limit_in_bytes"),
)


def on_cpu() -> bool:
    return ms.get_context("device_target") == "CPU"


def default_limit() -> int:
    """Bytes: on CPU, for the process, this rank's share of the container's limit, or of the host's free memory; on
    accelerators, for MindSpore's allocator, what it has reserved, and the device's free memory."""
    if on_cpu():
        ranks = rank_and_ranks()[1]
        free = psutil.Process().memory_info().rss + psutil.virtual_memory().available // ranks
        return min([free, *(limit // ranks for limit in container_limits())])
    with no_grad():
        ops.zeros((1,), ms.float32).asnumpy()  # before its first kernel, a device reports nothing
    return ms.runtime.memory_reserved() + device_memory_free(ms.get_context("device_id"))


def device_memory_free(device: int, maps: Path = Path("/proc/self/maps")) -> int:
    """Free bytes, from the vendor's runtime that MindSpore has loaded. MindSpore itself reports them only in
    `mindspore.hal` , which is deprecated, and not on GPU."""
    loaded, told = maps.read_text(), f"a process without any of {list(_LIBRARIES)}"
    for name, (set_device, get_info, kind) in _LIBRARIES.items():
        path = re.search(rf"/\S*/{re.escape(name)}\S*$", loaded, re.MULTILINE)
        if path is None:
            continue
        library = ctypes.CDLL(path[0])
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        failed = getattr(library, set_device)(device)
        failed = failed or getattr(library, get_info)(*kind, ctypes.byref(free), ctypes.byref(total))
        if not failed and free.value:
            return free.value
        told = f"error {failed} from '{get_info}', {free.value} of {total.value} bytes free"
    raise RuntimeError(
        f"For 'memory_report', the free memory of device {device} must be known, but got {told}. Give 'memory_limit'."
    )


def container_limits(root: Path = Path("/")) -> list[int]:
    """The memory limits, in bytes, of this process's control groups, seen from within a container and from outside."""
    limits = []
    groups = root / "proc/self/cgroup"
    text = groups.read_text() if groups.exists() else ""
    for pattern, folder, name in _GROUPS:
        for path in re.findall(pattern, text, re.MULTILINE):
            group = root / folder / path
            for place in (group, *group.parents):  # a limit of a group holds for all groups below it
                limit = (place / name).read_text().strip() if (place / name).exists() else "max"
                if limit.isdigit():
                    limits.append(int(limit))
    return limits
