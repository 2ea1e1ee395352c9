"""GradAccumulationCell's options, and errors if the cell is used where nothing would accumulate."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, value_and_grad
from mindspore.parallel.nn import GradAccumulation

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell, audit
from tests.support.reference import batches, make_network


def loss_cell():
    return nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_size": 1.5}, TypeError, "'micro_size' must be an int, but got 1.5 of type 'float'"),
        ({"micro_size": 0}, ValueError, "'micro_size' must be at least 1, but got 0"),
        ({"micro_size": 2, "micro_batch_size": 2}, ValueError, "exactly one of .*micro_size=2, micro_batch_size=2"),
        ({}, ValueError, "exactly one of .*micro_size=None, micro_batch_size=None and accumulation_steps=None"),
        ({"accumulation_steps": 0}, ValueError, "'accumulation_steps' must be at least 1, but got 0"),
        ({"micro_size": 2, "max_grad_norm": float("nan")}, ValueError, "'max_grad_norm' must be positive, but got nan"),
        ({"micro_size": 2, "max_grad_norm": True}, TypeError, "'max_grad_norm' must be a float, but got True"),
        ({"micro_size": 2, "jit": 1}, TypeError, "'jit' must be a bool, but got 1"),
        (
            {"network": len, "micro_size": 2},
            TypeError,
            "'network' must be a Cell, but got 'builtin_function_or_method'",
        ),
        ({"micro_size": np.int64(0)}, ValueError, "'micro_size' must be at least 1, but got 0"),
        ({"micro_size": np.float64(4)}, TypeError, "'micro_size' must be an int, but got 4"),
    ],
)
def test_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
        GradAccumulationCell(**{"network": loss_cell(), **options})


def test_called_by_itself_it_is_the_network_and_never_trained_without_accumulating(pynative):
    batch = [Tensor(value) for value in batches(6)[0]]
    cell = GradAccumulationCell(loss_cell(), 4)
    np.testing.assert_array_equal(cell(*batch).asnumpy(), loss_cell()(*batch).asnumpy())
    with pytest.raises(RuntimeError, match="the cell itself is being trained"):
        cell.set_train()(*batch)
    weights = ms.ParameterTuple(cell.trainable_params())
    with pytest.raises(RuntimeError, match=r"For 'GradAccumulationCell', .*must not be differentiated"):
        ms.jit(value_and_grad(cell.set_train(False), None, weights))(*batch)


class Around(nn.Cell):
    """Holds another cell in the attribute named `attribute` ."""

    def __init__(self, held, attribute):
        super().__init__(auto_prefix=False)
        setattr(self, attribute, {"cell": held, "tuple": (1, (held,)), "list": [held], "dict": {"a": held}}[attribute])


@pytest.mark.parametrize(
    ("make", "attribute"),
    [
        (GradAccumulation, None),
        (lambda network, _: nn.TrainOneStepCell(network, nn.SGD(network.trainable_params())), None),
        (nn.GradAccumulationCell, "cell"),
        (nn.GradAccumulationCell, "tuple"),
        (GradAccumulationCell, "dict"),
    ],
)
def test_what_accumulates_by_itself_is_refused_inside(make, attribute):
    held = make(loss_cell(), 2)
    network = held if attribute is None else Around(Around(held, attribute), "list")
    with pytest.raises(ValueError, match=rf"the argument 'network' must .* is a '.*\.{type(held).__name__}'"):
        GradAccumulationCell(network, 2)


@pytest.mark.parametrize(("option", "value"), [("micro_size", 8), ("count", len), ("network", loss_cell())])
def test_what_a_step_is_built_with_is_not_assigned(option, value):
    cell = GradAccumulationCell(loss_cell(), 2)
    before = getattr(cell, option, None)
    step = step_of(cell)
    with pytest.raises(AttributeError, match=f"For 'GradAccumulationCell', '{option}' must be given when the cell is"):
        setattr(cell, option, value)
    assert getattr(cell, option, None) == before
    cell.note = "not an option"
    step.set_accumulation_steps(2)
    assert int(step.accumulation_steps.asnumpy()) == 2


def test_mindspores_own_training_steps_refuse_it():
    cell = GradAccumulationCell(loss_cell(), 2)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    for step in (nn.TrainOneStepCell, nn.wrap.cell_wrapper._TrainGradAccuStepCell):
        with pytest.raises(RuntimeError, match=r"gaccum_ms.TrainOneStepWithGradAccumulationCell\(cell, optimizer\)"):
            step(cell, optimizer)


def test_sizes_may_be_numbers_of_numpy():
    cell = GradAccumulationCell(loss_cell(), np.int64(4), accumulation_steps=np.int32(2), max_grad_norm=np.float32(0.5))
    types = [type(one) for one in (cell.micro_size, cell.accumulation_steps, cell.max_grad_norm)]
    assert types == [int, int, float]


class Square(nn.Cell):
    """A loss of one product, which mixed precision rounds."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1, "ones", "zeros")

    def construct(self, x):
        return self.dense(x * (1 + 2**-12)).astype(ms.float32).mean()


