"""`--dry-run slurm`, with Slurm itself: two nodes on this machine."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.launch.launched import LIMIT, PYTHONPATH, free_ports, printed, processes, wait_until, write

DAEMONS = ("munged", "slurmctld", "slurmd")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"  # a user's PATH may lack the daemons
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(
        not all(shutil.which(name, path=PATH) for name in DAEMONS),
        reason="Slurm is not installed: apt-get install slurm-wlm munge",
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="Slurm's daemons need root here"),
]

# A requeued job waits as long as credentials last, by default 120 s.
CONFIGURATION = """
ClusterName=two_nodes
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SchedulerParameters=sched_interval=1,bf_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=all Nodes=n1,n2 Default=YES
"""


class Slurm:
    """Two nodes. Its programs find it by an environment variable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PATH": PATH, "PYTHONPATH": PYTHONPATH, "SLURM_CONF": str(folder / "slurm.conf")}

    def say(self, *command: str, cwd: Path | None = None) -> str:
        """What one of Slurm's programs prints."""
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=LIMIT)
        return done.stdout.strip()

    def submit(self, script: Path, *options: str, args: tuple[str, ...] = ()) -> str:
        """Submit what `--dry-run slurm` prints for one rank on each node, and return the job's number."""
        # The names of these nodes are no host names, so the address is given.
        where = ("--processes=1", "--nodes=2", "--master-addr=localhost", f"--master-port={free_ports(1)[0]}")
        (script.parent / "job").write_text(printed(script, *where, *options, "--dry-run=slurm", args=args))
        return self.say("sbatch", "--parsable", "--output=job.out", "--open-mode=append", "job", cwd=script.parent)

    def state(self, job: str) -> str:
        fields = dict(field.partition("=")[::2] for field in self.say("scontrol", "show", "job", job).split())
        return fields.get("JobState", "")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory) -> Iterator[Slurm]:
    folder = tmp_path_factory.mktemp("slurm")
    folder.chmod(0o755)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    host = socket.gethostname().split(".")[0]
    (folder / "slurm.conf").write_text(CONFIGURATION.format(host=host, ports=free_ports(3), folder=folder))
    munged = ["munged", "--foreground", "--force", f"--key-file={folder}/key", f"--socket={folder}/munge.socket"]
    munged += [f"--{name}={folder}/munge.{name[:4]}" for name in ("pid-file", "seed-file", "log-file")]
    cluster, daemons = Slurm(folder), []
    with (folder / "daemons.log").open("w") as log:
        try:
            for command in (munged, ["slurmctld", "-D"], ["slurmd", "-D", "-N", "n1"], ["slurmd", "-D", "-N", "n2"]):
                daemons.append(subprocess.Popen(command, env=cluster.env, stdout=log, stderr=log))
                wait_until((folder / "munge.socket").exists)
            wait_until(lambda: cluster.say("sinfo", "-h", "-o", "%T %D") == "idle 2")
            yield cluster
        finally:
            cluster.say("scancel", "--full", "--signal=KILL", "--state=RUNNING")
            left = [child for daemon in daemons for child in psutil.Process(daemon.pid).children(recursive=True)]
            for daemon in reversed(daemons):
                daemon.terminate()
            for daemon in daemons:
                daemon.wait(LIMIT)
            for process in psutil.wait_procs(left, timeout=60)[1]:
                process.kill()


def test_a_job_whose_rank_fails_ends_on_both_nodes_and_is_requeued(slurm, tmp_path):
    """test_restarts.py shows what ranks that train make of a restart."""
    script = write(
        tmp_path / "a folder's" / "script.py",
        'assert sys.argv[1:] == ["it\'s", "$HOME *"]\ncount = os.environ["GACCUM_MS_RESTART_COUNT"]\n'
        'open(f"up.{count}.{rank}", "w").write(f"{os.environ[\'SLURMD_NODENAME\']} {os.environ[\'RANK_SIZE\']}")\n'
        'while not os.path.exists(f"up.{count}.{1 - rank}"): time.sleep(0.1)\n'
        'if (count, rank) == ("0", 1): raise ValueError("no such thing")\nif count == "0": time.sleep(1000)\n'
        "os._exit(0)",  # at its end it would wait for the other host's
    )
    job = slurm.submit(script, "--max-restarts=1", args=("it's", "$HOME *"))
    wait_until(lambda: slurm.state(job) in ENDED)
    assert slurm.state(job) == "COMPLETED", (script.parent / "job.out").read_text()
    said = (script.parent / "job.out").read_text()
    assert "error: rank 1 on host 1 failed with exit code 1; all ranks of this host were ended." in said
    assert "ValueError: no such thing" in said
    for count in range(2):
        assert [(script.parent / f"up.{count}.{rank}").read_text() for rank in range(2)] == ["n1 2", "n2 2"]
        for rank in range(2):
            logs = script.parent / "log_output" / f"host.{rank}" / str(count + 1)
            assert (logs / f"rank.{rank}" / "stdout").exists()
    wait_until(lambda: not processes(lambda each: str(script) in each.cmdline()))  # Slurm ends the other node's late
