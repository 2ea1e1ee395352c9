"""Prints a launch as a bash script: each rank with its variables, without the launcher ( ``ranks`` ), or the launcher
on each host, by ``slurm`` or ``openmpi`` ."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gaccum_ms.launch.cluster import RANK_TABLE, Cluster, LaunchError, of_another_cluster
from gaccum_ms.launch.logs import launcher_folder, rank_folder

FORMS = ("ranks", "slurm", "openmpi")
PASSED_ON = ("PYTHONPATH", "PYTHONSAFEPATH")  # variables that a launcher on another host needs
_OPTIONS = (
    *("launcher", "timeout", "start_timeout", "end_timeout"),
    *("max_restarts", "min_processes", "rank_table_file", "bind_core"),
)


@dataclasses.dataclass(frozen=True)
class DryRun:
    """A launch to print."""

    cluster: Cluster
    command: list[str]  # the script that each rank runs, and its arguments
    log_dir: Path
    hosts: list[str]  # their names, if they are known
    words: list[str]  # the launcher's options that are the same on all hosts

    def text(self, form: str) -> str:
        """Return the script."""
        lines = {"ranks": self._ranks, "slurm": self._slurm, "openmpi": self._openmpi}[form]()
        return "\n".join(["#!/bin/bash", *lines, ""])

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _ranks(self) -> list[str]:
        for option in ("--timeout", "--end-timeout", "--max-restarts", "--min-processes", "--bind-core"):
            if any(word.startswith(f"{option}=") for word in self.words):
                raise LaunchError(f"{option} is done by the launcher, which --dry-run ranks leaves out.", code=2)
        several = self.cluster.nodes > 1
        heads = [f"# Host {node}{self._named(node)}:\n" * several for node in range(self.cluster.nodes)]
        return [head + "\n".join(["(", *self._on_host(node), ")"]) for node, head in enumerate(heads)]

    def _on_host(self, node: int) -> list[str]:
        # With mpirun, we set MindSpore's variables.
        here, devices = dataclasses.replace(self.cluster, node_rank=node, launcher="mpirun"), self._devices()
        env = here.environment(os.environ, len(os.sched_getaffinity(0)))
        env |= {RANK_TABLE: here.rank_table_file} if here.rank_table_file else {}
        script, logs = shlex.join([sys.executable, *self.command]), launcher_folder(self.log_dir, self.cluster)
        folders = [logs, *(rank_folder(self.log_dir, rank) for rank in here.local_ranks)]
        lines = [f"cd {shlex.quote(os.getcwd())}", f"mkdir -p {shlex.join(map(str, folders))}"]
        lines += [f"unset {name}" for name in sorted(os.environ) if of_another_cluster(name)]
        for name, value in env.items():
            if name in PASSED_ON or (os.environ.get(name) != value and name != "PATH"):
                lines.append(f"export {name}={shlex.quote(value)}")
        if node == 0:
            lines.append(f"MS_ROLE=MS_SCHED RANK_ID=0 {script} >{shlex.quote(str(logs / 'scheduler.log'))} 2>&1 &")
        for rank in here.local_ranks:
            folder, device = rank_folder(self.log_dir, rank), devices.get(rank, here.device_of(rank))
            own = f"MS_ROLE=MS_WORKER MS_NODE_ID={rank} RANK_ID={rank} DEVICE_ID={device}"
            output = " ".join(f"{n}>{shlex.quote(str(folder / name))}" for n, name in ((1, "stdout"), (2, "stderr")))
            lines.append(f"{own} {script} {output} &")
        return [*lines, "code=0", 'for job in $(jobs -p); do wait "$job" || code=$?; done', 'exit "$code"']

    def _devices(self) -> dict[int, int]:
        """Each rank's device, from Ascend's rank table."""
        file = self.cluster.rank_table_file
        if not file:
            return {}
        try:
            servers: list[Mapping] = json.loads(Path(file).read_text())["server_list"]
            hosts = [{int(each["rank_id"]): int(each["device_id"]) for each in host["device"]} for host in servers]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"--rank-table-file: '{file}' is no table of ranks ({error!r}).", code=2) from None
        wanted = [set(self.cluster.ranks_of(node)) for node in range(self.cluster.nodes)]
        if [set(ranks) for ranks in hosts] != wanted:
            shape = f"--nodes {len(hosts)} --processes {len(hosts[0]) if hosts else 0}"
            ours = f"--nodes {self.cluster.nodes} --processes {self.cluster.processes}"
            why = f"the table '{file}' must have the ranks of each host in succession, as {ours} has"
            raise LaunchError(f"{why}, but got a table for {shape}, or another order.", code=2)
        return {rank: device for ranks in hosts for rank, device in ranks.items()}

    # -- the launcher on each host -------------------------------------------------------------------------------------

    def _slurm(self) -> list[str]:
        start = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_ON_NODE"'
        restarts = self.cluster.max_restarts if self.cluster.nodes > 1 else 0  # one host's launcher restarts by itself
        count, address = "${SLURM_RESTART_COUNT:-0}", shlex.quote(self.cluster.master_addr)
        if address == Cluster().master_addr:  # it was not given
            address = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        more = f"--attempt $(({count} + 1))" * (restarts > 0)
        again = f'[ $code -eq 0 ] || [ {count} -ge {restarts} ] || scontrol requeue "$SLURM_JOB_ID"'
        return [
            f"#SBATCH --nodes={self.cluster.nodes}",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --exclusive",
            *["#SBATCH --requeue"] * (restarts > 0),
            f"cd {shlex.quote(os.getcwd())}",
            f"first={address}",
            *self._launcher(start, '"$SLURM_NODEID"', '"$0"', more, '"$first"'),
            *["code=$?", again, "exit $code"] * (restarts > 0),
        ]

    def _openmpi(self) -> list[str]:
        if not self.hosts:
            raise LaunchError("--dry-run openmpi needs --hosts, the names of the hosts, from host 0 on.", code=2)
        places = shlex.quote(",".join(f"{name}:1" for name in self.hosts))
        as_root = " --allow-run-as-root" if os.geteuid() == 0 else ""
        start = f"mpirun -n {len(self.hosts)} --host {places} --map-by node --bind-to none{as_root}"
        words = self._launcher(start, '"$OMPI_COMM_WORLD_RANK"', self.cluster.master_addr, "")
        return [f"cd {shlex.quote(os.getcwd())}", *words]

    def _launcher(self, start: str, node: str, address: str, more: str, *arguments: str) -> list[str]:
        """The launcher's command on each host. `node` and `address` may be expressions of the shell there."""
        passed = [f"{name}={shlex.quote(os.environ[name])}" for name in PASSED_ON if os.environ.get(name)]
        own = [sys.executable, "-m", "gaccum_ms.launch", "--processes", str(self.cluster.processes), *self.words]
        logs = shlex.quote(str(self.log_dir)) + (f"/host.{node}" if self.cluster.nodes > 1 else "")
        host = f"--nodes {self.cluster.nodes} --node-rank {node} --master-addr {address}"
        host += f" --master-port {self.cluster.master_port} --log-dir {logs} {more}".rstrip()
        script = shlex.join(["--script", self.command[0], "--", *self.command[1:]])
        words = " ".join(["exec env", *passed, shlex.join(own), host, script])
        return [f"{start} \\", "    " + " ".join(["bash -c", shlex.quote(words), *arguments])]

    def _named(self, node: int) -> str:
        return f", {self.hosts[node]}" if self.hosts else f", {self.cluster.master_addr}" if node == 0 else ""


def words_of(options: argparse.Namespace, defaults: Callable[[str], object]) -> list[str]:
    """The options of a command line that are the same on all hosts, and differ from their defaults."""
    values = {name: getattr(options, name) for name in _OPTIONS if getattr(options, name) != defaults(name)}
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items()]
