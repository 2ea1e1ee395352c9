"""`--on ray`, with Ray itself: a cluster of two nodes on this machine, which stand for two hosts."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from tests.launch.hidden import HIDES, STAYS, ends, kill
from tests.launch.launched import (
    LIMIT,
    PYTHONPATH,
    TRAINS,
    Launched,
    free_ports,
    in_mounts_of_its_own,
    wait_until,
    write,
)

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]


class RayCluster:
    """A running cluster. With `prefix` , its second node starts after that prefix of a command."""

    def __init__(self, log: Path, prefix: list[str]) -> None:
        self._nodes: list[psutil.Popen] = []
        self._log = log
        wait_until(self._head_starts)
        wait_until(lambda: self._starts(prefix, f"--address={self.address}"))

    def _head_starts(self) -> bool:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        return self._starts([], "--head", f"--port={port}", "--include-dashboard=false")

    def _starts(self, prefix: list[str], *options: str) -> bool:
        """Start a node. Ray ends one that is not up after 30 s, as on a busy machine."""
        command = [*prefix, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *options]
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "RAY_USAGE_STATS_ENABLED": "0"}
        with self._log.open("w") as output:
            node = psutil.Popen(command, env=env, stdout=output, stderr=output)
        wait_until(lambda: "Ray runtime started" in self._log.read_text() or node.poll() is not None)
        if node.poll() is None:
            self._nodes.append(node)
        return node.poll() is None

    def remove_a_node(self) -> None:
        """End the second node, as a host that loses power."""
        node = self._nodes.pop()
        for process in (*node.children(recursive=True), node):
            process.kill()
        node.wait()

    def end(self) -> None:
        while self._nodes:
            self.remove_a_node()

    def launch(self, script: Path, *options: str, args=(), cwd: Path, env=None, **more) -> Launched:
        where = ["--on", "ray", "--ray-address", self.address, "--nodes", "2", "-n", "1"]
        return Launched(script, *where, *options, args=args, cwd=cwd, env=env, **more)


@contextmanager
def cluster(log: Path, prefix: Sequence[str] = ()) -> Iterator[RayCluster]:
    running = RayCluster(log, [*prefix])
    try:
        yield running
    finally:
        running.end()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[RayCluster]:
    with cluster(tmp_path_factory.mktemp("ray") / "log") as running:
        yield running


def test_two_hosts_of_one_rank_train_together(hosts, tmp_path):
    done = hosts.launch(TRAINS, args=["steps", str(tmp_path), "5", "pynative"], cwd=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    assert "2 ranks finished" in done.stdout
    weights = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert len(weights) == 1, "their data differ, so they must have communicated"
    assert weights.pop().startswith("2 ")
    for rank in range(2):
        assert (tmp_path / "log_output" / f"host.{rank}" / "1" / f"rank.{rank}" / "stdout").exists()


def test_a_rank_that_raises_is_named_and_ends_all(hosts, tmp_path):
    """Rank 0's output is shown until then. Both hosts' ranks have the variables of this program."""
    script = write(
        tmp_path / "script.py",
        'print(rank, os.environ["RANK_SIZE"], os.environ["TEST_VALUE"], sys.argv[1:], os.getcwd(), flush=True)\n'
        'open(f"up.{rank}", "x")\nwhile not os.path.exists(f"up.{1 - rank}"): time.sleep(0.1)\n'
        'if rank == 1: raise ValueError("no such thing")\ntime.sleep(1000)',
    )
    done = hosts.launch(script, args=["it's", "$HOME *"], cwd=tmp_path, env={"TEST_VALUE": "a b"}).finish()
    assert done.returncode == 1
    assert done.stdout == f"0 2 a b [\"it's\", '$HOME *'] {tmp_path}\n"
    assert done.stderr.startswith("error: rank 1 on host 1 failed with exit code 1")
    assert f"the end of {tmp_path}/log_output/host.1/1/rank.1/stderr" in done.stderr
    assert "ValueError: no such thing" in done.stderr


WAITS = 'print("up", flush=True)\nopen(f"up.{rank}", "x")\ntime.sleep(1000)'


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["Ctrl-C", "killed"])
def test_the_end_of_this_program_ends_every_rank(hosts, tmp_path, number, code):
    launched = hosts.launch(write(tmp_path / "script.py", WAITS), cwd=tmp_path)
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    assert launched.process.stdout.readline() == "up\n"
    assert len(launched.running()) >= 4  # msrun, a guard and a script on each host
    launched.process.send_signal(number)
    try:
        assert launched.process.wait(LIMIT) == code
        wait_until(lambda: not launched.running() or number == signal.SIGINT)  # Ray ends the actors, guards the ranks
    finally:
        launched.finish()  # asserts that no process is left


@pytest.mark.thorough
@pytest.mark.parametrize("victims", ["launcher", "launcher-guards"])
def test_ranks_that_hide_end_with_this_program(hosts, tmp_path, victims):
    """Ray kills the actors' children itself when it ends actors."""
    launched = hosts.launch(write(tmp_path / "script.py", HIDES + STAYS), "--end-timeout", "0", cwd=tmp_path)
    launched.wait_for(tmp_path / "up.0.0", tmp_path / "up.0.1")
    kill(launched, tmp_path, victims)
    ends(launched, tmp_path)


