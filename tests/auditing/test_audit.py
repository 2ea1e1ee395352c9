"""audit finds networks that accumulation cannot reproduce, accepts the others, and leaves no trace."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored, GradAccumulationCell, audit
from tests.support.modes import eagerly
from tests.support.reference import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    ConvNet,
    DenseNet,
    Regression,
    as_numpy,
    batches,
    make_network,
    make_step,
    relative_error,
)


def fill(network):
    """Set weights that depend only on their order and shape."""
    random = np.random.default_rng(5)
    for weight in network.trainable_params():
        weight.set_data(Tensor(random.normal(size=weight.shape) * 0.4, weight.dtype))
    return network


def batch(samples=10):
    return [Tensor(value) for value in batches(samples, 1)[0]]


SUM = nn.CrossEntropyLoss(reduction="sum")


class Called(nn.Cell):
    """A loss that the user's code calls: the cell does not know its reduction."""

    def __init__(self, reduction):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(reduction=reduction)

    def construct(self, logits, labels):
        return self.loss(logits, labels)


def in_loss(network, loss=None):
    return nn.WithLossCell(network, loss or nn.CrossEntropyLoss())


def run(network, *inputs, optimizer="sgd", loss=None, **options):
    """Audit a network with cross entropy, or with its own loss if the inputs are given."""
    inside = network if inputs else in_loss(network, loss)
    cell = GradAccumulationCell(inside, **(options or {"micro_size": 4}))
    return audit(cell, OPTIMIZERS[optimizer](cell.trainable_params()), *(inputs or batch()))


# -- correct networks pass ---------------------------------------------------------------------------------------------


def test_a_clean_network_passes(pynative):
    report = run(make_network("conv"), optimizer="grouped")
    assert report.ok
    assert report.problems == ()
    assert report.loss_behaves_as == "mean"
    assert not report.couples_samples
    assert report.batch_norm_layers == report.dropout_layers == ()
    assert set(report.gradients) == set(report.parameters) == {"conv.weight", "out.weight", "out.bias"}
    assert max(report.gradients.values()) < 1e-5


class TwoLosses(DenseNet):
    def construct(self, x, y):
        logits = self.logits(x)
        return ops.cross_entropy(logits, y), ops.square(logits).mean()


class NormalisedNet(DenseNet):
    """Its layer is centred, so `shift` has no effect: its gradient is zero except for rounding."""

    def __init__(self):
        super().__init__()
        self.shift = ms.Parameter(Tensor(0.3, ms.float32), name="shift")

    def logits(self, x):
        hidden = self.hidden(x) + self.shift
        return self.out(ops.tanh(hidden - hidden.mean(axis=1, keep_dims=True)))


class DropoutNet(DenseNet):
    """Its dropout is left out."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(p=0.5)

    def logits(self, x):
        return self.out(self.dropout(ops.tanh(self.hidden(x))))


def with_ignored():
    x, y = batch()
    return x, Tensor(np.where(np.arange(10) < 4, -100, y.asnumpy()).astype(np.int32))


@pytest.mark.parametrize(
    ("network", "inputs", "options"),
    [
        (make_network("embedding"), (), {"micro_batch_size": 3, "max_grad_norm": 0.1}),
        (make_network("dense", ms.float16), (), {"micro_size": 4}),
        (make_network("dense"), (), {"micro_size": 3, "reduction": "sum", "loss": SUM}),
        (fill(TwoLosses()), batch(), {"micro_size": 4, "loss_weights": (1.0, 0.3)}),
        (in_loss(make_network("dense")), with_ignored(), {"micro_size": 4, "count": CountNotIgnored()}),
        (fill(NormalisedNet()), (), {}),
        (fill(DropoutNet()), (), {}),
    ],
    ids=["clip", "float16", "sum", "two", "count", "a gradient that is zero but for rounding", "dropout"],
)
def test_other_networks_and_options_pass(network, inputs, options, pynative):
    report = run(network, *inputs, **options)
    assert report.ok, str(report)
    assert report.dropout_layers == (("_backbone.dropout",) if isinstance(network, DropoutNet) else ())


# -- problems are found and named --------------------------------------------------------------------------------------


class BatchNormNet(ConvNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def logits(self, x):
        return self.out(ops.relu(self.norm(self.conv(x.reshape((-1, 1, 3, 4))))).reshape((-1, 6 * FEATURES)))


class InBatchNegatives(DenseNet):
    """The InfoNCE loss, which compares each sample's counterpart with the counterparts of all others."""

    def construct(self, x, y):
        return ops.cross_entropy(self.hidden(x) @ self.hidden(x * x).T, ops.arange(0, x.shape[0]).astype(ms.int32))


