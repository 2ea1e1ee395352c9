"""The launcher, on ranks that train with MindSpore: the cluster is real, and so are hanging AllReduces."""

from __future__ import annotations

import os
import shutil
import signal
import struct
import sys
import time
from pathlib import Path

import pytest
from launched import ROOT, Launched

WORKER = Path(__file__).resolve().with_name("training_worker.py")
FOR_EVER = "1000000"
pytestmark = pytest.mark.distributed

# The variables that an outer launch of each kind would leave. Each value is wrong for this launch.
STALE = {
    **{"MS_ROLE": "MS_SCHED", "MS_SCHED_HOST": "192.0.2.1", "MS_SCHED_PORT": "1", "MS_WORKER_NUM": "9"},
    **{"MS_NODE_ID": "5", "MS_WORKER_IP": "192.0.2.1", "MS_TOPO_TIMEOUT": "1", "MS_SERVER_NUM": "3"},
    **{"MS_ENABLE_RECOVERY": "1", "MS_SIMULATION_LEVEL": "1", "DEVICE_ID": "7"},
    **{"RANK_ID": "7", "RANK_SIZE": "9", "RANK_TABLE_FILE": "/nowhere/table.json"},
    **{"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "9", "OMPI_COMM_WORLD_LOCAL_RANK": "5", "PMIX_RANK": "5"},
}


def assert_trained(out: Path, ranks: int) -> None:
    """All ranks have trained, and have the same weights. Their data differ, so they must have communicated."""
    sizes, totals = zip(*((out / f"rank{rank}").read_text().split() for rank in range(ranks)), strict=True)
    assert set(sizes) == {str(ranks)}
    assert len(set(totals)) == 1


def wait_for_step(launched: Launched, out: Path, rank: int, step: int) -> int:
    """The process id of a rank that has done this step."""
    while True:
        launched.wait_for(out / str(rank))
        pid, done = (out / str(rank)).read_text().split()
        if int(done) >= step:
            return int(pid)
        time.sleep(0.05)


@pytest.mark.thorough
def test_two_launches_at_once_with_spaces_in_every_path_and_variables_of_another_cluster(tmp_path):
    """Both launches train, by the run.sh of a copy of the project, called from another folder."""
    project, elsewhere = tmp_path / "a project", tmp_path / "some where"
    shutil.copytree(ROOT / "gaccum_ms", project / "gaccum_ms", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "run.sh", project)
    (project / "sample_code").mkdir()
    script = shutil.copy(WORKER, project / "sample_code" / "a script.py")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**STALE, "PATH": path, "PYTHONPATH": ""}
    program = ["bash", "../a project/run.sh", "--timeout", "90", "--processes", "2", "--script", str(script)]
    both = []
    for name in ("out one", "out two"):
        (elsewhere / name).mkdir(parents=True)
        options = ["--log-dir", f"logs {name}", name, "5", "pynative"]
        both.append(Launched(None, *options, program=program, env=env, cwd=elsewhere))
    for launched, name in zip(both, ("out one", "out two"), strict=True):
        done = launched.finish()
        assert done.returncode == 0, done.stderr
        assert_trained(elsewhere / name, 2)
        assert (elsewhere / f"logs {name}" / "1" / "rank.1" / "stderr").exists()


@pytest.mark.core("killed")
@pytest.mark.parametrize("end", ["killed", "raises"])
def test_a_rank_that_ends_in_training_ends_the_others_in_their_allreduce(tmp_path, end):
    """One rank waits in a compiled step, another in a step of PyNative mode."""
    arguments = [str(tmp_path), FOR_EVER, *(["pynative", "1"] if end == "raises" else ["graph"])]
    launched = Launched(WORKER, "-n", "2", args=arguments, cwd=tmp_path)
    rank_1 = wait_for_step(launched, tmp_path, rank=1, step=4)
    begin = time.monotonic()
    if end == "killed":
        os.kill(rank_1, signal.SIGKILL)
    done = launched.finish()
    assert time.monotonic() - begin < 30
    assert done.returncode == 1
    code = "137 (SIGKILL)" if end == "killed" else "1"
    assert done.stderr.startswith(f"error: rank 1 failed with exit code {code}; all ranks were ended.")
    assert f"the end of {tmp_path}/log_output/1/rank.1/stderr" in done.stderr
    assert ("ValueError: no step 5 on rank 1" in done.stderr) == (end == "raises")


