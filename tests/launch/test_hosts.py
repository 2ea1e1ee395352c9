"""Several hosts, started by hand: each launcher watches its own ranks. The hosts are network namespaces."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ADDRESS, start, write

WORKER = Path(__file__).resolve().with_name("training_worker.py")
pytestmark = pytest.mark.distributed


@pytest.mark.thorough
def test_two_hosts_train_as_one(hosts, tmp_path):
    """Ranks wait at their end, because no launcher knows the other's ranks; so the last collective is complete."""
    both = [start(hosts, WORKER, tmp_path, number, args=[str(tmp_path), "5", "pynative"]) for number in range(2)]
    for number, launched in enumerate(both):
        done = launched.finish()
        assert done.returncode == 0, done.stderr
        assert f"2 ranks of host {number} finished" in done.stdout
        logs = tmp_path / f"host {number}" / "1"
        assert sorted(path.name for path in logs.iterdir()) == [f"rank.{2 * number}", f"rank.{2 * number + 1}"]
    results = {(tmp_path / f"rank{rank}").read_text() for rank in range(4)}
    assert len(results) == 1, "all have the same weights"
    assert results.pop().startswith("4 ")


def test_a_launcher_ends_and_names_its_own_ranks(hosts, tmp_path):
    script = write(
        tmp_path / "script.py",
        'assert os.environ["RANK_SIZE"] == "4"\nopen(f"up.{rank}", "x")\n'
        'while not os.path.exists("go"): time.sleep(0.1)\n'
        'if rank == 3: raise ValueError(f"no such thing on rank {rank}")\ntime.sleep(1000)',
    )
    both = [start(hosts, script, tmp_path, number) for number in range(2)]
    for rank in range(4):
        both[rank // 2].wait_for(tmp_path / f"up.{rank}")
    (tmp_path / "go").touch()
    done = both[1].finish()
    assert done.returncode == 1
    assert "error: rank 3 on host 1 failed with exit code 1; all ranks of this host were ended." in done.stderr
    assert f"the end of {tmp_path}/host 1/1/rank.3/stderr" in done.stderr
    assert "ValueError: no such thing on rank 3" in done.stderr
    assert both[0].process.poll() is None, "its ranks are another launcher's"
    both[0].process.send_signal(signal.SIGTERM)
    assert both[0].finish().returncode == 143


def test_a_taken_port_is_named(hosts, tmp_path):
    script = write(tmp_path / "script.py", "time.sleep(1000)")
    listens = f"import socket; listener = socket.create_server(('{ADDRESS}', 8118)); print('up', flush=True); input()"
    taker = subprocess.Popen(
        [*hosts[0], sys.executable, "-c", listens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert taker.stdout.readline() == "up\n"
        done = start(hosts, script, tmp_path, 0).finish()
    finally:
        taker.communicate("\n", timeout=60)
    assert done.returncode == 2
    assert f"port 8118 of {ADDRESS} is taken. Name another --master-port" in done.stderr
