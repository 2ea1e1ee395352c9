"""Runs the scripts of --dry-run, by bash and by Open MPI, on hosts that are network namespaces. Slurm is in
test_slurm.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import ADDRESS, PYTHONPATH, Launched, write

OTHER = "10.231.77.2"
ENV = {**os.environ, "PYTHONPATH": PYTHONPATH}
# A rank writes its variables and its host, which the tests compare.
SAYS = (
    'import json\nnames = ["RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", '
    '"MS_SCHED_PORT", "RANK_TABLE_FILE"]\nsaid = {name: os.environ.get(name) for name in names}\n'
    'said["host"] = os.readlink("/proc/self/ns/net")\nopen(f"said.{rank}", "w").write(json.dumps(said))\n'
)
pytestmark = pytest.mark.distributed


def printed(script: Path, *options: str, args=(), code: int = 0) -> str:
    command = [sys.executable, "-m", "gaccum_ms.launch", *options, str(script), *args]
    done = subprocess.run(command, cwd=script.parent, env=ENV, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


def run(text: str, folder: Path, prefix=(), **env: str) -> Launched:
    """Run a printed script by bash, on the host of `prefix` ."""
    (folder / "printed.sh").write_text(text)
    return Launched(None, program=[*prefix, "bash", str(folder / "printed.sh")], env=env, cwd=folder)


def said(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / f"said.{rank}").read_text()) for rank in range(ranks)]


@pytest.fixture
def mpirun(hosts, tmp_path) -> dict[str, str]:
    """Variables with which Open MPI enters a host's network namespace, where it would use ssh."""
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed: apt-get install openmpi-bin")
    enter = [" ".join(prefix) for prefix in hosts]
    ssh = tmp_path / "ssh"
    ssh.write_text(
        '#!/bin/bash\nwhile [ "${1#-}" != "$1" ]; do shift; done\nhost=$1; shift\n'
        f'if [ "$host" = {ADDRESS} ]; then exec {enter[0]} sh -c "$*"; fi\nexec {enter[1]} sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    return {"OMPI_MCA_plm_rsh_agent": str(ssh)}


def test_open_mpi_starts_the_launcher_on_each_host(hosts, mpirun, tmp_path):
    folder = tmp_path / "a folder's"
    script = write(folder / "script.py", SAYS + 'assert sys.argv[1:] == ["it\'s", "$HOME *"]')
    options = ["-n", "2", "--hosts", f"{ADDRESS},{OTHER}", "--dry-run", "openmpi"]
    done = run(printed(script, *options, args=["it's", "$HOME *"]), folder, hosts[0], **mpirun).finish()
    assert done.returncode == 0, done.stderr
    got = said(folder, 4)
    assert got[0]["host"] == got[1]["host"] != got[2]["host"] == got[3]["host"]
    for rank in range(4):
        assert got[rank]["RANK_ID"] == got[rank]["MS_NODE_ID"] == str(rank)
        assert (got[rank]["MS_WORKER_NUM"], got[rank]["MS_SCHED_HOST"]) == ("4", ADDRESS)
    assert sorted(path.name for path in (folder / "log_output").iterdir()) == ["host.0", "host.1"]


def test_open_mpi_ends_all_hosts_when_a_rank_fails(hosts, mpirun, tmp_path):
    script = write(tmp_path / "script.py", 'if rank == 1: raise ValueError("no such thing")\ntime.sleep(1000)')
    text = printed(script, "-n", "1", "--hosts", f"{ADDRESS},{OTHER}", "--dry-run", "openmpi")
    done = run(text, tmp_path, hosts[0], **mpirun).finish()
    assert done.returncode != 0
    assert "rank 1 on host 1 failed with exit code 1; all ranks of this host were ended." in done.stderr
    assert "ValueError: no such thing" in done.stderr


def test_each_rank_is_started_by_hand_with_the_devices_of_ascends_table(hosts, tmp_path):
    """The scheduler is started too, with the same script. The exit code is a failing rank's."""
    table = tmp_path / "table.json"
    devices = iter([(4, "0"), (5, "1"), (2, "2"), (3, "3")])
    server = [
        {
            "server_id": address,
            "device": [{"device_id": str(d), "rank_id": r} for d, r in (next(devices), next(devices))],
        }
        for address in (ADDRESS, OTHER)
    ]
    table.write_text(json.dumps({"version": "1.0", "status": "completed", "server_list": server}))
    script = write(tmp_path / "script.py", f"{SAYS}print(rank)\nsys.exit(3 * (rank == 1))")
    options = ["-n", "2", "--rank-table-file", "table.json", "--dry-run", "ranks"]
    text = printed(script, *options, "--hosts", f"{ADDRESS},{OTHER}")
    parts = re.split("^# Host .*:$", text, flags=re.MULTILINE)[1:]
    codes = [run(part, tmp_path, prefix).finish().returncode for part, prefix in zip(parts, hosts, strict=True)]
    assert codes == [3, 0]
    got = said(tmp_path, 4)
    assert [variables["DEVICE_ID"] for variables in got] == ["4", "5", "2", "3"]
    assert {variables["RANK_TABLE_FILE"] for variables in got} == {str(table)}
    assert {variables["MS_WORKER_NUM"] for variables in got} == {"4"}
    assert got[0]["host"] != got[2]["host"]
    assert (tmp_path / "log_output" / "1" / "rank.3" / "stdout").read_text() == "3\n"
    message = printed(script, *options, code=2)
    assert "the ranks of each host in succession, as --nodes 1 --processes 2 has" in message
    assert "but got a table for --nodes 2 --processes 2, or another order." in message


@pytest.mark.thorough
@pytest.mark.parametrize("form", ["ranks", "openmpi"])
def test_the_ranks_train(form, hosts, tmp_path, request):
    """The script is the same in both forms, on one rank of each host. It ends with an AllReduce, so that no rank ends
    while another still needs it: in the form "ranks" there is no launcher that ensures this."""
    source = Path(__file__).with_name("training_worker.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(source + "ops.AllReduce()(ms.Tensor([1.0])).asnumpy()\n")
    options = ["-n", "1", "--hosts", f"{ADDRESS},{OTHER}", "--dry-run", form]
    text = printed(script, *options, args=[str(tmp_path), "5", "pynative"])
    if form == "ranks":
        parts = re.split("^# Host .*:$", text, flags=re.MULTILINE)[1:]
        (tmp_path / "other").mkdir()
        other = run(parts[1], tmp_path / "other", hosts[1])
        done = [run(parts[0], tmp_path, hosts[0]).finish(), other.finish()]
    else:
        done = [run(text, tmp_path, hosts[0], **request.getfixturevalue("mpirun")).finish()]
    assert [each.returncode for each in done] == [0] * len(done), done
    results = {(tmp_path / f"rank{rank}").read_text() for rank in range(2)}
    assert len(results) == 1
    assert results.pop().startswith("2 ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dry-run", "openmpi"], "--dry-run openmpi needs --hosts"),
        (["--dry-run", "ranks", "--max-restarts", "2"], "--max-restarts is done by the launcher"),
        (["--dry-run", "ranks", "--timeout", "7"], "--timeout is done by the launcher"),
        (["--dry-run", "ranks", "--end-timeout", "0"], "--end-timeout is done by the launcher"),
        (["--dry-run", "ranks", "--min-processes", "1", "--max-restarts", "1"], "is done by the launcher"),
        (["--dry-run", "ranks", "--rank-table-file", "script.py"], "is no table of ranks"),
        (["--hosts", "a,b"], "--hosts needs --dry-run"),
        (["--hosts", "a,b", "--nodes", "3", "--dry-run", "openmpi"], "--hosts must be --nodes = 3 names, but got 2"),
        (["--dry-run", "ssh"], "argument --dry-run: invalid choice: 'ssh'"),
        (["--dry-run", "openmpi", "--hosts", "a,b", "--max-restarts", "1"], "--max-restarts and --min-processes need"),
    ],
)
def test_what_cannot_be_printed_is_one_line(options, message, tmp_path):
    said = printed(write(tmp_path / "script.py", ""), *options, code=2)
    assert said.startswith("error: ")
    assert message in said
    assert said.count("\n") == 1


def test_nothing_is_started(tmp_path):
    script = write(tmp_path / "script.py", "")
    for form in ("ranks", "slurm", "openmpi"):
        assert printed(script, "--hosts", "a,b", "--dry-run", form).startswith("#!/bin/bash\n")
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]


def test_the_launchers_options_are_passed_on(tmp_path):
    for form in ("slurm", "openmpi"):
        options = ["--launcher", "mpirun", "--timeout", "7", "--hosts", "a", "--dry-run", form]
        text = printed(write(tmp_path / "script.py", ""), *options)
        assert "--launcher=mpirun --timeout=7.0 --nodes 1" in text


def test_a_script_that_cannot_be_printed_is_no_success(tmp_path):
    command = [sys.executable, "-m", "gaccum_ms.launch", "--dry-run", "ranks", str(write(tmp_path / "script.py", ""))]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, cwd=tmp_path, env=ENV, stdout=full, stderr=subprocess.PIPE, text=True, timeout=100
        )
    assert (done.returncode, done.stderr) == (1, "note: standard output takes no more: No space left on device\n")
