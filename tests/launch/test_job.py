"""A launch on one host: of scripts that never import MindSpore, and of ranks that train."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launched import LIMIT, ROOT, TRAINS, Launched, wait_until, write
from tests.support.modes import MODES

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
    script = write(
        tmp_path / "a folder" / "my script.py",
        'print("out", rank, sys.argv[1:], flush=True)\nprint("err", rank, file=sys.stderr)\n'
        'assert os.environ["RANK_SIZE"] == "3"\nwhile not os.path.exists("go"): time.sleep(0.1)',
    )
    launched = Launched(script, "-n", "3", "--log-dir", "my logs", args=["--two words", "b c"], env=STALE)
    notes = [launched.process.stdout.readline() for _ in range(2)]
    assert [note.partition("=")[0] for note in notes] == ["note: RANK_TABLE_FILE", "note: MS_WORKER_IP"]
    assert launched.process.stdout.readline() == "out 0 ['--two words', 'b c']\n"
    assert launched.process.poll() is None
    (script.parent / "go").touch()
    done = launched.finish()
    assert done.returncode == 0, done.stderr
    logs = script.parent / "my logs" / "1"
    assert sorted(path.name for path in logs.iterdir()) == ["rank.0", "rank.1", "rank.2"]
    for rank in range(3):
        assert (logs / f"rank.{rank}" / "stdout").read_text() == f"out {rank} ['--two words', 'b c']\n"
        assert (logs / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"
    assert "out 1" not in done.stdout
    assert str(logs) in done.stdout.splitlines()[-1]


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


@pytest.mark.core(handler="SIG_DFL")
@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_ctrl_c_leaves_no_process(tmp_path, handler):
    # Ranks that ignore SIGTERM, and their own processes in other sessions, must end too.
    script = write(
        tmp_path / "script.py",
        f"import signal, subprocess\nsignal.signal(signal.SIGTERM, signal.{handler})\n"
        'subprocess.Popen(["sleep", "1000"], start_new_session=True)\nopen(f"up.{rank}", "x")\ntime.sleep(1000)',
    )
    launched = Launched(script, "-n", "2")
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    assert len(launched.running()) >= 7  # msrun, a guard, a script and a sleep for each rank
    launched.process.send_signal(signal.SIGINT)
    assert launched.finish().returncode == 130


@pytest.mark.thorough
def test_killed_while_it_ends_its_processes_it_leaves_none(tmp_path):
    """As by Ray, when the program dies whose actor it is: the guards are still there and end the rest."""
    script = write(
        tmp_path / "script.py",
        'import signal\nsignal.signal(signal.SIGTERM, lambda *_: open(f"term.{rank}", "x"))\n'
        'open(f"up.{rank}", "x")\nwhile True: time.sleep(1000)',
    )
    launched = Launched(script, "-n", "2")
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    launched.process.terminate()
    launched.wait_for(tmp_path / "term.0", tmp_path / "term.1")
    launched.process.kill()
    launched.ends_alone()


@pytest.mark.thorough
def test_a_launch_under_nohup_goes_on_after_sighup(tmp_path):
    script = write(tmp_path / "script.py", 'open("up", "x")\nwhile not os.path.exists("go"): time.sleep(0.1)')
    launched = Launched(script, "-n", "1", prefix=["nohup"])
    launched.wait_for(tmp_path / "up")
    launched.process.send_signal(signal.SIGHUP)
    (tmp_path / "go").touch()
    done = launched.finish()
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
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
    done = Launched(script, "-n", "1", "--bind-core", "some").finish()
    assert done.returncode == 1
    assert "--bind_core" in done.stderr, "msrun names what it refuses"


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


@pytest.mark.core("full", "full, and errors")
@pytest.mark.parametrize(
    ("prefix", "note"),
    [
        (["sh", "-c", 'exec "$@" >/dev/full', "sh"], "note: standard output takes no more: No space left on device\n"),
        (["sh", "-c", 'exec "$@" >&-', "sh"], ""),
        ([sys.executable, "-c", TERMINAL], "note: standard output takes no more: Input/output error\n"),
        (["sh", "-c", 'exec "$@" >/dev/full 2>&1', "sh"], ""),
        (["sh", "-c", 'exec "$@" >&- 2>&-', "sh"], ""),
        ([sys.executable, "-c", TERMINAL.replace("; os.exec", "; os.dup2(1, 2); os.exec")], ""),
    ],
    ids=["full", "closed", "terminal", "full, and errors", "closed, and errors", "terminal, and errors"],
)
def test_an_output_that_takes_nothing_does_not_end_the_ranks(tmp_path, prefix, note):
    script = write(tmp_path / "script.py", 'print("line", flush=True)\ntime.sleep(1)\nprint("last")')
    done = Launched(script, "-n", "1", prefix=prefix).finish()
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


@pytest.mark.thorough
@pytest.mark.parametrize("number", [None, signal.SIGTERM])
def test_a_reader_that_stands_still_costs_the_launcher_no_memory(tmp_path, number):
    """It gets all when the ranks have ended well. What it lacks of a launch that is ended is in the log."""
    size, waits = 200_000_000, "time.sleep(1000)" if number else ""
    script = write(tmp_path / "script.py", f'print("x" * {size}, end="", flush=True)\nopen("up", "x")\n{waits}')
    launched = Launched(script, "-n", "1")
    launched.wait_for(tmp_path / "up")
    if number:
        launched.process.send_signal(number)
    shown, peak = 0, 0
    while part := launched.process.stdout.buffer.read(1 << 20):
        shown, last = shown + len(part), part
        status = Path(f"/proc/{launched.process.pid}/status").read_text()
        peak = max([peak, *map(int, re.findall(r"VmHWM:\s+(\d+) kB", status))])  # a process that has ended has none
    done = launched.finish()
    assert 0 < peak * 1024 < size / 2
    if number:
        assert done.returncode == 128 + number
        assert done.stderr == f"note: much of the output is only in '{tmp_path}/log_output/1/rank.0/stdout'\n"
        assert shown < size
    else:
        assert done.returncode == 0
        assert shown - len(last[last.index(b"1 ranks finished") :]) == size


# -- a rank fails, ends or stops: the error names the right one --------------------------------------------------------

GO_ON = 'if rank != 1: open("waits", "w"); time.sleep(1000)\nwhile not os.path.exists("waits"): time.sleep(0.1)\n'


def test_a_rank_that_fails_beside_a_thread_that_lives_on_ends_all(tmp_path):
    """The end of its log is shown."""
    script = write(
        tmp_path / "script.py",
        f"import threading\n{GO_ON}threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        'for i in range(50): print("item", i)\nraise ValueError("no such thing")',
    )
    done = Launched(script, "-n", "3").finish()
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed with exit code 1; all ranks were ended.")
    assert "ValueError: no such thing" in done.stderr
    assert re.findall(r"item \d+", done.stderr) == [f"item {i}" for i in range(30, 50)]
    assert str(tmp_path / "log_output" / "1" / "rank.1" / "stderr") in done.stderr


@pytest.mark.thorough
def test_exit_handlers_of_a_rank_that_fails_have_time(tmp_path):
    script = write(
        tmp_path / "script.py",
        f'import atexit\n{GO_ON}def last(): time.sleep(2.5); open("last", "x")\n'
        'atexit.register(last)\nraise ValueError("no such thing")',
    )
    done = Launched(script, "-n", "2").finish()
    assert done.stderr.startswith("error: rank 1 failed with exit code 1;")
    assert (tmp_path / "last").exists()


def test_a_rank_that_ends_while_others_wait_ends_all(tmp_path):
    script = write(tmp_path / "script.py", f"{GO_ON}os._exit(0)")
    done = Launched(script, "-n", "3", "--end-timeout", "3").finish()
    assert done.returncode == 1
    what = "rank 1 ended with exit code 0, and rank 0, rank 2 have stood still for 3 s since"
    assert done.stderr.startswith(f"error: {what} (in {script}, line 4); all ranks were ended.")


@pytest.mark.thorough
def test_ranks_that_go_on_alone_may(tmp_path):
    """The rank computes for 4 s, waits 4 s for a child, and sleeps 1 s. It never stands still for long."""
    script = write(
        tmp_path / "script.py",
        "import subprocess\nif rank: sys.exit()\nend = time.monotonic() + 4\n"
        'while time.monotonic() < end: sum(range(1000))\nsubprocess.run(["sleep", "4"])\ntime.sleep(1)',
    )
    done = Launched(script, "-n", "2", "--end-timeout", "2.5").finish()
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_a_stopped_rank_is_named(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"pid.{rank}", "x").write(str(os.getpid()))\ntime.sleep(1000)')
    launched = Launched(script, "-n", "2")
    launched.wait_for(tmp_path / "pid.0", tmp_path / "pid.1")
    wait_until((tmp_path / "pid.1").read_text)
    os.kill(int((tmp_path / "pid.1").read_text()), signal.SIGSTOP)
    done = launched.finish()
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 is stopped (SIGSTOP) for 15 s, and others go on; all ranks were ended")


# -- ranks that train: the cluster is real, and so are hanging AllReduces ----------------------------------------------


def assert_trained(out: Path, ranks: int) -> None:
    """All ranks have trained, and have the same weights. Their data differ, so they must have communicated."""
    sizes, totals = zip(*((out / f"rank{rank}").read_text().split() for rank in range(ranks)), strict=True)
    assert set(sizes) == {str(ranks)}
    assert len(set(totals)) == 1


@pytest.mark.thorough
def test_two_launches_at_once_with_variables_of_another_cluster(tmp_path):
    both = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        arguments = ["steps", str(tmp_path / name), "5", "pynative"]
        both.append(Launched(TRAINS, "-n", "2", args=arguments, env=STALE, cwd=tmp_path / name))
    for launched, name in zip(both, ("one", "two"), strict=True):
        done = launched.finish()
        assert done.returncode == 0, done.stderr
        assert_trained(tmp_path / name, 2)


@pytest.mark.core("pynative")
@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_is_killed_in_training_ends_the_others_in_their_allreduce(tmp_path, mode):
    launched = Launched(TRAINS, "-n", "2", args=["steps", str(tmp_path), "1000000", mode], cwd=tmp_path)
    launched.wait_for(tmp_path / "1")
    wait_until(lambda: int((tmp_path / "1").read_text().split()[1]) >= 4)
    os.kill(int((tmp_path / "1").read_text().split()[0]), signal.SIGKILL)
    done = launched.finish()
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed with exit code 137 (SIGKILL); all ranks were ended.")
    assert f"the end of {tmp_path}/log_output/1/rank.1/stderr" in done.stderr


@pytest.mark.thorough
def test_a_collective_waits_as_long_as_the_variable_says_that_the_launcher_sets(tmp_path):
    """test_cluster.py shows which value the launcher sets."""
    script = tmp_path / "script.py"
    script.write_text(
        "import time\nimport mindspore as ms\nfrom mindspore import ops\n"
        'from mindspore.communication import get_rank, init\nms.set_device("CPU")\ninit()\n'
        "time.sleep(12 * get_rank())\nprint(ops.AllReduce()(ms.Tensor([1.0])).asnumpy())"
    )
    done = Launched(script, "-n", "2", env={"MS_CPU_COMM_OP_TIMEOUT": "3"}).finish()
    assert done.stderr.startswith("error: rank 0 failed with exit code 1"), done.stderr
    assert "Launch kernel failed, name:Default/AllReduce" in done.stderr


@pytest.mark.thorough
def test_a_rank_that_never_comes_is_named_after_the_start_timeout(tmp_path):
    """The script listens and connects as `init()` does."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, time\n"
        'where = os.environ["MS_SCHED_HOST"], int(os.environ["MS_SCHED_PORT"])\n'
        'if os.environ["MS_ROLE"] == "MS_SCHED":\n'
        "    scheduler = socket.create_server(where)\n"
        'elif os.environ["RANK_ID"] == "0":\n'
        '    while not os.path.exists("up"): time.sleep(0.1)\n'
        "    rank = socket.create_connection(where)\n"
        "else:\n"
        '    print("waiting for a disk that never comes", flush=True)\n'
        'if os.environ["MS_ROLE"] == "MS_SCHED": open("up", "x")\n'
        "time.sleep(1000)"
    )
    done = Launched(script, "-n", "2", "--start-timeout", "30").finish()
    assert done.returncode == 124
    assert done.stderr.startswith("error: did not come to init() within 30 s: rank 1; all ranks were ended.\n")
    assert "    waiting for a disk that never comes" in done.stderr


