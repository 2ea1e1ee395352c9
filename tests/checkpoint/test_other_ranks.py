"""The counts of a checkpoint on other ranks: arithmetic. test_fewer_ranks.py shows it on real ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import GradAccumulator, resume
from gaccum_ms.accumulation.open_window import BATCHES, SUMS
from gaccum_ms.backend.data_sets import epoch_of
from gaccum_ms.backend.parameters import own
from gaccum_ms.checkpoint.other_ranks import counted_here
from gaccum_ms.checkpoint.rank_files import of_rank
from gaccum_ms.record.run_record import RULES, numbers_of

SAMPLES = 48


def slices(batch: int, ranks: int, samples: int = SAMPLES, **options: Any) -> Any:
    rows = np.arange(samples, dtype=np.float32)
    options = {"shuffle": False, "num_shards": ranks, "shard_id": 0, **options}
    return NumpySlicesDataset((rows,), ["x"], **options).batch(batch)


def checkpoint(ranks: int, steps: int, seen: int, data_set: Any = None, rule: str = "samples", **others: int) -> Any:
    """The values of a checkpoint of each rank after `seen` batches, in windows of `steps` ."""
    values = {
        "batch_count": seen,
        "window_position": seen % steps,
        "window_steps": steps,
        "accumulation_steps": steps,
        "configured_steps": steps,
        "rate_steps": steps,
        "window_rule": RULES.index(rule),
        **(numbers_of(epoch_of(data_set, ranks)) if data_set is not None else {}),
        **others,
    }
    arrays = {own(name): np.array(value, np.int32) for name, value in values.items()}
    sums = np.zeros(SUMS + 1, np.float32)
    sums[BATCHES] = seen % steps
    return arrays | {own("window_sums"): sums, own("window_origin"): np.array([0, ranks])}


def counted(values: Any, ranks: int, steps: int, data_set: Any) -> Any:
    record: Any = SimpleNamespace(ranks=ranks, own_steps=steps)
    got = counted_here([(Path("net.ckpt"), values)], values, record, data_set)
    names = ("batch_count", "window_position", "window_steps", "rate_steps", "accumulation_steps", "epoch_batches")
    return {name: int(got[own(name)]) for name in names} | {"added": int(got[own("window_sums")][BATCHES])}


def warning_of(*arguments: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        counted(*arguments)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


# Eight samples are in a batch of all ranks, or two of each rank; an update has sixteen. So an epoch has three updates.
FORMS = {"larger batches": lambda ranks: (8 // ranks, 2), "more batches": lambda ranks: (2, 8 // ranks)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("saved", "ranks"), [(4, 1), (4, 2), (2, 4), (2, 2)])
def test_other_ranks_go_on_at_the_same_sample_of_the_same_window(form, saved, ranks):
    """Half a window after the first epoch, without a warning."""
    batch, steps = FORMS[form](saved)
    values = checkpoint(saved, steps, (SAMPLES + 8) // (saved * batch), slices(batch, saved))
    batch, steps = FORMS[form](ranks)
    assert counted(values, ranks, steps, slices(batch, ranks)) == {
        "batch_count": (SAMPLES + 8) // (ranks * batch),
        "window_position": steps // 2,
        "added": steps // 2,
        "window_steps": steps,
        "accumulation_steps": steps,
        "rate_steps": steps,
        "epoch_batches": SAMPLES // (ranks * batch),
    }


def test_a_number_of_batches_that_a_schedule_has_set_is_that_of_all_ranks():
    values = checkpoint(2, 4, 8, slices(2, 2), accumulation_steps=6, rate_steps=6)
    got = counted(values, 1, 8, slices(2, 1))
    assert (got["accumulation_steps"], got["rate_steps"]) == (12, 12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # A rank of four repeats samples, so that all have equally many.
        (lambda: (checkpoint(4, 2, 2, slices(2, 4, 42)), 2, 2, slices(4, 2, 42)), "42 samples .*, and 44"),
        (lambda: (checkpoint(2, 2, 2, slices(4, 2)), 1, 2, slices(8, 1, 96)), "got 12 .* 6 .*: 96 .*, and 48"),
        # Sixteen samples are seen, and eight together.
        (lambda: (checkpoint(2, 1, 3, slices(2, 2)), 1, 2, slices(8, 1)), r"\[3\] .*: 12 samples .*, and 8 in"),
        # One batch of two is half a window of each of two ranks, and so a quarter of theirs.
        (lambda: (checkpoint(1, 4, 1), 2, 2, None), "'window_position' of 1, .* 0.5"),
    ],
    ids=["samples that ranks repeat", "another data set", "batches", "window"],
)
def test_what_does_not_divide_is_refused_with_both_numbers(make, message):
    with pytest.raises(ValueError, match=f"^For 'resume', .*{message}"):
        counted(*make())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: (checkpoint(2, 4, 4, slices(4, 2)), 1, 4, slices(4, 1)),
            "an update has 16 samples, 4 batch(es) of 4 on each of 1 rank(s), where it had 32 samples, 4 batch(es) of",
        ),
        (
            lambda: (checkpoint(2, 2, 4, slices(4, 2)), 1, 2, slices(8, 1).shuffle(9)),
            "'shuffle' orders the samples of each rank alone",
        ),
        (
            lambda: (checkpoint(2, 1, 4, epoch_batches=0), 1, 1, slices(4, 1)),
            "the checkpoint does not say how large a batch was",
        ),
        (
            lambda: (checkpoint(2, 4, 4, slices(4, 2, 20)), 1, 8, slices(4, 1, 20)),
            "an epoch's 20 samples are no whole batches",
        ),
    ],
    ids=["update", "order", "nothing known", "a smaller last batch"],
)
def test_one_warning_says_in_what_the_next_updates_differ(make, message):
    assert message in warning_of(*make())


@pytest.mark.parametrize(
    ("rule", "mean", "factor"), [("samples", True, ""), ("samples", False, "0.5"), ("sums", True, "2")]
)
def test_a_gradient_that_grows_with_the_ranks_is_warned_of(rule, mean, factor):
    """From four ranks to two: as in MindSpore's own step, ranks are averaged or summed, whatever the loss is."""
    values = checkpoint(4, 2, 2, slices(2, 4), rule=rule)
    older = values | {own("window_rule"): values[own("window_rule")] + len(RULES)}  # when sharded, once
    mode, mean_before = (ms.get_auto_parallel_context(name) for name in ("parallel_mode", "gradients_mean"))
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=mean)
    try:
        warning = warning_of(values, 2, 2, slices(4, 2))
        assert warning_of(older, 2, 2, slices(4, 2)) == warning
    finally:
        ms.set_auto_parallel_context(parallel_mode=mode, gradients_mean=mean_before)
    assert (f"gradients_mean={mean} makes their gradients {factor} times" in warning) == bool(factor)
    assert bool(warning) == bool(factor)


