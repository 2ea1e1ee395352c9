"""The page of tests for hardware agrees with the marks; a rehearsal on CPU writes the report."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.device import report
from tests.device.marks import PAGE, ROOT, marked, page
from tests.support.device import DEVICE


def test_the_page_has_all_marked_tests():
    assert PAGE.read_text() == page(), "write it by: python tests/device/marks.py"


@pytest.mark.thorough
def test_the_tests_on_the_page_are_those_that_pytest_finds():
    marks = marked()
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "device", *{mark.file for mark in marks}]
    env = {**os.environ, "PYTEST_ADDOPTS": ""}  # the user's options may change how tests are listed
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    collected = {line.partition("::")[2].partition("[")[0] for line in done.stdout.splitlines() if "::" in line}
    assert collected == {mark.name for mark in marks}


def test_the_device_is_that_which_works_or_is_asked_for(monkeypatch):
    monkeypatch.delenv("DEVICE", raising=False)
    machine = "CPU        works\nGPU        no: there is no NVIDIA driver\nAscend     no: what\nAllReduce  works on 2\n"
    assert report.chosen(machine) is None
    assert report.chosen(machine.replace("no: what", "works")) == "Ascend"
    assert report.chosen(machine.replace("no: there is no NVIDIA driver", "works")) == "GPU"
    monkeypatch.setenv("DEVICE", "CPU")
    assert report.chosen(machine) == "CPU"
    monkeypatch.setenv("DEVICE", "GPU")
    assert report.chosen(machine) is None


def test_results_that_failed_say_why(tmp_path):
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="tests.a.test_b" name="test_c" time="1.25"/>'
        '<testcase classname="tests.a.test_b" name="test_d[4]" time="2"><failure message="m">E  assert 1 == 2</failure>'
        '<properties><property name="table" value="1 2"/></properties></testcase></testsuite></testsuites>'
    )
    text = "\n".join(report.results(tmp_path / "tests.xml"))
    assert "| `a.test_b.test_c` | passed | 1.2 |" in text
    assert "| `a.test_b.test_d[4]` | FAILED | 2.0 |" in text
    assert "E  assert 1 == 2" in text
    assert "table\n\n```text\n1 2\n```" in text


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory) -> str:
    """The report of a rehearsal on CPU, of two tests."""
    out = tmp_path_factory.mktemp("rehearsal") / "out"
    env = {**os.environ, "DEVICE": "CPU", "GACCUM_MS_DEVICE_REPORT": str(out), "CUDA_VISIBLE_DEVICES": ""}
    words = ["tests/device/test_devices.py", "tests/end_to_end/test_equivalence.py", "-p", "no:cacheprovider"]
    words += ["-k", "test_benchmarks_measure or (equals_the_whole_batch and dense-2-13-sgd)"]
    command = [sys.executable, str(ROOT / "tests" / "device" / "report.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return (out / "report.md").read_text()


@pytest.mark.thorough
def test_a_rehearsal_on_cpu_writes_the_report(rehearsal):
    assert rehearsal.startswith("# 2 × CPU, ")
    assert "mindspore  " in rehearsal
    assert "test_equals_the_whole_batch[dense-2-13-sgd-graph-float32]` | passed |" in rehearsal
    assert "test_benchmarks_measure` | passed |" in rehearsal
    assert "test_benchmarks_measure: table" in rehearsal


@pytest.mark.thorough
@pytest.mark.skipif(DEVICE != "CPU", reason="there is a device")
def test_without_a_device_the_command_says_so_and_exits_with_3(rehearsal, tmp_path, monkeypatch, capsys):
    """The machine is this one, as the rehearsal describes it."""
    machine = rehearsal.split("```text\n")[1].partition("```")[0]
    monkeypatch.setenv("DEVICE", "")
    monkeypatch.setattr(report, "FOLDER", tmp_path / "report")
    assert report.chosen(machine) is None
    assert report.main([], machine) == 3
    said = capsys.readouterr()
    assert "no device: neither Ascend nor GPU works here, so nothing was tested.\n" in said.err
    assert "Ascend     no: " in said.out
    assert not (tmp_path / "report").exists()
