"""audit names the one remedy that works, which it has tried: here each is applied, and the audit passes. Most networks
are those of proof/losses.py."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    CountClassWeights,
    CountMask,
    CountNotIgnored,
    EvenSplit,
    GradAccumulationCell,
    WithBatchLossCell,
    audit,
    convert_batchnorm_to_groupnorm,
)
from tests.proof import losses
from tests.proof.losses import CLASSES, FEATURES, LABELS, WRONG, Case, Model, X, classes, of, right
from tests.support.reference import as_numpy

RANDOM = np.random.default_rng(1)
TRIED = "This was tried, and makes it equal: "


def report_of(network, *batch, **options):
    cell = GradAccumulationCell(network, **(options if "micro_batch_size" in options else {"micro_size": 4, **options}))
    return audit(cell, nn.SGD(cell.trainable_params(), 0.1), *map(Tensor, batch))


def report_of_case(case: Case, **options):
    return report_of(case.network(), *case.inputs, **{**case.options, **options})


def remedy_of(report) -> str:
    """The remedy that is named, alone."""
    assert len(report.problems) == 1, report
    assert TRIED in report.problems[0], report
    return report.problems[0].partition(TRIED)[2].removesuffix(".")


def options_of(remedy, network) -> dict:
    """The remedy's words as the cell's options. The names of the network's Cells are those of its attributes."""
    known = {one.__name__: one for one in (CountNotIgnored, CountClassWeights, CountMask, EvenSplit)}
    return eval(f"dict({remedy})", {**known, **network._cells, **vars(network)})


# -- what a loss is a mean over ----------------------------------------------------------------------------------------


def mean_by_lengths(m, tokens, lengths):
    """A mean over valid tokens, which an input of lengths tells."""
    valid = ops.cast(ops.arange(losses.LENGTH) < lengths.reshape((-1, 1)), ms.float32)
    return (ops.square(m.net(tokens)).sum(axis=-1) * valid).sum() / ops.cast(lengths, ms.float32).sum()


@pytest.mark.parametrize(
    ("case", "options", "remedy"),
    [
        (WRONG["ignored_labels"], {}, "count=CountNotIgnored()"),
        (WRONG["weighted_classes"], {}, "count=CountClassWeights(_loss_fn.weight)"),
        (WRONG["shifted_labels"], {"count": CountNotIgnored()}, "count=CountNotIgnored(shift=1)"),
        (
            right(losses.embedding, mean_by_lengths, losses.TOKENS, losses.LENGTHS.astype(np.int32)),
            {},
            "count=CountMask()",
        ),
        (WRONG["count_of_what_is_not_ignored"], {}, "count=None"),
    ],
    ids=["ignored", "class weights", "shifted", "lengths", "needless"],
)
def test_names_the_count(case, options, remedy, pynative):
    network, options = case.network(), {**case.options, **options}
    before = [as_numpy(one).tobytes() for one in network.get_parameters()]
    assert remedy_of(report_of(network, *case.inputs, **options)) == remedy
    assert [as_numpy(one).tobytes() for one in network.get_parameters()] == before
    assert report_of(network, *case.inputs, **{**options, **options_of(remedy, network)}).ok


def focal_ratio(m, x, positives):
    p = ops.sigmoid(m.net(x))
    p = p * positives + (1 - p) * (1 - positives)
    return (-ops.square(1 - p) * ops.log(p)).sum(), positives.sum()


def focal(m, x, positives):
    """Focal loss over all anchors, divided by the number of positives: images without any have a loss too."""
    total, number = focal_ratio(m, x, positives)
    return total / ops.maximum(number, Tensor(1.0))


POSITIVES = np.zeros((16, CLASSES), np.float32)
POSITIVES[[0, 0, 1, 14], [0, 2, 3, 1]] = 1  # the second micro-batch of four has none


def positives(x, positives):
    return positives.sum()


@pytest.mark.parametrize(("count", "said"), [(positives, "what 'count' counts"), (None, "count=CountMask()")])
def test_names_the_ratio_where_a_micro_batch_counts_nothing_but_has_a_loss(count, said, pynative):
    remedy = remedy_of(report_of(Model(classes(), focal), X, POSITIVES, count=count))
    assert remedy.startswith('reduction="ratio", min_count=1 in place of a count')
    assert said in remedy
    assert report_of(Model(classes(), focal_ratio), X, POSITIVES, reduction="ratio", min_count=1).ok


# -- losses of the whole batch -----------------------------------------------------------------------------------------


class WithLabels(nn.Cell):
    def __init__(self, net):
        super().__init__(auto_prefix=False)
        self.net = net

    def construct(self, x, y):
        return self.net(x), y


def test_names_a_loss_of_the_whole_batch(pynative):
    net = nn.SequentialCell(classes(), nn.Sigmoid())
    remedy = remedy_of(report_of(nn.WithLossCell(net, nn.DiceLoss()), X, losses.ONE_HOT))
    assert remedy == "WithBatchLossCell(backbone, loss)"
    assert report_of(WithBatchLossCell(WithLabels(net), nn.DiceLoss()), X, losses.ONE_HOT).ok


