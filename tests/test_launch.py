"""The launcher, on scripts that never import MindSpore: what is promised here holds before any training begins."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from gaccum_ms import launch

# The launcher ends its own processes after TIMEOUT; should it fail to, the test ends after LIMIT and fails.
TIMEOUT, LIMIT = 60, 90
pytestmark = pytest.mark.distributed


def write(path: Path, text: str) -> Path:
    """Write a script that knows its rank; msrun starts it once more as the scheduler, which has none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prologue = 'import os, sys, time\nif os.environ["MS_ROLE"] == "MS_SCHED": sys.exit()\n'
    path.write_text(prologue + 'rank = int(os.environ["RANK_ID"])\n' + text)
    return path


class Launched:
    """A running launcher whose processes can be found, even those that left its tree."""

    def __init__(self, script: Path, *options: str, args=(), env=None) -> None:
        self.mark = uuid.uuid4().hex
        command = [sys.executable, launch.__file__, "--timeout", str(TIMEOUT), *options, str(script), *args]
        env = {**os.environ, **(env or {}), "TEST_MARK": self.mark}
        self.process = subprocess.Popen(
            command, env=env, cwd=script.parent, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def finish(self) -> subprocess.CompletedProcess:
        try:
            out, err = self.process.communicate(timeout=LIMIT)
        finally:
            self.process.kill()
            left = self.running()
            for process in left:
                process.kill()
        assert not left, f"left running: {left}"
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, out, err)

    def running(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("TEST_MARK") == self.mark and process.pid != self.process.pid:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def wait_for(self, path: Path) -> None:
        until = time.monotonic() + LIMIT
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.1)
        assert path.exists(), f"{path} never came"


def test_free_port_can_be_listened_on_and_is_no_taken_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = launch.free_port()
        assert port != taken.getsockname()[1]
        with socket.socket() as mine:
            mine.bind(("127.0.0.1", port))


