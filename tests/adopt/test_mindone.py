"""mindone's three training steps: their errors, and correct results with ours."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms.adopt import mindone as adopted
from tests.support.adopted import ROUNDING, K, apart, assert_takes_arguments_of, few_batches, joined, losses, trained
from tests.support.package import package
from tests.support.reference import as_numpy

EXTRA = "mindone is in the extra 'trainers'"
trainers = package("mindone.trainers.train_step", EXTRA)
averaging = package("mindone.trainers.ema", EXTRA)
adapter = package("mindone.transformers.mindspore_adapter.train_onestep_wrapper", EXTRA)
diffusers = package("mindone.diffusers.training_utils", EXTRA)
ONE = Tensor(1.0, ms.float32)


def of_mindone(steps=K, **arguments):
    return lambda network, optimizer: trainers.TrainOneStepWrapper(
        network, optimizer, ONE, gradient_accumulation_steps=steps, **arguments
    )


def of_ours(steps=K, **arguments):
    return lambda network, optimizer: adopted.train_step(
        network, optimizer, ONE, gradient_accumulation_steps=steps, **arguments
    )


def with_average(make_step):
    return lambda network, optimizer: make_step(ema=averaging.EMA(network, 0.9, offloading=False))(network, optimizer)


def averages(step) -> dict[str, np.ndarray]:
    return {one.name: as_numpy(one) for one in step.get_parameters() if one.name.startswith("ema.")}


def test_trainers_the_average_moves_once_per_update(mode):
    batches = few_batches()
    whole = trained(with_average(lambda **ema: of_mindone(1, **ema)), joined(batches))
    micro = trained(with_average(of_mindone), batches)
    ours = trained(with_average(of_ours), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert apart(averages(micro.step), averages(whole.step)) > 5e-5


def by_rates(weights):
    return nn.SGD(weights, [0.02 * (number + 1) for number in range(12)])


def test_trainers_rates_are_per_update_in_both(mode):
    """mindone's FIXME says "get_lr() will not increase global step". Its rates advance with updates, not with batches,
    so it equals K = 1 on the joined batch, as ours does."""
    batches = few_batches()
    clip = {"clip_grad": True, "clip_norm": 0.3}
    whole = trained(of_mindone(1, **clip), joined(batches), by_rates)
    for make_step in (of_mindone, of_ours):
        run = trained(make_step(**clip), batches, by_rates)
        assert apart(run.weights, whole.weights) < ROUNDING
        assert int(run.optimizer.global_step.asnumpy()[0]) == 2


def of_adapter(steps=K, **arguments):
    return lambda network, optimizer: adapter.TrainOneStepWrapper(
        network, optimizer, gradient_accumulation_steps=steps, **arguments
    )


def of_ours_for_adapter(steps=K, **arguments):
    return lambda network, optimizer: adopted.transformers_train_step(
        network, optimizer, gradient_accumulation_steps=steps, **arguments
    )


@pytest.mark.parametrize("clip_grad", ["none", "norm", "value"])
def test_transformers_accumulates_at_all(clip_grad):
    batches = few_batches()
    clip = {"clip_grad": clip_grad, "clip_value": 0.1}
    whole = trained(of_adapter(1, **clip), joined(batches))
    with pytest.raises(AttributeError, match="accumulated_grads"):
        trained(of_adapter(**clip), batches)
    ours = trained(of_ours_for_adapter(**clip), batches)
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


def test_errors():
    for given, error, words in (
        ({"zero_helper": object()}, ValueError, "'zero_helper' must be left out.*ShardedOptimizer"),
        ({"ema": averaging}, TypeError, "'ema' must be"),
    ):
        with pytest.raises(error, match=words):
            trained(of_ours(**given), [])
    with pytest.raises(ValueError, match="'clip_grad' must be one of"):
        trained(of_ours_for_adapter(clip_grad="most"), [])
    with pytest.raises(TypeError, match=r"must be a 'mindone\.diffusers\.training_utils\.TrainStep'"):
        adopted.diffusers_train_step(nn.Dense(2, 2))


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, trainers.TrainOneStepWrapper.__init__)
    assert_takes_arguments_of(adopted.transformers_train_step, adapter.TrainOneStepWrapper.__init__)
