"""A launch on one host: of scripts that never import MindSpore, and of ranks that communicate."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.launch.launched import CONNECTED, LIMIT, ROOT, Launched, write

pytestmark = pytest.mark.distributed

# The variables that an outer launch of each kind would leave. Each value is wrong for this launch.
STALE = {
    **{"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "192.0.2.1", "MS_SCHED_PORT": "1", "MS_WORKER_NUM": "9"},
    **{"MS_NODE_ID": "5", "MS_WORKER_IP": "192.0.2.1", "MS_TOPO_TIMEOUT": "1", "MS_SERVER_NUM": "3"},
    **{"MS_ENABLE_RECOVERY": "1", "MS_SIMULATION_LEVEL": "1", "DEVICE_ID": "7"},
    **{"RANK_ID": "7", "RANK_SIZE": "9", "RANK_TABLE_FILE": "/nowhere/table.json"},
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "5", "PMIX_RANK": "5"},
}


def test_each_rank_has_its_own_logs_and_rank_0_is_shown_while_it_runs(tmp_path):
    """Under nohup, SIGHUP ends nothing. No rank leaves before all have come to their end: its exit handler shows when
    its process ends."""
    script = write(
        tmp_path / "a folder" / "my script.py",
        'import atexit\nprint("out", rank, sys.argv[1:], flush=True)\nprint("err", rank, file=sys.stderr)\n'
        'assert os.environ["RANK_SIZE"] == "3"\nwhile not os.path.exists("go"): time.sleep(0.1)\n'
        'atexit.register(lambda: print(os.path.exists("last")))\nif rank == 2: time.sleep(2); open("last", "x")',
    )
    options = ["-n", "3", "--log-dir", "my logs"]
    launched = Launched(script, *options, args=["--two words", "b c"], env=STALE, prefix=["nohup"])
    notes = [launched.process.stdout.readline() for _ in range(2)]
    assert [note.partition("=")[0] for note in notes] == ["note: RANK_TABLE_FILE", "note: MS_WORKER_IP"]
    assert launched.process.stdout.readline() == "out 0 ['--two words', 'b c']\n"
    launched.process.send_signal(signal.SIGHUP)
    (script.parent / "go").touch()
    done = launched.finish()
    assert done.returncode == 0, done.stderr
    logs = script.parent / "my logs" / "1"
    assert sorted(path.name for path in logs.glob("rank.*")) == ["rank.0", "rank.1", "rank.2"]
    for rank in range(3):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == f"out {rank} ['--two words', 'b c']\nTrue\n"
        assert (logs / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"
    assert "out 1" not in done.stdout
    assert str(logs) in done.stdout.splitlines()[-1]


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


def test_a_reader_that_goes_away_ends_all_without_a_traceback(tmp_path):
    script = write(tmp_path / "script.py", 'while True: print("line", flush=True); time.sleep(0.1)')
    launched = Launched(script, "-n", "2")
    assert launched.process.stdout.readline() == "line\n"
    launched.process.stdout.close()
    _, err = launched.process.communicate(timeout=LIMIT)
    left = launched.running()
    assert (launched.process.returncode, err) == (128 + signal.SIGPIPE, "")
    assert not left


@pytest.mark.parametrize(
    ("redirected", "note"),
    [(">/dev/full", "note: standard output takes no more: No space left on device\n"), (">&- 2>&-", "")],
    ids=["full", "closed, and errors"],
)
def test_an_output_that_takes_nothing_does_not_end_the_ranks(tmp_path, redirected, note):
    script = write(tmp_path / "script.py", 'print("line", flush=True)\ntime.sleep(0.5)\nprint("last")')
    done = Launched(script, "-n", "1", prefix=["sh", "-c", f'exec "$@" {redirected}', "sh"]).finish()
    assert (done.returncode, done.stderr) == (0, note)
    assert (tmp_path / "log_output" / "1" / "rank.0" / "stdout").read_text() == "line\nlast\n"


@pytest.mark.parametrize("unbuffered", [False, True])
def test_an_output_that_takes_a_part_at_a_time_gets_all(unbuffered):
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    writes = "from gaccum_ms.launch.output import write; print('begins', end=' '); write(b'x' * 3_000_000)"
    command = [sys.executable, *["-u"] * unbuffered, "-c", writes]
    with subprocess.Popen(command, stdout=writer, cwd=ROOT) as process, os.fdopen(reader, "rb") as output:
        os.close(writer)
        assert output.read() == b"begins " + b"x" * 3_000_000
    assert process.returncode == 0


def test_a_rank_that_fails_beside_a_thread_that_lives_on_ends_all(tmp_path):
    """The end of its log is shown. Its process has some seconds, as for exit handlers."""
    script = write(
        tmp_path / "script.py",
        'import threading\nif rank != 1: open("waits", "w"); time.sleep(1000)\n'
        'while not os.path.exists("waits"): time.sleep(0.1)\n'
        'def lives_on(): time.sleep(2.5); open("last", "x"); time.sleep(1000)\n'
        'threading.Thread(target=lives_on).start()\nfor i in range(50): print("item", i)\n'
        'raise ValueError("no such thing")',
    )
    done = Launched(script, "-n", "2").finish()
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed with exit code 1; all ranks were ended.")
    assert "ValueError: no such thing" in done.stderr
    assert re.findall(r"item \d+", done.stderr) == [f"item {i}" for i in range(30, 50)]
    assert str(tmp_path / "log_output" / "1" / "rank.1" / "stderr") in done.stderr
    assert (tmp_path / "last").exists()


def test_of_two_launches_at_once_one_succeeds_and_in_the_other_a_rank_ends_early(tmp_path):
    """Both have variables of another cluster. One is mpirun's, if there is one. In the other, a rank waits in a
    collective until MindSpore gives up."""
    by_mpirun = ["--launcher", "mpirun"] if shutil.which("mpirun") else []
    (early := tmp_path / "early.py").write_text(
        CONNECTED + 'assert total() == 6.0\nwhile not os.path.exists("go"): time.sleep(0.1)\n'
        "if rank == 1: sys.exit(0)\nif rank == 2: time.sleep(1000)\ntotal()"
    )
    fails = Launched(early, "-n", "3", env={**STALE, "MS_CPU_COMM_OP_TIMEOUT": "15"})
    (tmp_path / "a folder").mkdir()
    (script := tmp_path / "a folder" / "a script.py").write_text(CONNECTED + "print(total())")
    done = Launched(script, "-n", "2", "--log-dir", "log output", *by_mpirun, env=STALE).finish()
    assert done.returncode == 0, done.stderr
    logs = tmp_path / "a folder" / "log output" / "1"
    said = {str(path.relative_to(logs)): path.read_text() for path in logs.rglob("stdout")}
    assert said == {"rank.0/stdout": "3.0\n", "rank.1/stdout": "3.0\n"}
    (tmp_path / "go").touch()
    done = fails.finish()
    assert done.returncode == 1
    why = r"error: rank 0 failed with exit code 1, \d+ s after rank 1 had ended with exit code 0; all ranks were ended"
    assert re.match(why, done.stderr), done.stderr