def test_a_rank_does_not_draw_what_another_draws():
    saved = {own("window_origin"): np.array([0, 2]), own("random_state"): np.zeros(3), "weight": np.ones(2)}
    files = [(Path("rank0.ckpt"), saved)]
    assert of_rank(files, rank=0, ranks=2) == saved
    assert of_rank(files, rank=1, ranks=2).keys() == saved.keys() - {own("random_state")}


@pytest.mark.usefixtures("pynative")
def test_batches_that_weigh_alike_weigh_by_their_samples_on_other_ranks(tmp_path):
    """Two ranks have added a batch of four each, and one adds a batch of eight."""

    def make(data_set: Any, files: Any) -> tuple[GradAccumulator, ms.Parameter]:
        weight = ms.Parameter(Tensor(np.zeros(3), ms.float32), name="weight")
        accumulator = GradAccumulator(nn.SGD([weight], 1.0), 2)
        resume(accumulator, files, data_set)
        return accumulator, weight

    gradients = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
    files = [tmp_path / f"{rank}.ckpt" for rank in range(2)]
    for rank, file in enumerate(files):
        accumulator, _ = make(slices(4, 1, 24), tmp_path / "none")
        accumulator((Tensor(gradients[rank]),))
        accumulator.run_record.window_origin.set_data(Tensor([rank, 2], ms.int32))
        ms.save_checkpoint(accumulator, str(file))
    accumulator, weight = make(slices(8, 1), files)
    assert int(accumulator.batch_count.asnumpy()) == 1
    assert accumulator((Tensor(gradients[2]),))
    expected = -(gradients[:2].mean(axis=0) + gradients[2]) / 2
    np.testing.assert_allclose(weight.asnumpy(), expected, rtol=1e-5)
