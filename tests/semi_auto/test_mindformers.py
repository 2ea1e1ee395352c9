"""What mindformers' Trainer trains with in semi-auto mode, after `use_in_trainer()` and without: compiled for eight
devices, simulated, and compared with single texts. Those of Llama run on the CPU, which lacks kernels of Qwen3: its
texts are simulated too, in a whole batch without micro-batches, whose other texts are padding."""

from __future__ import annotations

import functools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from tests.semi_auto.compiled import Compiler
from tests.semi_auto.mindformers_cases import (
    CLIP,
    GROUP_RATE,
    LAYOUTS,
    MICRO,
    RATE,
    TEXTS,
    WORDS_OF_TEXT,
    llama,
)
from tests.semi_auto.mindformers_machine import part_of, pipeline_of
from tests.support import no_device
from tests.support.package import package
from tests.support.small_llama import WORDS

EXTRA = "In the project's folder: pip install --no-deps -r tests/mindformers.txt"
package("mindformers.models.llama", EXTRA)
# tests/adopt/test_mindformers.py has the quick ones.
pytestmark = [pytest.mark.thorough, pytest.mark.distributed, pytest.mark.xdist_group("mindformers in parallel")]

ROUNDING = 2e-5  # of a weight's largest gradient
# Our step of Llama has each kind in each layout, and the others one kind in each, in turn.
MEAN_FIRST = [(("mean", "per token")[number % 2], layout) for number, layout in enumerate(LAYOUTS)]
TOKEN_FIRST = [(("per token", "mean")[number % 2], layout) for number, layout in enumerate(LAYOUTS)]


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A function that compiles a case of mindformers_cases.py, by its name."""
    if reason := no_device.why_not():
        pytest.skip(reason)
    with Compiler(tmp_path_factory.mktemp("mindformers"), worker="mindformers_compile_worker.py") as compiler:
        yield compiler


def texts():
    """Texts of different lengths, padded."""
    random = np.random.default_rng(3)
    result = random.integers(1, WORDS, size=(TEXTS, WORDS_OF_TEXT)).astype(np.int32)
    for text, length in zip(result, random.integers(3, WORDS_OF_TEXT + 1, size=TEXTS), strict=True):
        text[length:] = 0
    return result


class Sums(nn.Cell):
    """The loss of a text: its sum and its tokens, and the sum's gradients."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network, self.weights = network, ms.ParameterTuple(network.trainable_params())
        self.backward = ops.GradOperation(get_by_list=True, sens_param=True)

    def construct(self, text):
        numerator, tokens = self.network(text)
        seeds = ops.ones_like(numerator), ops.zeros_like(tokens)
        return numerator, tokens, self.backward(self.network, self.weights)(text, seeds)


def inputs_of(model, batch):
    return (batch,) if model == "llama" else (batch[:, :-1], batch[:, 1:])


@functools.cache
def of_each_text(steps, model, layers):
    """Sums, tokens, and gradients by weights' names, of each text alone."""
    return of_each_llama(layers) if model == "llama" else of_each_qwen3(steps, layers)


def of_each_qwen3(steps, layers):
    whole = WholeBatch(steps, layers)
    batch, losses, gradients = texts(), [], []
    tokens = (batch[:, :-1] != 0).sum(1)
    for index in range(TEXTS):
        loss, of_mean = whole.step(np.where(np.arange(TEXTS)[:, None] == index, batch, 0))
        losses.append(loss)
        gradients.append(of_mean)
    of_sums = {
        name: np.stack([number * one[name] for number, one in zip(tokens, gradients, strict=True)])
        for name in gradients[0]
    }
    return np.array(losses) * tokens, tokens, of_sums


class WholeBatch:
    """MindSpore's own step of Qwen3 on a whole batch of eight devices, each time from the weights `values` ."""

    def __init__(self, steps, layers):
        case = steps(f"whole, {layers} layers, qwen3")
        self.program, self.values = case.program, case.parameters

    def step(self, batch, changes=None):
        """The loss and its gradients. `changes` : of weights, before."""
        values = self.values | {name: self.values[name] + change for name, change in (changes or {}).items()}
        devices = pipeline_of([self.program], [values], 8, 1)
        results = devices.step(*(np.split(one, 8) for one in inputs_of("qwen3", batch)))
        after = devices.stages[0].state
        names = [name for name in self.values if f"stat.{name}" in self.values]  # SGD's state of each weight
        return _number(results[0][0]), {
            name: (values[name] - after[name][0].astype(np.float64)) / RATE for name in names
        }


def of_each_llama(layers):
    ms.set_context(mode=ms.GRAPH_MODE)
    network = llama(layers, per_token=True).set_train()
    step = Sums(network)
    results = [step(Tensor(text[None])) for text in texts()]
    numerators, tokens = (np.array([float(one[part].asnumpy().sum()) for one in results]) for part in (0, 1))
    gradients = {
        weight.name: np.stack([one[2][position].asnumpy() for one in results]).astype(np.float64)
        for position, weight in enumerate(network.trainable_params())
    }
    return numerators, tokens, gradients


