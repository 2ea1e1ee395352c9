"""Outputs beside the loss, ``aux=True`` , on one process, compared with NumPy and with the same step without them.
Ranks: test_counted_ranks.py. Callbacks: test_training_metrics.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountMask, GradAccumulationCell
from gaccum_ms.splitting import micro_batches
from tests.support.reference import as_numpy, make_step
from tests.support.reuse import Reused
from tests.support.state import manager

START = np.linspace(-1, 1, 4)
COUNT_MASK = CountMask()
MASK = [1, 1, 0, 0.5, 1, 0, 0, 0]  # in micro-batches of one or two, some count nothing


class WithOutputs(nn.Cell):
    """Squared errors of w x ~ 1, reduced according to `loss` , with outputs of many kinds: two of equal shape (the
    second int32), bool, rows of another shape, and a scalar equal to the loss. All but the integers have gradients."""

    def __init__(self, loss="mean", returns_outputs=True):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")
        self.loss = loss
        self.returns_outputs = returns_outputs

    def construct(self, x, mask):
        errors = (x * self.weight).sum(-1) - 1
        total = (ops.square(errors) * mask).sum()
        if self.loss == "mean":
            losses = (ops.square(errors).mean(),)
        elif self.loss == "sum":
            losses = (ops.square(errors).sum(),)
        elif self.loss == "masked":
            losses = (total / mask.sum(),)
        else:
            losses = (total, mask.sum())
        if not self.returns_outputs:
            return losses if self.loss == "ratio" else losses[0]
        return (*losses, errors, ops.cast(errors * 9, ms.int32), errors > 0, x * self.weight, losses[0] * 2)


class Returning(WithOutputs):
    """Returns outputs of this `kind` ."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def construct(self, x, mask):
        loss, errors = super().construct(x, mask)[:2]
        if self.kind == "alone":
            return loss
        if self.kind == "nothing":
            return (loss,)
        if self.kind == "part":
            return loss, errors[:1]
        if self.kind == "tuple":
            return loss, (errors, errors)
        if self.kind == "text":
            return loss, "errors"
        if self.kind == "narrow":
            return loss, ops.cast(errors, ms.float16), ops.tile(errors[:, None, None], (1, 2, 3))
        if self.kind == "scalars":
            return loss, loss * 2, ops.cast(errors > 0, ms.int32).sum() / errors.shape[0], loss * 3
        return loss, errors


def options_of(loss):
    """The cell's options for a network with this kind of loss."""
    reduction = loss if loss in ("sum", "ratio") else "mean"
    return {"reduction": reduction, "count": COUNT_MASK if loss == "masked" else None}


def step_of(network, scaled=False, **options):
    return make_step(network, scale_sense=manager() if scaled else None, **options)


@Reused
def steps(loss="mean", aux=True, **options):
    return step_of(WithOutputs(loss, aux), aux=aux, **options_of(loss), **options)


def batch(mask, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(mask), 4)).astype(np.float32)
    return Tensor(x), Tensor(np.array(mask, np.float32))


