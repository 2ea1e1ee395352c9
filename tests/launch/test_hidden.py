"""Ranks and their processes that hide from a launch, which is ended in every way: nothing is left running.

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

GOES = 'while not os.path.exists("up.0.0") or not os.path.exists("up.0.1"): time.sleep(0.1)\n'


KILLED = ["a-guard", "guards", "launcher", "keeper", "launcher-guards", "launcher-keeper", "keeper-guards"]


@pytest.mark.core("SIGTERM", "a-guard", "launcher-guards")
@pytest.mark.parametrize("end", ["SIGINT", "SIGTERM", "SIGHUP", *KILLED])
def test_a_launch_that_is_ended_leaves_nothing(tmp_path, pytestconfig, end):
    for number in range(pytestconfig.getoption("rounds")):
        folder, chance = tmp_path / str(number), random.Random(f"{end}, {number}")
        launched = Launched(write(folder / "script.py", HIDES + STAYS), "-n", "2", "--end-timeout", "0")
        if number:
            time.sleep(chance.uniform(0, 8))
        else:
            launched.wait_for(folder / "up.0.0", folder / "up.0.1")
        if end in KILLED:
            kill(launched, folder, end)
        else:
            launched.process.send_signal(signal.Signals[end])
        code = ends(launched, folder)
        if not number:
            assert code == (-9 if "launcher" in end else 1 if end in KILLED else 128 + signal.Signals[end])


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: apt-get install openmpi-bin")
def test_two_keepers_do_not_end_each_other(tmp_path):
    """With mpirun, MindSpore's scheduler has a keeper too, which is done before."""
    launched = Launched(write(tmp_path / "script.py", HIDES + STAYS), "-n", "2", "--launcher", "mpirun")
    launched.wait_for(tmp_path / "up.0.0", tmp_path / "up.0.1")
    kill(launched, tmp_path, "launcher-guards")
    ends(launched, tmp_path)


@pytest.mark.core("a rank fails")
@pytest.mark.parametrize(
    ("last", "options", "code"),
    [("sys.exit(3 * rank)", [], 1), ("sys.exit()", [], 0), ("time.sleep(1000)", ["--timeout", "20"], 124)],
    ids=["a rank fails", "all end well", "time runs out"],
)
def test_a_launch_that_ends_leaves_nothing(tmp_path, pytestconfig, last, options, code):
    for number in range(pytestconfig.getoption("rounds")):
        folder = tmp_path / str(number)
        launched = Launched(write(folder / "script.py", HIDES + GOES + last), "-n", "2", *options)
        assert ends(launched, folder) == code


def test_a_restart_waits_until_the_ranks_before_it_are_gone(tmp_path):
    """They take SIGTERM for nothing."""
    looks = (
        'assert not [path for path in __import__("glob").glob("/proc/[0-9]*/cmdline")\n'
        '    if os.path.exists(path) and open(path, "rb").read() == b"sleep\\00010000\\0"\n'
        '    and os.path.realpath(path.replace("cmdline", "cwd")) == os.getcwd()]\n'
    )
    fails = f'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{GOES}if count == "0" and rank: sys.exit(3)\n'
    stays = 'if count == "0": time.sleep(1000)'
    script = write(tmp_path / "script.py", f'if os.environ["GACCUM_MS_RESTART_COUNT"] == "1":\n    {looks}')
    script.write_text(script.read_text() + HIDES + fails + stays)
    launched = Launched(script, "-n", "2", "--max-restarts", "1")
    code = ends(launched, tmp_path)
    assert code == 0, (tmp_path / "log_output" / "2" / "rank.0" / "stderr").read_text()
