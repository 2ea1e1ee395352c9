"""Limits oneDNN's CPU instructions to AVX2, for networks with convolutions.

MindSpore runs convolutions on CPU by oneDNN, with a memory layout for which oneDNN multiplies matrices if it is limited
to AVX2. With AVX-512, oneDNN 3 (in MindSpore since 2.9) uses its reference kernel instead, which is about eighty times
slower. oneDNN 2 (in older versions) multiplies matrices with AVX-512 too.

The limit must be set before oneDNN creates its first kernel, even one of a matrix product. oneDNN's own function for
the limit returns whether it is still possible.

This file imports MindSpore only when needed: ``bash run.sh check`` runs it, also without MindSpore, to print how
convolutions will run.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import os
import re
import warnings
from pathlib import Path

VARIABLE = "ONEDNN_MAX_CPU_ISA"
AVX2 = "AVX2"
_AVX512_CORE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}  # Linux's flags; with all four, oneDNN uses AVX-512

# From oneDNN's C interface, dnnl_types.h.
_DNNL_SUCCESS = 0
_DNNL_CPU_ISA_AVX2 = 0x7
_DNNL_CPU_ISA_AVX512_BIT = 0x20

_LIMITED = (
    f"gaccum_ms limits oneDNN to {AVX2} on this CPU with AVX-512: {VARIABLE}={AVX2}. Without, MindSpore's convolutions "
    f"take up to eighty times as long. Set {VARIABLE} yourself to choose otherwise, {VARIABLE}=ALL for no limit. "
    f"Other kernels round otherwise: to compare with a training without gaccum_ms, start that with {VARIABLE}={AVX2} "
    f"in its environment too."
)
_TOO_LATE = (
    f"On this CPU with AVX-512 MindSpore's convolutions take up to eighty times as long as with {VARIABLE}={AVX2}, "
    f"which can no longer be set: a kernel has run in this process already. Set it in the environment, or call "
    f"gaccum_ms.tune_cpu() before anything computes. {VARIABLE}=ALL says that it is to be so."
)


def has_avx512(record: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has AVX-512, according to Linux; False on other systems."""
    try:
        lines = record.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return set(flags) >= _AVX512_CORE


def is_onednn_2() -> bool:
    """Whether the installed MindSpore has oneDNN 2, as before version 2.9."""
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 9)


def description() -> str:
    """How convolutions run on this CPU, for `gaccum-ms check` ."""
    if not has_avx512() or is_onednn_2():
        return "convolutions are fast"
    if VARIABLE in os.environ:
        return f"{VARIABLE}={os.environ[VARIABLE]} decides how fast convolutions are"
    return f"convolutions are fast, because gaccum_ms sets {VARIABLE}={AVX2}"


def limit_instructions() -> None:
    """Limit oneDNN to AVX2, in this process and those that it starts, and log it; or warn that it is too late. Nothing
    is done on a CPU without AVX-512, with oneDNN 2, or if the environment sets a limit."""
    if VARIABLE in os.environ or not has_avx512() or is_onednn_2():
        return
    if _limit_this_process():
        os.environ[VARIABLE] = AVX2
        from mindspore import log

        log.warning(_LIMITED)
    else:
        _warn_that_it_is_too_late()


@functools.cache  # one warning per process
def _warn_that_it_is_too_late() -> None:
    warnings.warn(_TOO_LATE, UserWarning, stacklevel=6)


def _limit_this_process() -> bool:
    """Whether oneDNN has accepted the limit, or did not use AVX-512 before. If MindSpore's oneDNN is not found, only
    the variable limits it."""
    import mindspore

    for library in (Path(mindspore.__file__).parent / "lib").glob("libdnnl.so*"):  # MindSpore has already loaded it
        onednn = ctypes.CDLL(str(library))
        if onednn.dnnl_set_max_cpu_isa(_DNNL_CPU_ISA_AVX2) != _DNNL_SUCCESS:
            return not onednn.dnnl_get_effective_cpu_isa() & _DNNL_CPU_ISA_AVX512_BIT
    return True


if __name__ == "__main__":
    print(description())