def check_rows(outputs, x, weight=START):
    """Check each sample's outputs, in the batch's order."""
    values = x.asnumpy() * weight
    errors = values.sum(-1) - 1
    for output, wanted, dtype in zip(
        outputs, (errors, errors * 9, errors > 0, values), (ms.float32, ms.int32, ms.bool_, ms.float32), strict=True
    ):
        assert output.dtype == dtype
        assert output.shape == wanted.shape
        if dtype == ms.int32:
            wanted = np.trunc(wanted)
        np.testing.assert_allclose(output.asnumpy().astype(np.float64), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.core(mode="pynative")
@pytest.mark.parametrize(
    ("mode", "loss", "micro_size"),
    [("graph", "mean", 3), ("pynative", "masked", 8), ("pynative", "sum", 1), ("pynative", "ratio", 3)],
    indirect=["mode"],
)
def test_outputs_are_the_batchs_and_change_nothing(mode, loss, micro_size):
    """Samples that count nothing have outputs too. Three micro-batches are 3 + 3 + 2."""
    step, plain = (steps(loss, aux, micro_size=micro_size) for aux in (True, False))
    for seed in range(2):
        weight = as_numpy(step.weights[0])
        x, mask = batch(MASK, seed)
        step_loss, *rows, scalar = step(x, mask)
        check_rows(rows, x, weight)
        assert scalar.dtype == ms.float32
        np.testing.assert_allclose(scalar.asnumpy(), 2 * step_loss.asnumpy(), rtol=1e-6)
        np.testing.assert_array_equal(step_loss.asnumpy(), plain(x, mask).asnumpy())
        np.testing.assert_array_equal(as_numpy(step.weights[0]), as_numpy(plain.weights[0]))
        assert (as_numpy(step.weights[0]) != weight).all()


def test_negative_control_a_changed_order_is_caught(pynative, monkeypatch):
    def in_front(state, turned, rows):
        following = (state[0] + rows, state[1] + turned[0])
        for old, new in zip(state[2:], turned[1:], strict=True):
            following = (*following, old + new if new.shape == () else ops.concat((new, old[: len(old) - rows])))
        return following

    monkeypatch.setattr(micro_batches, "following", in_front)
    x, mask = batch(MASK)
    _, *rows, _ = step_of(WithOutputs(), aux=True, micro_size=4)(x, mask)
    with pytest.raises(AssertionError, match="tolerance"):
        check_rows(rows, x)


def test_each_batch_of_a_window_has_its_own(pynative):
    """Scalars are averaged as the loss of the call; the tail is flushed."""
    step, plain = (steps("masked", aux, micro_size=2, accumulation_steps=2) for aux in (True, False))
    for seed, mask in enumerate([MASK, [0, 0, 0], MASK[:5]]):
        weight = as_numpy(step.weights[0])
        x, mask = batch(mask, seed)
        step_loss, *rows, scalar = step(x, mask)
        check_rows(rows, x, weight)
        np.testing.assert_allclose(scalar.asnumpy(), 2 * step_loss.asnumpy(), rtol=1e-6)
        np.testing.assert_array_equal(step_loss.asnumpy(), plain(x, mask).asnumpy())
    assert step.flush()
    assert plain.flush()
    np.testing.assert_array_equal(as_numpy(step.weights[0]), as_numpy(plain.weights[0]))


def test_after_a_loss_scale_and_of_what_is_dropped(pynative):
    """(loss, overflow, scale, *aux): a micro-batch that overflows has rows, but no part in a scalar."""
    step = steps("masked", micro_size=4, scaled=True, overflow="drop_micro_batch")
    x, mask = batch(MASK)
    values = x.asnumpy().copy()
    values[2:4, 0] = 3e30  # its squares are not finite
    x = Tensor(values)
    loss, overflow, scale, *rows, scalar = step(x, mask)
    errors, weights = np.delete(values @ START - 1, [2, 3]), np.delete(mask.asnumpy(), [2, 3])
    expected = (errors**2 * weights).sum() / weights.sum()
    assert not overflow.asnumpy()
    assert float(scale.asnumpy()) == 2.0**10
    np.testing.assert_allclose(loss.asnumpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(scalar.asnumpy(), 2 * expected, rtol=1e-5)
    np.testing.assert_allclose(rows[0].asnumpy(), values @ START.astype(np.float32) - 1, rtol=1e-4)
    assert int(step.dropped_micro_batches.asnumpy()) == 1


@pytest.mark.core(mode="pynative")
def test_scalars_alone(mode):
    """Scalars have one shape and are in the loop with the sums: floats and integers become float32 means."""
    x, mask = batch([1] * 7)
    loss, twice, positive, thrice = step_of(Returning("scalars"), aux=True, micro_size=3)(x, mask)
    np.testing.assert_allclose([twice.asnumpy(), thrice.asnumpy()], loss.asnumpy() * [2, 3], rtol=1e-6)
    np.testing.assert_allclose(positive.asnumpy(), (x.asnumpy() @ START > 1).mean(), rtol=1e-6)


def test_rows_of_another_dtype_and_of_more_axes(pynative):
    x, mask = batch([1] * 7)
    _, half, tiled = step_of(Returning("narrow"), aux=True, micro_size=3)(x, mask)
    assert (half.dtype, tiled.shape) == (ms.float16, (7, 2, 3))
    for rows in (half, tiled[:, 1, 2]):
        np.testing.assert_allclose(as_numpy(rows), x.asnumpy() @ START - 1, rtol=1e-3, atol=1e-3)


@pytest.mark.thorough
def test_in_a_graph_for_all_lengths():
    step = step_of(WithOutputs(), aux=True, micro_size=3)
    step.set_inputs(Tensor(shape=[None, 4], dtype=ms.float32), Tensor(shape=[None], dtype=ms.float32))
    for seed, samples in enumerate((8, 5, 1)):
        weight = as_numpy(step.weights[0])
        x, mask = batch([1] * samples, seed)
        loss, *rows, scalar = step(x, mask)
        check_rows(rows, x, weight)
        np.testing.assert_allclose(scalar.asnumpy(), 2 * loss.asnumpy(), rtol=1e-6)
    assert len(step.compile_cache) == 1


@pytest.mark.parametrize(
    ("kind", "mode", "error", "got"),
    [
        ("alone", "pynative", ValueError, "a tuple, but got one output. Return such"),
        ("nothing", "pynative", ValueError, "a tuple, but got a tuple of 1. Return such"),
        ("part", "graph", ValueError, r"output 1 got shape \(1,\) for 5 sample\(s\). Return"),
        ("tuple", "pynative", TypeError, "each of 'aux' is a Tensor, but output 1 got 'Tuple.*'. Return"),
        ("text", "pynative", TypeError, "each of 'aux' is a Tensor, but output 1 got 'String'. Return"),
    ],
    indirect=["mode"],
    ids=["alone", "nothing", "part", "tuple", "text"],
)
def test_what_is_no_output_is_refused(kind, error, got, mode):
    step = step_of(Returning(kind), aux=True, micro_size=2)
    with pytest.raises(error, match=rf"with aux=True the network must return \(loss, \*aux\).*{got}"):
        step(*batch(MASK))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


class Looking(nn.Cell):
    """Returns outputs that are not per sample, though two samples, as in each micro-batch, make them look so. A
    Parameter counts its runs."""

    def __init__(self, kind):
        super().__init__()
        self.dense = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        self.runs = ms.Parameter(Tensor(0.0), name="runs", requires_grad=False)
        self.kind = kind

    def construct(self, x):
        rows = self.dense(x.reshape((2, 3)) if self.kind == "two" else x)
        loss = ops.depend(ops.square(rows).mean(), ops.assign_add(self.runs, Tensor(1.0)))
        if self.kind == "means":
            return loss, x, rows.mean(axis=0)
        if self.kind == "table":
            return loss, self.dense.weight
        if self.kind == "turned":
            return loss, ops.swapaxes(rows, 0, 1)
        return loss, rows


@pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")
@pytest.mark.parametrize(
    ("kind", "mode", "got"),
    [
        ("means", "graph", r"but output 2 got shape \(2,\) for 3 sample\(s\). Return a mean"),
        ("table", "pynative", r"but output 1 got shape \(2, 3\) for 3 sample\(s\). Return a mean"),
        (
            "turned",
            "pynative",
            r"but output 1 got shape \(2, 3\) for 3 sample\(s\).*ops.swapaxes brings samples to axis 0",
        ),
    ],
    indirect=["mode"],
    ids=["means", "table", "turned"],
)
def test_what_has_no_samples_on_axis_0_is_refused_before_an_update(kind, got, mode):
    """Also where each micro-batch has as many samples as the output has rows."""
    network = Looking(kind)
    step = step_of(network, aux=True, micro_size=4)
    with pytest.raises(ValueError, match=got):
        step(Tensor(np.ones((8, 3), np.float32)))
    np.testing.assert_array_equal(as_numpy(network.dense.weight), np.ones((2, 3), np.float32))
    assert int(step.update_count.asnumpy()) == 0
    assert not as_numpy(network.runs), "what looks at the network leaves no trace"


@pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")
def test_a_network_that_takes_one_size_alone_trains(pynative):
    network = Looking("two")
    _, rows = step_of(network, aux=True, micro_size=2)(Tensor(np.arange(12).reshape(4, 3), ms.float32))
    np.testing.assert_array_equal(rows.asnumpy(), np.repeat([[3.0], [12], [21], [30]], 2, axis=1))
    assert as_numpy(network.runs) == 2


def test_an_option_that_is_no_bool_is_refused():
    with pytest.raises(TypeError, match="the argument 'aux' must be a bool, but got 1"):
        GradAccumulationCell(WithOutputs(), 2, aux=1)
