"""`--on ray`, with Ray itself: a cluster of two nodes on this machine, which stand for two hosts."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.hidden import HIDES, STAYS, ends, kill
from tests.launch.launched import CONNECTED, PYTHONPATH, Launched, free_ports, wait_until, write

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install '.[ray]'"),
]


class RayCluster:
    """A running cluster."""

    def __init__(self, log: Path) -> None:
        self._nodes: list[psutil.Popen] = []
        self._log = log
        wait_until(self._head_starts)
        wait_until(lambda: self._starts(f"--address={self.address}"))

    def _head_starts(self) -> bool:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        return self._starts("--head", f"--port={port}", "--include-dashboard=false")

    def _starts(self, *options: str) -> bool:
        """Start a node. Ray ends one that is not up after 30 s, as on a busy machine."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *options]
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

    def launch(self, script: Path, *options: str, **more) -> Launched:
        where = ["--on", "ray", "--ray-address", self.address, "--nodes", "2", "-n", "1"]
        return Launched(script, *where, *options, **more)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[RayCluster]:
    running = RayCluster(tmp_path_factory.mktemp("ray") / "log")
    try:
        yield running
    finally:
        running.end()


def test_two_hosts_communicate_and_a_rank_that_raises_ends_all(hosts, tmp_path):
    """Rank 0's output is shown until then. Both hosts' ranks have the variables of this program."""
    folder = tmp_path / "it's $HOME *"
    folder.mkdir()
    script = folder / "script.py"
    script.write_text(
        CONNECTED + 'print(rank, total(), os.environ["TEST_VALUE"], os.getcwd(), flush=True)\n'
        'total()\nif rank == 1: raise ValueError("no such thing")\ntime.sleep(1000)\n'
    )
    done = hosts.launch(script, env={"TEST_VALUE": "a b"}).finish()
    assert done.returncode == 1
    assert f"0 3.0 a b {folder}\n" in done.stdout
    assert done.stderr.startswith("error: rank 1 on host 1 failed with exit code 1")
    assert f"the end of {folder}/log_output/host.1/1/rank.1/stderr" in done.stderr
    assert "ValueError: no such thing" in done.stderr
    rank_1 = (folder / "log_output" / "host.1" / "1" / "rank.1" / "stdout").read_text()
    assert rank_1 == f"1 3.0 a b {folder}\n"
    assert (folder / "log_output" / "host.0" / "1" / "rank.0" / "stdout").exists()


def test_ctrl_c_ends_every_rank(hosts, tmp_path):
    script = write(tmp_path / "script.py", 'print("up", flush=True)\nopen(f"up.{rank}", "x")\ntime.sleep(1000)')
    launched = hosts.launch(script)
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    assert launched.process.stdout.readline() == "up\n"
    assert len(launched.running()) >= 4  # msrun, a guard and a script on each host
    launched.process.send_signal(signal.SIGINT)
    done = launched.finish()  # asserts that no process is left
    assert done.returncode == 130, done.stderr


def test_ranks_that_hide_end_with_this_program(hosts, tmp_path):
    """Ray kills the actors' children itself when it ends actors."""
    launched = hosts.launch(write(tmp_path / "script.py", HIDES + STAYS))
    launched.wait_for(tmp_path / "up.0.0", tmp_path / "up.0.1")
    kill(launched, tmp_path, "launcher-guards")
    ends(launched, tmp_path)


def test_resources_that_no_host_has_are_named(hosts, tmp_path):
    script = write(tmp_path / "script.py", "")
    needs = ["--ray-resources", "CPU=1,NPU=1", "--start-timeout", "2"]
    done = hosts.launch(script, *needs).finish()
    assert done.returncode == 124
    why = "2 hosts with CPU 1, NPU 1 were not free within 2 s; 0 of Ray's 2 hosts have that much."
    assert done.stderr.startswith(f"error: {why}")


def test_a_host_that_is_lost_is_done_without(hosts, tmp_path):
    """The variable RAY_ADDRESS names the cluster. A folder is sent to the hosts. This test must be the last one: then
    there is one host."""
    script = write(
        tmp_path / "sent" / "script.py",
        f'print(os.getcwd(), sys.argv[0], flush=True)\nopen(f"{tmp_path}/up.{{rank}}", "w")\n'
        'if os.environ["RANK_SIZE"] == "2": time.sleep(1000)',
    )
    options = ["--on", "ray", "--nodes", "2", "-n", "1", "--ray-working-dir", str(script.parent)]
    options += ["--max-restarts", "1", "--min-processes", "1", "--checkpoints", str(tmp_path / "shared")]
    launched = Launched(script, *options, cwd=tmp_path, env={"RAY_ADDRESS": hosts.address})
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    hosts.remove_a_node()
    done = launched.finish()
    assert done.returncode == 0, done.stderr
    assert re.match(r"host \d, [\d.]+, is lost; all ranks were ended\.\n", done.stderr)
    assert "note: all begin anew: restart 1 of 1." in done.stderr
    *_, sent, last = done.stdout.splitlines()
    assert re.fullmatch(r".*/runtime_resources/working_dir_files/.* script\.py", sent)
    assert last.startswith("1 ranks finished")
