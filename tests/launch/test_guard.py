"""The guard of a rank: the script runs and ends as in Python, and waits for the other ranks."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import pytest

from gaccum_ms.launch import guard
from gaccum_ms.launch.supervisor import Reports
from tests.launch.launched import Launched, write

pytestmark = pytest.mark.distributed


def test_the_script_runs_as_python_runs_it(tmp_path):
    """The script has its own `__main__` , folder, arguments and exit code, and its classes can be pickled."""
    script = write(
        tmp_path / "script.py",
        """
import helper, inspect, pickle
class Thing: pass
if __name__ == "__main__":
    assert inspect.getsource(Thing) == "class Thing: pass\\n"
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    assert sys.modules["__main__"].Thing is Thing and __file__ == os.path.abspath("script.py")
    assert sys.argv == ["script.py", "--epochs", "3"] and sys.path[0] == os.path.dirname(__file__)
    sys.exit(3 * rank)
""",
    )
    (tmp_path / "helper.py").touch()
    done = Launched(Path("script.py"), "-n", "2", args=["--epochs", "3"], cwd=tmp_path).finish()
    assert "rank 1 failed with exit code 3" in done.stderr
    assert not (tmp_path / "log_output" / "1" / "rank.0" / "stderr").read_text()
    assert script.exists()


@pytest.mark.thorough
def test_no_rank_leaves_before_all_have_come_to_their_end(tmp_path):
    # A rank's exit handler shows when its process ends. A rank that fails waits for nobody.
    script = write(
        tmp_path / "script.py",
        "import atexit\n"
        'atexit.register(lambda: print(os.path.exists("last"), flush=True))\n'
        'if rank == 2: time.sleep(4); open("last", "x")\nsys.exit(0)',
    )
    done = Launched(script, "-n", "3").finish()
    assert done.returncode == 0, done.stderr
    logs = tmp_path / "log_output" / "1"
    assert [(logs / f"rank.{number}" / "stdout").read_text() for number in range(3)] == ["True\n"] * 3


@pytest.mark.thorough
def test_a_rank_does_not_wait_for_ever_for_one_that_goes_on(tmp_path):
    # The other may wait in turn, in a collective to which this rank never comes: that must fail, not hang.
    script = write(
        tmp_path / "script.py",
        'import atexit\nif rank == 0: atexit.register(lambda: open("left", "x"))\n'
        'while rank == 1 and not os.path.exists("left"): time.sleep(0.1)',
    )
    done = Launched(script, "-n", "2", "--end-timeout", "0").finish()
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_launcher_needs_waits_until_it_reads_or_dies(reads, monkeypatch):
    """Its queue is full, and it reads only after the time in which other messages are lost."""
    monkeypatch.setattr(guard, "SEND_SECONDS", 0.1)
    job, message = uuid.uuid4().hex, {"rank": 0, "code": 0}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(f"\0{job}")
        launcher.settimeout(30)
        fill(job)
        guard.tell(job, rank=0, still=1.0)  # lost
        sender = threading.Thread(target=guard.tell, args=(job,), kwargs=message, daemon=True)
        sender.start()
        sender.join(0.5)
        assert sender.is_alive()
        if reads:
            while (said := launcher.recv(4096)) == b"filled":
                pass
            assert json.loads(said) == message
    sender.join(30)
    assert not sender.is_alive()


def send_as_nobody(name: str, message: bytes) -> None:
    """Send a message to a socket, as another user."""
    sends = (
        "import os, socket, sys\nos.setgid(65534)\nos.setuid(65534)\n"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), '\\0' + sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", sends, name, message], check=True, timeout=60)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_messages_of_other_users_are_ignored():
    """Anybody can send to the launcher's socket, and to a rank's, and can see their names."""
    job = uuid.uuid4().hex
    with contextlib.closing(Reports(job)) as reports:
        send_as_nobody(job, json.dumps({"rank": 0, "code": 0}).encode())
        guard.tell(job, rank=0, at_end=True)
        assert reports.read(30) == [{"rank": 0, "at_end": True}]
        rank = guard._Launcher(job, 0)
        send_as_nobody(f"{job}-0", guard.LET_GO)
        reports.send([0], guard.ASK)
        assert reports.read(30)[0].keys() == {"rank", "still", "place"}, "it has read both"
        assert not rank._let_go.is_set()
        reports.send([0], guard.LET_GO)
        assert rank._let_go.wait(30)


def test_a_message_may_be_long():
    """Such as one with a path in Chinese, of which JSON makes six letters a character."""
    job, place = uuid.uuid4().hex, "/" + "路" * 5000
    with contextlib.closing(Reports(job)) as reports:
        guard.tell(job, rank=0, still=1.0, place=place)
        assert reports.read(30) == [{"rank": 0, "still": 1.0, "place": place}]


def fill(job: str) -> None:
    """Send a launcher messages until it takes no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
        sender.setblocking(False)
        while True:
            sender.sendto(b"filled", f"\0{job}")


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    """So do their own processes, in other sessions too."""
    script = write(
        tmp_path / "script.py",
        'import subprocess\nsubprocess.Popen(["sleep", "1000"], start_new_session=True)\n'
        'open(f"up.{rank}", "x")\ntime.sleep(1000)',
    )
    launched = Launched(script, "-n", "2")
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    launched.process.kill()
    launched.ends_alone()


