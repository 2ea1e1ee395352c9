"""How much memory a run needs, and how much there is: of the process on CPU, of MindSpore's allocator elsewhere.

On CPU, MindSpore's allocator tells nothing, and resident size hides what a run needs: pages that an earlier run touched
and freed stay resident, and are used again. The kernel knows which pages were used: ``/proc/self/clear_refs`` forgets
it, and ``Referenced`` in ``/proc/self/smaps_rollup`` counts them anew, so that a run's working set does not depend on
what ran before it; but for blocks in the holes of a long-lived process's heap, which share their pages: some hundred MB
in small blocks were counted a fifth to a third more there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import mindspore as ms

from gaccum_ms.distributed.layout import rank_and_ranks

_PROCESS = Path("/proc/self")
_WARM_UP = 2  # the first run makes the graph and the kernels, the second still uses some 25 MB more than those after it
_REPEATS = 2


class ProcessMeter:
    """The process, on CPU."""

    what = "resident memory of the process"

    def __init__(self) -> None:
        try:
            self._forget()
            _kilobytes(_PROCESS / "smaps_rollup", "Referenced")
        except OSError as error:
            raise RuntimeError(
                f"For 'memory_report', memory on CPU is measured by the pages that a run uses, which needs "
                f"/proc/self/clear_refs and /proc/self/smaps_rollup of Linux, but got '{error}'. Measure outside of "
                f"this sandbox, or on an accelerator."
            ) from error

    @staticmethod
    def _forget() -> None:
        (_PROCESS / "clear_refs").write_text("5")  # the peak of the resident size
        (_PROCESS / "clear_refs").write_text("1")  # which pages were used

    def used_by(self, run: Callable[[], None]) -> int:
        """Bytes that `run` uses, whatever was resident before: its working set, code and weights included."""
        for _ in range(_WARM_UP):
            run()
        return min(self._used_by(run) for _ in range(_REPEATS))

    def _used_by(self, run: Callable[[], None]) -> int:
        self._forget()
        run()
        used = _kilobytes(_PROCESS / "smaps_rollup", "Referenced")
        # Large blocks go back to the system as soon as they are freed, and are in the peak alone.
        given_back = _kilobytes(_PROCESS / "status", "VmHWM") - _kilobytes(_PROCESS / "status", "VmRSS")
        return used + max(0, given_back)

    def held(self) -> int:
        """Bytes that the process holds, after all that it has run."""
        return _kilobytes(_PROCESS / "status", "VmRSS")

    def limit(self) -> int:
        """Bytes that this process may have: this rank's share of the container's limit, or of what is free."""
        free = _kilobytes(Path("/proc/meminfo"), "MemAvailable")
        ranks = rank_and_ranks()[1]
        return min([self.held() + free // ranks, *(limit // ranks for limit in container_limits())])


class AllocatorMeter:
    """MindSpore's allocator, on an accelerator."""

    what = "device memory that MindSpore has allocated"

    def used_by(self, run: Callable[[], None]) -> int:
        """Bytes allocated at the peak of `run` , weights included."""
        run()
        ms.runtime.reset_peak_memory_stats()
        run()
        ms.runtime.synchronize()
        self.peak = ms.runtime.max_memory_allocated()
        return self.peak

    def held(self) -> int:
        """Bytes allocated at the peak of the last run."""
        return self.peak

    def limit(self) -> int:
        """Bytes that MindSpore may allocate: what it has, and what the device has free."""
        device = ms.hal.get_device_properties(ms.get_context("device_id"))
        free = getattr(device, "free_memory", None)
        return device.total_memory if not free else ms.runtime.memory_reserved() + free


def meter() -> ProcessMeter | AllocatorMeter:
    """The one for MindSpore's device."""
    return ProcessMeter() if ms.get_context("device_target") == "CPU" else AllocatorMeter()


def container_limits(root: Path = Path("/")) -> list[int]:
    """The limits, in bytes, of the control groups that this process is in; of version 1 and 2, from within a container
    and from outside. What is not limited is left out."""
    found = []
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
            if text.isdigit() and int(text) < 1 << 60:  # version 1 writes no limit as a number
                found.append(int(text))
    return found


def _kilobytes(file: Path, name: str) -> int:
    """What a file of /proc says, in bytes."""
    match = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
    if match is None:
        raise OSError(f"{file} has no line '{name}'")
    return int(match[1]) * 1024