def test_a_folder_is_sent_to_the_hosts(hosts, tmp_path):
    """The variable RAY_ADDRESS names the cluster."""
    script = write(tmp_path / "sent" / "script.py", "print(os.getcwd(), sys.argv[0])")
    options = ["--on", "ray", "--nodes", "2", "-n", "1", "--ray-working-dir", str(script.parent)]
    done = Launched(script, *options, cwd=tmp_path, env={"RAY_ADDRESS": hosts.address}).finish()
    assert done.returncode == 0, done.stderr
    folder, script = done.stdout.split()[:2]
    assert script == "script.py"
    assert "/runtime_resources/working_dir_files/" in folder


def test_resources_that_no_host_has_are_named(hosts, tmp_path):
    script = write(tmp_path / "script.py", "")
    needs = ["--ray-resources", "CPU=1,NPU=1", "--start-timeout", "2"]
    done = hosts.launch(script, *needs, cwd=tmp_path).finish()
    assert done.returncode == 124
    why = "2 hosts with CPU 1, NPU 1 were not free within 2 s; 0 of Ray's 2 hosts have that much."
    assert done.stderr.startswith(f"error: {why}")


@pytest.mark.thorough
def test_a_cluster_that_is_not_there_is_named(tmp_path):
    env = {"RAY_ADDRESS": "127.0.0.1:1", "RAY_gcs_rpc_server_connect_timeout_s": "1", "RAY_NUM_REDIS_GET_RETRIES": "1"}
    done = Launched(write(tmp_path / "script.py", ""), "--on", "ray", "--nodes", "2", env=env).finish()
    assert done.returncode == 2
    assert "error: Ray's cluster cannot be used: " in done.stderr, "after Ray's own warnings"


