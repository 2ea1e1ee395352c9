"""audit finds networks that accumulation cannot reproduce, accepts the others, and leaves no trace."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import CountNotIgnored, GradAccumulationCell, TrainOneStepWithGradAccumulationCell
from gaccum_ms.auditing import measure
from gaccum_ms.auditing.audit import audit
from tests.support.modes import eagerly
from tests.support.reference import (
    CLASSES,
    FEATURES,
    OPTIMIZERS,
    ConvNet,
    DenseNet,
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

    def __init__(self, loss):
        super().__init__()
        self.loss = loss

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


def with_ignored(samples=10):
    x, y = batch(samples)
    return x, Tensor(np.where(np.arange(samples) < 4, -100, y.asnumpy()).astype(np.int32))


@pytest.mark.parametrize(
    ("network", "inputs", "options"),
    [
        (make_network("embedding"), (), {"micro_batch_size": 3, "max_grad_norm": 0.1}),
        (make_network("dense", ms.float16), (), {"micro_size": 4}),
        (make_network("dense"), (), {"micro_size": 3, "reduction": "sum", "loss": SUM}),
        (fill(TwoLosses()), batch(), {"micro_size": 4, "loss_weights": (1.0, 0.3)}),
        (in_loss(make_network("dense")), with_ignored(), {"micro_size": 4, "count": CountNotIgnored()}),
    ],
    ids=["clip", "float16", "sum", "two", "count"],
)
def test_the_cells_options_pass(network, inputs, options, pynative):
    report = run(network, *inputs, **options)
    assert report.ok, str(report)


# -- problems are found and named --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "declared"), [("sum", "mean"), ("mean", "sum")])
def test_catches_a_wrong_reduction(kind, declared, pynative):
    loss = Called(nn.CrossEntropyLoss(reduction=kind))
    report = run(make_network("dense"), loss=loss, optimizer="adam", micro_size=4, reduction=declared)
    assert not report.ok
    assert report.loss_behaves_as == kind
    assert len(report.problems) == 1
    assert f"behaves as a {kind} over samples, but the cell has reduction='{declared}'" in report.problems[0]
    assert min(report.gradients.values()) > 0.1
    assert not report.couples_samples


class BatchNormNet(ConvNet):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def logits(self, x):
        return self.out(ops.relu(self.norm(self.conv(x.reshape((-1, 1, 3, 4))))).reshape((-1, 6 * FEATURES)))


def test_catches_batch_norm_and_names_the_layer(pynative):
    """There is no warning: in these tests it would be an error."""
    report = run(fill(BatchNormNet()))
    assert report.batch_norm_layers == ("_backbone.norm",)
    assert report.couples_samples
    assert report.loss_behaves_as == "mean"
    assert len(report.problems) == 1
    assert report.problems[0].startswith("1 BatchNorm layer(s) couple the samples of a micro-batch: _backbone.norm.")
    assert max(report.gradients.values()) > 1e-2


class InBatchNegatives(nn.Cell):
    """The InfoNCE loss, which compares each sample's counterpart with the counterparts of all others."""

    def __init__(self):
        super().__init__()
        self.left = nn.Dense(FEATURES, 4)
        self.right = nn.Dense(FEATURES, 4)

    def construct(self, x, z):
        return ops.cross_entropy(self.left(x) @ self.right(z).T, ops.arange(0, x.shape[0]).astype(ms.int32))


