"""WithBatchLossCell on two real processes: each rank's own loss, and the loss of all ranks' samples."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.losses.test_batch_loss import clipped_whole
from tests.ranks.batch_loss_worker import PER_RANK, UPDATES
from tests.support import contrastive
from tests.support.contrastive import batches, whole
from tests.support.reference import relative_error
from tests.support.two_ranks import Results, case

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(rank_pair, tmp_path_factory) -> list[Results]:
    """The results of each of two ranks, by case."""
    return rank_pair.worker("tests.ranks.batch_loss_worker", tmp_path_factory.mktemp("batch_loss"))


def error(one: dict, other: dict) -> float:
    assert one.keys() == other.keys()
    return max(relative_error(one[name], other[name]) for name in one)


@functools.cache
def joined(kind: str, make_step=whole, optimizer=None) -> dict[str, np.ndarray]:
    """The results of one process, with MindSpore's own step on the joined batches of both ranks. PyNative mode compiles
    nothing."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    run = contrastive.train(make_step, kind, batches(kind, 2 * PER_RANK, UPDATES), optimizer)
    return {"losses": run.losses, **run.state}


@pytest.mark.core("graph-3-0")
@pytest.mark.parametrize(
    ("way", "mean"),
    [
        *(("graph-3", 0), ("pynative-3", 0), ("pynative-3", 1), ("jit-3", 1)),
        *(("graph-1", 0), ("pynative-scaled", 0), ("pynative-clipped", 1), ("graph-sharded", 1)),
    ],
)
def test_gathered_equals_one_process_on_the_joined_batch(ranks, way, mean):
    """The loss, the weights and the loss's temperature are equal, with and without gradients_mean. The test of labels
    below has gradients_mean in graph mode."""
    reference = joined("towers", clipped_whole if way == "pynative-clipped" else whole)
    for results in ranks:
        assert error(case(results, f"gathered-towers-{way}-mean{mean}"), reference) < 2 * TOLERANCE


@pytest.mark.core("pynative-0")
@pytest.mark.parametrize(("mode", "mean"), [("graph", 1), ("pynative", 0)])
def test_labels_are_gathered_too(ranks, mode, mean):
    reference = joined("labels")
    for results in ranks:
        assert error(case(results, f"gathered-labels-{mode}-3-mean{mean}"), reference) < 2 * TOLERANCE


@pytest.mark.thorough
def test_negative_control_ranks_that_each_count_the_joined_loss(ranks):
    """Without gradients_mean the gradient is twice as large. Each rank's own loss is not the joined loss either."""
    reference = joined("towers")
    for results in ranks:
        assert error(case(results, "gathered-towers-pynative-broken-mean0"), reference) > 100 * TOLERANCE
        own = case(results, "own-3-graph-mean0")
        assert relative_error(own["losses"], reference["losses"]) > 100 * TOLERANCE


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "mode", "mean"),
    [
        ("3", "graph", 0),
        *((way, "pynative", mean) for way, mean in (("1", 0), ("3", 1), ("sharded", 0), ("sharded", 1))),
    ],
)
def test_without_gathering_equals_mindspores_step_on_the_same_ranks(ranks, way, mode, mean):
    """MindSpore's step runs in PyNative mode, which compiles nothing."""
    for results in ranks:
        reference = case(results, f"own-whole-pynative-mean{mean}")
        assert error(case(results, f"own-{way}-{mode}-mean{mean}"), reference) < TOLERANCE


@pytest.mark.core("graph")
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_batches_of_unequal_size_are_refused_on_both_ranks_and_training_goes_on(ranks, mode):
    losses = []
    for results in ranks:
        found = case(results, f"left out-{mode}")
        assert "batches of the same size" in str(found["message"])
        assert "got [5, 6] samples on the ranks" in str(found["message"])
        assert found["unequal left all"]
        assert found["sound"]
        losses.append(float(found["loss"]))
    assert losses == pytest.approx([joined("towers")["losses"][0]] * 2, rel=TOLERANCE)


@pytest.mark.core("graph")
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_an_overflow_on_one_rank_skips_on_both(ranks, mode):
    for results in ranks:
        found = case(results, f"left out-{mode}")
        assert found["overflow"]
        assert found["overflow left all"]


def test_a_network_made_before_the_parallel_mode_was_set_is_refused(ranks):
    for results in ranks:
        assert "got 1 rank(s) then and 2 now" in str(results["early"])


@pytest.mark.core("pynative-1")
@pytest.mark.parametrize(("mode", "mean"), [("graph", 0), ("pynative", 1)])
def test_audit_passes_on_ranks(ranks, mode, mean):
    for results in ranks:
        found = case(results, f"audit-{mode}-mean{mean}")
        assert found["ok"], str(found["text"])


@pytest.mark.thorough
def test_model_train_on_two_ranks_equals_one_process(ranks, pynative):
    """The one process runs in PyNative mode, and the ranks in graph mode."""
    backbone, loss_fn = contrastive.make_parts("towers")
    network = contrastive.Whole(backbone, loss_fn)
    data_set = ms.dataset.NumpySlicesDataset(batches("towers", 2 * PER_RANK, 1)[0], shuffle=False).batch(2 * PER_RANK)
    ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.2)).train(3, data_set, dataset_sink_mode=False)
    for results in ranks:
        found = case(results, "model")
        for one in network.get_parameters():
            assert relative_error(found[one.name], one.asnumpy()) < 2 * TOLERANCE
