"""mindone's three training steps: their errors, and correct results with ours."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms.adopt import mindone as adopted
from tests.support.adopted import (
    ROUNDING,
    K,
    apart,
    assert_takes_arguments_of,
    averages,
    few_batches,
    joined,
    losses,
    steps,
    trained,
    with_average,
)
from tests.support.package import package

EXTRA = "mindone is in the extra 'trainers'"
trainers = package("mindone.trainers.train_step", EXTRA)
averaging = package("mindone.trainers.ema", EXTRA)
adapter = package("mindone.transformers.mindspore_adapter.train_onestep_wrapper", EXTRA)
diffusers = package("mindone.diffusers.training_utils", EXTRA)
ONE = Tensor(1.0, ms.float32)


def by_rates(weights):
    return nn.SGD(weights, [0.1 * (number + 1) for number in range(12)])


def test_trainers_average_and_rates_are_per_update(mode):
    """mindone's FIXME says "get_lr() will not increase global step". Its rates advance with updates, not with batches,
    so its weights equal those of K = 1 on the joined batch, as ours do; its average moves with each batch."""
    batches, clip = few_batches(), {"clip_grad": True, "clip_norm": 1.0}
    of_theirs, of_ours = (
        with_average(steps(step, ONE), lambda network: averaging.EMA(network, 0.9, offloading=False))
        for step in (trainers.TrainOneStepWrapper, adopted.train_step)
    )
    whole = trained(of_theirs(1, **clip), joined(batches), by_rates)
    micro, ours = (trained(of(**clip), batches, by_rates) for of in (of_theirs, of_ours))
    for run in (micro, ours):
        assert apart(run.weights, whole.weights) < ROUNDING
        assert int(run.optimizer.global_step.asnumpy()[0]) == 2
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert apart(averages(micro.step), averages(whole.step)) > 5e-5


@pytest.mark.parametrize("clip_grad", ["norm", "value"])
def test_transformers_accumulates_at_all(clip_grad):
    batches, clip = few_batches(), {"clip_grad": clip_grad, "clip_value": 0.1}
    of_theirs = steps(adapter.TrainOneStepWrapper)
    whole = trained(of_theirs(1, **clip), joined(batches))
    with pytest.raises(AttributeError, match="accumulated_grads"):
        trained(of_theirs(**clip), batches)
    ours = trained(steps(adopted.transformers_train_step)(**clip), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert [bool(overflow.asnumpy()) for _, _, overflow in ours.outputs] == [False] * len(batches)
    windows = [np.mean(losses(ours.outputs)[start : start + K]) for start in (0, K)]
    np.testing.assert_allclose(windows, losses(whole.outputs), rtol=1e-5)


class Regressing(diffusers.TrainStep):
    """A user's own training step."""

    def forward(self, x, y):
        loss = self.scale_loss(self.model(x, y))
        return loss, x


def of_diffusers(steps=K, length=5, **arguments):
    return lambda network, optimizer: Regressing(
        network,
        optimizer,
        gradient_accumulation_steps=steps,
        gradient_accumulation_kwargs={"length_of_dataloader": length},
        **arguments,
    )


def of_ours_for_diffusers(**arguments):
    return lambda network, optimizer: adopted.diffusers_train_step(of_diffusers(**arguments)(network, optimizer))


def test_diffusers_the_epochs_tail_is_divided_by_its_own_batches(mode):
    batches = few_batches(5)
    whole = trained(of_diffusers(1, max_grad_norm=2.0), joined(batches))
    ours = trained(of_ours_for_diffusers(max_grad_norm=2.0), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert ours.step.sync_gradients
    for (loss, returned), (x, _) in zip(ours.outputs, batches, strict=True):
        assert loss.shape == ()
        np.testing.assert_array_equal(returned.asnumpy(), x)  # the second value that `forward` returns
    assert int(ours.step.update_count.asnumpy()) == 2
    if mode == "graph":  # in PyNative mode mindone needs ZerosLikeExt, which has no kernel on CPU
        assert apart(trained(of_diffusers(max_grad_norm=2.0), batches).weights, whole.weights) > 5e-3


def test_another_step_than_diffusers_is_refused():
    with pytest.raises(TypeError, match=r"must be a 'mindone\.diffusers\.training_utils\.TrainStep'"):
        adopted.diffusers_train_step(nn.Dense(2, 2))


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, trainers.TrainOneStepWrapper.__init__)
    assert_takes_arguments_of(adopted.transformers_train_step, adapter.TrainOneStepWrapper.__init__)
