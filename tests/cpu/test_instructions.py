"""Every way to start training sets oneDNN's limit, if it is needed and still possible.

The cases are in instructions_worker.py, in processes without a limit. They need a CPU with AVX-512 and oneDNN 3
(MindSpore 2.9 and later); elsewhere nothing may be set.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gaccum_ms.cpu import instructions
from gaccum_ms.cpu.instructions import VARIABLE, description, has_avx512, is_onednn_2

ROOT = Path(__file__).resolve().parents[2]
OLD_VARIABLE = "DNNL_MAX_CPU_ISA"

LIMIT = ("train", "build_an_accumulator", "tune_for_a_network_that_convolves")
LEAVE = "build_steps_that_do_not_convolve"
TOO_LATE = "build_two_steps_too_late"
IN_PYNATIVE_MODE = "train_a_model_in_pynative_mode"

with_avx512 = pytest.mark.skipif(
    not has_avx512() or is_onednn_2(), reason="no AVX-512, or MindSpore before 2.9: there is nothing to limit"
)


def run(out: Path, *cases: str, **variables: str) -> dict[str, dict[str, Any]]:
    """The record and the output of each case."""
    env = {k: v for k, v in os.environ.items() if k not in (VARIABLE, OLD_VARIABLE, "GLOG_v")}
    env |= {"PYTHONPATH": str(ROOT), "ONEDNN_VERBOSE": "1", **variables}
    command = [sys.executable, str(Path(__file__).with_name("instructions_worker.py")), str(out), *cases]
    finished = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, timeout=1500)
    found = {}
    for case in cases:
        printed = (out / f"{case}.txt").read_text()
        assert (out / f"{case}.json").exists(), finished.stderr + printed
        found[case] = json.loads((out / f"{case}.json").read_text()) | {"printed": printed}
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """What `run` returns of an environment without the variable."""
    return run(tmp_path_factory.mktemp("bare"), *LIMIT, LEAVE, TOO_LATE)


@with_avx512
@pytest.mark.parametrize("case", LIMIT)
def test_a_network_that_convolves_is_kept_from_avx512_and_one_line_says_so(bare, case):
    """The variable is set for the processes that this one starts."""
    found = bare[case]
    assert (found["avx512"], found["variable"], found["warnings"]) == (False, "AVX2", [])
    lines = [line for line in found["printed"].splitlines() if VARIABLE in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("[WARNING]")
    assert f"{VARIABLE}=AVX2" in lines[0]
    assert f"{VARIABLE}=ALL for no limit" in lines[0]


def convolution_kernels(printed: str) -> set[str]:
    fields = [line.split(",") for line in printed.splitlines() if ",exec,cpu,convolution," in line]
    return {one[one.index("convolution") + 1] for one in fields}  # oneDNN 3 has more fields before it than oneDNN 2


@with_avx512
def test_no_convolution_runs_by_the_reference_kernel(bare):
    """oneDNN's own record lists the kernels that ran."""
    kernels = convolution_kernels(bare["train"]["printed"])
    assert kernels
    assert not any("ref" in kernel for kernel in kernels), kernels


@with_avx512
def test_a_network_that_does_not_convolve_is_left_alone(bare):
    found = bare[LEAVE]
    assert (found["avx512"], found["variable"], found["warnings"]) == (True, None, [])
    assert VARIABLE not in found["printed"]


@with_avx512
def test_where_a_kernel_has_run_one_warning_says_what_to_do(bare):
    """Two steps are built. The variable stays unset, because it would not be this process's limit."""
    found = bare[TOO_LATE]
    assert (found["avx512"], found["variable"]) == (True, None)
    (warning,) = found["warnings"]
    assert "can no longer be set: a kernel has run in this process already" in warning
    assert "Set it in the environment, or call gaccum_ms.tune_cpu() before anything computes" in warning


@with_avx512
def test_what_the_environment_says_stays(tmp_path):
    """With ALL, convolutions run by the reference kernel. If that changes, the limit is no longer needed."""
    for case, found in run(tmp_path, IN_PYNATIVE_MODE, "tune", TOO_LATE, **{VARIABLE: "ALL"}).items():
        assert (found["avx512"], found["variable"], found["warnings"]) == (True, "ALL", []), case
        assert "gaccum_ms limits" not in found["printed"], case
    printed = (tmp_path / f"{IN_PYNATIVE_MODE}.txt").read_text()
    assert any("ref" in kernel for kernel in convolution_kernels(printed)), printed


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512dq avx512bw avx512vl avx512_vnni", True),
        ("flags\t\t: fpu avx2 avx512f avx512dq avx512cd", False),  # Xeon Phi, where oneDNN uses AVX2
        ("Features\t: fp asimd sve", False),  # ARM
    ],
)
def test_what_is_a_cpu_with_avx512(tmp_path, flags, found):
    record = tmp_path / "cpuinfo"
    record.write_text(f"processor\t: 0\nmodel name\t: avx512f avx512dq avx512bw avx512vl\n{flags}\n\nprocessor\t: 1\n")
    assert has_avx512(record) is found
    assert has_avx512(tmp_path / "none") is False


def test_check_says_what_becomes_of_convolutions(monkeypatch):
    """What `bash run.sh check` prints."""
    for name in (VARIABLE, OLD_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(instructions, "has_avx512", lambda: True)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")
    assert description() == f"convolutions are fast, because gaccum_ms sets {VARIABLE}=AVX2"
    monkeypatch.setenv(OLD_VARIABLE, "AVX")
    assert description() == f"{OLD_VARIABLE}=AVX decides how fast convolutions are"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.0")
    assert description() == "convolutions are fast"
    monkeypatch.setattr(instructions, "has_avx512", lambda: False)
    assert description() == "convolutions are fast"
