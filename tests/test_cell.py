"""GradAccumulationCell's options, and errors if the cell is used where nothing would accumulate."""

from __future__ import annotations

import copy

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, value_and_grad
from mindspore.parallel.nn import GradAccumulation

from gaccum_ms import (
    GradAccumulationCell,
    GradAccumulator,
    TrainOneStepWithGradAccumulationCell,
    audit,
    find_micro_batch_size,
    memory_report,
)
from tests.support.reference import Line, batches, make_network


def loss_cell():
    return nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"micro_size": 1.5}, TypeError, "'micro_size' must be an int, but got 1.5 of type 'float'"),
        ({"micro_size": True}, TypeError, "'micro_size' must be an int, but got True"),
        ({"micro_size": 0}, ValueError, "'micro_size' must be at least 1, but got 0"),
        ({"micro_batch_size": False}, TypeError, "'micro_batch_size' must be an int, but got False"),
        ({"micro_batch_size": 0}, ValueError, "'micro_batch_size' must be at least 1, but got 0"),
        ({"micro_size": 2, "micro_batch_size": 2}, ValueError, "exactly one of .*micro_size=2, micro_batch_size=2"),
        ({}, ValueError, "exactly one of .*micro_size=None, micro_batch_size=None and accumulation_steps=None"),
        ({"accumulation_steps": 0}, ValueError, "'accumulation_steps' must be at least 1, but got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "'accumulation_steps' must be an int, but got 2.0 of type 'float'"),
        ({"micro_size": 2, "max_grad_norm": float("nan")}, ValueError, "'max_grad_norm' must be positive, but got nan"),
        ({"micro_size": 2, "max_grad_norm": 0.0}, ValueError, "'max_grad_norm' must be positive, but got 0.0"),
        ({"micro_size": 2, "max_grad_norm": True}, TypeError, "'max_grad_norm' must be a float, but got True"),
        ({"micro_size": 2, "jit": 1}, TypeError, "'jit' must be a bool, but got 1"),
    ],
)
def test_refuses_bad_options(options, error, message):
    with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
        GradAccumulationCell(loss_cell(), **options)


def test_refuses_a_network_that_is_no_cell():
    with pytest.raises(TypeError, match="'network' must be a Cell, but got 'function'"):
        GradAccumulationCell(lambda x: x, 2)


@pytest.mark.core(mode="pynative")
def test_called_by_itself_it_is_the_network(mode):
    batch = [Tensor(value) for value in batches(6)[0]]
    np.testing.assert_array_equal(GradAccumulationCell(loss_cell(), 4)(*batch).asnumpy(), loss_cell()(*batch).asnumpy())


class Doubled(nn.Cell):
    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, x, y):
        return 2 * self.network(x, y)


@pytest.mark.parametrize("wrap", [lambda cell: cell, Doubled], ids=["outermost", "buried"])
def test_never_trained_without_accumulating(wrap, mode):
    network = wrap(GradAccumulationCell(loss_cell(), 2)).set_train()
    weights = [parameter.asnumpy().copy() for parameter in network.get_parameters()]
    with pytest.raises(RuntimeError, match="the cell itself is being trained"):
        network(*map(Tensor, batches(6)[0]))
    for weight, parameter in zip(weights, network.get_parameters(), strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), weight)


def taken_in_python(function, weights):
    return value_and_grad(function, None, weights)


def taken_under_jit(function, weights):
    return ms.jit(value_and_grad(function, None, weights))


def taken_of_a_function_around_it(function, weights):
    def forward(x, y):
        return 2 * function(x, y), x

    return value_and_grad(forward, None, weights, has_aux=True)


@pytest.mark.parametrize(
    ("taken", "training", "message"),
    [
        (taken_in_python, False, "must not be differentiated"),
        (taken_in_python, True, "the cell itself is being trained"),
        (taken_under_jit, False, "must not be differentiated"),
        (taken_under_jit, True, "the cell itself is being trained"),
        (taken_of_a_function_around_it, False, "must not be differentiated"),
    ],
)
def test_a_functional_gradient_is_refused(taken, training, message, mode):
    """The gradient is refused in training mode or not, and later calls are not affected."""
    x, y = Tensor([1.0, 2.0], ms.float32), Tensor([0.0, 0.0], ms.float32)
    network = Line(3.0)
    cell = GradAccumulationCell(network, 2).set_train(training)
    weights = ms.ParameterTuple(cell.trainable_params())
    for _ in range(1 if mode == "graph" else 2):  # two interrupted gradients would break MindSpore's eager mode
        with pytest.raises(RuntimeError, match=f"For 'GradAccumulationCell', .*{message}"):
            taken(cell, weights)(x, y)
    _, (gradient,) = value_and_grad(network, None, weights)(x, y)
    assert float(gradient.asnumpy()) == 7.5
    assert float(x[1].asnumpy()) == 2.0


