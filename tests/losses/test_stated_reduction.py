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

WORDS = ("mean", "sum", "none")
KINDS = {
    f"{module.__name__.split('.')[1]}.{name}": kind
    for module in (nn, mint.nn)
    for name, kind in vars(module).items()
    if name.endswith("Loss") and "reduction" in inspect.signature(kind.__init__).parameters
}


def make(kind, reduction):
    more = {"num_sampled": 1, "num_classes": 2} if kind is nn.SampledSoftmaxLoss else {}
    return kind(reduction=reduction, **more)


@pytest.mark.filterwarnings("ignore")  # some of the losses are deprecated
def test_each_loss_of_mindspore_says_its_reduction():
    assert len(KINDS) > 30
    for name, kind in KINDS.items():
        for word in WORDS:
            stated = stated_reduction(nn.WithLossCell(nn.Identity(), make(kind, word)))
            assert (stated.loss, stated.reduction, stated.is_certain) == (kind.__name__, word, True), name
    batch_mean = stated_reduction(nn.WithLossCell(nn.Identity(), nn.KLDivLoss(reduction="batchmean")))
    assert batch_mean.reduction == "mean"
    for of_batch in (nn.RMSELoss(), nn.DiceLoss(), nn.MultiClassDiceLoss()):
        assert stated_reduction(nn.WithLossCell(nn.Identity(), of_batch)) is None


POSITIVE, SIGNS = np.abs(X[:, :4]) + 0.1, np.sign(X[:, :4])
LABELS, ONE_HOT = np.arange(SAMPLES, dtype=np.int32) % 4, np.eye(4, dtype=np.float32)[np.arange(SAMPLES) % 4]
PROBABILITIES = (1 / (1 + np.exp(-X[:, :4]))).astype(np.float32)
# Losses of two inputs that have kernels on CPU, with inputs.
CALLED = {
    nn.L1Loss: (X, -X),
    nn.MSELoss: (X, -X),
    nn.MAELoss: (X, -X),
    nn.SmoothL1Loss: (X, -X),
    nn.HuberLoss: (X, -X),
    nn.PoissonNLLLoss: (X[:, :4], POSITIVE),
    nn.KLDivLoss: (np.log(PROBABILITIES), PROBABILITIES),
    nn.BCELoss: (PROBABILITIES, ONE_HOT),
    nn.BCEWithLogitsLoss: (X[:, :4], ONE_HOT),
    nn.HingeEmbeddingLoss: (X[:, :4], SIGNS),
    nn.MultiLabelSoftMarginLoss: (X[:, :4], ONE_HOT),
    nn.CrossEntropyLoss: (X[:, :4], LABELS),
    nn.NLLLoss: (np.log(PROBABILITIES), LABELS),
    nn.SoftmaxCrossEntropyWithLogits: (X[:, :4], ONE_HOT),
}


@pytest.mark.thorough
@pytest.mark.parametrize("kind", CALLED, ids=lambda kind: kind.__name__)
def test_what_is_said_is_true(kind, pynative):
    """On the batch twice over a mean stays the same, and a sum doubles."""
    once = [Tensor(value) for value in CALLED[kind]]
    twice = [Tensor(np.concatenate((value, value))) for value in CALLED[kind]]
    for word, factor in (("mean", 1), ("sum", 2)):
        if (kind, word) == (nn.BCEWithLogitsLoss, "mean"):
            continue
        loss = kind(reduction=word)
        assert float(loss(*twice)) == pytest.approx(factor * float(loss(*once)), rel=1e-4)


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


class OwnOfBase(nn.LossBase):
    """It has the base's default, and says nothing by that."""

    def construct(self, logits, labels):
        return ops.square(logits - labels).sum()


class Calls(nn.Cell):
    def __init__(self, loss):
        super().__init__()
        self.loss = loss

    def construct(self, logits, labels):
        return self.loss(logits, labels)


class OtherWithLoss(nn.WithLossCell):
    def construct(self, data, label):
        return self._loss_fn(self._backbone(data), label) / 2


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (with_loss(Documented("sum")), ("sum", True)),
        (with_loss(Documented("none")), ("none", True)),
        (with_loss(OfMindSpore()), ("sum", True)),
        (with_loss(InFloat32(nn.MSELoss("sum"))), ("sum", True)),
        (with_loss(AlreadyMean("sum")), None),
        (with_loss(Own("sum")), ("sum", False)),
        (with_loss(Own("none")), None),
        (with_loss(Own(3)), None),
        (with_loss(OwnOfBase()), ("mean", False)),
        (with_loss(OwnOfBase("sum")), ("sum", False)),
        (with_loss(Calls(nn.MSELoss("sum"))), None),
        (with_loss(PerSampleLoss(nn.MSELoss("none"), "sum")), None),
        (PerSampleLoss(with_loss(nn.MSELoss("none")), "sum"), None),
        (OtherWithLoss(network(), nn.MSELoss("sum")), None),
        (nn.MSELoss("sum"), None),
        (lambda x, y: nn.MSELoss("sum")(x, y), None),
    ],
)
def test_what_other_functions_say(function, said):
    stated = stated_reduction(function)
    assert (stated and stated[1:]) == said


