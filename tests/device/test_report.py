"""The page of tests for hardware agrees with the marks; a rehearsal on CPU writes the report."""

from __future__ import annotations

import importlib.metadata

import pytest

from gaccum_ms.cpu import instructions
from gaccum_ms.launch import doctor
from tests.device import report
from tests.device.marks import PAGE, page
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
    """It begins with what `gaccum-ms check` says of this machine. Of absent devices it says without MindSpore, sooner,
    that they are absent."""
    monkeypatch.setattr(report, "FOLDER", tmp_path / "out")
    monkeypatch.setenv("DEVICE", "CPU")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "mindspore.py").write_text("raise ImportError")
    check, without = doctor.check_device, {"PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr(doctor, "check_device", lambda name, env: check(name, env if name == "CPU" else env | without))
    assert doctor.main([]) == 0
    machine = capsys.readouterr().out
    version = importlib.metadata.version("mindspore")
    assert f"mindspore  {version}, supported (gaccum_ms needs 2.7.2 to 2.10)\n" in machine
    assert f"CPU speed  {instructions.description()}\nCPU        works\n" in machine
    assert "AllReduce  " in machine
    assert all(len(line) <= 80 or "/" in line for line in machine.splitlines()), "only a path is longer"
    words = ["tests/device/test_devices.py", "-p", "no:cacheprovider", "-k", "data_parallel"]
    assert report.main(words, machine) == 0
    text = (report.FOLDER / "report.md").read_text()
    assert text.startswith("# 2 × CPU, ")
    assert machine.strip() == text.split("```text\n")[1].partition("\n```")[0]
    assert "test_data_parallel_ranks_train_as_one_process` | passed |" in text
    monkeypatch.setenv("DEVICE", "")
    monkeypatch.setattr(report, "FOLDER", tmp_path / "none")
    assert report.main([], machine) == 3, "there is no device to be tested"
    said = capsys.readouterr()
    assert "no device: neither Ascend nor GPU works here, so nothing was tested.\n" in said.err
    assert "Ascend     no: " in said.out
    assert not report.FOLDER.exists()
