"""BatchNorm with accumulation; a warning describes the differences."""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms import GradAccumulationCell, WindowBatchNorm
from tests.support.reference import CLASSES, FEATURES, BatchNormInEvalNet, Outer, batches, make_step


def two_norms():
    first, second = nn.Dense(FEATURES, 6), nn.Dense(6, CLASSES)
    return nn.SequentialCell(first, nn.BatchNorm1d(6), second, nn.BatchNorm1d(CLASSES))


def window_norm():
    return nn.SequentialCell(nn.Dense(FEATURES, CLASSES), WindowBatchNorm(CLASSES))


def step_of(network, **options):
    """A step of a classifier with these options."""
    return make_step(nn.WithLossCell(network, nn.CrossEntropyLoss()), **({"micro_size": 2} | options))


def batch(samples=8):
    return map(Tensor, batches(samples, 1)[0])


def test_batch_norm_draws_one_warning_that_says_what_differs(pynative):
    """At the first run, on the caller's line; never again."""
    step = step_of(two_norms())
    with pytest.warns(UserWarning) as caught:
        step(*batch())
        step(*batch())
        step(*batch(7))
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("For 'GradAccumulationCell', the network has 2 BatchNorm layer(s) (")
    for part in ("_backbone.1", "_backbone.3", "mean and variance of one micro-batch", "moving", "nn.GroupNorm"):
        assert part in text
    assert caught[0].filename == __file__


TWO = "the network has 2 BatchNorm layer(s)"


@pytest.mark.filterwarnings("ignore:.*is trained in evaluation mode")
@pytest.mark.parametrize(
    ("network", "samples", "options", "frozen", "expected"),
    [
        (two_norms, 8, {"micro_size": 1, "accumulation_steps": 2}, None, [TWO]),
        (two_norms, 8, {}, 3, ["the network has 1 BatchNorm layer(s) (_backbone.1)"]),
        (BatchNormInEvalNet, 8, {}, None, []),
        (two_norms, 8, {"micro_size": 1}, None, []),
        (window_norm, 8, {"micro_size": 4}, None, []),
        (window_norm, 4, {"micro_size": 4}, 1, []),
    ],
)
def test_what_is_warned_of_at_the_first_run(network, samples, options, frozen, expected, pynative):
    """A layer is judged by its mode then."""
    network = network()
    step = step_of(network, **options)
    if frozen:
        network[frozen].set_train(False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", message=".*BatchNorm")
        step(*batch(samples))
        step(*batch(samples))
    texts = [str(one.message) for one in caught]
    assert len(texts) == len(expected) and all(one in text for one, text in zip(expected, texts, strict=True)), texts


def test_layers_are_judged_by_their_mode_at_the_first_run(pynative):
    """One that was made in evaluation mode, and trains by then, is not left out."""
    cell = GradAccumulationCell(nn.WithLossCell(two_norms().set_train(False), nn.CrossEntropyLoss()), 2)
    data = ms.dataset.NumpySlicesDataset(batches(8, 1)[0], shuffle=False).batch(8)
    with pytest.warns(UserWarning, match=r"the network has 2 BatchNorm layer\(s\)"):
        ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), 0.05)).train(1, data)


def test_the_warnings_come_where_another_graph_compiles_the_step():
    """As data sinking does, which never calls the step from Python."""
    step = make_step(normalised(nn.BatchNorm1d(6)), micro_size=8)
    with pytest.warns(UserWarning, match=r"1 BatchNorm layer\(s\)") as caught:
        Outer(step).set_train()(*rows_of(8))
    assert len(caught) == 1


# -- how a batch is cut ------------------------------------------------------------------------------------------------


def normalised(norm):
    return nn.WithLossCell(nn.SequentialCell(nn.Dense(5, 6), norm, nn.Dense(6, 1)), nn.MSELoss())


def rows_of(samples, seed=0):
    random = np.random.default_rng(seed)
    return [Tensor(random.normal(size=(samples, width)), ms.float32) for width in (5, 1)]


@pytest.mark.filterwarnings("ignore:.*has 1 BatchNorm layer")
def test_no_remainder_makes_the_moving_variance_nan():
    """In a graph for batches of any length."""
    norm = nn.BatchNorm1d(6)
    step = make_step(normalised(norm), micro_size=8)
    step.set_inputs(*(Tensor(shape=[None, width], dtype=ms.float32) for width in (5, 1)))
    for samples in (16, 9, 8, 5, 3, 2):
        step(*rows_of(samples))
    assert np.isfinite(norm.moving_variance.asnumpy()).all()
    assert len(step.compile_cache) == 1


@pytest.mark.parametrize(
    ("norm", "trains", "options", "sizes"),
    [
        (nn.BatchNorm1d(6), True, {"micro_size": 4}, {8: [2] * 4, 4: [2, 2], 7: [2, 2, 3]}),
        (nn.BatchNorm1d(6), False, {"micro_size": 3}, {7: [3, 3, 1]}),
        (nn.BatchNorm1d(6), True, {"micro_batch_size": 1}, {4: [1] * 4}),
        (nn.Identity(), True, {"micro_size": 4}, {8: [2] * 4, 4: [1] * 4, 7: [2, 2, 2, 1]}),
    ],
    ids=["a layer", "frozen", "the user's choice", "another layer"],
)
@pytest.mark.filterwarnings("ignore:.*has 1 BatchNorm layer", "ignore:.*is trained in evaluation mode")
def test_no_micro_batch_has_one_sample_but_by_the_users_choice(norm, trains, options, sizes, pynative):
    step = make_step(normalised(norm), **options)
    norm.set_train(trains)
    step(*rows_of(8))
    for samples, expected in sizes.items():
        plan = step.window.plan_in_python([one.shape for one in rows_of(samples)])
        assert [plan.size] * plan.full + [plan.rest] * (plan.rest > 0) == expected