class Around(nn.Cell):
    """Holds another cell in the attribute named `attribute` ."""

    def __init__(self, held, attribute):
        super().__init__(auto_prefix=False)
        setattr(self, attribute, {"cell": held, "tuple": (1, (held,)), "list": [held], "dict": {"a": held}}[attribute])


INSIDE = {
    "nn": lambda: nn.GradAccumulationCell(loss_cell(), 2),
    "parallel.nn": lambda: GradAccumulation(loss_cell(), 2),
    "ours": lambda: GradAccumulationCell(loss_cell(), 2),
    "step": lambda: nn.TrainOneStepCell(network := loss_cell(), nn.SGD(network.trainable_params())),
}


@pytest.mark.parametrize(
    ("kind", "attribute"), [*((kind, None) for kind in INSIDE), ("nn", "cell"), ("nn", "tuple"), ("ours", "dict")]
)
def test_what_accumulates_by_itself_is_refused_inside(kind, attribute):
    held = INSIDE[kind]()
    network = held if attribute is None else Around(Around(held, attribute), "list")
    with pytest.raises(ValueError, match=rf"the argument 'network' must .* is a '.*\.{type(held).__name__}'"):
        GradAccumulationCell(network, 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("micro_size", 8),
        ("micro_batch_size", 2),
        ("accumulation_steps", 3),
        ("max_grad_norm", 1.0),
        ("loss_weights", (2.0,)),
        ("count", len),
        ("overflow", "drop_micro_batch"),
        ("network", loss_cell()),
    ],
)
def test_options_are_refused_once_a_step_is_built_with_them(option, value):
    cell = GradAccumulationCell(loss_cell(), 2)
    cell.micro_size = 4  # no step is built yet
    before = getattr(cell, option, None)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    with pytest.raises(AttributeError, match=f"For 'GradAccumulationCell', the option '{option}' must be set before"):
        setattr(cell, option, value)
    assert getattr(cell, option, None) == before
    cell.note = "not an option"
    step.set_accumulation_steps(2)
    assert int(step.accumulation_steps.asnumpy()) == 2


@pytest.mark.parametrize(
    ("assigned", "error", "message"),
    [
        ({"micro_batch_size": 2}, ValueError, "exactly one of 'micro_size'"),
        ({"micro_size": -2}, ValueError, "'micro_size' must be at least 1"),
        ({"max_grad_norm": -1.0}, ValueError, "'max_grad_norm' must be positive"),
        ({"reduction": "Mean"}, ValueError, "'reduction' must be one of"),
        ({"overflow": "drop_micro_batch", "loss_weights": (1.0, 0.5)}, ValueError, "divides what is left by its count"),
    ],
)
def test_assigned_options_are_checked_when_a_step_is_built(assigned, error, message):
    cell = GradAccumulationCell(loss_cell(), 2)
    for option, value in assigned.items():
        setattr(cell, option, value)
    with pytest.raises(error, match=message):
        TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1))
    cell = GradAccumulationCell(loss_cell(), 2)
    cell.micro_size, cell.micro_batch_size = None, 2  # one after the other
    assert TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1)).micro_batch_size == 2


def test_a_second_model_takes_the_same_cell():
    """For example in a notebook, with another optimizer."""
    cell = GradAccumulationCell(loss_cell(), 2)
    for rate in (0.1, 0.2):
        model = ms.Model(cell, optimizer=nn.SGD(cell.trainable_params(), rate))
        assert model.train_network.network is cell.network


def test_mindspores_own_training_steps_refuse_it():
    cell = GradAccumulationCell(loss_cell(), 2)
    optimizer = nn.SGD(cell.trainable_params(), 0.1)
    for step in (nn.TrainOneStepCell, nn.wrap.cell_wrapper._TrainGradAccuStepCell):
        with pytest.raises(RuntimeError, match=r"gaccum_ms.TrainOneStepWithGradAccumulationCell\(cell, optimizer\)"):
            step(cell, optimizer)


# -- what a user may do with a cell before it is trained ---------------------------------------------------------------


def test_sizes_may_be_numbers_of_numpy():
    cell = GradAccumulationCell(loss_cell(), np.int64(4), accumulation_steps=np.int32(2), max_grad_norm=np.float32(0.5))
    types = [type(one) for one in (cell.micro_size, cell.accumulation_steps, cell.max_grad_norm)]
    assert types == [int, int, float]
    with pytest.raises(ValueError, match="'micro_size' must be at least 1, but got 0"):
        GradAccumulationCell(loss_cell(), np.int64(0))
    with pytest.raises(TypeError, match="'micro_size' must be an int, but got 4"):
        GradAccumulationCell(loss_cell(), np.float64(4))


