"""What a loss says of its own reduction is what it does, and what the cell and the accumulator do then."""

from __future__ import annotations

import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, mint, nn, ops

from gaccum_ms import (
    GradAccumulationCell,
    GradAccumulator,
    PerSampleLoss,
    TrainOneStepWithGradAccumulationCell,
    audit,
    memory_report,
)
from gaccum_ms.losses.counts import CountSamples
from gaccum_ms.losses.in_float32 import InFloat32
from gaccum_ms.losses.stated_reduction import stated_reduction
from tests.support.modes import eagerly
from tests.support.reference import FEATURES, as_numpy, relative_error

TOLERANCE = 1e-5
SAMPLES = 10
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
Y = X.cumsum(axis=0)[:, :1]
RATE = 1e-3


def network():
    return nn.Dense(FEATURES, 1, weight_init="ones", bias_init="zeros")


def with_loss(loss):
    return nn.WithLossCell(network(), loss)


# -- what is said ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # some of the losses are deprecated
def test_each_loss_of_mindspore_says_its_reduction():
    named = [*vars(nn).items(), *vars(mint.nn).items()]
    losses = [kind for name, kind in named if name.endswith("Loss")]
    kinds = [kind for kind in losses if "reduction" in inspect.signature(kind.__init__).parameters]
    assert len(kinds) > 30
    for kind in kinds:
        more = {"num_sampled": 1, "num_classes": 2} if kind is nn.SampledSoftmaxLoss else {}
        for word in ("mean", "sum", "none"):
            stated = stated_reduction(nn.WithLossCell(nn.Identity(), kind(reduction=word, **more)))
            assert (stated.loss, stated.reduction, stated.is_certain) == (kind.__name__, word, True), kind
    batch_mean = stated_reduction(nn.WithLossCell(nn.Identity(), nn.KLDivLoss(reduction="batchmean")))
    assert batch_mean.reduction == "mean"
    for of_batch in (nn.RMSELoss(), nn.DiceLoss(), nn.MultiClassDiceLoss()):
        assert stated_reduction(nn.WithLossCell(nn.Identity(), of_batch)) is None


class Documented(nn.LossBase):
    """As MindSpore's page shows it."""

    def construct(self, logits, labels):
        return self.get_loss(ops.square(logits - labels))


class OfMindSpore(nn.MSELoss):
    """With another constructor, and MindSpore's code."""

    def __init__(self):
        super().__init__(reduction="sum")


class AlreadyMean(nn.MSELoss):
    def construct(self, logits, labels):
        return super().construct(logits, labels) / logits.shape[0]


class Own(nn.Cell):
    """As in other packages."""

    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def construct(self, logits, labels):
        errors = ops.square(logits - labels)
        return errors.sum() if self.reduction == "sum" else errors.mean()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (with_loss(Documented("sum")), ("sum", True)),
        (with_loss(OfMindSpore()), ("sum", True)),
        (with_loss(InFloat32(nn.MSELoss("sum"))), ("sum", True)),
        (with_loss(AlreadyMean("sum")), None),
        (with_loss(Own("sum")), ("sum", False)),
        (with_loss(Own(3)), None),
        (amp.custom_mixed_precision(with_loss(nn.MSELoss("sum")), black_list=[nn.MSELoss]), ("sum", True)),
        (PerSampleLoss(with_loss(nn.MSELoss("none")), "sum"), None),
        (nn.MSELoss("sum"), None),
        (lambda x, y: nn.MSELoss("sum")(x, y), None),
    ],
)
def test_what_other_functions_say(function, said):
    stated = stated_reduction(function)
    assert (stated and stated[1:]) == said


# -- what is done ------------------------------------------------------------------------------------------------------


def train_whole(network, loss, optimizer):
    data = ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(SAMPLES)
    ms.Model(network, loss, optimizer).train(1, data, dataset_sink_mode=False)


def updated(net):
    """What training has changed."""
    return np.concatenate([(as_numpy(net.weight) - 1).ravel(), as_numpy(net.bias)])


def sgd(net):
    return nn.SGD(net.trainable_params(), RATE)


@eagerly()
def whole_batch(loss):
    net = network()
    train_whole(net, loss, sgd(net))
    return updated(net)


@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
def test_a_sum_stays_a_sum(mode):
    """The loss is in the network, or given to ms.Model."""
    loss, net = nn.MSELoss(reduction="sum"), network()
    if mode == "graph":
        train_whole(GradAccumulationCell(net, 4), loss, sgd(net))
    else:
        train_whole(GradAccumulationCell(nn.WithLossCell(net, loss), 4), None, sgd(net))
    assert relative_error(updated(net), whole_batch(loss)) < TOLERANCE