def micro_batches(who, layout):
    """The texts of each micro-batch. mindformers takes the next part of the batch, we the next part of each device."""
    if who == "theirs":
        return np.split(np.arange(TEXTS), MICRO)
    by_device = np.arange(TEXTS).reshape(LAYOUTS[layout][0], MICRO, -1)
    return [by_device[:, index].ravel() for index in range(MICRO)]


class Expected:
    """The update: `loss` , the `gradients` , and their `norm` ."""

    def __init__(self, steps, who, kind, layout, model="llama"):
        numerators, tokens, gradients = of_each_text(steps, model, LAYOUTS[layout][2])
        groups = [np.arange(TEXTS)] if kind == "per token" else micro_batches(who, layout)
        self.loss = np.mean([numerators[group].sum() / tokens[group].sum() for group in groups])
        self.gradients = {
            name: np.mean([one[group].sum(0) / tokens[group].sum() for group in groups], 0)
            for name, one in gradients.items()
        }
        self.norm = np.sqrt(sum((one**2).sum() for one in self.gradients.values()))


class Trained:
    """A case after one step on all devices."""

    def __init__(self, steps, name, layout, changed=None, model="llama"):
        self.data, self.model, stages = LAYOUTS[layout]
        case = steps(name if model == "llama" else f"{name}, {model}", stages)
        of_stages = [case.stage(stage) for stage in range(stages)]
        self.values = {**of_stages[0].parameters, **(changed or {})}
        programs = [one.program for one in of_stages]
        self.pipeline = pipeline_of(programs, [self.values] * stages, self.data, self.model)
        devices = 8 // stages
        inputs = [np.split(one, self.data) for one in inputs_of(model, texts())]
        results = self.pipeline.step(*([parts[rank // self.model] for rank in range(devices)] for parts in inputs))
        # Loss, overflow, scale, rate, norm of each device of each stage.
        self.outputs = [[_number(one) for one in result] for of_stage in results for result in of_stage]

    @property
    def losses(self):
        return [outputs[0] for outputs in self.outputs]

    def parameter(self, name):
        return [float(value) for stage in self.pipeline.stages for value in np.ravel(stage.state.get(name, ()))]

    def movements(self, names):
        """Of each weight on each device: its name, how far it moved, and a function that takes the device's part of
        a whole."""
        for stage in self.pipeline.stages:
            for name in names & stage.state.keys():
                for rank, after in enumerate(stage.state[name]):
                    place = functools.partial(part_of, name, after.shape, self.data, self.model, rank=rank)
                    yield name, after - place(self.values[name].astype(np.float64)), place

    def distance(self, gradients, factor=1.0, rate_of=lambda name: RATE):
        """The largest difference of a weight's movement on any device from that by these gradients, as a part of the
        largest movement."""
        largest, seen = 0.0, set()
        for name, movement, place in self.movements(gradients.keys()):
            seen.add(name)
            whole = -rate_of(name) * factor * gradients[name]
            largest = max(largest, np.abs(movement - place(whole)).max() / np.abs(whole).max())
        assert seen == gradients.keys()
        return largest

    def stood_still(self, names):
        movements = [movement for _, movement, _ in self.movements(names)]
        return bool(movements) and not any(movement.any() for movement in movements)


def _number(output):
    return None if output is None else float(np.ravel(output)[0])


def rate_of(name):
    return GROUP_RATE if "attention" in name else RATE


@pytest.mark.parametrize(
    ("kind", "layout", "mode", "model"),
    [
        # Four stages first: their group over stages must not be there already on the first rank alone, which makes it
        # for data parallel devices of another layout.
        *((*pair, "", "qwen3") for pair in TOKEN_FIRST[::-1]),
        *((kind, layout, "", "llama") for kind in ("mean", "per token") for layout in LAYOUTS),
        *((kind, layout, ", auto parallel", "llama") for kind, layout in (("mean", "dp"), ("per token", "two stages"))),
    ],
)
def test_our_step_makes_the_update_of_all_micro_batches(steps, kind, layout, mode, model):
    """And each device of each stage reports the mean loss."""
    trained = Trained(steps, f"ours, {kind}, {layout}{mode}", layout, model=model)
    expected = Expected(steps, "ours", kind, layout, model)
    assert trained.distance(expected.gradients) < ROUNDING
    np.testing.assert_allclose(trained.losses, expected.loss, rtol=1e-5)
    other = Expected(steps, "theirs", "mean", layout, model)  # negative control: the mean over other micro-batches
    assert trained.distance(other.gradients) > 1e-3


@pytest.mark.parametrize(
    ("kind", "layout", "model"),
    [
        *((*pair, "llama") for pair in MEAN_FIRST),
        *(("mean", layout, "qwen3") for layout in ("dp", "split", "two stages")),
    ],
)
def test_mindformers_own_step_makes_it_too(steps, kind, layout, model):
    """It cuts the batch otherwise, and reports the sum of mean losses; in a pipeline on the last stage alone. So the
    simulation, and what ours is compared with, are right."""
    trained = Trained(steps, f"theirs, {kind}, {layout}", layout, model=model)
    expected = Expected(steps, "theirs", kind, layout, model)
    assert trained.distance(expected.gradients) < ROUNDING
    times = MICRO if kind == "mean" else 1
    np.testing.assert_allclose(trained.losses[-1], times * expected.loss, rtol=1e-5)
    if LAYOUTS[layout][2] > 1:
        assert trained.losses[0] == 0.0


@pytest.mark.parametrize("layout", ["dp", "two stages"])
def test_mindformers_own_step_cannot_train_qwen3_per_token(steps, layout):
    """The model has six outputs, and its cells take at most five."""
    stages = LAYOUTS[layout][2]
    case = steps(f"theirs, per token, {layout}, qwen3", stages)
    assert "Unstack" in case.stage(stages - 1).message


def test_the_simulated_gradient_of_qwen3_is_the_losss_slope(steps):
    whole, batch, width = WholeBatch(steps, 1), texts(), 1e-2
    gradients = whole.step(batch)[1]
    norm = np.sqrt(sum((one**2).sum() for one in gradients.values()))
    losses = [
        whole.step(batch, {name: (side * width / norm * one).astype(np.float32) for name, one in gradients.items()})[0]
        for side in (1, -1)
    ]
    assert (losses[0] - losses[1]) / (2 * width) == pytest.approx(norm, rel=2e-3)


@pytest.mark.parametrize(("kind", "layout"), MEAN_FIRST)
def test_scale_clipping_and_rates_of_groups(steps, kind, layout):
    """With a loss scale that is adjusted, a limit for spikes, and a group with a rate of its own."""
    trained = Trained(steps, f"ours, all options {kind}, {layout}", layout)
    expected = Expected(steps, "ours", kind, layout)
    factor = CLIP["max_grad_norm"] / expected.norm
    assert trained.distance(expected.gradients, factor, rate_of) < ROUNDING
    for outputs in trained.outputs:  # loss, overflow, scale, rate, norm
        np.testing.assert_allclose(outputs, [expected.loss, 0.0, 1024.0, RATE, expected.norm], rtol=1e-5)
    assert set(trained.parameter("current_default_lr")) == {RATE}
    assert set(trained.parameter("current_grouped_lr")) == {GROUP_RATE}


@pytest.mark.parametrize(("kind", "layout"), MEAN_FIRST[2::2])
def test_an_overflow_updates_no_stage(steps, kind, layout):
    too_large = {"gaccum_ms.scale_sense": np.array(np.inf, np.float32)}
    trained = Trained(steps, f"ours, all options {kind}, {layout}", layout, too_large)
    assert trained.stood_still(Expected(steps, "ours", kind, layout).gradients.keys())
    assert {outputs[1] for outputs in trained.outputs} == {1.0}


@pytest.mark.parametrize("layout", ["dp", "four stages"])
def test_a_spike_updates_no_stage(steps, layout):
    trained, expected = Trained(steps, f"ours, skipped, {layout}", layout), Expected(steps, "ours", "mean", layout)
    assert trained.stood_still(expected.gradients.keys())
    np.testing.assert_allclose([outputs[4] for outputs in trained.outputs], expected.norm, rtol=1e-5)


@pytest.mark.parametrize("layout", ["dp", "split", "two stages, split"])
def test_inputs_that_mindformers_broadcasts(steps, layout):
    trained, expected = Trained(steps, f"ours, broadcast, {layout}", layout), Expected(steps, "ours", "mean", layout)
    assert trained.distance(expected.gradients) < ROUNDING


def test_inputs_are_broadcast_too_when_windows_span_batches_later(steps):
    assert steps("ours, broadcast, then windows, dp").message == "LaidSums"


@pytest.mark.parametrize("layout", ["dp", "two stages"])
def test_callbacks(steps, layout):
    """The monitor shows the mean; callbacks find the model behind `network` and `_backbone` ."""
    assert steps(f"ours, says, {layout}").message == "LlamaForCausalLM, loss 12.0"
    assert steps(f"theirs, says, {layout}").message == f"LlamaForCausalLM, loss {12.0 / MICRO}"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("local norm", "'local_norm' must be left out"),
        ("interleaved", "'micro_batch_interleave_num' must be 1"),
        ("parts of sequences", "'parallel_config.seq_split_num' must be 1"),
    ],
)
def test_refused_before_compiling(steps, name, words):
    for layout, stages in (("dp", 1), ("two stages", 2)):
        case = steps(f"ours, {name}, {layout}", stages)
        assert all(words in case.stage(stage).message for stage in range(stages))
