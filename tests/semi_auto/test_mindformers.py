"""What mindformers' Trainer trains with in semi-auto mode after `use_in_trainer()` , compiled for eight devices and
simulated, makes the update of MindSpore's own step of the whole batch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.semi_auto.conftest import compiler_of
from tests.semi_auto.mindformers_cases import CLIP, GROUP_RATE, LAYOUTS, RATE, TEXTS, WORDS_OF_TEXT
from tests.semi_auto.ran import Ran
from tests.semi_auto.whole_batch import UpdateBySGD
from tests.support.package import package
from tests.support.small_llama import WORDS

package("mindformers.models.llama", "In the project's folder: pip install --no-deps -r tests/mindformers.txt")
pytestmark = [pytest.mark.distributed, pytest.mark.xdist_group("mindformers in parallel")]

ROUNDING = 2e-5  # of a weight's largest gradient


steps = compiler_of("mindformers_cases")


def texts(name):
    """The inputs of a case: texts of different lengths, padded. Those of a mean over micro-batches have one length."""
    random = np.random.default_rng(3)
    result = random.integers(1, WORDS, size=(TEXTS, WORDS_OF_TEXT)).astype(np.int32)
    for text, length in zip(result, random.integers(3, WORDS_OF_TEXT + 1, size=TEXTS), strict=True):
        text[length if name != "mean" else WORDS_OF_TEXT :] = 0
    return (result[:, :-1], result[:, 1:]) if "qwen3" in name else (result,)


def trained(steps, name, layout, data, changed=None):
    """A case after one step on all devices."""
    stages = LAYOUTS[layout][1]
    ran = Ran(steps(name, stages), stages=stages, steps=0)
    for parameter, value in (changed or {}).items():
        for stage in ran.stages:
            stage.state[parameter] = [value] * stage.ranks
    ran.step(data)
    return ran


def outputs(ran):
    """Loss, overflow, scale, rate and norm of each device of each stage."""
    return [[None if one is None else float(np.ravel(one)[0]) for one in result] for result in ran.results]


def run(steps, name, layout):
    """A case after one step, and the whole batch's loss and update."""
    data = texts(name)
    ran = trained(steps, name, layout, data)
    whole = trained(steps, "qwen3, whole" if name == "qwen3" else "llama, whole", "dp", data)
    weights = {name: value for name, value in whole.values.items() if f"stat.{name}" in whole.values}
    assert all(np.array_equal(value, ran.values[name]) for name, value in weights.items())
    gradients = {name: (value - whole.parameter(name)[0].astype(np.float64)) / RATE for name, value in weights.items()}
    update = UpdateBySGD(weights, gradients)
    return ran, whole.losses[0], update.move(lambda gradient: gradient, lambda name: RATE)


# Qwen3 first: mindformers' context of a Llama would make it a model of the older kind.
@pytest.mark.parametrize(("name", "layout"), [("qwen3", "two stages"), ("mean", "dp"), ("per token", "op")])
def test_our_step_makes_the_whole_batchs_update(steps, name, layout):
    """In a pipeline; in auto parallel mode; with optimizer parallel, and inputs that mindformers broadcasts. Each
    device reports the mean loss."""
    ran, loss, update = run(steps, name, layout)
    assert ran.distance(update) < ROUNDING
    np.testing.assert_allclose([one[0] for one in outputs(ran)], loss, rtol=1e-5)


def test_scale_clipping_and_rates_of_groups(steps):
    """With a loss scale that is adjusted, a limit for spikes, and a group with a rate of its own."""
    ran, loss, update = run(steps, "options", "two stages")
    factor = CLIP["max_grad_norm"] / update.norm
    assert factor < 1.0
    update.move(lambda gradient: factor * gradient, lambda name: GROUP_RATE if "attention" in name else RATE)
    assert ran.distance(update) < ROUNDING
    np.testing.assert_allclose(outputs(ran), [[loss, 0.0, 1024.0, RATE, update.norm]] * 8, rtol=1e-5)
    assert set(map(float, ran.parameter("current_default_lr"))) == {RATE}
    assert {float(rate[0]) for rate in ran.parameter("current_grouped_lr")} == {GROUP_RATE}


def test_an_overflow_updates_no_stage(steps):
    changed = {"gaccum_ms.scale_sense": np.array(np.inf, np.float32)}
    ran = trained(steps, "options", "two stages", texts("options"), changed)
    assert {one[1] for one in outputs(ran)} == {1.0}
    assert not any(ran.moved([name for name in ran.values if f"stat.{name}" in ran.values]))


def test_callbacks(steps):
    """The monitor shows the mean; callbacks find the model behind `network` and `_backbone` . Inputs are broadcast too
    when windows span batches later."""
    assert steps("says").message == "LlamaForCausalLM, loss 12.0, LaidSums"


def test_refused_before_compiling(steps):
    assert "'parallel_config.seq_split_num' must be 1" in steps("parts of sequences").message
