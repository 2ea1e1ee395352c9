"""The parts of a launch: the port, the environment and the command of its ranks. No process is started."""

from __future__ import annotations

import importlib.metadata
import socket

import pytest

from gaccum_ms.launch.cluster import Cluster, LaunchError, left_out, reserved_port
from gaccum_ms.launch.ray_engine import OnHost


def test_a_reserved_port_is_a_free_one_and_stays_free_for_the_scheduler_alone():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        host, number = taken.getsockname()
        with pytest.raises(LaunchError, match=f"port {number} of 127.0.0.1 is taken"), reserved_port(host, number):
            pass
        with reserved_port(host) as port:
            assert port != number
            with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
                other.bind(("127.0.0.1", port))
            with socket.socket() as scheduler:  # with the option that MindSpore's scheduler sets
                scheduler.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                scheduler.bind(("127.0.0.1", port))
                scheduler.listen()


def test_another_clusters_variables_are_dropped_and_other_variables_kept():
    stale = {"MS_ROLE", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_WORKER_NUM", "MS_NODE_ID", "RANK_ID", "RANK_SIZE"}
    stale |= {"MS_WORKER_IP", "MS_SERVER_NUM", "MS_ENABLE_RECOVERY", "MS_TOPO_TIMEOUT", "RANK_TABLE_FILE", "PMIX_RANK"}
    stale |= {"OMPI_COMM_WORLD_RANK", "DEVICE_ID", "MS_SIMULATION_LEVEL", "GACCUM_MS_NO_SCHEDULER"}
    kept = {"HOME": "/root", "GLOG_v": "3", "MS_DEV_SAVE_GRAPHS": "1", "DATA_PATH": "/data"}
    env = Cluster().environment(dict.fromkeys(stale, "7") | kept, cores=2)
    assert not stale & env.keys()
    assert kept.items() <= env.items()


def test_a_card_and_a_table_that_can_be_meant_for_this_host_are_kept_and_others_named(tmp_path):
    table = tmp_path / "table.json"
    table.touch()
    own = {"MS_WORKER_IP": "127.0.0.1", "RANK_TABLE_FILE": str(table)}
    assert own.items() <= Cluster().environment(own, cores=2).items()
    assert left_out(own) == left_out({}) == {}
    strange = {"MS_WORKER_IP": "192.0.2.1", "RANK_TABLE_FILE": "/nowhere/table.json"}
    assert not strange.keys() & Cluster().environment(strange, cores=2).keys()
    reasons = {"MS_WORKER_IP": "it is no address of this host", "RANK_TABLE_FILE": "there is no such file"}
    assert left_out(strange) == reasons


@pytest.mark.parametrize(("processes", "cores", "threads"), [(8, 2, "1"), (2, 8, "4")])
def test_processes_share_the_cores(processes, cores, threads):
    env = Cluster(processes=processes).environment({"MKL_NUM_THREADS": "3"}, cores)
    assert (env["OMP_NUM_THREADS"], env["OPENBLAS_NUM_THREADS"]) == (threads, threads)
    assert env["MKL_NUM_THREADS"] == "3", "the user's number is kept"


def test_ranks_wait_for_one_another_longer_than_mindspore_would_or_as_long_as_the_user_says(monkeypatch):
    def timeouts(parent):
        return {k: v for k, v in Cluster().environment(parent, cores=2).items() if k.endswith("_TIMEOUT")}

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.0")
    assert timeouts({}) == {"MS_CPU_COMM_OP_TIMEOUT": "300"}
    for own in ({"MS_CPU_COMM_OP_TIMEOUT": "20"}, {"MS_NODE_TIMEOUT": "20"}):
        assert timeouts(own) == own
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.9.0")  # it has only MS_NODE_TIMEOUT
    assert timeouts({})["MS_NODE_TIMEOUT"] == "300"
    assert timeouts({"MS_CPU_COMM_OP_TIMEOUT": "20"})["MS_NODE_TIMEOUT"] == "20"
    assert timeouts({"MS_NODE_TIMEOUT": "20"}) == {"MS_NODE_TIMEOUT": "20"}


def test_of_hosts_with_one_disk_only_the_first_makes_a_file(tmp_path):
    assert [OnHost().makes(tmp_path / "checkpoints" / "file") for _ in range(2)] == [True, False]
