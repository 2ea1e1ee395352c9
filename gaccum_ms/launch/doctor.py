"""`gaccum-ms check` : whether this machine can train. It looks at packages, devices, and ranks that communicate.

Each part is tried in a process of its own, with the environment that the launcher sets. Each broken part is reported
with a remedy, and makes the exit code 1. A part that is only absent, such as a GPU, does not.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from gaccum_ms.launch import cuda
from gaccum_ms.launch.cluster import COLLECTIVE_TIMEOUT, Cluster
from gaccum_ms.launch.command_line import Parser
from gaccum_ms.launch.output import say, show

# Training's own rule, run as a separate program, because the launcher does not import the other packages.
CPU_INSTRUCTIONS = Path(__file__).parents[1] / "cpu" / "instructions.py"
DESCRIPTION = (
    "Say what is installed, which devices MindSpore can use, and whether two ranks can add numbers. Whatever is "
    "broken is named with its remedy, and the exit code is then 1. Nothing is installed or changed."
)
DEVICE_SECONDS = 120
RANKS_SECONDS = 180
MINDSPORE = "mindspore>=2.7.2,<2.11"
PACKAGES = (  # what pip installs, the first version that is right and the first that is not, and what is said of it
    ("numpy<2", [1], [2], ""),
    ("psutil", [0], [1000], ""),
    (MINDSPORE, [2, 7, 2], [2, 11], ", {}supported (gaccum_ms needs 2.7.2 to 2.10)"),
)
# These import nothing of ours, so their failures are MindSpore's.
COMPUTES = """
import sys, mindspore as ms
ms.set_device(sys.argv[1])
assert float((ms.Tensor([1.0]) + 1.0).asnumpy()[0]) == 2.0, "1 + 1 is not 2"
"""
COMMUNICATES = """
import mindspore as ms
from mindspore.communication import get_group_size, init
ms.set_device("CPU")
init()
assert float(ms.ops.AllReduce()(ms.Tensor([1.0])).asnumpy()[0]) == get_group_size(), "the sum over ranks is wrong"
"""


class Finding(NamedTuple):
    """One line of the report, and the remedy if it is broken."""

    name: str
    text: str
    remedy: str = ""


def install(package: str) -> str:
    """How to install a package."""
    return f"bash run.sh lets pip install it; by hand: pip install '{package}'"


def check_python() -> Finding:
    """Python's version."""
    right = (3, 10) <= sys.version_info[:2] <= (3, 12)
    remedy = "" if right else "gaccum_ms needs Python 3.10, 3.11 or 3.12"
    return Finding("Python", f"{sys.version.split()[0]}  {sys.executable}", remedy)


def check_package(needed: str, low: list[int], high: list[int], note: str) -> Finding:
    """An installed package's version, and whether it is right."""
    name = re.split("[<>=]", needed)[0]
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, "not installed", install(needed))
    right = low <= [int(number) for number in re.findall(r"\d+", version)[: len(low)]] < high
    remedy = "" if right else f"pip install '{needed}'"
    return Finding(name, version + note.format("" if right else "not "), remedy)


def check_device(device: str, env: Mapping[str, str]) -> Finding:
    """Whether MindSpore computes on a device, and if not, why."""
    done = _run(["-c", COMPUTES, device], env, DEVICE_SECONDS)
    if done.returncode == 0:
        return Finding(device, "works")
    reason, remedy = _first_reason(done.stdout + done.stderr), "reinstall MindSpore: " + install(MINDSPORE)
    if device == "CPU":
        return Finding(device, f"fails: {reason}", remedy)
    if device == "GPU":
        home, missing = os.environ.get("CUDA_HOME"), cuda.missing_packages()
        remedy = "see nvidia-smi" + f"; if CUDA_HOME={home} is no CUDA 11, run: unset CUDA_HOME" * bool(home)
        if not cuda.has_driver():
            reason, remedy = f"there is no NVIDIA driver ({cuda.DRIVER})", ""
        elif missing and not home:
            reason, remedy = f"{', '.join(missing)} missing", cuda.REMEDY
    elif not any(Path("/dev").glob("davinci[0-9]*")):
        reason, remedy = "there is no Ascend device (/dev/davinci0)", ""
    else:
        load_error = re.search(r"libmindspore_ascend\S* failed\. (.*)", done.stdout + done.stderr)
        reason = load_error[1] if load_error else reason
        remedy = "install the CANN that this MindSpore needs, and source its set_env.sh"
    return Finding(device, f"no: {reason}", remedy)


def check_ranks() -> Finding:
    """Whether two ranks, started by the launcher, can add up a number."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # after Ctrl-C, the ranks may still write
        # As in this program, modules in the working folder must not replace Python's own.
        safe = ["-P"] * getattr(sys.flags, "safe_path", False)
        command = [*safe, "-m", "gaccum_ms.launch", "-n", "2", "--start-timeout", "60"]
        (script := Path(folder) / "ranks.py").write_text(COMMUNICATES)
        command += ["--timeout", str(RANKS_SECONDS - 30), "--log-dir", folder, str(script)]
        env = {**os.environ, COLLECTIVE_TIMEOUT: "30"}  # MindSpore's error comes before the launcher's
        done = _run(command, env, RANKS_SECONDS)
    if done.returncode == 0:
        return Finding("AllReduce", "works on 2 processes")
    return Finding("AllReduce", f"fails on 2 processes:\n{done.stderr}", "see the error above")


def _run(arguments: list[str], env: Mapping[str, str], seconds: float) -> subprocess.CompletedProcess:
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=seconds, errors="replace")
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"Error: nothing came in {seconds:g} s")


def _first_reason(said: str) -> str:
    """The first line with the cause; MindSpore puts dashes and titles above the parts of an error."""
    lines = [line.strip() for line in said.splitlines()]
    after_title = [b for a, b in itertools.pairwise(lines) if a.startswith("-----") and not b.startswith("-")]
    plain = [line for line in lines if line and not line.startswith(("-", "[WARNING]", "Traceback", "File "))]
    return (after_title[:1] or plain[-1:] or ["it said nothing"])[0]


def main(argv: list[str] | None = None, prog: str = "python -m gaccum_ms.launch.doctor") -> int:
    """Run all checks, print the findings, and return the exit code."""
    Parser(prog=prog, usage="%(prog)s", description=DESCRIPTION).parse_args(argv)
    failed: list[Finding] = []
    try:
        for finding in _findings(failed):
            show(f"{finding.name:10} {finding.text}\n")
            failed += [finding] if finding.remedy else []
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    for finding in failed:
        say(f"broken: {finding.name}. {finding.remedy}\n")
    return 1 if failed else 0


def _findings(failed: list[Finding]) -> Iterator[Finding]:
    """All findings. What cannot work is not tried."""
    yield check_python()
    yield from itertools.starmap(check_package, PACKAGES)
    yield Finding("CPU speed", _run(["-I", str(CPU_INSTRUCTIONS)], os.environ, DEVICE_SECONDS).stdout.strip())
    if not failed:
        with tempfile.TemporaryDirectory() as folder:
            env = Cluster().environment(os.environ, 1)
            env |= cuda.environment(Path(folder), env)
            for device in ("CPU", "GPU", "Ascend"):
                yield check_device(device, env)
        yield check_ranks()


if __name__ == "__main__":
    sys.exit(main())