class VarianceOverTheBatch(DenseNet):
    """A doubled batch has the same variance, so the loss looks like a mean; only the gradient shows the problem."""

    def construct(self, x, y):
        output = self.logits(x)
        return ops.square(output - output.mean(axis=0)).mean()


class SumAndPenalty(DenseNet):
    def construct(self, x, y):
        return ops.cross_entropy(self.logits(x), y, reduction="sum") + ops.square(self.out.weight).sum()


class RandomNet(DenseNet):
    def construct(self, x, y):
        return ops.cross_entropy(self.out(ops.dropout(ops.tanh(self.hidden(x)), 0.5)), y)


class Constant(DenseNet):
    def construct(self, x, y):
        return self.logits(x).mean() * 0.0 + y.astype(ms.float32).mean()


class NotFinite(DenseNet):
    def construct(self, x, y):
        return ops.log(-ops.abs(self.logits(x))).mean()


class MeanOverNothing(DenseNet):
    """The first micro-batch has no item, so its loss is 0 / 0; the whole batch's loss is finite."""

    def construct(self, x, y):
        mask = (x[:, 3] > 0).astype(ms.float32)
        return (self.logits(x).mean(axis=1) * mask).sum() / mask.sum()


def with_sum():
    return in_loss(make_network("dense"), Called("sum"))


def with_mean():
    return in_loss(make_network("dense"), Called("mean"))


@pytest.mark.parametrize(
    ("network", "options", "behaves_as", "said"),
    [
        (with_sum, {}, "sum", "behaves as a sum over samples, but the cell has reduction='mean'"),
        (with_mean, {"reduction": "sum"}, "mean", "behaves as a mean over samples, but the cell has reduction='sum'"),
        (InBatchNegatives, {}, "neither", "compares samples of one batch"),
        (VarianceOverTheBatch, {}, "mean", "compares samples of one batch"),
        (SumAndPenalty, {"reduction": "sum"}, "neither", "adds a term of its own to a sum"),
        (RandomNet, {}, None, "differs from one call to the next"),
        (NotFinite, {}, None, "not finite"),
        (Constant, {}, None, "All gradients are zero"),
        (MeanOverNothing, {}, None, "a micro-batch takes a mean over nothing"),
    ],
    ids=[
        *("a sum", "a mean", "coupled_samples", "coupled_samples that look like a mean", "penalty", "random"),
        *("not finite", "zero", "mean over nothing"),
    ],
)
def test_one_problem_is_named(network, options, behaves_as, said, pynative):
    report = run(fill(network()), *batch(), **{"micro_size": 2, **options})
    assert not report.ok
    assert len(report.problems) == 1
    assert re.search(said, report.problems[0])
    assert report.couples_samples == (network in (InBatchNegatives, VarianceOverTheBatch, SumAndPenalty))
    assert report.batch_norm_layers == ()
    if behaves_as is not None:
        assert report.loss_behaves_as == behaves_as
        assert max(report.gradients.values()) > 1e-2


def test_clipping_hides_nothing(pynative):
    """With clipping to a small norm, gradients of a wrong size give the right update."""
    report = run(make_network("dense"), loss=Called("sum"), micro_size=2, max_grad_norm=1e-3)
    assert min(report.gradients.values()) > 0.1
    assert max(report.parameters.values()) < 1e-6


def test_batch_norm_is_named_and_the_report_is_a_table(pynative):
    """There is no warning: in these tests it would be an error."""
    report = run(fill(BatchNormNet()))
    assert report.batch_norm_layers == ("_backbone.norm",)
    assert report.couples_samples
    assert report.loss_behaves_as == "mean"
    (problem,) = report.problems
    assert problem.startswith("1 BatchNorm layer(s) couple the samples of a micro-batch: _backbone.norm.")
    lines = str(report).splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines}
    for name in report.gradients:
        assert rows[name].split()[1:] == [f"{report.gradients[name]:.1e}", f"{report.parameters[name]:.1e}"]
    assert len({len(rows[name]) for name in (*report.gradients, "worst relative error")}) == 1
    assert f"{report.loss_whole:.6g} on the whole batch, {report.loss_accumulated:.6g} accumulated" in rows["loss"]
    assert rows["couples samples"].endswith("yes")
    assert rows["BatchNorm layers"].endswith("_backbone.norm")
    assert rows["verdict"].endswith("1 problem(s)")
    assert lines[-1] == f"* {problem}"


