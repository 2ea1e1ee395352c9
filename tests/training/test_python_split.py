"""A function as ``split=`` , for micro-batches that are not even cuts of axis 0; each set of shapes compiles once.

The oracle is MindSpore's own step on the whole batch, or on one batch that joins a window's. Ranks:
test_split_ranks.py.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators, CountMask, EvenSplit, GradAccumulationCell
from tests.support import reference
from tests.support.adopted import joined
from tests.support.adopted import losses as losses_of
from tests.support.modes import eagerly
from tests.support.reference import Clipped, Outer, Regression, as_numpy, batches, relative_error
from tests.support.state import assert_identical, everything, manager

TOLERANCE = 1e-5


def momentum(weights):
    return nn.Momentum(weights, 0.05, 0.9)


def state(optimizer):
    return [as_numpy(one) for one in (*optimizer.parameters, *optimizer.moments)]


def assert_close(arrays, expected):
    errors = [relative_error(array, other) for array, other in zip(arrays, expected, strict=True)]
    assert max(errors) < TOLERANCE, errors


def uneven(*batch):
    """Three samples, one, and the rest."""
    return [tuple(one[start:end] for one in batch) for start, end in ((0, 3), (3, 4), (4, None))]


def masked(data):
    """With a mask that leaves samples out: in every second batch, the whole first micro-batch."""
    random = np.random.default_rng(5)
    result = []
    for number, (x, y) in enumerate(data):
        mask = random.uniform(0.1, 2, len(x)).astype(np.float32)
        mask[: 3 * (number % 2)] = 0
        result.append((x, y, mask))
    return result


def make_step(split=uneven, network=Regression, **options):
    return reference.make_step(network(), momentum, split=split, **options)


@eagerly()
def whole(data, max_norm=None):
    """Losses and state of MindSpore's step on whole batches."""
    loss_cell = Regression()
    optimizer = momentum(loss_cell.trainable_params())
    step = nn.TrainOneStepCell(loss_cell, optimizer).set_train()
    if max_norm is not None:
        step.grad_reducer = Clipped(max_norm)
    losses = [float(step(*map(Tensor, batch)).asnumpy()) for batch in data]
    return losses, state(optimizer)


def run(step, data):
    """The losses."""
    return losses_of([step(*map(Tensor, batch)) for batch in data])


def graphs(step):
    """The numbers of compiled graphs: micro-steps, and ends of a window."""
    return len(step._runner._graph.compile_cache), len(step.end_window.compile_cache)


class States(nn.Cell):
    """Two outputs of samples, or one whose shape differs in two axes."""

    def __init__(self, second="rows"):
        super().__init__()
        self.dense = nn.Dense(2, 1, weight_init="ones", bias_init="zeros")
        self.second = second

    def construct(self, x, y):
        loss = ops.square(self.dense(x)).mean()
        return loss, ops.stack((x, y, x + y), 1), {"rows": x, "map": x @ x.T}[self.second]


def thirds(x, y):
    return [(x[:1], y[:1]), (x[1:], y[1:])]


def test_outputs_of_a_function_are_joined_or_refused_before_the_update(pynative):
    x, y = np.arange(8.0, dtype=np.float32).reshape(4, 2), np.ones((4, 2), np.float32)
    _, states, rows = make_step(thirds, States, aux=True)(Tensor(x), Tensor(y))
    np.testing.assert_array_equal(states.asnumpy(), np.stack((x, y, x + y), 1))
    np.testing.assert_array_equal(rows.asnumpy(), x)
    network = States("map")
    step = make_step(thirds, lambda: network, aux=True)
    with pytest.raises(ValueError, match=r"but output 2 got shapes \[\(1, 1\), \(3, 3\)\] for micro-batches"):
        step(Tensor(x), Tensor(y))
    assert int(step.update_count.asnumpy()) == 0
    np.testing.assert_array_equal(as_numpy(network.dense.weight), np.ones((1, 2), np.float32))
    assert not any(as_numpy(one).any() for one in step.accu_grads)


DATA = batches(7, 6)


@pytest.mark.parametrize(("mode", "steps"), [("graph", 2), ("pynative", 1)], indirect=["mode"])
def test_an_uneven_split_equals_the_whole_batch(mode, steps):
    data = masked(DATA)
    options = {"count": CountMask(), "accumulation_steps": steps, "max_grad_norm": 0.1}
    step = make_step(scale_sense=manager(), accumulators=Accumulators(compensated=True), **options)
    losses = run(step, data)
    whole_losses, expected = whole(joined(data, steps), max_norm=0.1)
    assert_close(state(step.optimizer), expected)
    if steps == 1:
        np.testing.assert_allclose(losses, whole_losses, rtol=TOLERANCE)
    else:
        assert losses[0] == pytest.approx(float(Regression()(*map(Tensor, data[0])).asnumpy()), rel=TOLERANCE)
        assert float(step.window_loss.asnumpy()) == pytest.approx(whole_losses[-1], rel=TOLERANCE)
    assert int(step.batch_count.asnumpy()) == len(data)
    assert int(step.update_count.asnumpy()) == len(data) // steps
    assert not int(step.window_position.asnumpy())
    assert graphs(step) == ((2, 1) if mode == "graph" else (0, 0))  # the first micro-batch and the last are alike