def test_a_guard_that_cannot_write_logs_reports_a_failed_rank(tmp_path):
    """Such as one whose folder was removed before the rank began."""
    job = uuid.uuid4().hex
    env = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": "0", guard.JOB: job}
    with contextlib.closing(Reports(job)) as reports:
        command = [sys.executable, guard.__file__, "--guard", tmp_path / "missing", tmp_path / "script.py"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
        assert f"No such file or directory: '{tmp_path}/missing/rank.0/stdout'" in done.stderr
        assert reports.read(30)[1:] == [{"rank": 0, "code": 1}]


@pytest.mark.parametrize(
    ("end", "by_argparse"),
    [("parser.parse_args()", True), ("import helper", True), ("sys.exit(2)", False)],
    ids=["in the script", "in another file", "not at all"],
)
def test_a_script_that_argparse_ends_says_so(tmp_path, end, by_argparse):
    """Restarts would not mend it, and it may come after init()."""
    parser = "import argparse, sys\nparser = argparse.ArgumentParser()\nparser.add_argument('--lr', type=float)\n"
    (tmp_path / "helper.py").write_text(f"{parser}parser.parse_args()")
    (tmp_path / "script.py").write_text(parser + end)
    job = uuid.uuid4().hex
    env = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": "0", guard.JOB: job}
    with contextlib.closing(Reports(job)) as reports:
        command = [sys.executable, guard.__file__, tmp_path / "script.py", "--lr", "high"]
        assert subprocess.run(command, env=env, capture_output=True, timeout=60).returncode == 2
        assert reports.read(30) == [{"rank": 0, "fails": 2, "argparse": by_argparse}]


@pytest.mark.core(end=["1 / 0", "sys.exit('no such thing')", "sys.exit(300)", "1 +"])
@pytest.mark.parametrize(
    "end",
    [
        "1 / 0",
        "sys.excepthook = lambda *_: print('hook')\n1 / 0",
        "sys.exit('no such thing')",
        "sys.exit(300)",
        "sys.exit(-1)",
        "sys.exit(10**30)",
        "sys.exit(-(2**63) - 1)",
        "raise SystemExit(2**32 + 3)",
        "1 +",
        "raise KeyboardInterrupt",
        "sys.stdout.close()\nsys.stderr.close()\nsys.exit(3)",
    ],
)
def test_a_rank_that_fails_says_what_python_says_and_ends_as_it_does(tmp_path, end):
    script = tmp_path / "script.py"
    script.write_text("import sys\n" + end)
    env = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": "0", guard.JOB: "nobody"}
    ways = ([sys.executable, script], [sys.executable, guard.__file__, script])
    python, ours = (subprocess.run(way, env=env, capture_output=True, text=True, timeout=60) for way in ways)
    assert ours.returncode == python.returncode != 0
    assert ours.stdout == python.stdout
    if end != "raise KeyboardInterrupt":  # Python prints that traceback itself, with the guard's lines
        assert ours.stderr == python.stderr
