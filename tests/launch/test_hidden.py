"""Ranks and processes of theirs that hide from their launch, which is ended in every way: nothing is left running.

``--rounds 8`` makes each end eight times, and all but the first at a random moment, from the launcher's start on.
"""

from __future__ import annotations

import random
import shutil
import signal
import time

import pytest

from tests.launch.hidden import HIDES, STAYS, ends, kill
from tests.launch.launched import Launched, write

pytestmark = pytest.mark.distributed

WITH_MPIRUN = pytest.mark.skipif(
    not shutil.which("mpirun"), reason="Open MPI is not installed: apt-get install openmpi-bin"
)


@pytest.mark.parametrize(
    ("launcher", "end", "code"),
    [
        ("msrun", "SIGINT", 130),
        ("msrun", "timeout", 124),
        ("msrun", "keeper-guards", 1),
        ("msrun", "launcher-keeper", -9),
        ("msrun", "launcher-guards", -9),
        pytest.param("mpirun", "launcher-guards", -9, marks=WITH_MPIRUN),
    ],
)
def test_a_launch_that_is_ended_leaves_nothing(tmp_path, pytestconfig, launcher, end, code):
    """No restart follows on a signal, or when time runs out. With mpirun, MindSpore's scheduler has a keeper too, which
    is done before."""
    options = ["-n", "2", "--launcher", launcher]
    options += ["--max-restarts", "1"] if end in ("SIGINT", "timeout") else []
    options += ["--timeout", "5"] if end == "timeout" else []
    for number in range(pytestconfig.getoption("rounds")):
        folder, chance = tmp_path / str(number), random.Random(f"{end}, {number}")
        launched = Launched(write(folder / "script.py", HIDES + STAYS), *options)
        if number:
            time.sleep(chance.uniform(0, 8))
        elif end != "timeout":
            launched.wait_for(folder / "up.0.0", folder / "up.0.1")
        if end == "SIGINT":
            launched.process.send_signal(signal.SIGINT)
        elif end != "timeout":
            kill(launched, folder, end)
        got = ends(launched, folder)
        assert number or got == code
        assert not list(folder.glob("up.1.*"))


def test_a_restart_waits_until_the_ranks_before_it_are_gone(tmp_path):
    """They take SIGTERM for nothing. A guard is killed: its rank ends, and all begin anew."""
    looks = (
        'assert not [process for process in __import__("psutil").process_iter(["cmdline", "cwd"])\n'
        '    if process.info["cmdline"] == ["sleep", "10000"] and process.info["cwd"] == os.getcwd()]\n'
    )
    script = write(tmp_path / "script.py", f'if os.environ["GACCUM_MS_RESTART_COUNT"] == "1":\n    {looks}')
    ignores = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    stays = 'if count == "0": time.sleep(1000)'
    script.write_text(script.read_text() + ignores + HIDES + stays)
    launched = Launched(script, "-n", "2", "--max-restarts", "1")
    launched.wait_for(tmp_path / "up.0.0", tmp_path / "up.0.1")
    kill(launched, tmp_path, "a-guard")
    code = ends(launched, tmp_path)
    assert code == 0, (tmp_path / "log_output" / "2" / "rank.0" / "stderr").read_text()
