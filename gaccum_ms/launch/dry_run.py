"""Prints a launch as a bash script: each rank with its variables, without the launcher ( ``ranks`` ), or the launcher
on each host, by ``slurm`` or ``openmpi`` ."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

from gaccum_ms.launch.cluster import Cluster, LaunchError, of_another_cluster
from gaccum_ms.launch.logs import launcher_folder, rank_folder

FORMS = ("ranks", "slurm", "openmpi")
PASSED_ON = ("PYTHONPATH", "PYTHONSAFEPATH")  # variables that a launcher on another host needs


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
        for option in (word.partition("=")[0] for word in self.words):
            if option not in ("--launcher", "--start-timeout"):
                raise LaunchError(f"{option} is done by the launcher, which --dry-run ranks leaves out.", code=2)
        several = self.cluster.nodes > 1
        names = [f", {name}" for name in self.hosts] or [""] * self.cluster.nodes
        heads = [f"# Host {node}{name}:\n" * several for node, name in enumerate(names)]
        return [head + "\n".join(["(", *self._on_host(node), ")"]) for node, head in enumerate(heads)]

    def _on_host(self, node: int) -> list[str]:
        # With mpirun, we set MindSpore's variables.
        here = dataclasses.replace(self.cluster, node_rank=node, launcher="mpirun")
        env = here.environment(os.environ, len(os.sched_getaffinity(0)))
        script, logs = shlex.join([sys.executable, *self.command]), launcher_folder(self.log_dir, self.cluster)
        folders = [logs, *(rank_folder(self.log_dir, rank) for rank in here.local_ranks)]
        lines = [f"cd {shlex.quote(os.getcwd())}", f"mkdir -p {shlex.join(map(str, folders))}"]
        lines += [f"unset {name}" for name in sorted(os.environ) if of_another_cluster(name)]
        for name, value in env.items():
            same = os.environ.get(name) == value and name not in PASSED_ON and not of_another_cluster(name)
            if not same and name != "PATH":
                lines.append(f"export {name}={shlex.quote(value)}")
        if node == 0:
            lines.append(f"MS_ROLE=MS_SCHED RANK_ID=0 {script} >{shlex.quote(str(logs / 'scheduler.log'))} 2>&1 &")
        for rank in here.local_ranks:
            folder, own = rank_folder(self.log_dir, rank), f"MS_ROLE=MS_WORKER MS_NODE_ID={rank} RANK_ID={rank}"
            output = " ".join(f"{n}>{shlex.quote(str(folder / name))}" for n, name in ((1, "stdout"), (2, "stderr")))
            lines.append(f"{own} DEVICE_ID={here.device_of(rank)} {script} {output} &")
        return [*lines, "code=0", 'for job in $(jobs -p); do wait "$job" || code=$?; done', 'exit "$code"']

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
