"""mindocr's TrainOneStepWrapper: its errors, and correct results with our step.

mindocr 0.5.0 as a whole cannot be imported beside MindSpore 2.10 ("No module named 'mindspore.parallel._transformer'"):
its step is imported without the rest.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from gaccum_ms.adopt import mindocr as adopted
from tests.support.adopted import ROUNDING, K, apart, assert_takes_arguments_of, few_batches, joined, losses, trained
from tests.support.package import modules_alone
from tests.support.reference import as_numpy

theirs, averaging = modules_alone("mindocr", "mindocr.utils.train_step_wrapper", "mindocr.utils.ema")
ONE = Tensor(1.0, ms.float32)


def of_mindocr(steps=K, **arguments):
    return lambda network, optimizer: theirs.TrainOneStepWrapper(
        network, optimizer, ONE, gradient_accumulation_steps=steps, **arguments
    )


def of_ours(steps=K, **arguments):
    return lambda network, optimizer: adopted.train_step(
        network, optimizer, ONE, gradient_accumulation_steps=steps, **arguments
    )


def with_average(make_step, ema_class):
    return lambda network, optimizer: make_step(ema=ema_class(network, 0.9))(network, optimizer)


def averages(step) -> dict[str, np.ndarray]:
    return {one.name: as_numpy(one) for one in step.get_parameters() if one.name.startswith("ema.")}


def test_the_average_moves_once_per_update(mode):
    batches = few_batches()
    whole = trained(with_average(lambda **ema: of_mindocr(1, **ema), averaging.EMA), joined(batches))
    micro = trained(with_average(of_mindocr, averaging.EMA), batches)
    ours = trained(with_average(of_ours, averaging.EMA), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert apart(averages(micro.step), averages(whole.step)) > 5e-5


def test_clipping_is_of_the_window():
    """The step has the three outputs of mindocr's step."""
    batches = few_batches()
    clip = {"clip_grad": True, "clip_norm": 0.3}
    whole = trained(of_mindocr(1, **clip), joined(batches))
    ours = trained(of_ours(**clip), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert [len(output) for output in ours.outputs] == [3] * len(batches)
    np.testing.assert_allclose(losses(ours.outputs), losses(trained(of_mindocr(**clip), batches).outputs), rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"clip_grad": "norm"}, "'clip_grad' must be a bool"),
        ({"micro_size": 0}, "'micro_size' must be at least 1"),
    ],
)
def test_errors(given, words):
    with pytest.raises((TypeError, ValueError), match=words):
        trained(of_ours(**given), [])


def test_only_a_fixed_scale_can_update_in_spite_of_overflows():
    def make_step(network, optimizer):
        return adopted.train_step(
            network, optimizer, nn.DynamicLossScaleUpdateCell(64, 2, 10), drop_overflow_update=False
        )

    with pytest.raises(ValueError, match="updates in spite of an overflow need a fixed loss scale"):
        trained(make_step, [])


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, theirs.TrainOneStepWrapper.__init__)
