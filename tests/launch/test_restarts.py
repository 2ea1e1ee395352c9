"""Killed ranks: all restart, with the same training results as without the failure."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from mindspore import Tensor, nn

from gaccum_ms.launch.cluster import Cluster, LaunchError
from gaccum_ms.launch.restarts import Restarts
from tests.launch.launched import TRAINS, Launched, processes, wait_until, write
from tests.launch.training_rank import BATCHES, EPOCHS, make_network, samples_of_an_epoch
from tests.support.reference import as_numpy

KILLS = 4
KEEPS = ["sh", "-c", 'exec "$@" 2>stderr', "sh"]  # nobody reads a pipe meanwhile, and it would fill up
SECONDS = 1500  # for all restarts on a busy machine
pytestmark = pytest.mark.distributed


def weights(folder: Path, ranks: int, training: str = "rank") -> list[dict[str, np.ndarray]]:
    """All Parameters of each rank, at the end."""
    return [dict(np.load(folder / f"{training}{rank}.npz")) for rank in range(ranks)]


def rows_of(folder: Path, rank: int, training: str = "trained") -> list[list]:
    """Attempt, update and samples of each batch that a rank trained on. An incomplete last line is left out."""
    file = folder / f"{training}.{rank}"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def begin(folder: Path, ranks: int, updates: int, *options: str, mode: str) -> Launched:
    folder.mkdir(exist_ok=True)
    options = ("-n", str(ranks), "--timeout", str(SECONDS), *options)
    arguments = ["updates", str(folder), str(updates), mode]
    return Launched(TRAINS, *options, args=arguments, cwd=folder, prefix=KEEPS)


def said(folder: Path) -> str:
    """The launcher's messages on stderr."""
    return (folder / "stderr").read_text()


def ranks_of_attempt(launched: Launched, attempt: int, *ranks: int) -> list[psutil.Process]:
    """The ranks' own processes, without their guards; once all of these ranks are there, or the launcher has ended."""
    found: list[psutil.Process] = []

    def right(process: psutil.Process) -> bool:
        env, command = process.environ(), process.cmdline()
        mine = env.get("TEST_MARK") == launched.mark and env.get("GACCUM_MS_RESTART_COUNT") == str(attempt)
        rank = mine and env.get("MS_ROLE") == "MS_WORKER" and int(env["RANK_ID"]) in ranks
        return rank and "--guard" not in command and str(TRAINS) in command

    def all_are_there() -> bool:
        found[:] = processes(right)
        return len(found) == len(ranks) or launched.process.poll() is not None

    wait_until(all_are_there)
    return found


def kill_one(launched: Launched, folder: Path, attempt: int, ranks: int, chance: random.Random) -> None:
    """Kill a rank of this attempt at a random moment: while it starts, or some batches after it has begun to train."""
    batches = chance.choice([None, None, 1, 2])
    found = ranks_of_attempt(launched, attempt, *range(ranks))
    if batches is None:
        time.sleep(chance.uniform(0, 3))
    else:
        wait_until(
            lambda: (
                sum(row[0] == attempt for row in rows_of(folder, 0)) >= batches or launched.process.poll() is not None
            )
        )
        time.sleep(chance.uniform(0, 0.05))
    chance.choice(found).kill()


def assert_trained_once(folder: Path, ranks: int, updates: int) -> None:
    """Check that every update has the samples of the undisturbed training, and that each attempt makes its updates
    in succession, from where the earlier attempts ended."""
    batches = BATCHES // ranks  # of an update, on each rank
    for rank in range(ranks):
        undisturbed = [row[1:] for row in rows_of(folder, rank, "undisturbed")]
        rows = rows_of(folder, rank)
        assert all(row[1:] in undisturbed for row in rows)
        before = 0
        for attempt in sorted({row[0] for row in rows}):
            places = [undisturbed.index(row[1:]) for row in rows if row[0] == attempt]
            assert places == list(range(places[0], places[0] + len(places)))
            first, begun = places[0] // batches + 1, places[0] % batches
            assert begun == 0
            assert before <= first <= before + 2
            before = places[-1] // batches + 1
        assert before == updates