def test_another_clusters_variables_are_dropped_and_other_variables_kept():
    stale = {"MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_NODE_ID", "RANK_ID", "RANK_SIZE"}
    stale |= {"RANK_TABLE_FILE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "DEVICE_ID", "MS_SIMULATION_LEVEL"}
    kept = {"HOME": "/root", "GLOG_v": "3", "MS_DEV_SAVE_GRAPHS": "1", "DATA_PATH": "/data"}
    env = launch.child_environment(dict.fromkeys(stale, "7") | kept, processes=8, cores=2)
    assert not stale & env.keys()
    assert kept.items() <= env.items()


@pytest.mark.parametrize(("processes", "cores", "threads"), [(8, 2, "1"), (2, 8, "4"), (1, 6, "6")])
def test_processes_share_the_cores(processes, cores, threads):
    env = launch.child_environment({"MKL_NUM_THREADS": "3"}, processes, cores)
    assert (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"]) == (threads, threads)
    assert env["MKL_NUM_THREADS"] == "3", "the user's number is kept"


def test_each_rank_has_its_own_logs_and_rank_0_is_shown(tmp_path):
    script = write(
        tmp_path / "a folder" / "my script.py",
        'print("out", rank, sys.argv[1:])\nprint("err", rank, file=sys.stderr)\nassert os.environ["RANK_SIZE"] == "3"',
    )
    stale = {"RANK_ID": "7", "RANK_SIZE": "9", "MS_ROLE": "MS_SCHED", "OMPI_COMM_WORLD_RANK": "5"}
    done = Launched(script, "-n", "3", "--log-dir", "my logs", args=["--two words", "b c"], env=stale).finish()
    assert done.returncode == 0, done.stderr
    logs = script.parent / "my logs" / "1"
    assert sorted(path.name for path in logs.iterdir()) == ["rank.0", "rank.1", "rank.2"]
    for rank in range(3):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == f"out {rank} ['--two words', 'b c']\n"
        assert (logs / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"
    assert "out 0" in done.stdout
    assert "out 1" not in done.stdout
    assert str(logs) in done.stdout.splitlines()[-1]


def test_rank_0_is_shown_while_it_runs(tmp_path):
    script = write(
        tmp_path / "script.py", 'print("first", flush=True)\nwhile not os.path.exists("go"): time.sleep(0.1)'
    )
    launched = Launched(script, "-n", "2")
    assert launched.process.stdout.readline() == "first\n"
    assert launched.process.poll() is None
    (tmp_path / "go").touch()
    assert launched.finish().returncode == 0


def test_a_failing_rank_is_named_with_the_end_of_its_log_and_ends_the_others(tmp_path):
    script = write(
        tmp_path / "script.py",
        'if rank != 1: time.sleep(1000)\nfor i in range(50): print("item", i)\nraise ValueError("no such thing")',
    )
    begin = time.monotonic()
    done = Launched(script, "-n", "3").finish()
    assert done.returncode == 1
    assert "rank 1 failed with exit code 1" in done.stderr
    assert "ValueError: no such thing" in done.stderr
    assert re.findall(r"item \d+", done.stderr) == [f"item {i}" for i in range(30, 50)]
    assert str(tmp_path / "log_output" / "1" / "rank.1" / "stderr") in done.stderr
    assert time.monotonic() - begin < 30


def test_a_killed_rank_ends_the_others(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"pid.{rank}", "x").write(str(os.getpid()))\ntime.sleep(1000)')
    launched = Launched(script, "-n", "3")
    for rank in range(3):
        launched.wait_for(tmp_path / f"pid.{rank}")
    begin = time.monotonic()
    os.kill(int((tmp_path / "pid.2").read_text()), signal.SIGKILL)
    done = launched.finish()
    assert "rank 2 failed with exit code 137" in done.stderr
    assert done.returncode == 1
    assert time.monotonic() - begin < 30


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_process(tmp_path, number, code):
    # Ranks that ignore the polite signal, and one with a process of its own in another session, must go too.
    script = write(
        tmp_path / "script.py",
        "import signal, subprocess\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        'subprocess.Popen(["sleep", "1000"], start_new_session=True)\nopen(f"up.{rank}", "x")\ntime.sleep(1000)',
    )
    launched = Launched(script, "-n", "2")
    for rank in range(2):
        launched.wait_for(tmp_path / f"up.{rank}")
    assert len(launched.running()) >= 7  # msrun, a guard, a script and a sleep for each rank
    launched.process.send_signal(number)
    assert launched.finish().returncode == code


def test_ranks_end_when_the_launcher_is_killed(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "x")\ntime.sleep(1000)')
    launched = Launched(script, "-n", "2")
    for rank in range(2):
        launched.wait_for(tmp_path / f"up.{rank}")
    launched.process.kill()
    until = time.monotonic() + 30
    while launched.running() and time.monotonic() < until:
        time.sleep(0.2)
    launched.finish()  # asserts that none is left


def test_time_runs_out(tmp_path):
    script = write(tmp_path / "script.py", "time.sleep(1000 * rank)")
    done = Launched(script, "-n", "2", "--timeout", "20").finish()
    assert done.returncode == 124
    assert "ranks [1] had not ended after 20 s" in done.stderr


def test_a_log_folder_serves_one_launch_at_a_time(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "x")\nwhile not os.path.exists("go"): time.sleep(0.1)')
    first = Launched(script, "-n", "1")
    first.wait_for(tmp_path / "up.0")
    second = Launched(script, "-n", "1").finish()
    assert second.returncode == 2
    assert "another launch writes to" in second.stderr
    (tmp_path / "go").touch()
    assert first.finish().returncode == 0


def test_a_log_folder_that_cannot_be_made_is_named(tmp_path):
    script = write(tmp_path / "script.py", "")
    (tmp_path / "file").touch()
    done = Launched(script, "--log-dir", "file/logs").finish()
    assert done.returncode == 2
    assert str(tmp_path / "file" / "logs") in done.stderr


def test_logs_of_an_older_launch_with_more_ranks_are_removed(tmp_path):
    script = write(tmp_path / "script.py", "")
    old = tmp_path / "log_output" / "1" / "rank.5"
    old.mkdir(parents=True)
    (old / "exit_code").write_text("1")
    assert Launched(script, "-n", "1").finish().returncode == 0
    assert not old.exists()


def test_a_launcher_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(launch.LaunchError, match="'mpirun' is not installed"):
        launch.launcher_command("mpirun", 2, 8118, tmp_path, {"PATH": str(tmp_path)})


def test_it_is_a_module_to_run():
    command = [sys.executable, "-m", "gaccum_ms.launch", "--help"]
    root = Path(launch.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.startswith("usage: python -m gaccum_ms.launch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--processes", "0", __file__], "must be at least 1, but got 0"), (["missing.py"], "no such script: missing.py")],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        launch.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err
