"""mindone's three training steps: ours train on batches as theirs on the batch that joins them."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
from mindspore import Tensor

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
CLIP = {"clip_grad": True, "clip_norm": 0.3}


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


def test_trainers_clipping_and_the_average_are_of_the_window(mode):
    batches = few_batches()
    whole = trained(with_average(functools.partial(of_mindone, 1, **CLIP)), joined(batches))
    ours = trained(with_average(functools.partial(of_ours, **CLIP)), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING


def of_ours_for_adapter(**arguments):
    return lambda network, optimizer: adopted.transformers_train_step(
        network, optimizer, gradient_accumulation_steps=K, **arguments
    )


def test_transformers_clips_the_window():
    batches = few_batches()
    clip = {"clip_grad": "value", "clip_value": 0.1}
    whole = trained(lambda *of: adapter.TrainOneStepWrapper(*of, **clip), joined(batches))
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


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, trainers.TrainOneStepWrapper.__init__)
    assert_takes_arguments_of(adopted.transformers_train_step, adapter.TrainOneStepWrapper.__init__)