def step_of(cell):
    return TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1)).set_train()


def trained(cell, convert_step=lambda step: step):
    step = step_of(cell)
    assert convert_step(step) is step
    x = Tensor(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    found = [float(step(x)) for _ in range(3)]
    assert all(not one.asnumpy().any() for one in step.accu_grads)
    return found


def test_precision_of_the_step_or_cell_is_that_of_the_network(pynative):
    half = trained(GradAccumulationCell(Square().to_float(ms.float16), 3))
    assert half != trained(GradAccumulationCell(Square(), 3))
    assert trained(GradAccumulationCell(Square(), 3), lambda step: step.to_float(ms.float16)) == half
    assert trained(GradAccumulationCell(Square(), 3).to_float(ms.float16)) == half
    cell = ms.amp.auto_mixed_precision(GradAccumulationCell(Square(), 3), "O2")
    assert isinstance(cell, GradAccumulationCell)
    assert trained(cell) == trained(GradAccumulationCell(ms.amp.auto_mixed_precision(Square(), "O2"), 3))


def test_a_hook_of_the_cell_is_refused():
    for kind in ("forward_pre", "forward", "backward_pre", "backward"):
        with pytest.raises(RuntimeError, match="a hook must be registered on the network, because"):
            getattr(GradAccumulationCell(loss_cell(), 2), f"register_{kind}_hook")(print)


def kept(gradients):
    return gradients


def test_a_copy_has_a_network_of_its_own_and_no_step(pynative):
    cell = GradAccumulationCell(Square(), 3, accumulation_steps=1, transforms=(kept,)).set_train()
    TrainOneStepWithGradAccumulationCell(GradAccumulationCell(cell.network, 2), nn.SGD(cell.trainable_params(), 0.1))
    cell.has_step = True
    copied = copy.deepcopy(cell)
    assert vars(copied.options) == vars(cell.options)
    assert copied.training
    before = cell.network.dense.weight.asnumpy().copy()
    trained(copied)
    np.testing.assert_array_equal(cell.network.dense.weight.asnumpy(), before)
    assert (copied.network.dense.weight.asnumpy() != before).any()


def test_a_name_of_another_package_is_an_error_that_names_ours():
    network = loss_cell()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    of_step = GradAccumulationCell(network, 2), optimizer
    for make, arguments, name, ours in (
        (GradAccumulationCell, (network,), "per_device_train_batch_size", "micro_batch_size"),
        (GradAccumulator, (optimizer,), "lr_scheduler", "scheduler"),
        (TrainOneStepWithGradAccumulationCell, of_step, "gradient_accumulation_steps", "accumulation_steps"),
    ):
        given = rf"For '{make.__name__}', the argument '{name}' must be given as '{ours}', but got .* Give .*{ours}=4"
        with pytest.raises(TypeError, match=given):
            make(*arguments, **{name: 4})
        with pytest.raises(TypeError, match="got an unexpected keyword argument 'learning_rates'"):
            make(*arguments, learning_rates=4)


def test_a_step_takes_its_loss_too(pynative):
    """As MindSpore's `nn.WithLossCell` adds it."""
    network, loss = make_network("dense"), nn.CrossEntropyLoss()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    batch = [Tensor(value) for value in batches(8)[0]]
    alone, joined = GradAccumulationCell(network, 4), GradAccumulationCell(nn.WithLossCell(network, loss), 4)
    losses = [
        TrainOneStepWithGradAccumulationCell(cell, optimizer, loss_fn=of_cell).set_train()(*batch).asnumpy()
        for cell, of_cell in ((alone, loss), (joined, None))
    ]
    assert losses[1] < losses[0]  # the second step goes on from the first's update
    with pytest.raises(TypeError, match="'loss_fn' must be a Cell"):
        audit(GradAccumulationCell(network, 4), optimizer, *batch, loss_fn=abs)