class PartsOfDict:
    """A callable object."""

    def __call__(self, batch):
        return [list(part) for part in uneven(batch["x"], batch["y"])]


def test_a_batch_may_be_a_dict_and_a_split_any_object_that_is_callable(pynative):
    step = make_step(PartsOfDict())
    losses = losses_of([step({"x": Tensor(x), "y": Tensor(y)}) for x, y in DATA[:3]])
    whole_losses, expected = whole(DATA[:3])
    np.testing.assert_allclose(losses, whole_losses, rtol=TOLERANCE)
    assert_close(state(step.optimizer), expected)


def test_a_flush_divides_by_what_is_there(pynative):
    step = make_step(accumulation_steps=3)
    run(step, DATA[:5])
    assert int(step.window_position.asnumpy()) == 2
    assert float(step.window.open.window_unit.asnumpy()) == pytest.approx(1 / (3 * 7))  # of all that is expected
    assert step.flush()
    assert_close(state(step.optimizer), whole(joined(DATA[:5], 3))[1])
    assert not step.flush()


def test_a_new_number_of_batches_is_for_windows_to_come(pynative):
    step = make_step(accumulation_steps=3)
    run(step, DATA[:4])
    step.set_accumulation_steps(1)
    assert int(step.update_count.asnumpy()) == 1
    run(step, [*DATA[4:], DATA[0]])
    assert_close(state(step.optimizer), whole([*joined(DATA, 3), DATA[0]])[1])


def test_what_fails_half_way_drops_its_window(pynative):
    """A failure before anything is added does not change the window."""
    fails = []

    def split(x, y):
        if "split" in fails:
            raise KeyError("no such image")
        parts = uneven(x, y)
        return [*parts[:2], (parts[2][0], parts[2][1][:2])] if "network" in fails else parts

    step = make_step(split, accumulation_steps=3)
    run(step, DATA[:1])
    before = everything(step)
    fails[:] = ["split"]
    with pytest.raises(KeyError, match="no such image"):
        run(step, DATA[1:2])
    assert_identical(everything(step), before)
    fails[:] = ["network"]
    with (
        pytest.raises((ValueError, RuntimeError)),
        pytest.warns(UserWarning, match=r"a batch failed half-way, and with it the 1 batch\(es\) before it"),
    ):
        run(step, DATA[2:3])
    assert not int(step.window_position.asnumpy())
    fails.clear()
    run(step, DATA[3:])
    assert_close(state(step.optimizer), whole(joined(DATA[3:], 3))[1])


def test_an_overflow_drops_the_window_or_its_micro_batch(pynative):
    poisoned = [tuple(np.array(one) for one in batch) for batch in DATA[:2]]
    poisoned[0][0][3] = np.inf  # the second micro-batch, of one sample
    step = make_step(scale_sense=manager())
    before = state(step.optimizer)
    _, overflow, scale = step(*map(Tensor, poisoned[0]))
    assert bool(overflow.asnumpy()) and float(scale.asnumpy()) == 1024
    assert_close(state(step.optimizer), before)
    assert float(step.scale_sense.asnumpy().ravel()[0]) == 512
    step(*map(Tensor, poisoned[1]))
    assert_close(state(step.optimizer), whole(poisoned[1:])[1])

    step = make_step(scale_sense=manager(), overflow="drop_micro_batch")
    step(*map(Tensor, poisoned[0]))
    rest = [tuple(np.delete(column, 3, axis=0) for column in poisoned[0])]
    assert_close(state(step.optimizer), whole(rest)[1])
    assert float(step.dropped_micro_batches.asnumpy()) == 1


def test_data_sinking_is_refused():
    ms.set_context(mode=ms.GRAPH_MODE)
    with pytest.raises(RuntimeError, match="a function as 'split' need Python at each batch"):
        Outer(make_step())(*map(Tensor, DATA[0]))


X, Y = (Tensor(one) for one in DATA[0])
RETURNED = [
    (None, TypeError, "must return a list of micro-batches, .* but got None of type 'NoneType'"),
    ({"x": X}, TypeError, "must return a list of micro-batches, .* but got a dict of 1"),
    ([], ValueError, "must return at least one micro-batch, but got an empty list. Leave such a batch out"),
    ([(X, Y), {"x": X}], TypeError, "micro-batch 1 is a dict of 1 .* Give the Tensors of a dict as inputs"),
    ([(X, np.ones(3))], TypeError, "input 1 of micro-batch 0 is ndarray of shape .3,. and dtype float64"),
    ([(X, Y), (X,)], ValueError, r"with the same number of inputs, but got \[2, 1\]"),
    ([(Y.sum(), Y)], ValueError, "axis 0 of the first input counts samples, at least one, or 'count'"),
]


def test_what_a_function_must_return(pynative):
    answers = (returned for returned, _, _ in RETURNED)
    step = make_step(lambda x, y: next(answers))
    before = everything(step)
    for _, error, words in RETURNED:
        with pytest.raises(error, match=f"For 'GradAccumulationCell', the function 'split' .*{words}"):
            step(X, Y)
        assert_identical(everything(step), before)


@pytest.mark.parametrize("split", [3, EvenSplit])
def test_what_is_no_function_is_refused(split):
    with pytest.raises(TypeError, match="'split' must be an EvenSplit, a function"):
        GradAccumulationCell(Regression(), 2, split=split)
