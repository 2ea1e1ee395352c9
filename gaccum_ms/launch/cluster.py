"""The description of a launch: its ranks and hosts, and the command and environment that start them."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.metadata
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from gaccum_ms.launch.guard import JOB, NO_SCHEDULER

MASTER_PORT = 8118  # msrun's own default

# For the script: the number of restarts so far, and the largest number. torchrun has variables with similar names.
RESTART_COUNT, MAX_RESTARTS = "GACCUM_MS_RESTART_COUNT", "GACCUM_MS_MAX_RESTARTS"
VISIBLE_DEVICES = ("ASCEND_RT_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")

# Variables of a batch system, an outer msrun or an outer mpirun. MindSpore would use these first.
CLUSTER_PREFIXES = ("RANK_", "MS_SCHED_", "OMPI_", "PMIX_", "PMI_", "PRTE_")
CLUSTER_NAMES = {"MS_ROLE", "MS_WORKER_NUM", "MS_SERVER_NUM", "MS_NODE_ID", "MS_NODE_RANK"}
CLUSTER_NAMES |= {"MS_TOPO_TIMEOUT", "MS_SIMULATION_LEVEL", "MS_ENABLE_RECOVERY", "MS_RECOVERY_PATH"}
CLUSTER_NAMES |= {"DEVICE_ID", "DEVICE_NUM", "MSRUN_CPU_LIST", "MSRUN_BIND_FILE", JOB, NO_SCHEDULER}
# Variables that a user may set for this cluster: the network card of a host's ranks, and Ascend's table of devices.
# They are kept if they fit this host.
WORKER_IP, RANK_TABLE = "MS_WORKER_IP", "RANK_TABLE_FILE"
THREAD_NAMES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

# How long ranks wait for each other in a collective on CPU. MindSpore's own 30 s are too short if one rank compiles,
# evaluates or writes a checkpoint meanwhile.
COLLECTIVE_TIMEOUT = "MS_CPU_COMM_OP_TIMEOUT"
COLLECTIVE_TIMEOUT_SECONDS = 300
NODE_TIMEOUT = "MS_NODE_TIMEOUT"  # MindSpore uses this one if the other is not set, and always before 2.10

# MindSpore gives up this much later than the launcher, whose error names the missing ranks.
MINDSPORE_WAITS_LONGER_SECONDS = 60
MINDSPORE_WAITS_SECONDS = 1_000_000  # the limit: MindSpore counts milliseconds in 32 bits


class LaunchError(Exception):
    """A launch that cannot start or did not succeed.

    It has this program's exit code, the rank that failed, if one did, and when it failed, by ``time.monotonic()`` .
    """

    def __init__(self, message: str, code: int = 1, rank: int | None = None, since: float | None = None) -> None:
        super().__init__(message)
        self.code, self.rank = code, rank
        self.since = time.monotonic() if since is None else since


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The ranks of a launch."""

    launcher: str = "msrun"  # or "mpirun"
    processes: int = 8  # ranks on each host
    nodes: int = 1  # hosts
    node_rank: int = 0  # the number of this host
    master_addr: str = "127.0.0.1"  # an address of host 0, where MindSpore's scheduler runs
    master_port: int = 0  # the scheduler's port there; 0: any free port
    start_timeout: float = 600  # seconds in which all ranks must reach `init()`
    end_timeout: float = 0  # seconds for which others may go on once a rank has ended; 0: for ever
    rank_table_file: str = ""  # msrun's option
    bind_core: str = ""  # msrun's option
    max_restarts: int = 0
    min_processes: int = 0  # the least number of ranks, on all hosts, after a restart; 0: all of them
    attempt: int = 1
    devices: tuple[int, ...] = ()  # the devices of this host that take part; empty: the first ones

    @property
    def size(self) -> int:
        """The number of ranks on all hosts."""
        return self.nodes * self.processes

    @property
    def local_ranks(self) -> range:
        """The ranks on this host, with msrun's numbers."""
        return self.ranks_of(self.node_rank)

    def ranks_of(self, node: int) -> range:
        """The ranks on one host."""
        return range(node * self.processes, (node + 1) * self.processes)

    def device_of(self, rank: int) -> int:
        """The number of a rank's device on its host."""
        local = rank % self.processes
        return self.devices[local] if self.devices else local

    def environment(self, parent: Mapping[str, str], cores: int) -> dict[str, str]:
        """The environment of the processes to start: `parent` without another cluster's variables, with a share of this
        host's `cores` for each process, and the time that ranks wait for each other; values in `parent` are kept."""
        unfit = left_out(parent)
        env = {k: v for k, v in parent.items() if k not in unfit and not _is_of_another_cluster(k)}
        for name in THREAD_NAMES:
            env.setdefault(name, str(max(1, cores // self.processes)))
        env.setdefault("PYTHONUNBUFFERED", "1")
        if NODE_TIMEOUT not in env:
            seconds = env.setdefault(COLLECTIVE_TIMEOUT, str(COLLECTIVE_TIMEOUT_SECONDS))
            env |= {NODE_TIMEOUT: seconds} if _before_2_10() else {}
        env |= {RESTART_COUNT: str(self.attempt - 1), MAX_RESTARTS: str(self.max_restarts)}
        env |= {NO_SCHEDULER: "1"} if self.node_rank else {}
        if self.devices:
            env |= {name: _visible(env.get(name), self.devices) for name in VISIBLE_DEVICES}
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        if self.launcher == "mpirun":  # it does not set the variables of MindSpore's cluster
            env |= {"MS_SCHED_HOST": self.master_addr, "MS_SCHED_PORT": str(self.master_port)}
            env |= {"MS_WORKER_NUM": str(self.size), "RANK_SIZE": str(self.size)}
            env |= {"MS_TOPO_TIMEOUT": str(self._mindspores_timeout())}
        return env

    def command(self, logs: Path, env: Mapping[str, str]) -> list[str]:
        """Return the command that starts a Python program on each of this host's ranks, without that program."""
        path = shutil.which(self.launcher, path=env["PATH"])
        if path is None:
            remedy = "on Debian: apt-get install openmpi-bin" if self.launcher == "mpirun" else "pip install mindspore"
            raise LaunchError(f"'{self.launcher}' is not installed ({remedy}).", code=2)
        if self.launcher == "mpirun":
            as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
            return [path, "-n", str(self.processes), "--oversubscribe", "--bind-to", "none", *as_root, sys.executable]
        count = [f"--worker_num={self.size}", f"--local_worker_num={self.processes}", f"--node_rank={self.node_rank}"]
        address = [f"--master_addr={self.master_addr}", f"--master_port={self.master_port}"]
        waits = [f"--cluster_time_out={self._mindspores_timeout()}", "--join=True"]
        more = [f"--{name}={getattr(self, name)}" for name in ("rank_table_file", "bind_core") if getattr(self, name)]
        own_logs = [f"--log_dir={logs}", "--tail_worker_log=0"]
        return [path, *count, *address, *waits, *more, *own_logs, "python3"]

    def _mindspores_timeout(self) -> int:
        return int(min(self.start_timeout + MINDSPORE_WAITS_LONGER_SECONDS, MINDSPORE_WAITS_SECONDS))


def _is_of_another_cluster(name: str) -> bool:
    """Whether an environment variable describes a cluster; it is never the one that starts here."""
    return name in CLUSTER_NAMES or (name.startswith(CLUSTER_PREFIXES) and name != RANK_TABLE)


def _visible(value: str | None, devices: tuple[int, ...]) -> str:
    """The names of some devices. If the variable is set, devices are counted among those that it names."""
    names = value.split(",") if value else []
    return ",".join(names[device] if device < len(names) else str(device) for device in devices)


def left_out(parent: Mapping[str, str]) -> dict[str, str]:
    """The user's variables for this cluster that do not fit this host, and are not passed on to the ranks, and why."""
    reasons = {}
    if parent.get(RANK_TABLE) and not Path(parent[RANK_TABLE]).is_file():
        reasons[RANK_TABLE] = "there is no such file"
    try:
        with reserved_port(parent.get(WORKER_IP) or Cluster.master_addr):
            pass
    except LaunchError:
        reasons[WORKER_IP] = "it is no address of this host"
    return reasons


@contextlib.contextmanager
def reserved_port(address: str, port: int = 0) -> Iterator[int]:
    """Find a free TCP port, or take the given one, and reserve it until MindSpore's scheduler listens there.

    A socket that is bound and does not listen reserves the port: the system assigns it to no program that requests any
    free port. The scheduler requests this port and sets SO_REUSEADDR, as we do, and so gets it.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as reserves:
        reserves.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reserves.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} of {address} is taken. Name another --master-port, the same on all hosts."
            else:
                why = f"this host has no address '{address}' ({error.strerror}). --master-addr is one of host 0's."
            raise LaunchError(why, code=2) from None
        yield reserves.getsockname()[1]


def _before_2_10() -> bool:
    """Whether the installed MindSpore is older than 2.10; it is not imported."""
    try:
        version = importlib.metadata.version("mindspore")
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(map(int, re.findall(r"\d+", version)[:2])) < (2, 10)
