"""``bash run.sh test device``: describes the machine, runs the tests for devices, and writes one report.

Without a device it reports this and exits with 3. The variable ``DEVICE`` chooses one; CPU is a rehearsal.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from gaccum_ms.launch import cuda

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "device"
NO_DEVICE = 3
DEVICES = ("Ascend", "GPU")
TOOLS = {"GPU": ["nvidia-smi"], "Ascend": ["npu-smi", "info"]}


def said_by(command: list[str]) -> str:
    """The output of a program, or the reason that it cannot run."""
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed\n"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, errors="replace")
    return done.stdout + done.stderr


def count(device: str) -> int:
    """The number of devices, or of ranks in a rehearsal."""
    if device == "GPU":
        return said_by(["nvidia-smi", "-L"]).count("GPU ")
    if device == "Ascend":
        return sum(bool(re.fullmatch(r"davinci\d+", path.name)) for path in Path("/dev").iterdir())
    return 2


def chosen(machine: str) -> str | None:
    """The working device that ``DEVICE`` names, or without it the first that works; None if there is none."""
    works = [device for device in (*DEVICES, "CPU") if re.search(rf"^{device} +works$", machine, re.MULTILINE)]
    asked = os.environ.get("DEVICE")
    if asked:
        return asked if asked in works else None
    return next((device for device in works if device != "CPU"), None)


def results(file: Path) -> list[str]:
    """The tests' part of the report, from pytest's file of results."""
    rows, details = [], []
    for case in ElementTree.parse(file).iter("testcase"):
        bad = next((one for kind in ("failure", "error", "skipped") for one in case.iter(kind)), None)
        result = "passed" if bad is None else {"failure": "FAILED", "error": "FAILED"}.get(bad.tag, bad.tag)
        name = f"{case.get('classname', '')}.{case.get('name')}".removeprefix("tests.")
        rows.append(f"| `{name}` | {result} | {float(case.get('time', 0)):.1f} |")
        if bad is not None:
            details += [f"## {name}", "", "```text", (bad.text or bad.get("message") or "").strip(), "```", ""]
        for one in case.iter("property"):
            details += [f"## {name}: {one.get('name')}", "", "```text", (one.get("value") or "").strip(), "```", ""]
    return ["| test | result | seconds |", "| --- | --- | --- |", *rows, "", *details]


def main(words: list[str], machine: str) -> int:
    """Test the chosen device of a machine that `gaccum-ms check` has described, and return the exit code."""
    print(machine, end="", flush=True)
    device = chosen(machine)
    if device is None:
        print("no device: neither Ascend nor GPU works here, so nothing was tested.", file=sys.stderr)
        return NO_DEVICE
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    ranks = count(device)
    machine += said_by(TOOLS[device]) if device in TOOLS else ""
    env = {**os.environ, "DEVICE": device, "GACCUM_MS_DEVICE": device, "GACCUM_MS_DEVICES": str(ranks)}
    env |= cuda.environment(FOLDER / ".cuda", env) if device == "GPU" else {}
    file = FOLDER / "tests.xml"
    pytest = [sys.executable, "-m", "pytest", "-m", "device", "--junitxml", str(file), "-o", "junit_family=xunit1"]
    code = subprocess.run([*pytest, *words], cwd=ROOT, env=env).returncode
    head = [f"# {ranks} × {device}, {time.strftime('%Y-%m-%d %H:%M')}", "", "```text", machine.strip(), "```", ""]
    (FOLDER / "report.md").write_text("\n".join([*head, *(results(file) if file.exists() else []), ""]))
    print(f"the report is {FOLDER / 'report.md'}")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], said_by([sys.executable, "-m", "gaccum_ms.launch.doctor"])))