def test_casts_are_looked_through():
    """Around the network, and around the loss in it."""
    cast = amp.custom_mixed_precision(with_loss(nn.MSELoss("sum")), black_list=[nn.MSELoss])
    assert not isinstance(cast, nn.WithLossCell) and not isinstance(cast._backbone._loss_fn, nn.MSELoss)
    assert stated_reduction(cast).reduction == "sum"


# -- what is done ------------------------------------------------------------------------------------------------------


def data(samples=SAMPLES):
    return ms.dataset.NumpySlicesDataset((X, Y), shuffle=False).batch(samples)


def updated(net):
    """What training has changed."""
    return np.concatenate([(as_numpy(net.weight) - 1).ravel(), as_numpy(net.bias)])


def sgd(net):
    return nn.SGD(net.trainable_params(), RATE)


def whole_batch(loss, level="O0"):
    net = network()
    ms.Model(net, loss, sgd(net), amp_level=level).train(1, data(), dataset_sink_mode=False)
    return updated(net)


def in_two(x, y):
    return [(x[:3], y[:3]), (x[3:], y[3:])]


WAYS = {
    "model": lambda net, loss: ms.Model(GradAccumulationCell(net, 4), loss, sgd(net)),
    "network": lambda net, loss: ms.Model(GradAccumulationCell(nn.WithLossCell(net, loss), 4), optimizer=sgd(net)),
    "step": lambda net, loss: ms.Model(
        TrainOneStepWithGradAccumulationCell(GradAccumulationCell(net, 4), sgd(net), loss_fn=loss)
    ),
    "split": lambda net, loss: ms.Model(GradAccumulationCell(net, split=in_two), loss, sgd(net)),
    "auto": lambda net, loss: ms.Model(GradAccumulationCell(net, micro_batch_size="auto"), loss, sgd(net)),
}


@pytest.mark.core("model-graph", "network-pynative", "step-graph")
@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
@pytest.mark.parametrize("way", WAYS)
def test_a_sum_stays_a_sum(way, mode):
    loss = nn.MSELoss(reduction="sum")
    net = network()
    WAYS[way](net, loss).train(1, data(), dataset_sink_mode=False)
    assert relative_error(updated(net), whole_batch(loss)) < TOLERANCE


@pytest.mark.thorough
def test_a_sum_stays_a_sum_in_low_precision():
    """The level puts a cast around the loss. MindSpore itself refuses the others on CPU."""
    loss = nn.MSELoss(reduction="sum")
    net = network()
    ms.Model(GradAccumulationCell(net, 4), loss, sgd(net), amp_level="auto").train(1, data(), dataset_sink_mode=False)
    assert relative_error(updated(net), whole_batch(loss, "auto")) < 1e-2


def test_windows_of_several_batches_add_sums():
    loss = nn.MSELoss(reduction="sum")
    net = network()
    ms.Model(GradAccumulationCell(net, accumulation_steps=3), loss, sgd(net)).train(1, data(4), dataset_sink_mode=False)
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
    known.network = with_loss(nn.MSELoss())
    known.check_options()
    assert known.reduction == "mean"


def test_what_takes_a_cell_takes_the_reduction_of_its_loss(pynative):
    net = network()
    report = audit(GradAccumulationCell(net, 4), sgd(net), Tensor(X), Tensor(Y), loss_fn=nn.MSELoss("sum"))
    assert report.ok and report.reduction == "sum", report
    with pytest.raises(ValueError, match="a 'MSELoss' with reduction='none'"):
        memory_report(GradAccumulationCell(net, 4), sgd(net), Tensor(X), Tensor(Y), loss_fn=nn.MSELoss("none"))


CONTRADICTS = "'reduction' must be what the loss says, but got reduction='{}' and a '{}' with reduction='{}'. Leave"
NONE = "the loss must be one number, .* but got a '{}' with reduction='none', .*gaccum_ms.PerSampleLoss"


@pytest.mark.parametrize(
    ("loss", "reduction", "message"),
    [
        (nn.MSELoss("sum"), "mean", CONTRADICTS.format("mean", "MSELoss", "sum")),
        (nn.MSELoss(), "sum", CONTRADICTS.format("sum", "MSELoss", "mean")),
        (Documented("sum"), "mean", CONTRADICTS.format("mean", "Documented", "sum")),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True), None, NONE.format("SoftmaxCrossEntropyWithLogits")),
        (nn.MSELoss("none"), "mean", NONE.format("MSELoss")),
    ],
)
def test_what_contradicts_the_loss_is_refused(loss, reduction, message):
    net = network()
    for owner, make_it in (
        ("GradAccumulationCell", lambda: GradAccumulationCell(nn.WithLossCell(net, loss), 4, reduction=reduction)),
        ("GradAccumulationCell", lambda: ms.Model(GradAccumulationCell(net, 4, reduction=reduction), loss, sgd(net))),
        (
            "GradAccumulator",
            lambda: GradAccumulator(sgd(net), 2, reduction=reduction).value_and_grad(nn.WithLossCell(net, loss)),
        ),
    ):
        with pytest.raises(ValueError, match=f"For '{owner}', {message}"):
            make_it()