@pytest.mark.thorough
def test_a_rank_that_ends_early_ends_the_others_in_their_collective(tmp_path):
    """One rank waits in a graph, and sleeps; another waits in PyNative mode, in a busy loop."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport mindspore as ms\nfrom mindspore import ops\n"
        'from mindspore.communication import get_rank, init\nms.set_device("CPU")\ninit()\n'
        "add = ops.AllReduce()\n"
        "for step in range(3):\n    print(add(ms.Tensor([1.0])).asnumpy())\n"
        "if get_rank() == 1: sys.exit(0)\n"
        "if get_rank() == 2: ms.set_context(mode=ms.GRAPH_MODE); add = ms.jit(add)\n"
        "add(ms.Tensor([1.0])).asnumpy()"
    )
    done = Launched(script, "-n", "3", "--end-timeout", "3").finish()
    assert done.returncode == 1
    what = "error: rank 1 ended with exit code 0, and rank 0, rank 2 have stood still for 3 s since"
    assert done.stderr.startswith(f"{what} (in {script}, line 12)"), done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: apt-get install openmpi-bin")
def test_mpirun_trains_and_keeps_logs_as_msrun_does(tmp_path):
    script = tmp_path / "a script.py"
    shutil.copy(TRAINS, script)
    options = ["-n", "2", "--launcher", "mpirun", "--log-dir", "log output"]
    done = Launched(script, *options, args=["steps", str(tmp_path), "5", "pynative"], env=STALE).finish()
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path, 2)
    logs = tmp_path / "log output" / "1"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("std*")) == [
        f"rank.{rank}/{name}" for rank in range(2) for name in ("stderr", "stdout")
    ]
