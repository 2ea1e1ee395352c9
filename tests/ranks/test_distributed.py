"""Data parallel: two real processes compared with MindSpore's own step on the same ranks, and with one process."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from tests.ranks.distributed_worker import PER_RANK, SENT, UPDATES
from tests.support.reference import OPTIMIZERS, Regression, as_numpy, batches, relative_error, train
from tests.support.state import assert_close, assert_identical
from tests.support.two_ranks import case, results_of

pytestmark = pytest.mark.distributed
TOLERANCE = 1e-5


ranks = results_of("distributed_worker")


def test_two_ranks_equal_one_process_on_the_joined_batch(ranks, pynative):
    """The weights, the optimizer's state, and the mean of the ranks' losses."""
    network = Regression()
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    joined = train(nn.TrainOneStepCell, network, optimizer, batches(2 * PER_RANK, UPDATES))
    one, other = (case(results, "joined") for results in ranks)
    losses = (one.pop("losses") + other.pop("losses")) / 2
    assert relative_error(losses, joined.losses) < 2 * TOLERANCE
    assert_close(one, joined.state, 2 * TOLERANCE)
    assert_identical(one, other)


def test_parameter_broadcast_starts_all_ranks_alike(ranks, pynative):
    """ms.Model broadcasts rank 0's weights, and the ranks train as one process that had begun with them. Rank r reads
    samples r, r + 2, ... An epoch has 2 batches of 6 on each rank, and 2 of 12 in one process. A rank's record of
    itself stays its own."""
    network = Regression()
    data_set = ms.dataset.NumpySlicesDataset(batches(24, 1)[0], shuffle=False).batch(12)
    ms.Model(network, optimizer=nn.SGD(network.trainable_params(), 0.1)).train(2, data_set)
    trained = [case(results, "broadcast") for results in ranks]
    assert relative_error(trained[0]["before"], trained[1]["before"]) > 0.1
    for rank, values in enumerate(trained):
        assert relative_error(values["after"], as_numpy(network.out)) < 2 * TOLERANCE
        assert values["origin"].tolist() == [rank, 2]


def test_parameter_broadcast_sends_each_dtype_as_it_is(ranks):
    for results in ranks:
        values = case(results, "dtypes")
        for name, sent in SENT.items():
            assert values[name].dtype == sent.dtype
            np.testing.assert_array_equal(values[name], sent)


def test_hand_worked_gradient_on_two_ranks(ranks):
    """The ranks' gradients are 1.5 and 12: see `hand_worked` in the worker."""
    for results in ranks:
        np.testing.assert_allclose(results["hand"], [1 - 0.1 * 6.75, 1 - 0.1 * 13.5], rtol=1e-6)


def test_ranks_with_one_and_two_micro_batches_in_bfloat16_stay_alike(ranks):
    first, second = (case(results, "uneven") for results in ranks)
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name])


def test_ranks_that_nothing_joins_are_told_so_once(ranks):
    first, second = (case(results, "apart") for results in ranks)
    assert first["warned"].tolist() == second["warned"].tolist() == [1, 1]
    assert relative_error(first["weight"], second["weight"]) > 1e-3