# -- what is taken for samples -----------------------------------------------------------------------------------------


def nearest_prototype(m, x, prototypes):
    """The squared distance to the nearest prototype, of which there are as many as samples."""
    return ops.square(m.net(x).expand_dims(1) - prototypes).sum(axis=-1).min(axis=1).mean()


def test_names_inputs_that_are_shared(pynative):
    case = right(of(FEATURES), nearest_prototype, X, RANDOM.normal(size=(16, FEATURES)).astype(np.float32))
    option, _, meaning = remedy_of(report_of_case(case)).partition(". ")
    assert option == "split=EvenSplit(shared=(1,))"
    assert meaning == "Each micro-batch then sees the whole of input(s) 1: share only what has no entries of samples"
    assert report_of_case(case, **options_of(option, case.network())).ok


SUM = losses.RIGHT["sum_that_says_so"]


@pytest.mark.parametrize(
    ("case", "shape", "is_own"),
    [
        (
            right(losses.with_loss(losses.one, nn.MSELoss("sum")), None, X, losses.TARGET[:, 0], reduction="sum"),
            (16, 1),
            False,
        ),
        (WRONG["flat_labels_of_mindspore"], (16, 1), False),
        (WRONG["flat_outputs"], (16,), True),
    ],
    ids=["a sum", "a mean", "own loss"],
)
def test_names_an_input_that_is_broadcast(case, shape, is_own, pynative):
    """No option is named that makes the two sides equal: both would learn from wrong pairs."""
    report, (x, labels) = report_of_case(case), case.inputs
    assert len(report.problems) == 1, report
    assert f"input 1 of shape {labels.shape} is broadcast" in report.problems[0], report
    assert f"Give it the shape {shape}" in report.problems[0]
    assert TRIED not in report.problems[0] and "shared=(" not in report.problems[0]
    assert ("or, if its entries are not those of samples" in report.problems[0]) == is_own
    assert report_of_case(case._replace(inputs=(x, labels.reshape(shape)))).ok


def time_major(m, x, y):
    """A mean over samples of a function of each sequence, with time in front."""
    return ops.square(ops.tanh(m.net(x)).mean(axis=0) - y).mean()


def test_names_the_axis_of_samples(pynative):
    sequences = RANDOM.normal(size=(6, 6, FEATURES)).astype(np.float32)
    case = right(of(FEATURES), time_major, sequences, RANDOM.normal(size=(6, FEATURES)).astype(np.float32))
    assert remedy_of(report_of_case(case)) == "split=EvenSplit(axis=(1, 0))"
    assert report_of_case(case, split=EvenSplit(axis=(1, 0))).ok


def test_names_outputs_that_are_not_of_a_sample(pynative):
    """The second output depends on the other samples."""

    def with_outputs(m, x, y):
        out = m.net(x)
        return ops.cross_entropy(out, y), y, out - out.mean(axis=0)

    (problem,) = report_of_case(right(classes, with_outputs, X, LABELS, aux=True)).problems
    assert "Output(s) 1 after the loss, counted from 0" in problem


# -- BatchNorm over one value ------------------------------------------------------------------------------------------


def test_names_a_variance_of_one_value(pynative):
    def network():
        layers = nn.SequentialCell(losses.dense(FEATURES, 4), nn.BatchNorm1d(4), losses.dense(4, CLASSES))
        return nn.WithLossCell(layers, nn.CrossEntropyLoss())

    x, y = X[::4], LABELS[::4]
    report = report_of(network(), x, y, micro_batch_size=1)
    assert len(report.problems) == 2
    assert "BatchNorm layer(s) couple" in report.problems[0] and "nn.GroupNorm" in report.problems[0]
    assert report.problems[1].startswith("1.moving_variance become(s) NaN for good")
    assert not any("NaN" in problem for problem in report_of(network(), x, y, micro_batch_size=2).problems)
    converted = network()
    convert_batchnorm_to_groupnorm(converted, 1)
    assert report_of(converted, x, y, micro_batch_size=1).ok


# -- state -------------------------------------------------------------------------------------------------------------


def test_names_state(pynative):
    """The forward centres its outputs by a running mean, which it writes."""

    def centred(m, x, y):
        out = m.net(x)
        loss = ops.cross_entropy(out - m.center, y)
        mean = ops.depend(ops.stop_gradient(out), loss).mean(axis=0)
        return ops.depend(loss, ops.assign(m.center, 0.9 * m.center + 0.1 * mean))

    center = ms.Parameter(Tensor(np.zeros(CLASSES, np.float32)), name="center", requires_grad=False)
    (problem,) = report_of(Model(classes(), centred, center=center), X, LABELS).problems
    assert "writes state in 'construct' (" in problem
    assert "center" in problem
    assert "'after_update' of a gaccum_ms.Transform" in problem
