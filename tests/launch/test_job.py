"""A launch of scripts that never import MindSpore."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest
from launched import LIMIT, Launched, ranks_that_wait, write

pytestmark = pytest.mark.distributed


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


@pytest.mark.thorough
def test_two_launches_at_once_do_not_meet(tmp_path):
    script = write(
        tmp_path / "script.py",
        'print(os.environ["MS_SCHED_PORT"])\n'
        'open(f"{sys.argv[1]}.{rank}", "x")\n'
        'while not os.path.exists(f"one.{rank}") or not os.path.exists(f"two.{rank}"): time.sleep(0.1)',
    )
    both = [Launched(script, "-n", "2", "--log-dir", name, args=[name]) for name in ("one", "two")]
    done = [launched.finish() for launched in both]
    assert [one.returncode for one in done] == [0, 0], done
    ports = {(tmp_path / name / "1" / "rank.0" / "stdout").read_text() for name in ("one", "two")}
    assert len(ports) == 2


@pytest.mark.thorough
def test_a_scheduler_that_fails_ends_the_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        'import os, sys, time\nif os.environ["MS_ROLE"] == "MS_SCHED": sys.exit("no scheduling today")\n'
        "time.sleep(1000)"
    )
    done = Launched(script, "-n", "2").finish()
    assert done.returncode == 1
    assert "MindSpore's scheduler failed with exit code 1" in done.stderr
    assert "no scheduling today" in done.stderr


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
    launched = ranks_that_wait(tmp_path, 3)
    begin = time.monotonic()
    os.kill(int((tmp_path / "pid.2").read_text()), signal.SIGKILL)
    done = launched.finish()
    assert "rank 2 failed with exit code 137 (SIGKILL)" in done.stderr
    assert done.returncode == 1
    assert time.monotonic() - begin < 30


@pytest.mark.core("15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_no_process(tmp_path, number, code):
    # Ranks that ignore SIGTERM, and their own processes in other sessions, must end too.
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


def test_a_launch_under_nohup_goes_on_after_sighup(tmp_path):
    script = write(tmp_path / "script.py", 'open("up", "x")\nwhile not os.path.exists("go"): time.sleep(0.1)')
    launched = Launched(script, "-n", "1", prefix=["nohup"])
    launched.wait_for(tmp_path / "up")
    launched.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    done = launched.finish()
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_time_runs_out(tmp_path):
    script = write(tmp_path / "script.py", "time.sleep(1000 * rank)")
    done = Launched(script, "-n", "2", "--timeout", "8").finish()
    assert done.returncode == 124
    assert "ranks [1] had not ended after 8 s" in done.stderr


def test_msruns_own_options_reach_it(tmp_path):
    """The ranks get the given cores and table. An error of msrun's own check is shown."""
    table = tmp_path / "a table.json"
    table.write_text("{}")
    script = write(
        tmp_path / "script.py", 'print(rank, sorted(os.sched_getaffinity(0)), os.environ["RANK_TABLE_FILE"])'
    )
    core = min(os.sched_getaffinity(0))
    cores = ["--bind_core", f'{{"device0": ["{core}"], "device1": ["{core}"]}}']
    done = Launched(script, "-n", "2", *cores, "--rank_table_file", table.name).finish()
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        said = (tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout").read_text()
        assert said == f"{rank} [{core}] {table}\n"
    done = Launched(script, "-n", "1", "--bind-core", '{"gpu0": [0]}').finish()
    assert "Key gpu0 must be in format 'scheduler' or 'deviceX'" in done.stderr


def test_a_reader_that_goes_away_ends_all_without_a_traceback(tmp_path):
    script = write(tmp_path / "script.py", 'while True: print("line", flush=True); time.sleep(0.1)')
    launched = Launched(script, "-n", "2")
    assert launched.process.stdout.readline() == "line\n"
    launched.process.stdout.close()
    _, err = launched.process.communicate(timeout=LIMIT)
    left = launched.running()
    assert (launched.process.returncode, err) == (128 + signal.SIGPIPE, "")
    assert not left


# This program is on a terminal whose other end is closed.
TERMINAL = "import os, sys; os.dup2(os.openpty()[1], 1); os.execvp(sys.argv[1], sys.argv[1:])"


@pytest.mark.parametrize(
    ("prefix", "note"),
    [
        (["sh", "-c", 'exec "$@" >/dev/full', "sh"], "note: standard output takes no more: No space left on device\n"),
        (["sh", "-c", 'exec "$@" >&-', "sh"], ""),
        ([sys.executable, "-c", TERMINAL], "note: standard output takes no more: Input/output error\n"),
    ],
    ids=["full", "closed", "terminal"],
)
def test_an_output_that_takes_nothing_does_not_end_the_ranks(tmp_path, prefix, note):
    script = write(tmp_path / "script.py", 'print("line", flush=True)\ntime.sleep(1)\nprint("last")')
    done = Launched(script, "-n", "1", prefix=prefix).finish()
    assert (done.returncode, done.stderr) == (0, note)
    assert (tmp_path / "log_output" / "1" / "rank.0" / "stdout").read_text() == "line\nlast\n"
