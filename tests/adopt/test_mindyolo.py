"""mindyolo's Trainer: errors of its accumulation, and correct results with our step."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.amp import DynamicLossScaler, StaticLossScaler

from gaccum_ms import TrainOneStepWithGradAccumulationCell
from gaccum_ms.adopt import mindyolo as adopted
from tests.support.adopted import (
    ROUNDING,
    BatchTimesLoss,
    K,
    MeanLoss,
    Predictor,
    apart,
    assert_takes_arguments_of,
    few_batches,
    joined,
)
from tests.support.package import package
from tests.support.reference import as_numpy

EXTRA = "mindyolo is in the extra 'trainers'"
trainer_factory = package("mindyolo.utils.trainer_factory", EXTRA)
step_factory = package("mindyolo.utils.train_step_factory", EXTRA)
callbacks = package("mindyolo.utils.callback", EXTRA)
averaging = package("mindyolo.optim.ema", EXTRA)


class CountingReducer:
    def __init__(self):
        self.calls = 0

    def __call__(self, gradients):
        self.calls += 1
        return gradients


class Watch(callbacks.BaseCallback):
    """Records the parts of the loss, as mindyolo's callbacks get them."""

    def __init__(self):
        self.items = []

    def on_train_step_end(self, run_context):
        self.items.append(run_context.loss.asnumpy())


class Run:
    """One training by mindyolo's Trainer; `ours` selects our step."""

    def __init__(self, batches, accumulate, ours=False, loss=MeanLoss, scaler=None, average=False, **given):
        network = Predictor()
        optimizer = nn.Momentum(network.trainable_params(), 0.02, 0.9)
        scaler = scaler or StaticLossScaler(64.0)
        self.reducer = CountingReducer()
        self.ema = averaging.EMA(network, Predictor(), decay=0.9) if average else None
        arguments = ("detect", network, loss(), optimizer, 1.0, scaler, self.reducer, self.ema)
        if ours:
            reduction = "mean" if loss is MeanLoss else "sum"
            function = adopted.train_step(*arguments, accumulate=accumulate, reduction=reduction, **given)
            assert isinstance(function, TrainOneStepWithGradAccumulationCell)
        else:
            function = step_factory.create_train_step_fn(*arguments, **given)
        images, labels = (np.concatenate(values) for values in zip(*batches, strict=True))
        loader = ms.dataset.NumpySlicesDataset((images, labels), ["images", "labels"], shuffle=False)
        loader = loader.batch(len(batches[0][0]))
        watch = Watch()
        trainer = trainer_factory.create_trainer(
            "net", function, scaler, network, None, self.ema, optimizer, loader, len(batches), [watch], self.reducer,
            False, None,
        )  # fmt: skip
        trainer.train(1, False, accumulate=1 if ours else accumulate, log_interval=len(batches) + 1)
        self.items = watch.items
        self.weights = {one.name: as_numpy(one) for one in network.get_parameters()}
        self.updates = int(optimizer.global_step.asnumpy()[0])


def test_a_mean_over_a_batch_is_a_mean_over_the_window(mode):
    batches = few_batches()
    whole = Run(joined(batches), 1)
    micro = Run(batches, K)
    ours = Run(batches, K, ours=True)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(micro.weights, whole.weights) > 2e-2  # three times the gradient
    np.testing.assert_allclose(ours.items[:K], micro.items[:K], rtol=1e-5)
    assert micro.reducer.calls == 2 * K  # once per batch; our step reduces by itself, once per update
    assert ours.updates == micro.updates == 2


def test_clipping_is_of_the_window_not_of_each_batch(pynative):
    batches = few_batches()
    clip = {"clip_grad": True, "clip_grad_value": 0.5}
    for loss in (MeanLoss, BatchTimesLoss):
        whole = Run(joined(batches), 1, loss=loss, **clip)
        assert apart(Run(batches, K, ours=True, loss=loss, **clip).weights, whole.weights) < ROUNDING
        assert apart(Run(batches, K, loss=loss, **clip).weights, whole.weights) > 2e-3


@pytest.mark.parametrize("ms_jit", [False, True])
def test_its_own_average_and_a_dynamic_scale(ms_jit, pynative):
    batches = few_batches()
    whole = Run(joined(batches), 1, average=True)
    ours = Run(batches, K, ours=True, average=True, scaler=DynamicLossScaler(64.0, 2, 1000), ms_jit=ms_jit)
    averages = [{one.name: as_numpy(one) for one in run.ema.ema.get_parameters()} for run in (whole, ours)]
    assert apart(*averages) < ROUNDING
    assert int(ours.ema.updates.asnumpy()) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "classify"}, "'task' must be one of"),
        ({"micro_size": 2}, "'micro_size' must be left out"),
        ({"overflow_still_update": True, "scaler": DynamicLossScaler(2, 2, 2)}, "need a fixed loss scale"),
    ],
)
def test_errors(given, words):
    network = Predictor()
    parts = {"network": network, "loss_fn": MeanLoss(), "optimizer": nn.SGD(network.trainable_params())}
    arguments = {"task": "detect", "scaler": StaticLossScaler(1.0), "reduction": "mean", **parts, **given}
    with pytest.raises(ValueError, match=words):
        adopted.train_step(loss_ratio=1.0, **arguments)


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, step_factory.create_train_step_fn)
