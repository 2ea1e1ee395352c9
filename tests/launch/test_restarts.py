"""Killed ranks: all restart, with the same training results as without the failure."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from mindspore import nn

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.restarts import Restarts
from tests.launch.launched import TRAINS, Launched, processes, wait_until, write
from tests.launch.training_rank import EPOCHS, samples_of_an_epoch
from tests.support.reference import OPTIMIZERS, Regression, train

SECONDS = 1500  # for all restarts on a busy machine
UPDATES = 6
pytestmark = pytest.mark.distributed


def rows_of(folder: Path, rank: int, attempt: int) -> list[int]:
    """The update of each batch that a rank trained on in an attempt. An incomplete last line is left out."""
    file = folder / f"trained.{rank}"
    rows = [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []
    return [update for number, update in rows if number == attempt]


def kill_rank_1(launched: Launched, folder: Path, attempt: int, batches: int) -> None:
    """Kill the second rank's own process, not its guard, when both have trained on so many batches of this attempt."""

    def right(process: psutil.Process) -> bool:
        env, command = process.environ(), process.cmdline()
        mine = env.get("TEST_MARK") == launched.mark and env.get("GACCUM_MS_RESTART_COUNT") == str(attempt)
        rank_1 = mine and (env.get("MS_ROLE"), env.get("RANK_ID")) == ("MS_WORKER", "1")
        return rank_1 and "--guard" not in command and str(TRAINS) in command

    wait_until(
        lambda: (
            all(len(rows_of(folder, rank, attempt)) >= batches for rank in range(2))
            or launched.process.poll() is not None
        )
    )
    (rank,) = processes(right)
    rank.kill()


def test_all_begin_anew_and_those_that_are_left_make_the_same_updates(tmp_path, pynative):
    """The second rank of two is killed twice in succession, so one goes on alone. Two batches of each rank are an
    update, and then four. An update that was not saved is made again, and no other one."""
    options = ["-n", "2", "--timeout", str(SECONDS), "--max-restarts", "9", "--min-processes", "1"]
    arguments = [str(tmp_path), str(UPDATES)]
    launched = Launched(TRAINS, *options, args=arguments, cwd=tmp_path, env={"TEST_STOP_AT": "3 4"})
    wait_until(lambda: rows_of(tmp_path, 1, 0)[5:] or launched.process.poll() is not None)
    for rank in range(2):  # a killed rank, or a host that loses power, may leave such files
        (tmp_path / "saved" / str(rank) / "net-9_9.tmp").write_bytes(b"half a check")
        half = tmp_path / "saved" / str(rank) / "net-9_9.ckpt"
        half.write_bytes(b"half a check")
        os.utime(half, (time.time() + 60, time.time() + 60))  # newer than what the ranks save until one is killed
    for attempt, batches in ((0, 6), (1, 4)):
        kill_rank_1(launched, tmp_path, attempt, batches)
    done = launched.finish(SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 failed with exit code 137 (SIGKILL); all ranks were ended.") == 2
    for restart in (1, 2):
        assert f"note: all begin anew: restart {restart} of 9.\n" in done.stderr
    assert done.stdout.splitlines()[-1].startswith("1 ranks finished")
    assert f"logs: {tmp_path}/log_output/3/rank.N" in done.stdout
    assert "net-9_9.ckpt' is passed over" in (tmp_path / "log_output" / "2" / "rank.0" / "stderr").read_text()
    assert [rows_of(tmp_path, 0, attempt) for attempt in range(3)] == [
        [0, 1, 1, 2, 2, 3],
        [2, 3, 3, 4],
        [3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 6],
    ]
    samples = zip(*(np.split(column, UPDATES // EPOCHS) for column in samples_of_an_epoch(UPDATES)), strict=True)
    network, got = Regression(), dict(np.load(tmp_path / "rank0.npz"))
    right = train(nn.TrainOneStepCell, network, OPTIMIZERS["momentum"](network.trainable_params()), [*samples] * EPOCHS)
    for name in ("hidden", "out"):
        np.testing.assert_allclose(got[name], right.state[name], rtol=1e-4, atol=1e-6)


def test_a_rank_that_fails_twice_is_left_out_with_its_device(tmp_path):
    """The logs of each attempt are kept, and those of an earlier launch are replaced."""
    script = write(
        tmp_path / "script.py",
        'count, visible = os.environ["GACCUM_MS_RESTART_COUNT"], os.environ.get("CUDA_VISIBLE_DEVICES", "")\n'
        'print(count, os.environ["GACCUM_MS_MAX_RESTARTS"], os.environ["RANK_SIZE"], visible, flush=True)\n'
        'open(f"up.{count}.{rank}", "w")\nif not visible and rank == 1:\n'
        '    while not os.path.exists(f"up.{count}.0"): time.sleep(0.1)\n'
        'if (visible.split(",") if visible else list("012"))[rank] == "1": sys.exit(3)\n'
        "if not visible: time.sleep(1000)",
    )
    done = Launched(script, "-n", "3", "--max-restarts", "3", "--min-processes", "2").finish()
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 failed with exit code 3; all ranks were ended.") == 2
    shown = [f"{said}\n" for said in ("0 3 3 ", "1 3 3 ", "2 3 2 0,2")]
    assert done.stdout.startswith("".join(shown) + "2 ranks finished"), "rank 0 is shown in each"
    logs = tmp_path / "log_output"
    assert [(logs / attempt / "rank.0" / "stdout").read_text() for attempt in "123"] == shown
    assert not (logs / "3" / "rank.2").exists()
    done = Launched(script, "-n", "2").finish()
    assert done.returncode == 1
    assert done.stderr.startswith("error: rank 1 failed")
    assert sorted(path.name for path in logs.iterdir() if path.is_dir()) == ["1", "msrun"]


def failed(rank: int | None, code: int = 1) -> LaunchError:
    return LaunchError("why", code, rank)


def test_what_follows_on_a_failure():
    decide, cluster = Restarts().after, Cluster(processes=4, max_restarts=2, min_processes=3)
    assert decide(cluster, failed(1, code=124), 1) is None
    second = decide(cluster, failed(1), 1)
    assert (second.attempt, second.size, second.devices) == (2, 4, ())
    assert decide(second, failed(2), 1).size == 4, "another rank"
    assert decide(second, failed(2), 700).size == 4, "long after the start"
    third = decide(second, failed(2), 1)
    assert (third.attempt, third.size, third.devices) == (3, 3, (0, 1, 3))
    assert decide(third, failed(2), 1) is None, "no restart is left"
    env = third.environment({"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, cores=2)
    assert (env["CUDA_VISIBLE_DEVICES"], env["ASCEND_RT_VISIBLE_DEVICES"]) == ("4,5,7", "0,1,3")
    decide, all_needed = Restarts().after, Cluster(processes=4, max_restarts=2)
    assert decide(decide(all_needed, failed(1), 1), failed(1), 1).size == 4, "none may be left out"
    decide, fewer = Restarts().after, dataclasses.replace(third, max_restarts=9, min_processes=2)
    assert decide(decide(fewer, failed(1), 1), failed(1), 1).devices == (0, 3), "of the devices that are left"


def test_of_several_hosts_the_one_that_fails_twice_is_known():
    restarts, cluster = Restarts(), Cluster(processes=2, nodes=2, max_restarts=9)
    for hosts, rank, broken in ((["a", "b"], 1, set()), (["b", "a"], 0, set()), (["a", "b"], 3, {"b"})):
        assert restarts.after(cluster, failed(rank), 1, hosts).nodes == 2
        assert restarts.broken_hosts == broken
