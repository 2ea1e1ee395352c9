"""Prints a launch as a bash script, which starts the launcher on each host by Slurm or Open MPI."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from pathlib import Path

from gaccum_ms.launch.cluster import Cluster

FORMS = ("slurm", "openmpi")
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
        lines = self._slurm() if form == "slurm" else self._openmpi()
        return "\n".join(["#!/bin/bash", *lines, ""])

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
