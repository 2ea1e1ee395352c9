"""The step itself: bad input, compilation, eager execution, clipping. Its graph: test_first_call.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import GradAccumulationCell, GradAccumulator, TrainOneStepWithGradAccumulationCell
from tests.support import reference
from tests.support.modes import eagerly
from tests.support.reference import (
    FEATURES,
    OPTIMIZERS,
    Outer,
    Regression,
    as_numpy,
    batches,
    make_network,
    relative_error,
)
from tests.support.state import assert_identical, everything


def make_step(network=None, **options):
    return reference.make_step(network or Regression(), **(options or {"micro_size": 3}))


def batch(samples):
    return [Tensor(value) for value in batches(samples, 1)[0]]


def test_bad_batches_are_refused_before_anything_changes(mode):
    step = make_step()
    before = everything(step)
    for inputs, error, message in (
        (batch(2), ValueError, "got micro_size=3 and a batch of 2 sample"),
        ([Tensor(1.0), Tensor([1])], ValueError, r"input 0 got shape \(\)"),
        ([batch(6)[0], 3], TypeError, "input 1 got 3 of type 'int'"),
        ([batch(6)[0], batch(9)[1]], ValueError, r"got shapes \[\(6, 12\), \(9,\)\]"),
        ([], ValueError, "at least one input"),
    ):
        with pytest.raises(error, match=f"For 'GradAccumulationCell', .*{message}"):
            step(*inputs)
        assert_identical(everything(step), before)
    with pytest.raises(TypeError, match=r"TrainOneStepWithGradAccumulationCell', a batch .* got label by name"):
        step(batch(6)[0], label=batch(6)[1])
    assert_identical(everything(step), before)


def test_a_lambda_that_cannot_be_compiled_is_refused_where_it_would_be(mode):
    """MindSpore parses the lines in which it stands. In the first form it can."""
    alone = lambda x, y: y.shape[0]  # noqa: E731
    assert np.isfinite(make_step(micro_size=3, count=alone)(*batch(6)).asnumpy())
    refused = [
        {"count": lambda x, y: y.shape[0]},
        {"transforms": (lambda gradients: gradients,)},
    ]
    for options in refused:
        if mode == "pynative":
            assert np.isfinite(make_step(micro_size=3, **options)(*batch(6)).asnumpy())
        with pytest.raises(TypeError, match=rf"'{next(iter(options))}' .*alone, but got .* line \d+ of .*test_step.py"):
            make_step(micro_size=3, jit=True if mode == "pynative" else None, **options)
    if mode == "graph":
        weights = make_network("dense").trainable_params()
        with pytest.raises(TypeError, match=r"For 'GradAccumulator', .*'transforms'"):
            GradAccumulator(nn.SGD(weights, 0.1), 2, transforms=(lambda gradients: gradients,))


class LossAndInput(Regression):
    def construct(self, x, y):
        return super().construct(x, y), x


def test_what_is_no_loss_is_refused_before_anything_changes():
    losses = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss(reduction="none"))
    for network, message in (
        (Outer(losses), r"scalar loss of shape \(\), but got shape \(\d,\)"),
        (LossAndInput(), r"must return 1 loss\(es\), .* but got 2 output\(s\).* set aux=True"),
    ):
        step = make_step(network, micro_size=3)
        before = everything(step)
        with pytest.raises(ValueError, match=message):
            step(*batch(6))
        assert_identical(everything(step), before)


def test_refuses_bad_networks_optimizers_and_modes(parallel_context):
    network = nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss())
    cell, optimizer = GradAccumulationCell(network, 2), nn.SGD(network.trainable_params(), 0.1)
    others = nn.SGD(make_network("dense").trainable_params(), 0.1)
    for network_of_step, its_optimizer, error, message in (
        (network, optimizer, TypeError, "gaccum_ms.GradAccumulationCell, .*but got 'WithLossCell'"),
        (cell, 0.1, TypeError, "must be an nn.Optimizer, but got 'float'"),
        (cell, others, ValueError, r"optimizer with 4 parameter\(s\), none of them the network's"),
    ):
        with pytest.raises(error, match=message):
            TrainOneStepWithGradAccumulationCell(network_of_step, its_optimizer)
    parallel_context(parallel_mode="hybrid_parallel")
    with pytest.raises(RuntimeError, match=r"must be .*, but got 'hybrid_parallel'.*semi_auto_parallel"):
        TrainOneStepWithGradAccumulationCell(cell, optimizer)
    parallel_context(parallel_mode="stand_alone", pipeline_stages=2)
    with pytest.raises(RuntimeError, match=r"'pipeline_stages' must be 1 in .* 'stand_alone', but got 2"):
        TrainOneStepWithGradAccumulationCell(cell, optimizer)


TRACES: list[int] = []


@ops.constexpr(reuse_result=False)
def trace(shape):
    """Ordinary Python: it runs at every call of eager code, and in compiled code only at compile time."""
    TRACES.append(1)
    return shape


class Counted(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(ops.ones(FEATURES), name="weight")

    def construct(self, x, y):
        trace(x.shape)
        return (x * self.weight).mean() + y.mean()


def test_pynative_runs_every_micro_step_eagerly(pynative, monkeypatch):
    """So a breakpoint in the network stops at each micro-batch. MindSpore's variable against compiling has the same
    effect with `jit` ."""
    for jit in (None, True):
        step = make_step(Counted(), micro_size=3, jit=jit, check=None)
        TRACES.clear()
        for _ in range(4):
            step(batch(18)[0], ops.ones(18))
        assert len(TRACES) == 4 * 3
        monkeypatch.setenv("MS_JIT", "0")


def add_100(cell, inputs, loss):
    return loss + 100.0


def test_jit_compiles_the_step_once_by_graph_modes_path(pynative):
    """It does not use `mindspore.jit` , which would store the graph elsewhere: see test_graphs.py."""
    step = make_step(Counted(), micro_size=9, jit=True, check=None)
    step.register_forward_hook(add_100)
    TRACES.clear()
    losses = [float(step(batch(9)[0], ops.ones(9)))]
    compiling = len(TRACES)
    losses += [float(step(batch(9)[0], ops.ones(9))) for _ in range(3)]
    assert 0 < compiling == len(TRACES)
    assert compiling < 3  # the graph does not grow with the number of micro-batches
    assert len(step.compile_cache) == 1
    assert losses[0] > losses[1] > losses[-1] > 90


@pytest.mark.parametrize(
    ("mode", "max_norm"), [("graph", 0.1), ("pynative", 100.0), ("pynative", np.inf)], indirect=["mode"]
)
def test_clips_the_whole_batchs_gradient_once(mode, max_norm):
    """Equal to ops.clip_by_global_norm on the whole batch's gradient, applied by SGD."""
    network = Regression()
    with eagerly():
        gradients = ms.grad(network, None, tuple(network.trainable_params()))(*batch(13))
    norm = np.sqrt(sum((g.asnumpy() ** 2).sum() for g in gradients))
    clipped = ops.clip_by_global_norm(gradients, max_norm) if max_norm < np.inf else gradients
    expected = [as_numpy(w) - 0.05 * g.asnumpy() for w, g in zip(network.trainable_params(), clipped, strict=True)]
    step = make_step(optimizer=OPTIMIZERS["sgd"], micro_size=3, max_grad_norm=max_norm)
    step(*batch(13))
    assert (norm > max_norm) == (max_norm == 0.1)
    np.testing.assert_allclose(step.grad_norm.asnumpy(), norm, rtol=1e-5)
    for weight, value in zip(step.weights, expected, strict=True):
        assert relative_error(as_numpy(weight), value) < 1e-5


class WithOutputs(nn.Cell):
    """Returns its predictions too. `rows` : the only number of rows that it takes, if it has one."""

    def __init__(self, rows):
        super().__init__()
        self.net, self.rows = nn.Dense(4, 1, weight_init="ones", bias_init="zeros"), rows

    def construct(self, x):
        if self.rows not in (None, len(x)):
            raise ValueError(f"{self.rows} rows")
        outputs = self.net(x)
        return ops.square(outputs).mean(), outputs


def test_a_network_that_takes_only_the_rows_of_its_micro_batches_trains_as_another(pynative):
    """The look at its outputs' shapes, before the first batch, fails there and leaves nothing behind."""
    x = Tensor(np.random.default_rng(0).normal(size=(4, 4)), ms.float32)
    weights = []
    for rows in (2, None):
        step = make_step(WithOutputs(rows), micro_size=2, aux=True, check=None, accumulation_steps=2)
        step(x)
        step(x)
        weights.append(as_numpy(step.weights[0]))
    np.testing.assert_array_equal(*weights)
