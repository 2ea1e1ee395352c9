"""All micro-batches draw their own random numbers, wherever in its graphs a step runs them."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms.backend.random_operators import needs_copies, with_other_seeds
from tests.support.reference import Outer, make_step

CALLS = 2  # of a step with four micro-batches
NUMBERS = 16  # that each operator draws for a sample


pytestmark = pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")


class Draws(nn.Cell):
    """Appends to `drawn` what each of its operators draws for the first sample of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(NUMBERS, 1)
        self.dropout, self.dropout_2d = nn.Dropout(p=0.5), nn.Dropout2d()
        self.layers = nn.CellList([nn.SequentialCell(nn.Dropout(p=0.5))])
        self.operators = {"real": (ops.UniformReal(seed=7),)}
        self.method = self.dropout.construct
        self.drawn = ms.Parameter(ops.zeros((CALLS * 4, 7), ms.float32), "drawn", requires_grad=False)

    def draw(self, x):
        rows = x.shape[0]
        return (
            self.dropout(x),
            self.dropout_2d(x.reshape((rows, NUMBERS, 1, 1))),
            self.layers[0](x),
            ops.dropout(x, 0.5),
            self.operators["real"][0]((rows, NUMBERS)),
            ops.uniform((rows, NUMBERS), Tensor(0.0), Tensor(1.0), seed=4),
            self.method(x),
        )

    def construct(self, x, y):
        ones = ops.stop_gradient(x * 0 + 1)
        powers = Tensor(2.0 ** np.arange(NUMBERS), ms.float32)
        keys = ops.stack([(one.reshape((-1, NUMBERS))[0] * powers).sum() for one in self.draw(ones)])
        noted = ops.assign(self.drawn, ops.concat((self.drawn[1:], keys.reshape((1, -1)))))
        return ops.depend(((self.dense(self.dropout(x)) - y) ** 2).mean(), noted)


def rows_of_several_sizes(x, y):
    return [(x[start:end], y[start:end]) for start, end in ((0, 3), (3, 6), (6, 8), (8, 10))]


@pytest.mark.parametrize("options", [{"micro_size": 4}, {"split": rows_of_several_sizes}], ids=["number", "function"])
def test_no_two_micro_batches_draw_the_same(options):
    """Ten samples are 3 + 3 + 3 + 1, or what the function cuts."""
    ms.set_seed(1)
    network = Draws()
    step = make_step(network, **options)
    x = Tensor(np.random.default_rng(0).normal(size=(10, NUMBERS)).astype(np.float32))
    y = Tensor(np.arange(10, dtype=np.float32).reshape(10, 1))
    for _ in range(CALLS):
        step(x, y)
    drawn = network.drawn.asnumpy()
    assert drawn.any(axis=1).all()
    for operator, values in enumerate(drawn.T):
        assert len(np.unique(values)) > len(values) - 2, (operator, values)  # two of 65,536 masks may be equal


class Plain(nn.Cell):
    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(4, 4), nn.Dropout(p=0.5), nn.BatchNorm1d(4))
        self.head = nn.Dense(4, 1)
        self.parent = [self.head]

    def construct(self, x):
        return self.head(self.layers(x))


def test_a_copy_shares_everything_that_does_not_draw():
    ms.set_seed(1)  # without one, MindSpore draws the seeds when an operator runs
    network = Plain()
    copied = with_other_seeds(network, 1)
    assert needs_copies(network) and not needs_copies(network.layers[2])
    seeds = [with_other_seeds(network, copy).layers[1].dropout.Seed0 for copy in (1, 2, 1)]
    assert seeds[0] == seeds[2] != seeds[1]
    assert copied.head is network.head and copied.parent is network.parent and copied.layers[0] is network.layers[0]
    assert [id(one) for one in copied.get_parameters()] == [id(one) for one in network.get_parameters()]
    ours, theirs = copied.layers[1], network.layers[1]
    assert ours is not theirs and ours.p == theirs.p
    assert (ours.dropout.Seed0, ours.dropout.Seed1) != (theirs.dropout.Seed0, theirs.dropout.Seed1)
    copied.set_train()
    assert ours.training and not theirs.training


def test_a_copy_has_the_flags_of_its_compilation():
    """A dropout that the user stops after the step was built drops nothing in any micro-batch. The step is in another
    graph, as with data sinking."""
    network = nn.WithLossCell(nn.SequentialCell(nn.Dropout(p=0.5), nn.Dense(4, 1, "ones", "zeros")), nn.MSELoss())
    step = make_step(network, lambda weights: nn.SGD(weights, 0.0), micro_size=3)

    def drops(samples):
        x = np.random.default_rng(samples).normal(size=(samples, 4)).astype(np.float32)
        loss = float(Outer(step)(Tensor(x), Tensor(np.zeros((samples, 1), np.float32))))
        return loss != pytest.approx(np.square(x.sum(axis=1)).mean(), rel=1e-5)

    network.set_train()
    assert drops(7)
    network.set_train(False)
    assert not drops(10)
