"""What can be an output beside the loss, ``aux=True`` . In windows, and of what is dropped: options/test_setups.py.
Ranks: test_counted_ranks.py. Callbacks: test_training_metrics.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountMask, GradAccumulationCell
from tests.support.reference import as_numpy, make_step

START = np.linspace(-1, 1, 4)
MASK = [1, 1, 0, 0.5, 1, 0, 0, 0]  # in micro-batches of one or two, some count nothing


class WithOutputs(nn.Cell):
    """Squared errors of w x ~ 1, weighted by a mask, with outputs of many kinds: two of equal shape (the second int32),
    bool, rows of another shape, and a scalar equal to the loss. All but the integers have gradients."""

    def __init__(self, returns_outputs=True):
        super().__init__()
        self.weight = ms.Parameter(Tensor(START, ms.float32), name="weight")
        self.returns_outputs = returns_outputs

    def construct(self, x, mask):
        errors = (x * self.weight).sum(-1) - 1
        loss = (ops.square(errors) * mask).sum() / mask.sum()
        if not self.returns_outputs:
            return loss
        return loss, errors, ops.cast(errors * 9, ms.int32), errors > 0, x * self.weight, loss * 2


class Returning(WithOutputs):
    """Returns what `made` makes of its loss and errors."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def construct(self, x, mask):
        return self.made(*super().construct(x, mask)[:2])


def step_of(network, aux=True, **options):
    return make_step(network, aux=aux, count=CountMask(), **options)


def batch(mask, seed=0):
    x = np.random.default_rng(seed).normal(size=(len(mask), 4)).astype(np.float32)
    return Tensor(x), Tensor(np.array(mask, np.float32))


def check_rows(outputs, x, weight):
    """Check each sample's outputs, in the batch's order."""
    values = x.asnumpy() * weight
    errors = values.sum(-1) - 1
    expected = errors, np.trunc(errors * 9), errors > 0, values
    dtypes = ms.float32, ms.int32, ms.bool_, ms.float32
    for output, wanted, dtype in zip(outputs, expected, dtypes, strict=True):
        assert (output.dtype, output.shape) == (dtype, wanted.shape)
        np.testing.assert_allclose(output.asnumpy().astype(np.float64), wanted, rtol=1e-5, atol=1e-6)


def test_outputs_are_the_batchs_and_change_nothing(pynative):
    """Samples that count nothing have outputs too. Micro-batches are 3 + 3 + 2, and 1 in eight, where some count
    nothing."""
    for micro_size in (3, 8):
        step, plain = (step_of(WithOutputs(aux), aux, micro_size=micro_size) for aux in (True, False))
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


@pytest.mark.parametrize(
    ("made", "error", "got"),
    [
        (lambda loss, errors: (loss,), ValueError, "a tuple, but got 1 output.*Return such"),
        (lambda loss, errors: (loss, errors[:1]), ValueError, r"output 1 got shape \(1,\) for 5 sample\(s\). Return"),
        (lambda loss, errors: (loss, (errors, errors)), TypeError, "is a Tensor, but output 1 got 'Tuple.*'. Return"),
    ],
)
def test_what_is_no_output_is_refused(made, error, got, pynative):
    step = step_of(Returning(made), micro_size=2)
    with pytest.raises(error, match=rf"with aux=True the network must return \(loss, \*aux\).*{got}"):
        step(*batch(MASK))
    np.testing.assert_array_equal(as_numpy(step.weights[0]), START.astype(np.float32))


class Looking(nn.Cell):
    """Returns outputs that are not per sample, though two samples, as in each micro-batch, make them look so. A
    Parameter counts its runs."""

    def __init__(self, made):
        super().__init__()
        self.dense = nn.Dense(3, 2, weight_init="ones", bias_init="zeros")
        self.runs = ms.Parameter(Tensor(0.0), name="runs", requires_grad=False)
        self.made = made

    def construct(self, x):
        rows = self.dense(x)
        loss = ops.depend(ops.square(rows).mean(), ops.assign_add(self.runs, Tensor(1.0)))
        return (loss, *self.made(x, rows))


@pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")
@pytest.mark.parametrize(
    ("made", "mode", "got"),
    [
        (
            lambda x, rows: (x, rows.mean(axis=0)),
            "graph",
            r"output 2 got shape \(2,\) for 3 sample\(s\). Return a mean",
        ),
        (lambda x, rows: (rows.T,), "pynative", r"output 1 got shape \(2, 3\) for 3 .*ops.swapaxes brings samples to"),
    ],
    indirect=["mode"],
)
def test_what_has_no_samples_on_axis_0_is_refused_before_an_update(made, got, mode):
    """Also where each micro-batch has as many samples as the output has rows."""
    network = Looking(made)
    step = make_step(network, aux=True, micro_size=4)
    with pytest.raises(ValueError, match=got):
        step(Tensor(np.ones((8, 3), np.float32)))
    np.testing.assert_array_equal(as_numpy(network.dense.weight), np.ones((2, 3), np.float32))
    assert int(step.update_count.asnumpy()) == 0
    assert not as_numpy(network.runs), "what looks at the network leaves no trace"


@pytest.mark.parametrize("option", ["aux", "record_noise"])
def test_an_option_that_is_no_bool_is_refused(option):
    with pytest.raises(TypeError, match=f"the argument '{option}' must be a bool, but got 1"):
        GradAccumulationCell(WithOutputs(), 2, **{option: 1})
