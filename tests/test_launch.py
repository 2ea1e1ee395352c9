"""The launcher, on scripts that never import MindSpore: what is promised here holds before any training begins."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import LIMIT, Launched, in_mounts_of_its_own, write

from gaccum_ms import launch
from gaccum_ms.cluster import Cluster, LaunchError, held_port
from gaccum_ms.rank import MEET_SECONDS

pytestmark = pytest.mark.distributed


def test_a_held_port_is_a_free_one_and_stays_free_for_the_scheduler_alone():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with held_port("127.0.0.1") as port:
            assert port != taken.getsockname()[1]
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            with socket.socket() as scheduler:  # sets what MindSpore's sets
                scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                scheduler.bind(("127.0.0.1", port))
                scheduler.listen()


def test_a_taken_port_and_a_strange_address_are_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} of 127.0.0.1 is taken"), held_port("127.0.0.1", port):
            pass
    with pytest.raises(LaunchError, match=r"this host has no address '192\.0\.2\.1'"), held_port("192.0.2.1"):
        pass


def test_another_clusters_variables_are_dropped_and_other_variables_kept():
    stale = {"MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_NODE_ID", "RANK_ID", "RANK_SIZE"}
    stale |= {"MS_WORKER_IP", "MS_SERVER_NUM", "MS_ENABLE_RECOVERY", "MS_TOPO_TIMEOUT", "RANK_TABLE_FILE", "PMIX_RANK"}
    stale |= {"OMPI_COMM_WORLD_RANK", "DEVICE_ID", "MS_SIMULATION_LEVEL"}
    kept = {"HOME": "/root", "GLOG_v": "3", "MS_DEV_SAVE_GRAPHS": "1", "DATA_PATH": "/data"}
    env = Cluster().environment(dict.fromkeys(stale, "7") | kept, cores=2)
    assert not stale & env.keys()
    assert kept.items() <= env.items()


@pytest.mark.parametrize(("processes", "cores", "threads"), [(8, 2, "1"), (2, 8, "4"), (1, 6, "6")])
def test_processes_share_the_cores(processes, cores, threads):
    env = Cluster(processes=processes).environment({"MKL_NUM_THREADS": "3"}, cores)
    assert (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"]) == (threads, threads)
    assert env["MKL_NUM_THREADS"] == "3", "the user's number is kept"


def test_ranks_wait_for_one_another_longer_than_mindspore_would_or_as_long_as_the_user_says():
    def timeouts(parent):
        return {k: v for k, v in Cluster().environment(parent, cores=2).items() if k.endswith("_TIMEOUT")}

    assert timeouts({}) == {"MS_CPU_COMM_OP_TIMEOUT": "300"}
    for own in ({"MS_CPU_COMM_OP_TIMEOUT": "20"}, {"MS_NODE_TIMEOUT": "20"}):
        assert timeouts(own) == own


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


def test_the_script_runs_as_python_runs_it(tmp_path):
    """In the rank's process: its own `__main__`, folder, arguments and exit code, and what pickling it needs."""
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
    assert "rank 1 failed with exit code 3;" in done.stderr
    assert not (tmp_path / "log_output" / "1" / "rank.0" / "stderr").read_text()
    assert script.exists()


def test_no_rank_leaves_before_all_have_come_to_their_end(tmp_path):
    # What a rank does when its process ends shows when that was. One that fails waits for nobody.
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


def test_a_rank_does_not_wait_for_ever_for_one_that_goes_on(tmp_path):
    # It may be waited for in turn, in a collective to which it never comes: that must fail, not hang.
    script = write(
        tmp_path / "script.py",
        "import atexit\nbegin = time.monotonic()\n"
        "atexit.register(lambda: print(time.monotonic() - begin, flush=True))\n"
        f"time.sleep({MEET_SECONDS + 3} * rank)",
    )
    assert Launched(script, "-n", "2").finish().returncode == 0
    waited = float((tmp_path / "log_output" / "1" / "rank.0" / "stdout").read_text())
    assert MEET_SECONDS - 1 < waited < MEET_SECONDS + 3


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
    script = write(tmp_path / "script.py", 'open(f"pid.{rank}", "x").write(str(os.getpid()))\ntime.sleep(1000)')
    launched = Launched(script, "-n", "3")
    for rank in range(3):
        launched.wait_for(tmp_path / f"pid.{rank}")
    begin = time.monotonic()
    os.kill(int((tmp_path / "pid.2").read_text()), signal.SIGKILL)
    done = launched.finish()
    assert "rank 2 failed with exit code 137 (SIGKILL)" in done.stderr
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
    done = Launched(script, "-n", "2", "--timeout", "8").finish()
    assert done.returncode == 124
    assert "ranks [1] had not ended after 8 s" in done.stderr


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