class Square(nn.Cell):
    """A loss of one product, which mixed precision rounds."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1, "ones", "zeros")

    def construct(self, x):
        return self.dense(x * (1 + 2**-12)).astype(ms.float32).mean()


def trained(cell, convert_step=lambda step: step):
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(cell.trainable_params(), 0.1)).set_train()
    assert convert_step(step) is step
    x = Tensor(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))
    found = [float(step(x)) for _ in range(3)]
    assert all(not one.asnumpy().any() for one in step.accu_grads)
    return found


def of_network(convert):
    network = Square()
    return trained(GradAccumulationCell(convert(network), 3))


@pytest.mark.core(mode="pynative")
def test_to_float_of_the_step_or_cell_is_that_of_the_network(mode):
    half = of_network(lambda network: network.to_float(ms.float16))
    assert half != of_network(lambda network: network)
    assert trained(GradAccumulationCell(Square(), 3), lambda step: step.to_float(ms.float16)) == half
    assert trained(GradAccumulationCell(Square(), 3).to_float(ms.float16)) == half


@pytest.mark.core(mode="pynative", level="O2")
@pytest.mark.parametrize("level", ["auto", "O1", "O2"])
def test_mixed_precision_of_the_cell_is_that_of_the_network(level, mode):
    cell = ms.amp.auto_mixed_precision(GradAccumulationCell(Square(), 3), level)
    assert isinstance(cell, GradAccumulationCell)
    low = of_network(lambda network: ms.amp.auto_mixed_precision(network, level))
    assert trained(cell) == low != of_network(lambda network: network)


@pytest.mark.parametrize("kind", ["forward_pre", "forward", "backward_pre", "backward"])
def test_a_hook_of_the_cell_is_refused(kind):
    with pytest.raises(RuntimeError, match="a hook must be registered on the network, because"):
        getattr(GradAccumulationCell(loss_cell(), 2), f"register_{kind}_hook")(print)


@pytest.mark.core(mode="pynative")
def test_a_copy_has_a_network_of_its_own_and_no_step(mode):
    cell = GradAccumulationCell(Square(), 3, accumulation_steps=1, transforms=(abs,)).set_train()
    TrainOneStepWithGradAccumulationCell(GradAccumulationCell(cell.network, 2), nn.SGD(cell.trainable_params(), 0.1))
    cell.has_step = True
    copied = copy.deepcopy(cell)
    assert vars(copied.options) == vars(cell.options)
    assert copied.training
    copied.transforms = ()
    before = cell.network.dense.weight.asnumpy().copy()
    trained(copied)
    np.testing.assert_array_equal(cell.network.dense.weight.asnumpy(), before)
    assert (copied.network.dense.weight.asnumpy() != before).any()


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("gradient_accumulation_steps", "accumulation_steps"),
        ("accumulate_grad_batches", "accumulation_steps"),
        ("micro_batch_num", "micro_size"),
        ("per_device_train_batch_size", "micro_batch_size"),
        ("gradient_clip_val", "max_grad_norm"),
        ("lr_scheduler", "scheduler"),
        ("learning_rates", None),
    ],
)
def test_a_name_of_another_package_is_an_error_that_names_ours(name, ours):
    network = loss_cell()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    for owner, make, options in (
        (
            "GradAccumulationCell",
            lambda **one: GradAccumulationCell(network, **one),
            "micro_size max_grad_norm micro_batch_size accumulation_steps",
        ),
        (
            "GradAccumulator",
            lambda **one: GradAccumulator(optimizer, **one),
            "accumulation_steps max_grad_norm scheduler",
        ),
        (
            "TrainOneStepWithGradAccumulationCell",
            lambda **one: TrainOneStepWithGradAccumulationCell(GradAccumulationCell(network, 2), optimizer, **one),
            "micro_size micro_batch_size accumulation_steps max_grad_norm",
        ),
    ):
        message = f"got an unexpected keyword argument '{name}'"
        if ours in options.split():
            message = (
                rf"For '{owner}', the argument '{name}' must be given as '{ours}', but got {name}=4\. Give .*{ours}=4"
            )
        with pytest.raises(TypeError, match=message):
            make(**{name: 4})


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
    with pytest.raises(AttributeError, match="'micro_size' must be set before the training step is built"):
        alone.micro_size = 2
    with pytest.raises(TypeError, match="'loss_fn' must be a Cell"):
        audit(GradAccumulationCell(network, 4), optimizer, *batch, loss_fn=abs)


@pytest.mark.thorough
def test_what_takes_a_cell_takes_a_loss():
    network, loss = make_network("dense"), nn.CrossEntropyLoss()
    optimizer, cell = nn.SGD(network.trainable_params(), 0.1), GradAccumulationCell(network, 4)
    batch = [Tensor(value) for value in batches(8)[0]]
    joined = GradAccumulationCell(nn.WithLossCell(network, loss), 4)
    assert audit(cell, optimizer, *batch, loss_fn=loss) == audit(joined, optimizer, *batch)
    assert find_micro_batch_size(cell, optimizer, batch, loss_fn=loss) == 8
    rows = memory_report(cell, optimizer, *batch, micro_sizes=[4], measure=False, loss_fn=loss).rows
    assert [row.micro_batch_size for row in rows] == [2]