def test_what_says_nothing_contradicts_nothing():
    for loss in (Own("mean"), Own("sum"), OwnOfBase(), AlreadyMean("sum"), Calls(nn.MSELoss("none"))):
        for reduction in ("mean", "sum"):
            assert GradAccumulationCell(with_loss(loss), 4, reduction=reduction).reduction == reduction
    per_sample = PerSampleLoss(with_loss(nn.MSELoss("none")))
    assert GradAccumulationCell(per_sample, 4).options.loss_is_mean
    for more in ({"aux": True}, {"loss_weights": (1.0, 1.0)}, {"reduction": "ratio"}):
        GradAccumulationCell(with_loss(nn.MSELoss("none")), 4, **more)  # which the network's outputs decide


def test_all_rules_hold_for_the_reduction_of_the_loss():
    net = network()
    cell = GradAccumulationCell(net, 4, overflow="drop_micro_batch")
    with pytest.raises(ValueError, match=r"got 1 loss.es., reduction='sum' and count=None"):
        ms.Model(cell, nn.MSELoss("sum"), sgd(net))
    TrainOneStepWithGradAccumulationCell(cell, sgd(net), loss_fn=nn.MSELoss())


# -- in a loop of one's own --------------------------------------------------------------------------------------------

PARTS = (slice(0, 4), slice(4, 8), slice(8, 10))


def loop(loss, count=None, changed=tuple, **options):
    """One window of batches of 4, 4 and 2 samples; returns the weights and the accumulator."""
    net = network()
    accumulator = GradAccumulator(sgd(net), len(PARTS), **options)
    grad_fn = accumulator.value_and_grad(nn.WithLossCell(net, loss))
    for part in PARTS:
        value, gradients = grad_fn(Tensor(X[part]), Tensor(Y[part]))
        accumulator(changed(gradients), count and count(part), loss=value)
    return updated(net), accumulator


@pytest.mark.parametrize("mode", ["graph", "pynative"], indirect=True)
def test_sums_of_a_loop_stay_sums(mode):
    weights, accumulator = loop(nn.MSELoss("sum"))
    assert relative_error(weights, whole_batch(nn.MSELoss("sum"))) < TOLERANCE
    assert "accumulation_steps=3, reduction='sum'" in str(accumulator)
    assert accumulator.run_record.reduction == "sum"
    record = accumulator.record()
    wanted = np.square(X.sum(axis=1, keepdims=True) - Y).sum()
    assert record.loss == pytest.approx(wanted, rel=1e-4)
    assert (record.counts, record.counted) == ((1.0, 1.0, 1.0), "batches")


def test_a_known_sum_of_a_loop_with_counts_is_divided_by_them(pynative):
    weights, _ = loop(nn.MSELoss("sum"), count=lambda part: part.stop - part.start)
    assert relative_error(weights, whole_batch(nn.MSELoss())) < TOLERANCE


def test_functions_of_one_accumulator_must_agree():
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
    accumulator = GradAccumulator(sgd(net), 2, reduction="sum")
    accumulator.value_and_grad(total)
    accumulator.value_and_grad(forward)  # the user says what its code does


def test_a_sum_after_other_gradients_is_refused(pynative):
    net = network()
    accumulator = GradAccumulator(sgd(net), 2, jit=False)
    accumulator(tuple(ops.zeros_like(weight) for weight in accumulator.weights))
    with pytest.raises(ValueError, match="whose loss is a sum, where those before it are of a mean"):
        accumulator.value_and_grad(nn.WithLossCell(net, nn.MSELoss("sum")))


def test_dropped_batches_of_sums_need_counts(pynative):
    with pytest.raises(TypeError, match="overflow='drop_micro_batch' and losses that are sums, each call must have a"):
        loop(nn.MSELoss("sum"), overflow="drop_micro_batch")


def test_a_sum_of_several_outputs_says_nothing(pynative):
    net = network()
    accumulator = GradAccumulator(sgd(net), 2)
    accumulator.value_and_grad(nn.WithLossCell(net, nn.MSELoss("sum")), has_aux=True)
    assert accumulator.loss_is_mean


def test_ignored_labels_of_a_sum_draw_no_warning():
    """A count of a sum is the user's choice."""
    cell = GradAccumulationCell(nn.WithLossCell(nn.Dense(FEATURES, 3), nn.CrossEntropyLoss(reduction="sum")), 4)
    step = TrainOneStepWithGradAccumulationCell(cell, sgd(cell)).set_train()
    step(Tensor(X), Tensor(np.where(np.arange(SAMPLES) % 3, -100, 1).astype(np.int32)))
    assert step.options.reduction == "sum"