# -- everything is restored --------------------------------------------------------------------------------------------


class Stateful(BatchNormNet):
    """Moving statistics, a counter, a dropout layer, and a layer that the user has set to evaluation mode."""

    def __init__(self):
        super().__init__()
        self.calls = ms.Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)
        self.dropout = nn.Dropout(p=0.5)
        self.second = nn.BatchNorm1d(CLASSES)

    def logits(self, x):
        logits = self.second(super().logits(self.dropout(x)))
        return ops.depend(logits, ops.assign_add(self.calls, Tensor(1, ms.int32)))


def everything(*roots) -> list:
    """All values, and the flags of all Cells."""
    values = [(one.name, one.asnumpy().tobytes()) for root in roots for one in root.get_parameters()]
    cells = [named for root in roots for named in root.cells_and_names()]
    return values + [(name, one.training, one.requires_grad) for name, one in cells]


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 2 BatchNorm")
@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network writes state")
def test_leaves_everything_bit_identical(pynative):
    network = fill(Stateful())
    step = make_step(in_loss(network), OPTIMIZERS["adam"], micro_size=2)
    step(*batch())
    network.second.set_train(False)
    ms.manual_seed(11)
    before, generator = everything(step, step.optimizer), ms.get_rng_state().asnumpy().tobytes()
    report = audit(GradAccumulationCell(step.network, 2), step.optimizer, *batch())
    assert report.batch_norm_layers and report.dropout_layers
    assert everything(step, step.optimizer) == before
    assert ms.get_rng_state().asnumpy().tobytes() == generator


def test_a_compiled_step_goes_on_from_the_right_values():
    """In graph mode, of a cell with the step's network and optimizer."""
    optimizer = OPTIMIZERS["momentum"]
    step, other = (make_step(Regression(), optimizer, micro_size=3) for _ in range(2))
    losses = [float(step(*batch()))]
    assert audit(GradAccumulationCell(step.network, 3), step.optimizer, *batch(7)).ok
    losses += [float(step(*batch())), float(step(*batch()))]
    assert len(step.compile_cache) == 1
    with eagerly():
        assert losses == pytest.approx([float(other(*batch())) for _ in range(3)], rel=1e-5)
    assert relative_error(as_numpy(step.weights[0]), as_numpy(other.weights[0])) < 1e-5


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_refuses_what_it_cannot_audit_and_has_the_callers_tolerance(pynative):
    network = in_loss(make_network("dense"))
    cell = GradAccumulationCell(network, 2)
    optimizer = OPTIMIZERS["sgd"](cell.trainable_params())
    before = everything(cell)
    vector = GradAccumulationCell(in_loss(network.backbone_network, Called("none")), 2)
    elsewhere = OPTIMIZERS["sgd"](make_network("conv").trainable_params())
    one, too_many = GradAccumulationCell(network, micro_batch_size=16), GradAccumulationCell(network, 20)
    for error, message, arguments in (
        (TypeError, "'cell' must be .*, but got 'WithLossCell'", (network, optimizer, *batch())),
        (TypeError, r"'optimizer' must be an nn\.Optimizer, but got 'float'", (cell, 0.1, *batch())),
        (TypeError, "input 1 got 3 of type 'int'", (cell, optimizer, batch()[0], 3)),
        (ValueError, "at least two micro-batches, but got a batch of 10 sample", (one, optimizer, *batch())),
        (ValueError, "'micro_size' is the number of micro-batches", (too_many, optimizer, *batch())),
        (ValueError, "none of them the network's", (cell, elsewhere, *batch())),
        (ValueError, "scalar loss of shape", (vector, optimizer, *batch())),
    ):
        with pytest.raises(error, match=message):
            audit(*arguments)
    with pytest.raises(ValueError, match=r"'tolerance' must be positive, but got 0\.0"):
        audit(cell, optimizer, *batch(), tolerance=0.0)
    assert not audit(cell, optimizer, *batch(), tolerance=1e-12).ok
    assert everything(cell) == before
