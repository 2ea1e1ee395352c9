"""A network that convolves sets oneDNN's limit, if it is needed and still possible.

The programs run in processes without a limit. They need a CPU with AVX-512 and oneDNN 3 (MindSpore 2.9 and later).
"""

from __future__ import annotations

import importlib.metadata

import pytest

from gaccum_ms.cpu import instructions
from gaccum_ms.cpu.instructions import VARIABLE, description, has_avx512, is_onednn_2

with_avx512 = pytest.mark.skipif(
    not has_avx512() or is_onednn_2(), reason="no AVX-512, or MindSpore before 2.9: there is nothing to limit"
)

# oneDNN's instruction sets, with a bit for AVX-512, are read last, because reading them fixes the limit.
PROGRAM = """
import ctypes, os
from pathlib import Path
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)  # of the tests
os.environ |= {variables}
import mindspore as ms
from mindspore import nn, ops
import gaccum_ms
from tests.support.reference import make_step
ms.set_context(mode={mode})
convolving = nn.SequentialCell(nn.Conv2d(3, 8, 3), nn.Flatten())
{before}
step = make_step(nn.WithLossCell(convolving, nn.MSELoss()), micro_size=2)
step(ops.ones((4, 3, 8, 8)), ops.ones((4, 512))).asnumpy()
(library,) = (Path(ms.__file__).parent / "lib").glob("libdnnl.so*")
avx512 = bool(ctypes.CDLL(str(library)).dnnl_get_effective_cpu_isa() & 0x20)
print("AVX-512:", avx512, os.environ.get("ONEDNN_MAX_CPU_ISA"))
"""


@pytest.fixture
def trained(programs, tmp_path):
    """A function that returns the output of a program that trains."""

    def output(before="", mode="ms.GRAPH_MODE", **variables: str) -> str:
        (tmp_path / "script.py").write_text(PROGRAM.format(before=before, mode=mode, variables=variables))
        done = programs.run(tmp_path / "script.py", folder=tmp_path, ONEDNN_VERBOSE="1")
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return output


def convolution_kernels(printed: str) -> set[str]:
    """Those that ran, by oneDNN's own record."""
    fields = [line.split(",") for line in printed.splitlines() if ",exec,cpu,convolution," in line]
    return {one[one.index("convolution") + 1] for one in fields}  # oneDNN 3 has more fields before it than oneDNN 2


@with_avx512
def test_a_network_that_convolves_is_kept_from_avx512_and_one_line_says_so(trained):
    """The variable is set for the processes that this one starts. No convolution runs by the reference kernel."""
    printed = trained()
    assert "AVX-512: False AVX2\n" in printed
    (line,) = (line for line in printed.splitlines() if VARIABLE in line)
    assert line.startswith("[WARNING]")
    assert f"{VARIABLE}=AVX2. " in line and f"{VARIABLE}=ALL for no limit" in line
    kernels = convolution_kernels(printed)
    assert kernels
    assert not any("ref" in kernel for kernel in kernels), kernels


@with_avx512
def test_where_a_kernel_has_run_one_warning_says_what_to_do(trained):
    """Two steps are built. The variable stays unset, because it would not be this process's limit."""
    computes = "ops.matmul(ms.Tensor([[1.0]]), ms.Tensor([[1.0]])).asnumpy()"
    another = "make_step(nn.WithLossCell(convolving, nn.MSELoss()), micro_size=2)"
    printed = trained(before=f"{computes}\n{another}")
    assert "AVX-512: True None\n" in printed
    (warning,) = (line for line in printed.splitlines() if "Warning: " in line and VARIABLE in line)
    assert "can no longer be set: a kernel has run in this process already" in warning
    assert "Set it in the environment, or call gaccum_ms.tune_cpu() before anything computes" in warning


@with_avx512
def test_what_the_environment_says_stays(trained):
    """With ALL, convolutions run by the reference kernel. If that changes, the limit is no longer needed."""
    tunes = "gaccum_ms.tune_cpu(network=convolving)"
    printed = trained(before=tunes, mode="ms.PYNATIVE_MODE", **{VARIABLE: "ALL"})
    assert "AVX-512: True ALL\n" in printed
    assert "gaccum_ms limits" not in printed and "Warning: " not in printed
    assert any("ref" in kernel for kernel in convolution_kernels(printed)), printed


def test_check_says_what_becomes_of_convolutions(monkeypatch):
    """What `bash run.sh check` prints."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(instructions, "has_avx512", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    assert description() == f"convolutions are fast, because gaccum_ms sets {VARIABLE}=AVX2"
    monkeypatch.setenv(VARIABLE, "AVX")
    assert description() == f"{VARIABLE}=AVX decides how fast convolutions are"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.0")
    assert description() == "convolutions are fast"
