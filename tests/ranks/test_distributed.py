"""Data parallel: two real processes compared with MindSpore's own step on the same ranks, and with one process."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.ranks.distributed_worker import PER_RANK, SENT, UPDATES, fitted
from tests.support.modes import MODES
from tests.support.reference import OPTIMIZERS, Regression, as_numpy, batches, relative_error, train
from tests.support.state import assert_close
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


ranks = results_of("distributed_worker")


@pytest.mark.parametrize(
    ("ours", "whole"), [("graph-mean1-3", "mean1-whole"), ("jit-mean0-3", "mean0-whole"), ("clip", "clip-whole")]
)
def test_equals_mindspores_step_on_the_same_ranks(ranks, ours, whole):
    for results in ranks:
        assert_close(case(results, ours), case(results, whole))


def test_the_comparison_finds_what_is_not_clipped(ranks):
    for results in ranks:
        with pytest.raises(AssertionError):
            assert_close(case(results, "clip"), case(results, "mean0-whole"))


def test_two_ranks_equal_one_process_on_the_joined_batch(ranks, pynative):
    """With gradients_mean, the weights and the mean of the ranks' losses are equal. Without it the weights differ,
    because ranks sum."""
    network = Regression()
    joined = train(
        nn.TrainOneStepCell, network, OPTIMIZERS["momentum"](network.trainable_params()), batches(2 * PER_RANK, UPDATES)
    )
    averaged = [case(results, "graph-mean1-3") for results in ranks]
    summed = case(ranks[0], "jit-mean0-3")
    for name in (parameter.name for parameter in network.trainable_params()):
        assert relative_error(averaged[0][name], joined.state[name]) < 2 * TOLERANCE
        np.testing.assert_array_equal(averaged[0][name], averaged[1][name])
        assert relative_error(summed[name], joined.state[name]) > 100 * TOLERANCE
    losses = (averaged[0]["losses"] + averaged[1]["losses"]) / 2
    assert relative_error(losses, joined.losses) < 2 * TOLERANCE


def test_one_reduction_per_update(ranks):
    """An eager run has one collective for an update of 3 micro-batches."""
    for results in ranks:
        assert results["reductions"] == UPDATES


def test_ranks_fit_and_evaluate_as_one_process_without_accumulation(ranks, pynative):
    """Each rank evaluates its shard: the mean over equal shards is the number of one process."""
    alone = fitted(ms.Model)
    one, other = (case(results, "fit") for results in ranks)
    assert {"net_output", "loss", "accuracy", "hidden.weight"} <= alone.keys()
    for results in (one, other):
        np.testing.assert_allclose(results.pop("one number"), alone["accuracy"], rtol=1e-6)
    assert_close({name: (one[name] + other[name]) / 2 for name in one}, alone)
    assert not np.allclose(one["loss"], other["loss"])


def test_parameter_broadcast_starts_all_ranks_alike(ranks):
    """ms.Model broadcasts rank 0's weights, and the ranks train as if they had begun with them. A rank's record of
    itself stays its own."""
    trained = [case(results, "model broadcast") for results in ranks]
    assert relative_error(trained[0]["before"], trained[1]["before"]) > 0.1
    for rank, values in enumerate(trained):
        assert relative_error(values["after"], ranks[0]["model/after"]) < TOLERANCE
        assert values["origin"].tolist() == [rank, 2]


@pytest.mark.parametrize("name", SENT)
def test_parameter_broadcast_sends_each_dtype_as_it_is(ranks, name):
    for results in ranks:
        value = case(results, "dtypes")[name]
        assert value.dtype == SENT[name].dtype
        np.testing.assert_array_equal(value, SENT[name])


def test_model_train_on_two_ranks_equals_one_process(ranks, pynative):
    """Rank r reads samples r, r + 2, ... An epoch has 2 batches of 6 on each rank, and 2 of 12 in one process."""
    network = Regression()
    x, y = batches(24, 1)[0]
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False).batch(12)
    ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1)).train(2, data_set)
    for results in ranks:
        assert relative_error(results["model/after"], as_numpy(network.out)) < 2 * TOLERANCE


def test_hand_worked_gradient_on_two_ranks(ranks):
    """The ranks' gradients are 1.5 and 12: see `hand_worked` in the worker."""
    for results in ranks:
        np.testing.assert_allclose(results["hand"], [1 - 0.1 * 6.75, 1 - 0.1 * 13.5], rtol=1e-6)


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize("mode", MODES)
def test_ranks_with_one_and_two_micro_batches_in_bfloat16_stay_alike(ranks, mode):
    first, second = (case(results, f"uneven {mode}") for results in ranks)
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name])


def test_ranks_that_nothing_joins_are_told_so_once(ranks):
    first, second = (case(results, "apart") for results in ranks)
    assert first["warned"].tolist() == second["warned"].tolist() == [1, 1]
    assert relative_error(first["weight"], second["weight"]) > 1e-3
