"""Several hosts, simulated by two connected network namespaces."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launched import ADDRESS, start, write

WORKER = Path(__file__).resolve().with_name("training_worker.py")
pytestmark = pytest.mark.distributed


@pytest.mark.thorough
def test_two_hosts_train_as_one(hosts, tmp_path):
    env = {"GACCUM_MS_SECRET": "known to both of them"}
    arguments = [str(tmp_path), "5", "pynative"]
    both = [start(hosts, WORKER, tmp_path, number, args=arguments, env=env) for number in range(2)]
    for number, launched in enumerate(both):
        done = launched.finish()
        assert done.returncode == 0, done.stderr
        assert "4 ranks finished" in done.stdout
        assert "note: " not in done.stdout
        logs = tmp_path / f"host {number}" / "1"
        assert sorted(path.name for path in logs.iterdir()) == [f"rank.{2 * number}", f"rank.{2 * number + 1}"]
    results = {(tmp_path / f"rank{rank}").read_text() for rank in range(4)}
    assert len(results) == 1, "all have the same weights"
    assert results.pop().startswith("4 ")


@pytest.mark.core("3")
@pytest.mark.parametrize("failing", [0, 3])
def test_a_failing_rank_ends_both_hosts_which_name_it_with_its_log(hosts, tmp_path, failing):
    # The others are in no collective, so only the launchers can end them.
    script = write(
        tmp_path / "script.py",
        'assert os.environ["RANK_SIZE"] == "4"\nopen(f"up.{rank}", "x")\n'
        'while not os.path.exists("go"): time.sleep(0.1)\n'
        f'if rank == {failing}: raise ValueError(f"no such thing on rank {{rank}}")\ntime.sleep(1000)',
    )
    both = [start(hosts, script, tmp_path, number) for number in range(2)]
    for rank in range(4):
        both[rank // 2].wait_for(tmp_path / f"up.{rank}")
    (tmp_path / "go").touch()
    begin = time.monotonic()
    for launched in both:
        done = launched.finish()
        assert done.returncode == 1
        assert f"rank {failing} on host {failing // 2} failed with exit code 1" in done.stderr
        assert f"the end of {tmp_path}/host {failing // 2}/1/rank.{failing}/stderr" in done.stderr
        assert f"ValueError: no such thing on rank {failing}" in done.stderr
    assert time.monotonic() - begin < 30


@pytest.mark.thorough
@pytest.mark.parametrize("ending", [0, 2])
def test_a_rank_that_ends_while_those_of_both_hosts_wait_ends_both(hosts, tmp_path, ending):
    script = write(tmp_path / "script.py", f"if rank == {ending}: os._exit(0)\ntime.sleep(1000)")
    both = [start(hosts, script, tmp_path, number, "--end-timeout", "3") for number in range(2)]
    others = ", ".join(f"rank {rank} on host {rank // 2}" for rank in range(4) if rank != ending)
    for launched in both:
        done = launched.finish()
        assert done.returncode == 1
        what = (
            f"rank {ending} on host {ending // 2} ended with exit code 0, and {others} have stood still for 3 s since"
        )
        assert what in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_whose_launcher_is_killed_ends_the_other(hosts, tmp_path, lost):
    """Host 1 cannot go on without host 0, though restarts are left."""
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "x")\ntime.sleep(1000)')
    options = [] if lost else ["--max-restarts", "2", "--min-processes", "2"]
    both = [start(hosts, script, tmp_path, number, *options) for number in range(2)]
    for rank in range(4):
        both[rank // 2].wait_for(tmp_path / f"up.{rank}")
    begin = time.monotonic()
    both[lost].process.send_signal(signal.SIGKILL)
    done = both[1 - lost].finish()
    assert done.returncode == 1
    assert f"host {lost}{' (ranks 2 to 3)' if lost else ''} is lost" in done.stderr
    while both[lost].running() and time.monotonic() - begin < 30:
        time.sleep(0.2)
    both[lost].finish()
    assert time.monotonic() - begin < 30


@pytest.mark.thorough
def test_a_host_that_is_cut_off_ends_both(hosts, tmp_path):
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "x")\ntime.sleep(1000)')
    both = [start(hosts, script, tmp_path, number) for number in range(2)]
    for rank in range(4):
        both[rank // 2].wait_for(tmp_path / f"up.{rank}")
    begin = time.monotonic()
    subprocess.run([*hosts[1], "ip", "route", "flush", "table", "main"], check=True, timeout=60)
    for number, launched in enumerate(both):
        done = launched.finish()
        assert done.returncode == 1
        assert f"host {1 - number}" in done.stderr
        assert "is lost" in done.stderr
    assert time.monotonic() - begin < 40


@pytest.mark.thorough
def test_ranks_of_both_hosts_come_and_leave_together(hosts, tmp_path):
    # Each rank prints how long it ended after the last one was done: not before, and not only when its wait ran out.
    script = write(
        tmp_path / "script.py",
        'import atexit\nopen(f"up.{rank}", "x")\n'
        'atexit.register(lambda: print(time.time() - os.path.getmtime("last"), flush=True))\n'
        'if rank == 3: time.sleep(4); open("last", "x")',
    )
    other = start(hosts, script, tmp_path, 1)
    time.sleep(4)
    assert not (tmp_path / "up.2").exists(), "it waits for host 0"
    done = [launched.finish() for launched in (start(hosts, script, tmp_path, 0), other)]
    assert [one.returncode for one in done] == [0, 0]
    assert (tmp_path / "up.2").exists()
    who = f"whoever can reach {ADDRESS}, port 8119, can end this launch"
    assert f"note: without GACCUM_MS_SECRET or --secret-file {who}\n" in done[0].stdout
    assert "note: " not in done[1].stdout
    for rank in range(4):
        assert 0 <= float((tmp_path / f"host {rank // 2}" / "1" / f"rank.{rank}" / "stdout").read_text()) < 5


@pytest.mark.thorough
@pytest.mark.parametrize("present", [0, 1])
def test_a_host_that_never_comes_is_named(hosts, tmp_path, present):
    script = write(tmp_path / "script.py", "time.sleep(1000)")
    done = start(hosts, script, tmp_path, present, "--start-timeout", "4").finish()
    assert done.returncode == 124
    if present == 0:
        assert "hosts that did not join within 4 s: 1 (ranks 2 to 3)." in done.stderr
    else:
        assert f"no launcher of host 0 answers at {ADDRESS}, port 8119" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-n", "3"], "host 1 was started with --nodes 2 --processes 3, but host 0 with --nodes 2 --processes 2"),
        (["--master-addr", "10.231.77.2"], "is an address of this host, which --node-rank says is host 1"),
    ],
)
def test_a_host_with_other_numbers_is_refused(hosts, tmp_path, options, message):
    script = write(tmp_path / "script.py", "time.sleep(1000)")
    other = start(hosts, script, tmp_path, 1, *options)
    first = start(hosts, script, tmp_path, 0) if "-n" in options else None
    done = other.finish()
    assert done.returncode == 2
    assert message in done.stderr
    if first:
        done = first.finish()
        assert done.returncode == 2
        assert message in done.stderr


def test_a_taken_port_is_named(hosts, tmp_path):
    script = write(tmp_path / "script.py", "time.sleep(1000)")
    for port in (8118, 8119):  # MindSpore's port, and the launchers' port
        listens = f"import socket; held = socket.create_server(('{ADDRESS}', {port})); print('up', flush=True); input()"
        taker = subprocess.Popen(
            [*hosts[0], sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        try:
            assert taker.stdout.readline() == "up\n"
            done = start(hosts, script, tmp_path, 0).finish()
        finally:
            taker.communicate("\n", timeout=60)
        assert done.returncode == 2
        assert f"port {port} of {ADDRESS} is taken. Name another --master-port" in done.stderr
