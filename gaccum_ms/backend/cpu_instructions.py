"""How far oneDNN may go in the CPU's instructions: no further than AVX2, for networks that convolve.

MindSpore leaves convolutions on CPU to oneDNN, and gives them a memory layout for which oneDNN multiplies matrices, as
long as it may go no further than AVX2; with AVX-512 it takes its reference kernel, some eighty times slower. So does
oneDNN 3, which MindSpore has since 2.9; oneDNN 2, before, multiplies matrices with AVX-512 too.

The limit must be set before oneDNN makes its first kernel, be it of a matrix product. Its own function for that says
whether it still can be.

Nothing here imports MindSpore before it is needed: ``bash run.sh check`` runs this file, which prints what becomes of
convolutions, also where there is no MindSpore.
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
_OLD_VARIABLE = "DNNL_MAX_CPU_ISA"  # which oneDNN reads too
_AVX512_CORE = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}  # what oneDNN takes for AVX-512, by Linux's names

# Of oneDNN's interface in C, dnnl_types.h.
_DNNL_SUCCESS = 0
_DNNL_CPU_ISA_AVX2 = 0x7
_DNNL_CPU_ISA_AVX512_BIT = 0x20

_LIMITED = (
    f"gaccum_ms limits oneDNN to {AVX2} on this CPU with AVX-512: {VARIABLE}={AVX2}. Without, MindSpore's convolutions "
    f"take up to eighty times as long. Set {VARIABLE} yourself to choose otherwise, {VARIABLE}=ALL for no limit."
)
_TOO_LATE = (
    f"On this CPU with AVX-512 MindSpore's convolutions take up to eighty times as long as with {VARIABLE}={AVX2}, "
    f"which can no longer be set: a kernel has run in this process already. Set it in the environment, or call "
    f"gaccum_ms.tune_cpu() before anything computes. {VARIABLE}=ALL says that it is to be so."
)


def has_avx512(record: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this is a CPU with AVX-512, by Linux's own record; elsewhere, taken for one without."""
    try:
        lines = record.read_text().splitlines()
    except OSError:
        return False
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return set(flags) >= _AVX512_CORE


def is_onednn_2() -> bool:
    """Whether the MindSpore that is installed has oneDNN 2: one before 2.9."""
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 9)


def chosen() -> str:
    """What the environment says of the limit, as ``name=value`` ; empty: nothing."""
    return next((f"{name}={os.environ[name]}" for name in (VARIABLE, _OLD_VARIABLE) if name in os.environ), "")


def description() -> str:
    """What becomes of convolutions on this CPU, in a line."""
    if not has_avx512():
        return "no AVX-512, so convolutions run by its fast kernels"
    if is_onednn_2():
        return "oneDNN 2, whose convolutions are fast with AVX-512 too"
    if chosen():
        return f"{chosen()} is set, and kept"
    return f"AVX-512: gaccum_ms sets {VARIABLE}={AVX2} for networks that convolve; {VARIABLE}=ALL refuses"


def limit_instructions() -> None:
    """Limit oneDNN in this process, and those that it starts, to AVX2, and say so; or warn that it is too late. Not on
    a CPU without AVX-512, not with oneDNN 2, and not where the environment says anything of the limit."""
    if chosen() or not has_avx512() or is_onednn_2():
        return
    if _limit_this_process():
        os.environ[VARIABLE] = AVX2
        from mindspore import log

        log.warning(_LIMITED)
    else:
        _warn_that_it_is_too_late()


@functools.cache  # one warning, however many steps are built
def _warn_that_it_is_too_late() -> None:
    warnings.warn(_TOO_LATE, UserWarning, stacklevel=6)


def _limit_this_process() -> bool:
    """Whether oneDNN has taken the limit, or had no AVX-512 before. Where MindSpore's oneDNN is not found, the
    variable alone must do."""
    import mindspore

    for library in (Path(mindspore.__file__).parent / "lib").glob("libdnnl.so*"):  # which MindSpore has loaded by now
        onednn = ctypes.CDLL(str(library))
        if onednn.dnnl_set_max_cpu_isa(_DNNL_CPU_ISA_AVX2) != _DNNL_SUCCESS:
            return not onednn.dnnl_get_effective_cpu_isa() & _DNNL_CPU_ISA_AVX512_BIT
    return True


if __name__ == "__main__":
    print(description())