def test_a_known_sum_with_a_count_is_divided_by_it(pynative):
    net = network()
    cell = GradAccumulationCell(net, 4, count=CountSamples())
    step = TrainOneStepWithGradAccumulationCell(cell, sgd(net), loss_fn=nn.MSELoss(reduction="sum")).set_train()
    step(Tensor(X), Tensor(Y))
    assert relative_error(updated(net), whole_batch(nn.MSELoss())) < TOLERANCE
    assert step.options.reduction == "sum"


def test_what_was_resolved_is_shown_and_is_for_this_loss_alone():
    net = network()
    cell = GradAccumulationCell(net, 4)
    assert "micro_size=4, reduction=None" in str(cell)
    step = TrainOneStepWithGradAccumulationCell(cell, sgd(net), loss_fn=nn.MSELoss("sum"))
    assert "micro_size=4, reduction='sum'" in str(cell)
    assert "reduction='sum', weighs by sums" in str(step.run_record)
    TrainOneStepWithGradAccumulationCell(cell, sgd(net), loss_fn=nn.MSELoss())
    assert cell.reduction == "mean"
    known = GradAccumulationCell(with_loss(nn.MSELoss("sum")), 4)
    assert known.reduction == "sum"
    assert known.with_options(micro_size=2).reduction == "sum"


def test_what_takes_a_cell_takes_the_reduction_of_its_loss(pynative):
    net = network()
    report = audit(GradAccumulationCell(net, 4), sgd(net), Tensor(X), Tensor(Y), loss_fn=nn.MSELoss("sum"))
    assert report.ok and report.reduction == "sum", report
    with pytest.raises(ValueError, match="a 'MSELoss' with reduction='none'"):
        memory_report(GradAccumulationCell(net, 4), sgd(net), Tensor(X), Tensor(Y), loss_fn=nn.MSELoss("none"))


@pytest.mark.parametrize(
    ("loss", "reduction", "said"),
    [
        (
            nn.MSELoss(),
            "sum",
            "must be what the loss says, .* reduction='sum' and a 'MSELoss' with reduction='mean'",
        ),
        (nn.SoftmaxCrossEntropyWithLogits(), None, "one number, .* 'Softmax.* with reduction='none', .*PerSampleLoss"),
    ],
)
def test_what_contradicts_the_loss_is_refused(loss, reduction, said):
    net = network()
    with pytest.raises(ValueError, match=f"For 'GradAccumulationCell', .*{said}"):
        ms.Model(GradAccumulationCell(net, 4, reduction=reduction), loss, sgd(net))
    with pytest.raises(ValueError, match=f"For 'GradAccumulator', .*{said}"):
        GradAccumulator(sgd(net), 2, reduction=reduction).value_and_grad(nn.WithLossCell(net, loss))


# -- in a loop of one's own --------------------------------------------------------------------------------------------


def test_sums_of_a_loop_stay_sums(pynative):
    """One window of batches of 4, 4 and 2 samples."""
    net = network()
    accumulator = GradAccumulator(sgd(net), 3)
    grad_fn = accumulator.value_and_grad(nn.WithLossCell(net, nn.MSELoss("sum")))
    for part in (slice(0, 4), slice(4, 8), slice(8, 10)):
        value, gradients = grad_fn(Tensor(X[part]), Tensor(Y[part]))
        accumulator(gradients, loss=value)
    assert relative_error(updated(net), whole_batch(nn.MSELoss("sum"))) < TOLERANCE
    assert "accumulation_steps=3, reduction='sum'" in str(accumulator)
    assert accumulator.run_record.reduction == "sum"
    record = accumulator.record()
    wanted = np.square(X.sum(axis=1, keepdims=True) - Y).sum()
    assert record.loss == pytest.approx(wanted, rel=1e-4)
    assert (record.counts, record.counted) == ((1.0, 1.0, 1.0), "batches")


def test_functions_of_one_accumulator_must_agree(pynative):
    net = network()
    mean, total = (nn.WithLossCell(net, nn.MSELoss(word)) for word in ("mean", "sum"))

    def forward(x, y):
        return total(x, y)

    for first, other in ((mean, total), (total, mean), (total, forward), (forward, total)):
        accumulator = GradAccumulator(sgd(net), 2)
        accumulator.value_and_grad(first)
        accumulator.value_and_grad(first)
        with pytest.raises(ValueError, match=r"'GradAccumulator', all gradients .* but got a function whose loss is a"):
            accumulator.value_and_grad(other)
    accumulator = GradAccumulator(sgd(net), 2, jit=False)
    accumulator(tuple(ops.zeros_like(weight) for weight in accumulator.weights))
    with pytest.raises(ValueError, match="whose loss is a sum, where those before it are of a mean"):
        accumulator.value_and_grad(total)