@pytest.mark.thorough
@pytest.mark.parametrize("waits", [None, "5"])
def test_a_rank_may_be_late_for_a_collective(tmp_path, waits, monkeypatch):
    """It may be later than the 30 s of MindSpore's own default. The control has a limit of 5 s."""
    for name in ("MS_CPU_COMM_OP_TIMEOUT", "MS_NODE_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\nimport mindspore as ms\nfrom mindspore import ops\n"
        'from mindspore.communication import get_rank, init\nms.set_device("CPU")\ninit()\n'
        "time.sleep(float(sys.argv[1]) * get_rank())\n"
        "print(ops.AllReduce()(ms.Tensor([1.0])).asnumpy())"
    )
    env = {"MS_CPU_COMM_OP_TIMEOUT": waits} if waits else {}
    done = Launched(script, "-n", "2", args=["15" if waits else "42"], env=env).finish()
    if waits:
        assert done.stderr.startswith("error: rank 0 failed with exit code 1"), done.stderr
        assert "Launch kernel failed, name:Default/AllReduce" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert "[2.]" in done.stdout


@pytest.mark.thorough
def test_a_rank_that_never_comes_is_named_after_the_start_timeout(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\nfrom mindspore.communication import init\n"
        'if os.environ["MS_ROLE"] == "MS_WORKER" and os.environ["RANK_ID"] == "1":\n'
        '    print("waiting for a disk that never comes", flush=True)\n    time.sleep(1000)\n'
        'import mindspore\nmindspore.set_device("CPU")\ninit()'
    )
    begin = time.monotonic()
    done = Launched(script, "-n", "2", "--start-timeout", "25").finish()
    assert done.returncode == 124
    assert done.stderr.startswith("error: did not come to init() within 25 s: rank 1; all ranks were ended.\n")
    assert "    waiting for a disk that never comes" in done.stderr
    assert time.monotonic() - begin < 60


@pytest.mark.thorough
def test_a_rank_that_ends_early_ends_the_others_in_their_collective(tmp_path):
    """One rank waits in a graph, and sleeps; another waits in PyNative mode, in a busy loop."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nimport mindspore as ms\nfrom mindspore import ops\n"
        'from mindspore.communication import get_rank, init\nms.set_device("CPU")\ninit()\n'
        "add = ops.AllReduce()\n"
        "for step in range(3):\n    print(add(ms.Tensor([1.0])).asnumpy())\n"
        "if get_rank() == 1: sys.exit(0)\n"
        "if get_rank() == 2: ms.set_context(mode=ms.GRAPH_MODE); add = ms.jit(add)\n"
        "add(ms.Tensor([1.0])).asnumpy()"
    )
    done = Launched(script, "-n", "3", "--end-timeout", "3").finish()
    assert done.returncode == 1
    what = "error: rank 1 ended with exit code 0, and rank 0, rank 2 have stood still for 3 s since"
    assert done.stderr.startswith(f"{what} (in {script}, line 12)"), done.stderr


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed: apt-get install openmpi-bin")
def test_mpirun_trains_and_keeps_logs_as_msrun_does(tmp_path):
    script = tmp_path / "a script.py"
    shutil.copy(WORKER, script)
    options = ["-n", "2", "--launcher", "mpirun", "--log-dir", "log output"]
    done = Launched(script, *options, args=[str(tmp_path), "5", "pynative"], env=STALE).finish()
    assert done.returncode == 0, done.stderr
    assert_trained(tmp_path, 2)
    logs = tmp_path / "log output" / "1"
    assert sorted(str(path.relative_to(logs)) for path in logs.rglob("std*")) == [
        f"rank.{rank}/{name}" for rank in range(2) for name in ("stderr", "stdout")
    ]


@pytest.mark.thorough
def test_more_ranks_than_samples_train(tmp_path):
    """MindSpore gives both ranks the same image. The cell refuses to split a batch of one into train.py's default of 4
    micro-batches; with 1 micro-batch train.py trains."""
    for name in ("train", "t10k"):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">IIII", 2051, 1, 28, 28) + bytes(28 * 28))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, 1) + bytes(1))
    sample = ROOT / "sample_code" / "distributed_gradient_accumulation" / "train.py"
    arguments = ["--epochs", "2", "--print-every", "1", "--micro-size", "1"]
    env = {"DATA_PATH": str(tmp_path)}
    done = Launched(sample, "-n", "2", args=arguments, env=env, cwd=tmp_path).finish()
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert "epoch: 2 step: 1, loss is" in (tmp_path / f"log_output/1/rank.{rank}/stdout").read_text()
