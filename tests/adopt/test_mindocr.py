"""mindocr's TrainOneStepWrapper: our step trains on batches as theirs on the batch that joins them.

mindocr 0.5.0 as a whole cannot be imported beside MindSpore 2.10 ("No module named 'mindspore.parallel._transformer'"):
its step is imported without the rest.
"""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
from mindspore import Tensor

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


def averages(step) -> dict[str, np.ndarray]:
    return {one.name: as_numpy(one) for one in step.get_parameters() if one.name.startswith("ema.")}


def test_clipping_and_the_average_are_of_the_window(mode):
    """The step has the three outputs of mindocr's step."""
    batches, results = few_batches(), []
    for make_step, data in ((functools.partial(of_mindocr, 1), joined(batches)), (of_ours, batches)):

        def with_average(network, optimizer, make_step=make_step):
            average = averaging.EMA(network, 0.9)
            return make_step(ema=average, clip_grad=True, clip_norm=0.3)(network, optimizer)

        results.append(trained(with_average, data))
    whole, ours = results
    assert apart(ours.weights, whole.weights) < ROUNDING
    assert apart(averages(ours.step), averages(whole.step)) < ROUNDING
    assert [len(output) for output in ours.outputs] == [3] * len(batches)
    windows = [np.mean(losses(ours.outputs)[start : start + K]) for start in (0, K)]
    np.testing.assert_allclose(windows, losses(whole.outputs), rtol=1e-5)


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, theirs.TrainOneStepWrapper.__init__)
