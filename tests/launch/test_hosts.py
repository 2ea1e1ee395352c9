"""Several hosts by a printed script for Open MPI. The hosts are connected network namespaces, which programs cannot
distinguish from real hosts."""

from __future__ import annotations

import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.launched import Launched, printed, write

ADDRESSES = ("10.231.77.1", "10.231.77.2")
pytestmark = pytest.mark.distributed


@pytest.fixture
def hosts() -> Iterator[list[list[str]]]:
    """For each of the two hosts, the prefix of a command that runs on it."""
    if shutil.which("ip") is None:
        pytest.skip("there is no 'ip' to make network namespaces with")
    mark = uuid.uuid4().hex[:8]
    names = [f"gaccum-{mark}-{number}" for number in range(2)]
    ends = [f"g{mark}{number}" for number in range(2)]
    try:
        for line in (
            *(f"netns add {name}" for name in names),
            f"link add {ends[0]} netns {names[0]} type veth peer name {ends[1]} netns {names[1]}",
            *(f"-n {names[i]} addr add {ADDRESSES[i]}/24 dev {ends[i]}" for i in range(2)),
            *(f"-n {names[i]} link set {device} up" for i in range(2) for device in ("lo", ends[i])),
        ):
            done = subprocess.run(["ip", *line.split()], capture_output=True, text=True, timeout=60)
            if done.returncode != 0:
                pytest.skip(f"this machine allows no network namespaces: ip {line}: {done.stderr.strip()}")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)


TWO = ["--hosts", ",".join(ADDRESSES)]


def run(text: str, folder: Path, prefix=(), **env: str) -> Launched:
    """Run a printed script by bash, on the host of `prefix` ."""
    (folder / "printed.sh").write_text(text)
    return Launched(None, program=[*prefix, "bash", str(folder / "printed.sh")], env=env, cwd=folder)


def test_open_mpi_starts_the_launcher_on_each_host_and_ends_all_when_a_rank_fails(hosts, tmp_path):
    """In place of ssh, Open MPI enters a host's network namespace."""
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed: apt-get install openmpi-bin")
    enter = [" ".join(prefix) for prefix in hosts]
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
        f'if [ "$host" = {ADDRESSES[0]} ]; then exec {enter[0]} sh -c "$*"; fi\nexec {enter[1]} sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    folder = tmp_path / "a folder's"
    script = write(
        folder / "script.py",
        'import json\nassert sys.argv[1:] == ["it\'s", "$HOME *"]\n'
        'said = {name: os.environ[name] for name in ("RANK_ID", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST")}\n'
        'said["host"] = os.readlink("/proc/self/ns/net")\nopen(f"said.{rank}", "w").write(json.dumps(said))\n'
        'open(f"up.{rank}", "x")\nwhile not all(os.path.exists(f"up.{each}") for each in range(4)): time.sleep(0.1)\n'
        'if rank == 3: raise ValueError("no such thing")\ntime.sleep(1000)',
    )
    text = printed(script, "-n", "2", *TWO, "--dry-run", "openmpi", args=["it's", "$HOME *"])
    done = run(text, folder, hosts[0], OMPI_MCA_plm_rsh_agent=str(ssh)).finish()
    assert done.returncode != 0
    assert "rank 3 on host 1 failed with exit code 1; all ranks of this host were ended." in done.stderr
    assert "ValueError: no such thing" in done.stderr
    got = [json.loads((folder / f"said.{rank}").read_text()) for rank in range(4)]
    assert got[0]["host"] == got[1]["host"] != got[2]["host"] == got[3]["host"]
    for rank in range(4):
        assert got[rank]["RANK_ID"] == got[rank]["MS_NODE_ID"] == str(rank)
        assert (got[rank]["MS_WORKER_NUM"], got[rank]["MS_SCHED_HOST"]) == ("4", ADDRESSES[0])
    assert sorted(path.name for path in (folder / "log_output").iterdir()) == ["host.0", "host.1"]