class VarianceOverTheBatch(nn.Cell):
    """A doubled batch has the same variance, so the loss looks like a mean; only the gradient shows the problem."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(FEATURES, 3)

    def construct(self, x, z):
        output = self.dense(x) + z.mean()
        return ops.square(output - output.mean(axis=0)).mean()


@pytest.mark.parametrize(("network", "behaves_as"), [(InBatchNegatives, "neither"), (VarianceOverTheBatch, "mean")])
def test_catches_coupled_samples_without_a_known_layer(network, behaves_as, pynative):
    report = run(fill(network()), batch()[0], Tensor(batches(10, 1, seed=8)[0][0]))
    assert report.couples_samples
    assert report.loss_behaves_as == behaves_as
    assert report.batch_norm_layers == ()
    assert len(report.problems) == 1
    assert "compares samples of one batch" in report.problems[0]
    assert max(report.gradients.values()) > 1e-2


class SumAndPenalty(DenseNet):
    def construct(self, x, y):
        return ops.cross_entropy(self.logits(x), y, reduction="sum") + ops.square(self.out.weight).sum()


def test_catches_a_penalty_added_to_a_sum(pynative):
    report = run(fill(SumAndPenalty()), *batch(), micro_size=4, reduction="sum")
    assert report.loss_behaves_as == "neither"
    assert "adds a term of its own to a sum" in report.problems[0]


class Constant(DenseNet):
    def construct(self, x, y):
        return self.logits(x).mean() * 0.0 + y.astype(ms.float32).mean()


def not_finite():
    network = make_network("dense")
    network.out.weight.set_data(Tensor(np.full((CLASSES, 16), np.nan), ms.float32))
    return in_loss(network)


class MeanOverNothing(DenseNet):
    """The first micro-batch has no item, so its loss is 0 / 0; the whole batch's loss is finite."""

    def construct(self, x, y):
        mask = (ops.abs(x[:, 0]) < 1e3).astype(ms.float32)
        return (self.logits(x).mean(axis=1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(("network", "said"), [(not_finite, "not finite"), (Constant, "All gradients are zero")])
def test_passes_nothing_that_it_could_not_compare(network, said, pynative):
    report = run(network(), *batch(), micro_size=2)
    assert len(report.problems) == 1
    assert said in report.problems[0]


def test_says_why_only_the_accumulated_loss_is_not_finite(pynative):
    x, y = batches(10, 1)[0]
    x[:5, 0] = 1e4
    report = run(fill(MeanOverNothing()), Tensor(x), Tensor(y), micro_size=2)
    assert np.isfinite(report.loss_whole)
    assert not np.isfinite(report.loss_accumulated)
    assert len(report.problems) == 1
    assert "a micro-batch takes a mean over nothing" in report.problems[0]


class NormalisedNet(DenseNet):
    """Its layer is centred, so `shift` has no effect: its gradient is zero except for rounding."""

    def __init__(self):
        super().__init__()
        self.shift = ms.Parameter(Tensor(0.3, ms.float32), name="shift")

    def logits(self, x):
        hidden = self.hidden(x) + self.shift
        return self.out(ops.tanh(hidden - hidden.mean(axis=1, keep_dims=True)))


def test_a_gradient_that_is_zero_but_for_rounding_passes(pynative):
    """On a single batch, both roundings may happen to be equal."""
    for seed in range(3):
        assert run(in_loss(fill(NormalisedNet())), *map(Tensor, batches(10, 1, seed)[0])).ok


def test_clipping_hides_nothing(pynative):
    """With clipping to a small norm, gradients of a wrong size give the right update."""
    report = run(make_network("dense"), loss=Called(SUM), micro_size=2, max_grad_norm=1e-3)
    assert min(report.gradients.values()) > 0.1
    assert max(report.parameters.values()) < 1e-6


# -- dropout -----------------------------------------------------------------------------------------------------------


class DropoutNet(DenseNet):
    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(p=0.5)

    def logits(self, x):
        return self.out(self.dropout(ops.tanh(self.hidden(x))))


class RandomNet(DenseNet):
    def logits(self, x):
        return self.out(ops.dropout(ops.tanh(self.hidden(x)), 0.5))


def test_dropout_is_left_out(pynative):
    report = run(fill(DropoutNet()))
    assert report.ok, str(report)
    assert report.dropout_layers == ("_backbone.dropout",)


def test_what_is_random_without_a_layer_is_said_to_be(pynative):
    report = run(fill(RandomNet()))
    assert len(report.problems) == 1
    assert "differs from one call to the next" in report.problems[0]
    assert not report.couples_samples


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


def everything(*roots) -> dict[str, bytes]:
    return {one.name: one.asnumpy().tobytes() for root in roots for one in root.get_parameters()}


def flags(*roots) -> list:
    return [(name, one.training, one.requires_grad) for root in roots for name, one in root.cells_and_names()]


@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network has 2 BatchNorm")
@pytest.mark.filterwarnings("ignore:For 'GradAccumulationCell', the network writes state")
def test_leaves_everything_bit_identical(pynative):
    network = fill(Stateful())
    cell = GradAccumulationCell(in_loss(network), 2)
    optimizer = OPTIMIZERS["adam"](cell.trainable_params())
    step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
    step(*batch())
    network.second.set_train(False)
    ms.manual_seed(11)
    before, before_flags = everything(step, cell), flags(step, cell, optimizer)
    generator = ms.get_rng_state().asnumpy().tobytes()
    assert any("moment1" in name for name in before)
    report = audit(cell, optimizer, *batch())
    assert report.batch_norm_layers and report.dropout_layers
    assert everything(step, cell) == before
    assert flags(step, cell, optimizer) == before_flags
    assert ms.get_rng_state().asnumpy().tobytes() == generator


def test_a_compiled_step_goes_on_from_the_right_values():
    """In graph mode, of a cell with the step's network and optimizer."""
    optimizer = OPTIMIZERS["momentum"]
    step, other = (make_step(in_loss(make_network("conv")), optimizer, micro_size=3) for _ in range(2))
    losses = [float(step(*batch()))]
    assert audit(GradAccumulationCell(step.network, 3), step.optimizer, *batch(7)).ok
    losses += [float(step(*batch())), float(step(*batch()))]
    assert len(step.compile_cache) == 1
    with eagerly():
        assert losses == pytest.approx([float(other(*batch())) for _ in range(3)], rel=1e-5)
    assert relative_error(as_numpy(step.weights[0]), as_numpy(other.weights[0])) < 1e-5


def test_restores_when_a_step_fails(monkeypatch, pynative):
    network = make_network("dense")
    cell = GradAccumulationCell(in_loss(network), 2)
    optimizer = OPTIMIZERS["momentum"](cell.trainable_params())
    before, before_flags = everything(network, optimizer), flags(cell, optimizer)

    def fail(self, values):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(measure._Losses, "on", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        audit(cell, optimizer, *batch())
    assert everything(network, optimizer) == before
    assert flags(cell, optimizer) == before_flags


# -- the table ---------------------------------------------------------------------------------------------------------


def test_the_report_prints_as_a_table(pynative):
    report = run(fill(BatchNormNet()))
    lines = str(report).splitlines()
    rows = {line.split("  ")[0].strip(): line for line in lines}
    for name in report.gradients:
        assert rows[name].split()[1:] == [f"{report.gradients[name]:.1e}", f"{report.parameters[name]:.1e}"]
    assert len({len(rows[name]) for name in (*report.gradients, "worst relative error")}) == 1
    assert f"{report.loss_whole:.6g} on the whole batch, {report.loss_accumulated:.6g} accumulated" in rows["loss"]
    assert rows["couples samples"].endswith("yes")
    assert rows["BatchNorm layers"].endswith("_backbone.norm")
    assert rows["verdict"].endswith("1 problem(s)")
    assert lines[-1] == f"* {report.problems[0]}"


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_refuses_what_it_cannot_audit(pynative):
    network = in_loss(make_network("dense"))
    cell = GradAccumulationCell(network, 2)
    optimizer = OPTIMIZERS["sgd"](cell.trainable_params())
    before, before_flags = everything(cell), flags(cell)
    with pytest.raises(TypeError, match=r"For 'audit', the argument 'cell' must be .*, but got 'WithLossCell'"):
        audit(network, optimizer, *batch())
    with pytest.raises(TypeError, match=r"the argument 'optimizer' must be an nn\.Optimizer, but got 'float'"):
        audit(cell, 0.1, *batch())
    with pytest.raises(TypeError, match="input 1 got 3 of type 'int'"):
        audit(cell, optimizer, batch()[0], 3)
    for options, samples in (({"micro_size": 1}, 10), ({"micro_batch_size": 16}, 10), ({"micro_size": 2}, 1)):
        with pytest.raises(ValueError, match=f"at least two micro-batches, but got a batch of {samples} sample"):
            audit(GradAccumulationCell(network, **options), optimizer, *batch(samples))
    with pytest.raises(ValueError, match="'micro_size' is the number of micro-batches"):
        audit(GradAccumulationCell(network, 20), optimizer, *batch())
    with pytest.raises(ValueError, match="none of them the network's"):
        audit(cell, OPTIMIZERS["sgd"](make_network("conv").trainable_params()), *batch())
    with pytest.raises(ValueError, match="scalar loss of shape"):
        vector = in_loss(network.backbone_network, Called(nn.CrossEntropyLoss(reduction="none")))
        audit(GradAccumulationCell(vector, 2), optimizer, *batch())
    for tolerance in (0.0, -1.0):
        with pytest.raises(ValueError, match=f"'tolerance' must be positive, but got {tolerance}"):
            audit(cell, optimizer, *batch(), tolerance=tolerance)
    assert everything(cell) == before
    assert flags(cell) == before_flags


def test_the_tolerance_is_the_callers(pynative):
    cell = GradAccumulationCell(in_loss(make_network("dense")), 3)
    optimizer = OPTIMIZERS["sgd"](cell.trainable_params())
    assert not audit(cell, optimizer, *batch(), tolerance=1e-12).ok
