"""The page of tests for hardware agrees with the marks; a rehearsal on CPU writes the report."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest

from gaccum_ms.cpu import instructions
from tests.device import report
from tests.device.marks import PAGE, ROOT, page
from tests.support.device import DEVICE


def test_the_page_has_all_marked_tests():
    assert PAGE.read_text() == page(), "write it by: python tests/device/marks.py"


def test_the_device_is_that_which_works_or_is_asked_for(monkeypatch):
    monkeypatch.delenv("DEVICE", raising=False)
    machine = "CPU        works\nGPU        no: there is no NVIDIA driver\nAscend     no: what\nAllReduce  works on 2\n"
    assert report.chosen(machine) is None
    assert report.chosen(machine.replace("no: what", "works")) == "Ascend"
    monkeypatch.setenv("DEVICE", "CPU")
    assert report.chosen(machine) == "CPU"
    monkeypatch.setenv("DEVICE", "GPU")
    assert report.chosen(machine) is None


@pytest.mark.distributed
@pytest.mark.skipif(DEVICE != "CPU", reason="there is a device")
def test_a_rehearsal_on_cpu_writes_the_report(tmp_path, monkeypatch, capsys):
    """It begins with what `gaccum-ms check` says of this machine."""
    env = {**os.environ, "DEVICE": "CPU", "GACCUM_MS_DEVICE_REPORT": str(tmp_path / "out"), "CUDA_VISIBLE_DEVICES": ""}
    words = ["tests/device/test_devices.py", "-p", "no:cacheprovider", "-k", "data_parallel"]
    command = [sys.executable, str(ROOT / "tests" / "device" / "report.py"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    text = (tmp_path / "out" / "report.md").read_text()
    assert text.startswith("# 2 × CPU, ")
    assert "test_data_parallel_ranks_train_as_one_process` | passed |" in text
    machine = text.split("```text\n")[1].partition("```")[0]
    version = importlib.metadata.version("mindspore")
    assert f"mindspore  {version}, supported (gaccum_ms needs 2.7.2 to 2.10)\n" in machine
    assert f"CPU speed  {instructions.description()}\nCPU        works\n" in machine
    assert "AllReduce  " in machine
    assert all(len(line) <= 80 or "/" in line for line in machine.splitlines()), "only a path is longer"
    monkeypatch.setenv("DEVICE", "")
    monkeypatch.setattr(report, "FOLDER", tmp_path / "report")
    assert report.main([], machine) == 3, "there is no device to be tested"
    said = capsys.readouterr()
    assert "no device: neither Ascend nor GPU works here, so nothing was tested.\n" in said.err
    assert "Ascend     no: " in said.out
    assert not (tmp_path / "report").exists()
