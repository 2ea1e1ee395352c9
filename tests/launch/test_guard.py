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
    """The script has its own `__main__` , folder, arguments and exit code, and its classes can be pickled. msrun's own
    options reach it: the ranks get the given cores and table."""
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
    print(sorted(os.sched_getaffinity(0)), os.environ["RANK_TABLE_FILE"], flush=True)
    open(f"up.{rank}", "x").close()
    while not os.path.exists("up.0"): time.sleep(0.01)  # rank 1's end ends rank 0
    sys.exit(3 * rank)
""",
    )
    (tmp_path / "helper.py").touch()
    (table := tmp_path / "a table.json").write_text("{}")
    core = min(os.sched_getaffinity(0))
    options = ["--bind_core", f'{{"device0": ["{core}"], "device1": ["{core}"]}}', "--rank_table_file", table.name]
    done = Launched(Path("script.py"), "-n", "2", *options, args=["--epochs", "3"], cwd=tmp_path).finish()
    assert "rank 1 failed with exit code 3" in done.stderr
    assert not (tmp_path / "log_output" / "1" / "rank.0" / "stderr").read_text()
    for rank in range(2):
        assert (tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout").read_text() == f"[{core}] {table}\n"
    done = Launched(script, "-n", "1", "--bind-core", "some").finish()
    assert done.returncode == 1
    assert "--bind_core" in done.stderr, "msrun names what it refuses"


def test_a_rank_does_not_wait_for_ever_for_one_that_goes_on(monkeypatch):
    """The other may wait in turn, in a collective to which this rank never comes: that must fail, not hang."""
    monkeypatch.setattr(guard, "MEET_SECONDS", 0.1)
    job = uuid.uuid4().hex
    with contextlib.closing(Reports(job)) as reports:
        guard.wait_for_others(job, 0)
        assert reports.read(30) == [{"rank": 0, "at_end": True}]


@pytest.mark.parametrize("reads", [True, False])
def test_a_message_waits_until_the_launcher_reads_or_dies(reads):
    """Its queue is full."""
    job, message = uuid.uuid4().hex, {"rank": 0, "code": 0}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(f"\0{job}")
        launcher.settimeout(30)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as filler, contextlib.suppress(BlockingIOError):
            filler.setblocking(False)
            while True:
                filler.sendto(b"filled", f"\0{job}")
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


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_messages_of_other_users_are_ignored():
    """Anybody can send to the launcher's socket, and to a rank's, and can see their names."""
    job = uuid.uuid4().hex
    sends = (
        "import os, socket, sys\nos.setgid(65534)\nos.setuid(65534)\n"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), '\\0' + sys.argv[1])"
    )

    def send_as_nobody(name: str, message: bytes) -> None:
        subprocess.run([sys.executable, "-c", sends, name, message], check=True, timeout=60)

    with contextlib.closing(Reports(job)) as reports:
        send_as_nobody(job, json.dumps({"rank": 0, "code": 0}).encode())
        guard.tell(job, rank=0, at_end=True)
        assert reports.read(30) == [{"rank": 0, "at_end": True}]
        rank = threading.Thread(target=guard.wait_for_others, args=(job, 0), daemon=True)
        rank.start()
        assert reports.read(30) == [{"rank": 0, "at_end": True}]
        send_as_nobody(f"{job}-0", guard.LET_GO)
        rank.join(0.5)
        assert rank.is_alive()
        reports.let_go([0])
        rank.join(5)
        assert not rank.is_alive()


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
    "end",
    [
        "1 / 0",
        "sys.exit('no such thing')",
        "sys.exit(300)",
        "sys.exit(10**30)",
        "1 +",
        "sys.stdout.close()\nsys.stderr.close()\nsys.exit(3)",
    ],
)
def test_a_rank_that_fails_says_what_python_says_and_ends_as_it_does(tmp_path, end):
    script, job = tmp_path / "script.py", uuid.uuid4().hex
    script.write_text("import sys\n" + end)
    env = {**os.environ, "MS_ROLE": "MS_WORKER", "RANK_ID": "0", guard.JOB: job}
    ways = ([sys.executable, script], [sys.executable, guard.__file__, script])
    with contextlib.closing(Reports(job)) as reports:
        python, ours = (subprocess.run(way, env=env, capture_output=True, text=True, timeout=60) for way in ways)
        assert reports.read(30) == [{"rank": 0, "fails": python.returncode}]
    assert ours.returncode == python.returncode != 0
    assert (ours.stdout, ours.stderr) == (python.stdout, python.stderr)