def test_a_log_folder_on_a_file_system_that_is_read_only_is_named(tmp_path):
    # A file system's own refusal: permissions do not stop root, who often runs the tests.
    script = write(tmp_path / "script.py", "")
    (tmp_path / "mount").mkdir()
    prefix = in_mounts_of_its_own(f"mount -t tmpfs -o ro none '{tmp_path}/mount'")
    done = Launched(script, "--log-dir", "mount/logs", prefix=prefix).finish()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot write logs to '{tmp_path}/mount/logs': Read-only file system")
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize(("size", "code"), [("8k", 2), ("512k", 1)], ids=["before the start", "while they run"])
def test_a_full_disk_is_named(tmp_path, size, code):
    script = write(tmp_path / "script.py", 'if rank == 1: time.sleep(1000)\nwhile True: print("x" * 1000)')
    (tmp_path / "mount").mkdir()
    prefix = in_mounts_of_its_own(f"mount -t tmpfs -o size={size} none '{tmp_path}/mount'")
    done = Launched(script, "-n", "2", "--log-dir", "mount/logs", prefix=prefix).finish()
    assert done.returncode == code
    assert f"'{tmp_path}/mount/logs' takes no more logs: No space left on device" in done.stderr
    assert done.stderr.count("error: ") == 1
    assert ("rank 0 failed with exit code" in done.stderr) == (code == 1)


def test_logs_of_an_older_launch_with_more_ranks_are_removed(tmp_path):
    script = write(tmp_path / "script.py", "")
    old = tmp_path / "log_output" / "1" / "rank.5"
    old.mkdir(parents=True)
    (old / "stdout").write_text("an older launch's")
    assert Launched(script, "-n", "1").finish().returncode == 0
    assert not old.exists()


def test_a_launcher_that_is_not_installed_is_named(tmp_path):
    with pytest.raises(LaunchError, match="'mpirun' is not installed"):
        Cluster(launcher="mpirun").command(tmp_path, {"PATH": str(tmp_path)})


def test_it_is_a_module_to_run():
    command = [sys.executable, "-m", "gaccum_ms.launch", "--help"]
    root = Path(launch.__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout.startswith("usage: python -m gaccum_ms.launch")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--processes", "0", __file__], "must be at least 1, but got 0"),
        (["missing.py"], "no such script: missing.py"),
        (["--start-timeout", "0", __file__], "--start-timeout must be greater than 0, but got 0"),
        (["--nodes", "2", "--node-rank", "2", __file__], "--node-rank must be from 0 to --nodes - 1 = 1, but got 2"),
        (["--nodes", "2", __file__], "--nodes needs --master-addr"),
        (["--nodes", "2", "--launcher", "mpirun", __file__], "--nodes needs --launcher msrun"),
        (["--master-port", "65535", __file__], "--master-port must be from 1 to 65534, but got 65535"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as error:
        launch.main(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["--tune-cpu", "--tune-cpu-threads"])
def test_the_option_to_tune_has_its_old_name_too(name):
    assert launch._parse([name, __file__]).tune_cpu_threads
    assert not launch._parse([__file__]).tune_cpu_threads


@pytest.mark.parametrize(("options", "shown"), [((), ""), (("--tune-cpu",), "CpuThreads(dispatch=1, kernels=")])
def test_threads_are_tuned_when_asked_and_only_then(tmp_path, options, shown):
    """MindSpore says whether its threads have been set."""
    script = write(
        tmp_path / "script.py",
        "from mindspore._c_expression import RuntimeConf\n"
        'print("set", RuntimeConf.get_instance().is_dispatch_threads_num_configured())',
    )
    done = Launched(script, "-n", "2", *options, env={"PYTHONPATH": str(Path(launch.__file__).parents[1])}).finish()
    assert done.returncode == 0, done.stderr
    assert shown in done.stdout
    assert f"set {bool(options)}" in done.stdout
