"""mindocr's TrainOneStepWrapper: its errors, and correct results with our step.

mindocr 0.5.0 as a whole cannot be imported beside MindSpore 2.10 ("No module named 'mindspore.parallel._transformer'"):
its step is imported without the rest.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor

from gaccum_ms.adopt import mindocr as adopted
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
from tests.support.package import modules_alone

theirs, averaging = modules_alone("mindocr", "mindocr.utils.train_step_wrapper", "mindocr.utils.ema")
ONE = Tensor(1.0, ms.float32)


def test_the_average_moves_and_gradients_are_clipped_once_per_update():
    """The step has the three outputs of mindocr's step."""
    batches, clip = few_batches(), {"clip_grad": True, "clip_norm": 1.0}
    of_theirs, of_ours = (
        with_average(steps(step, ONE), lambda network: averaging.EMA(network, 0.9))
        for step in (theirs.TrainOneStepWrapper, adopted.train_step)
    )
    whole = trained(of_theirs(1, **clip), joined(batches))
    micro, ours = trained(of_theirs(**clip), batches), trained(of_ours(**clip), batches)
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert apart(averages(micro.step), averages(whole.step)) > 5e-5
    assert [len(output) for output in ours.outputs] == [3] * 2 * K
    np.testing.assert_allclose(losses(ours.outputs), losses(micro.outputs), rtol=1e-5)


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, theirs.TrainOneStepWrapper.__init__)
