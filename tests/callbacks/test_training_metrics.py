"""TrainingMetrics, and other callbacks with a step that returns more than its loss."""

from __future__ import annotations

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, train
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import EvenSplit, FlushAccumulation, TrainingMetrics, WindowMonitor
from gaccum_ms.training.step_in_model import samples_of_batch
from tests.support.reference import CLASSES, batches, make_network, make_step
from tests.support.state import manager

X, Y = batches(23, 1)[0]
ACCURACY, TOP = train.Accuracy(), train.Top1CategoricalAccuracy()


class WithLogits(nn.Cell):
    """Returns the loss, as a mean or as a sum and its count, and the outputs that a metric needs."""

    def __init__(self, ratio=False):
        super().__init__(auto_prefix=False)
        self.network = make_network("dense")
        self.loss = nn.CrossEntropyLoss(reduction="sum" if ratio else "mean")
        self.ratio = ratio

    def construct(self, x, y):
        logits = self.network(x)
        if self.ratio:
            return self.loss(logits, y), x.shape[0], logits, y
        return self.loss(logits, y), logits, y


def accuracy(logits, labels):
    assert isinstance(logits, np.ndarray)
    return (logits.argmax(1) == labels).mean()


def data_set():
    """Batches of six samples; the last has five."""
    return NumpySlicesDataset((X, Y), shuffle=False).batch(6)


def trained(callbacks, epochs=2, scaled=False, ratio=False, **options):
    options = {"micro_size": 2, "reduction": "ratio" if ratio else "mean", **options}
    scale = manager(2.0**8) if scaled else None
    model = ms.Model(make_step(WithLogits(ratio), lambda weights: nn.SGD(weights, 0.5), scale, aux=True, **options))
    model.train(epochs, data_set(), callbacks=callbacks, dataset_sink_mode=False)
    return model.train_network


class Seen(train.Callback):
    """The numbers of right answers and of samples in each batch, by the network with the weights before the batch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_train_epoch_begin(self, run_context):
        self.epochs.append([])

    def on_train_step_begin(self, run_context):
        parameters = run_context.original_args()
        x, y = parameters.train_dataset_element
        logits = parameters.train_network.network.network(x).asnumpy()
        self.epochs[-1].append([(logits.argmax(1) == y.asnumpy()).sum(), len(logits)])

    def accuracies(self):
        return [np.divide(*np.sum(one, axis=0)) for one in self.epochs]


@pytest.mark.parametrize(
    "options", [{"scaled": True, "ratio": True, "accumulation_steps": 3}, {}], ids=["scaled ratio in windows", "plain"]
)
def test_training_accuracy(options, pynative, capsys):
    """With ragged batches, by MindSpore's metric and by a function; other callbacks work as without outputs."""
    seen, monitor = Seen(), WindowMonitor()
    chosen = train.MAE().set_indexes([0, 0])
    metrics = TrainingMetrics({"accuracy": ACCURACY, "top": TOP, "f": accuracy, "F1": train.F1(), "none": chosen})
    flush = [FlushAccumulation()] * ("accumulation_steps" in options)
    step = trained([seen, metrics, monitor, train.LossMonitor(), *flush], **options)
    expected = seen.accuracies()
    assert expected[0] != expected[1]
    for name in ("accuracy", "top", "f"):
        np.testing.assert_allclose([one[name] for one in metrics.history], expected, rtol=1e-6)
    assert metrics.history[-1]["F1"].shape == (CLASSES,)
    assert metrics.history[-1]["none"] == 0, "the logits less themselves"
    printed = capsys.readouterr().out
    assert f"epoch 2: accuracy {expected[1]:.4g}, top {expected[1]:.4g}, f {expected[1]:.4g}, F1 [" in printed
    assert printed.count("loss is ") == 8
    assert [record.count for record in monitor.records] == ([18, 5] if flush else [6, 6, 6, 5]) * 2
    assert monitor.records[-1].loss_scale == (2.0**8 if flush else None)
    assert int(step.update_count.asnumpy()) == len(monitor.records)


def test_samples_may_be_on_another_axis():
    step = make_step(WithLogits(), aux=True, micro_size=2, split=EvenSplit(axis=1))
    parameters = SimpleNamespace(train_network=step, train_dataset_element=(ms.Tensor(np.ones((3, 5))),))
    assert samples_of_batch(SimpleNamespace(original_args=lambda: parameters)) == 5


def test_what_has_no_outputs_is_refused(pynative):
    step = make_step(nn.WithLossCell(make_network("dense"), nn.CrossEntropyLoss()), micro_size=2)
    with pytest.raises(ValueError, match=r"with aux=True .*, aux=False and dataset_sink_mode=False"):
        ms.Model(step).train(1, data_set(), callbacks=[TrainingMetrics({"accuracy": ACCURACY})])
    assert int(step.batch_count.asnumpy()) == 0


def test_bad_arguments():
    for arguments, error, words in (
        (({},), ValueError, "'metrics' must not be empty"),
        (({"accuracy": "accuracy"},), TypeError, "'metrics' must be a dict"),
        (({"accuracy": ACCURACY}, 1), TypeError, "'show' must be a bool, but got 1"),
    ):
        with pytest.raises(error, match=f"For 'TrainingMetrics', the argument {words}"):
            TrainingMetrics(*arguments)