def assert_identical(folder: Path, ranks: int, updates: int) -> None:
    """Compare all Parameters with the undisturbed training, which made all updates in one attempt."""
    for rank in range(ranks):
        rows = rows_of(folder, rank, "undisturbed")
        assert (len(rows), rows[-1][1]) == (updates * BATCHES // ranks, updates)
        assert len({row[0] for row in rows}) == 1
    for got, right in zip(weights(folder, ranks), weights(folder, ranks, "undisturbed"), strict=True):
        assert got.keys() == right.keys()
        for name in right:
            np.testing.assert_array_equal(got[name], right[name], name)


def whole_batches(updates: int) -> nn.Cell:
    """The network, trained by MindSpore's own step in this process, on the samples of each update as one batch."""
    network, optimizer = make_network()
    step = nn.TrainOneStepCell(network, optimizer).set_train()
    x, y = samples_of_an_epoch(updates)
    for _ in range(EPOCHS):
        for batch in zip(np.split(x, updates // EPOCHS), np.split(y, updates // EPOCHS), strict=True):
            step(*map(Tensor, batch))
    return network


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_started_again_and_nothing_is_trained_twice(tmp_path):
    folder = tmp_path / "disturbed"
    launched = begin(folder, 2, 6, "--max-restarts", "1", mode="graph")
    wait_until(lambda: len(rows_of(folder, 1)) >= 5 or launched.process.poll() is not None)
    for rank in range(2):  # a killed rank, or a host that loses power, may leave such files
        (folder / "saved" / str(rank) / "net-9_9.tmp").write_bytes(b"half a check")
        half = folder / "saved" / str(rank) / "net-9_9.ckpt"
        half.write_bytes(b"half a check")
        os.utime(half, (time.time() + 60, time.time() + 60))  # newer than what the ranks save until one is killed
    ranks_of_attempt(launched, 0, 0, 1)[0].kill()
    done = launched.finish(SECONDS)
    assert done.returncode == 0, said(folder)
    assert "failed with exit code 137 (SIGKILL); all ranks were ended." in said(folder)
    assert "note: all begin anew: restart 1 of 1.\n" in said(folder)
    assert f"logs: {folder}/log_output/2/rank.N" in done.stdout
    assert "net-9_9.ckpt' is passed over" in (folder / "log_output" / "2" / "rank.0" / "stderr").read_text()
    for attempt in ("1", "2"):
        assert (folder / "log_output" / attempt / "rank.1" / "stdout").exists()
    assert_identical(folder, 2, 6)


@pytest.mark.thorough
def test_kills_at_random_moments_leave_the_weights_of_an_undisturbed_training(tmp_path):
    ranks, updates = 2, 20
    folder, chance = tmp_path / "disturbed", random.Random(20)
    # One restart is spare: rarely, MindSpore itself ends a rank by SIGSEGV while it starts (docs/hardware.md).
    launched = begin(folder, ranks, updates, "--max-restarts", str(KILLS + 1), mode="pynative")
    for attempt in range(KILLS):
        kill_one(launched, folder, attempt, ranks, chance)
    done = launched.finish(SECONDS)
    assert done.returncode == 0, said(folder)
    crashes = said(folder).count("exit code 139 (SIGSEGV); all ranks were ended.")
    assert said(folder).count("exit code 137 (SIGKILL); all ranks were ended.") == KILLS
    assert said(folder).count("note: all begin anew") == KILLS + crashes
    assert_trained_once(folder, ranks, updates)
    assert_identical(folder, ranks, updates)


@pytest.mark.thorough
def test_the_ranks_that_are_left_make_the_same_updates_to_rounding(tmp_path, pynative):
    """The second rank of two fails twice in succession, so one goes on alone."""
    folder = tmp_path / "fewer"
    launched = begin(folder, 2, 6, "--max-restarts", "9", "--min-processes", "1", mode="pynative")
    wait_until(lambda: len(rows_of(folder, 1)) >= 2 or launched.process.poll() is not None)
    for attempt, rank in enumerate((1, 1)):
        ranks_of_attempt(launched, attempt, rank)[0].kill()
    done = launched.finish(SECONDS)
    assert done.returncode == 0, said(folder)
    assert done.stdout.splitlines()[-1].startswith("1 ranks finished")
    right = {each.name: as_numpy(each) for each in whole_batches(6).trainable_params()}
    for got in weights(folder, 1):
        for name in ("0.weight", "0.bias", "2.weight", "2.bias"):
            np.testing.assert_allclose(got[name], right[name], rtol=1e-4, atol=1e-6)


# -- without training --------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_rank_that_fails_each_time_fails_the_launch_when_no_restart_is_left(tmp_path):
    script = write(
        tmp_path / "script.py",
        'count, most = os.environ["GACCUM_MS_RESTART_COUNT"], os.environ["GACCUM_MS_MAX_RESTARTS"]\n'
        'print(f"attempt {count} of {most}", flush=True)\nopen(f"up.{count}.{rank}", "w")\n'
        'if rank == 1:\n    while not os.path.exists(f"up.{count}.0"): time.sleep(0.1)\n    sys.exit(3)\n'
        "time.sleep(1000)",
    )
    done = Launched(script, "-n", "2", "--max-restarts", "1").finish()
    assert done.returncode == 1
    assert done.stderr.count("rank 1 failed with exit code 3; all ranks were ended.") == 2
    assert done.stderr.count("note: all begin anew: restart") == 1
    assert "error: rank 1 failed" in done.stderr.split("restart 1 of 1.")[1]
    for attempt in range(2):
        said = (tmp_path / "log_output" / str(attempt + 1) / "rank.0" / "stdout").read_text()
        assert said == f"attempt {attempt} of 1\n"
        assert (tmp_path / "log_output" / ("msrun" if not attempt else f"msrun.{attempt + 1}")).is_dir()
        assert f"attempt {attempt} of 1\n" in done.stdout, "rank 0 is shown in each"
    assert Launched(write(script, ""), "-n", "1").finish().returncode == 0
    assert sorted(path.name for path in (tmp_path / "log_output").iterdir() if path.is_dir()) == ["1", "msrun"]


def processes_with(word: str, launched: Launched) -> list[psutil.Process]:
    """The launcher's processes with this word at the front of their commands."""
    return launched.running(lambda process: any(each.endswith(word) for each in process.cmdline()[:5]))


@pytest.mark.thorough
def test_what_stands_between_launcher_and_ranks_may_be_killed(tmp_path):
    script = write(
        tmp_path / "script.py",
        'count = os.environ["GACCUM_MS_RESTART_COUNT"]\nopen(f"up.{count}.{rank}", "w")\n'
        'if count < "2": time.sleep(1000)',
    )
    launched = Launched(script, "-n", "2", "--max-restarts", "2")
    for attempt, which in enumerate(("msrun", "--guard")):
        launched.wait_for(*(tmp_path / f"up.{attempt}.{rank}" for rank in range(2)))
        processes_with(which, launched)[-1].kill()
    done = launched.finish()
    assert done.returncode == 0, done.stderr
    for restart in (1, 2):
        assert f"note: all begin anew: restart {restart} of 2." in done.stderr


@pytest.mark.thorough
def test_a_signal_and_time_that_runs_out_end_all_though_restarts_are_left(tmp_path):
    script = write(tmp_path / "script.py", 'open(f"up.{rank}", "w")\ntime.sleep(1000 * rank)')
    launched = Launched(script, "-n", "2", "--max-restarts", "9")
    launched.wait_for(tmp_path / "up.0", tmp_path / "up.1")
    launched.process.send_signal(signal.SIGTERM)
    assert launched.finish().returncode == 143
    done = Launched(script, "-n", "2", "--max-restarts", "9", "--timeout", "8").finish()
    assert done.returncode == 124
    assert re.search(r"ranks \[(0, )?1\] had not ended after 8 s", done.stderr)
    assert "begin anew" not in done.stderr


def test_a_rank_that_fails_twice_is_left_out_with_its_device(tmp_path):
    script = write(
        tmp_path / "script.py",
        'visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")\nprint(os.environ["RANK_SIZE"], visible, flush=True)\n'
        'if (visible.split(",") if visible else list("012"))[rank] == "1": sys.exit(3)\n'
        'open(f"{os.environ[\'GACCUM_MS_RESTART_COUNT\']}.{rank}", "w")\nif not visible: time.sleep(1000)',
    )
    done = Launched(script, "-n", "3", "--max-restarts", "3", "--min-processes", "2").finish()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("2 ranks finished")
    assert (tmp_path / "log_output" / "3" / "rank.1" / "stdout").read_text() == "2 0,2\n"
    assert not (tmp_path / "log_output" / "3" / "rank.2").exists()


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