# -- restarts ----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_host_that_is_lost_is_done_without_and_training_goes_on(tmp_path):
    """With the weights of an undisturbed training, to the rounding of another number of ranks: `training_rank`
    makes the same updates with any."""
    with cluster(tmp_path / "ray.log") as hosts:
        options = ["--max-restarts", "1", "--min-processes", "1"]
        arguments, env = ["updates", str(tmp_path), "6", "pynative"], {"TEST_STOP_AT": "3"}
        launched = hosts.launch(TRAINS, *options, args=arguments, cwd=tmp_path, env=env)
        rows = tmp_path / "trained.1"
        wait_until(lambda: rows.exists() and len(rows.read_text().splitlines()) > 5)  # two batches are an update
        hosts.remove_a_node()
        done = launched.finish()
    assert done.returncode == 0, done.stderr
    assert re.match(r"host \d, [\d.]+, is lost; all ranks were ended\.\n", done.stderr)
    assert "note: all begin anew: restart 1 of 1." in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 ranks finished")
    rows = [json.loads(line) for line in (tmp_path / "trained.0").read_text().splitlines()]
    assert {row[0] for row in rows} == {0, 1}
    assert rows[-1][1] == 6
    got, right = (dict(np.load(tmp_path / f"{name}0.npz")) for name in ("rank", "undisturbed"))
    for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
        np.testing.assert_allclose(got[name], right[name], rtol=1e-4, atol=1e-6)


@pytest.mark.thorough
def test_a_host_whose_rank_fails_twice_is_done_without(hosts, tmp_path):
    """The host is known by its process of Ray, whichever ranks it gets. The other one goes on alone."""
    script = write(
        tmp_path / "script.py",
        "import psutil\n(host,) = [str(each.pid) for each in psutil.Process().parents() if each.name() == 'raylet']\n"
        'count, size = os.environ["GACCUM_MS_RESTART_COUNT"], int(os.environ["RANK_SIZE"])\nprint(size, flush=True)\n'
        'if (count, rank) == ("0", 1): open("broken", "w").write(host)\nopen(f"up.{count}.{rank}", "x")\n'
        'while not all(os.path.exists(f"up.{count}.{each}") for each in range(size)): time.sleep(0.1)\n'
        'if host == open("broken").read(): sys.exit(3)\ntime.sleep(1000 * (size - 1))',
    )
    done = hosts.launch(script, "--max-restarts", "2", "--min-processes", "1", cwd=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("2\n2\n1\n1 ranks finished")
    assert done.stderr.count("failed with exit code 3") == 2
    assert "note: all begin anew: restart 2 of 2." in done.stderr
    for attempt in ("1", "2"):
        assert (tmp_path / "log_output" / "host.1" / attempt / "rank.1" / "stdout").exists()


@pytest.mark.thorough
def test_hosts_with_disks_of_their_own(tmp_path):
    """The second host sees another folder: restarts are refused, unless the checkpoints are in one that both see. Its
    disk is small, and gets full of logs."""
    own, shared = tmp_path / "own", tmp_path / "shared"
    own.mkdir()
    prefix = in_mounts_of_its_own(f"mount -t tmpfs -o size=2m none '{own}'")
    waits = f'if not os.path.ismount({str(own)!r}): time.sleep(1000)\nwhile True: print("x" * 1000)'
    script, fills = write(tmp_path / "script.py", ""), write(tmp_path / "fills.py", waits)
    with cluster(tmp_path / "ray.log", prefix) as hosts:
        done = hosts.launch(script, "--max-restarts", "1", "--checkpoints", str(own), cwd=tmp_path).finish()
        assert done.returncode == 2
        why = f"error: --max-restarts needs a folder that all hosts see, but each has its own '{own}'."
        assert done.stderr.startswith(why)
        assert list(own.iterdir()) == []
        done = hosts.launch(script, "--max-restarts", "1", "--checkpoints", str(shared), cwd=tmp_path).finish()
        assert done.returncode == 0, done.stderr
        lacks = write(own / "script.py", "")
        done = hosts.launch(lacks, cwd=tmp_path).finish()
        assert done.returncode == 2
        assert re.match(r"error: host \d, [\d.]+, cannot start the ranks: \[Errno 2\] No such file", done.stderr)
        done = hosts.launch(fills, "--log-dir", str(own / "logs"), cwd=tmp_path).finish()
        assert done.returncode == 1
        host = re.match(r"error: rank (\d) on host \1 failed with exit code", done.stderr)[1]
        assert f"cannot write logs to '{own}/logs/host.{host}': No space left on device" in done.stderr
