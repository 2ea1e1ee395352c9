"""mindformers' MFTrainOneStepCell and Trainer: its setting takes effect with our step, on a small Llama of its own.

mindformers 2.0 cannot be installed beside MindSpore 2.10 from the package index: it needs hyper-parallel~=1.0.0, which
is not there, and cannot be imported without it. These tests import mindformers 1.9.0.
"""

from __future__ import annotations

import os
import tempfile
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms.adopt import mindformers as adopted
from tests.support.adopted import K, apart, assert_takes_arguments_of
from tests.support.package import package
from tests.support.reference import as_numpy
from tests.support.small_llama import RATE, WORDS, small_llama, tokens
from tests.support.two_ranks import run_on_ranks

os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp())  # otherwise mindformers writes into the working folder
EXTRA = "In the project's folder: pip install --no-deps -r tests/mindformers.txt"
wrapper = package("mindformers.wrapper.wrapper", EXTRA)
package("mindformers.models.llama", EXTRA)

ROUNDING = 2e-6


class OnCpu(wrapper.MFTrainOneStepCell):
    """mindformers' step, with a test for overflows that has kernels on CPU."""

    def start_overflow_check(self, pre_cond, compute_input):
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(ms.amp.all_finite(compute_output))


def texts(number: int, padded: bool = False) -> list[Tensor]:
    return [Tensor(batch) for batch in tokens(number, padded)]


def train(make_step, batches, per_token=False, rate=RATE):
    network = small_llama(per_token)
    optimizer = nn.Momentum(network.trainable_params(), rate, 0.9)
    step = make_step(network, optimizer).set_train()
    outputs = [step(batch) for batch in batches]
    return {one.name: as_numpy(one) for one in network.trainable_params()}, outputs, step


def numbers(output) -> list[float]:
    return [float(value.asnumpy().reshape(())) for value in output]


def test_micro_batches_train_as_the_whole_batch_with_all_five_outputs():
    given = {"use_clip_grad": True, "max_grad_norm": 0.3, "scale_sense": 64.0}
    rates = [0.1, 0.2, 0.3]
    whole, theirs, _ = train(lambda net, optimizer: OnCpu(net, optimizer, **given), texts(2), rate=rates)
    ours, outputs, _ = train(
        lambda net, optimizer: adopted.train_step(net, optimizer, gradient_accumulation_steps=K, **given),
        texts(2),
        rate=rates,
    )
    assert apart(ours, whole) < ROUNDING
    for own, reference in zip(outputs, theirs, strict=True):  # loss, overflow, scale, learning rate, norm
        np.testing.assert_allclose(numbers(own), numbers(reference), rtol=1e-5)


@pytest.mark.thorough
def test_tokens_weigh_alike_where_texts_have_padding():
    """With the model's own sums and counts, the step computes the mean over the tokens of all micro-batches."""
    batches = texts(2, padded=True)
    whole, theirs, _ = train(
        lambda net, optimizer: OnCpu(net, optimizer, calculate_per_token_loss=True), batches, per_token=True
    )
    ours, outputs, _ = train(
        lambda net, optimizer: adopted.train_step(
            net, optimizer, calculate_per_token_loss=True, gradient_accumulation_steps=K
        ),
        batches,
        per_token=True,
    )
    assert apart(ours, whole) < ROUNDING
    assert [numbers(one[:1]) for one in outputs] == [pytest.approx(numbers(one[:1]), rel=1e-5) for one in theirs]
    by_samples, _, _ = train(
        lambda net, optimizer: adopted.train_step(net, optimizer, gradient_accumulation_steps=K), batches
    )
    assert apart(by_samples, whole) > 1e-4


class Parts(nn.Cell):
    """Returns a loss as mindformers' newer models do: four means, or two pairs of sum and count and two more sums."""

    def __init__(self, per_token):
        super().__init__()
        self.per_token = per_token
        random = np.random.default_rng(7)
        self.table = ms.Parameter(Tensor(random.normal(size=(WORDS, 4)), ms.float32), name="table")

    def get_gpt_transformer_config(self):
        return None

    def construct(self, texts):
        vectors = ops.gather(self.table, texts, 0)
        sums = [ops.square(vectors - shift).sum().reshape((1,)) for shift in (0.0, 0.5, 1.0, 2.0)]
        number = ops.ones((1,), ms.float32) * texts.size
        if self.per_token:
            return sums[0], number, sums[1], number, sums[2], sums[3]
        return sums[0] / number, sums[1] / number, sums[2] / number, sums[3] / number


@pytest.mark.core(per_token=True)
@pytest.mark.parametrize("per_token", [False, True])
def test_losses_in_parts(per_token, monkeypatch):
    """The models of `use_legacy: False` in mindformers' configuration."""
    for module in (wrapper, package("mindformers.core.context.build_context", EXTRA)):
        monkeypatch.setattr(module, "is_legacy_model", lambda: False)
    given = {"calculate_per_token_loss": per_token}
    results = []
    for make_step in (
        lambda net, optimizer: OnCpu(net, optimizer, **given),
        lambda net, optimizer: adopted.train_step(net, optimizer, gradient_accumulation_steps=K, **given),
    ):
        network = Parts(per_token)
        step = make_step(network, nn.Momentum(network.trainable_params(), RATE, 0.9)).set_train()
        outputs = [step(batch) for batch in texts(2)]
        results.append((as_numpy(network.table), [numbers(one[:1]) for one in outputs]))
    (theirs, reference), (ours, own) = results
    np.testing.assert_allclose(ours, theirs, atol=ROUNDING)
    np.testing.assert_allclose(own, reference, rtol=1e-5)


@pytest.fixture(scope="module")
def whole_batches():
    """A function that trains with mindformers' step on two batches, each with the texts of all ranks."""

    def train_whole(ranks: int):
        batches = [Tensor(batch) for batch in tokens(2 * ranks).reshape(2, -1, 9)]
        clip = {"use_clip_grad": True, "max_grad_norm": 0.3}
        weights, outputs, _ = train(lambda net, optimizer: OnCpu(net, optimizer, **clip), batches)
        return weights, [numbers(output) for output in outputs]

    return train_whole


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_the_trainers_setting_takes_effect(ranks, whole_batches, tmp_path):
    """Stand-alone, and in data parallel mode, with mindformers' own Trainer and monitor."""
    weights, outputs = whole_batches(ranks)
    for result in run_on_ranks(ranks, "mindformers_worker.py", tmp_path, "ours"):
        assert int(result["steps"]) == K
        ours = {name.removeprefix("weight/"): value for name, value in result.items() if name.startswith("weight/")}
        assert apart(ours, weights) < ROUNDING
        np.testing.assert_allclose(result["outputs"][:, 1:], np.array(outputs)[:, 1:], rtol=1e-5)
        if ranks == 1:  # on two ranks the loss is the rank's own
            np.testing.assert_allclose(result["outputs"][:, 0], np.array(outputs)[:, 0], rtol=1e-5)


@pytest.mark.thorough
@pytest.mark.distributed
def test_mindformers_alone_resets_it(tmp_path):
    (result,) = run_on_ranks(1, "mindformers_worker.py", tmp_path, "theirs")
    assert int(result["steps"]) == 1
    assert result["lacks_kernel"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"local_norm": True}, "'local_norm' must be left out"),
        ({"gradient_accumulation_steps": 0}, "'gradient_accumulation_steps' must be at least 1"),
    ],
)
def test_errors(given, words):
    network = nn.Dense(2, 2)
    with pytest.raises(ValueError, match=words):
        adopted.train_step(network, nn.SGD(network.trainable_params()), **given)


class Expert(nn.Cell):
    """Counts what its tokens are, as mindformers' experts do."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.ones(2), ms.float32))
        self.expert_load = ms.Parameter(Tensor(np.zeros(2), ms.float32), requires_grad=False)

    def construct(self, x):
        return (x * self.weight).mean()


def test_a_forward_that_changes_what_callbacks_read_is_refused_in_semi_auto_mode(parallel_context):
    network = Expert()
    optimizer = nn.SGD(network.trainable_params())
    adopted.train_step(network, optimizer)
    parallel_context(parallel_mode="semi_auto_parallel", device_num=8, global_rank=0)
    with pytest.raises(ValueError, match=r"must have no Parameter that its forward changes .* got expert_load"):
        adopted.train_step(network, optimizer)


@pytest.mark.parametrize("kind", ["is_moe_model", "is_mtp_model"])
def test_parts_of_a_loss_that_mindformers_monitor_would_read_are_refused(kind, monkeypatch):
    build_context = package("mindformers.core.context.build_context", EXTRA)
    monkeypatch.setattr(build_context, "is_legacy_model", lambda: False)
    network = nn.Dense(2, 2)
    for name in ("is_moe_model", "is_mtp_model"):
        setattr(network, name, lambda name=name: name == kind)
    trainer = SimpleNamespace(config=SimpleNamespace(print_separate_loss=True))
    with pytest.raises(ValueError, match="'print_separate_loss' must be False for a model with experts"):
        adopted._refuse_parts_of_loss(trainer, network)
    trainer.config.print_separate_loss = False
    adopted._refuse_parts_of_loss(trainer, network)


def test_a_schedule_for_which_models_return_other_losses_is_refused(parallel_context):
    config = SimpleNamespace(micro_batch_interleave_num=1, parallel_config=SimpleNamespace(seq_split_num=1))
    adopted._check_settings(SimpleNamespace(config=config))
    parallel_context(pipeline_config={"pipeline_interleave": True, "pipeline_scheduler": "zero_bubble_v"})
    with pytest.raises(ValueError, match="'pipeline_scheduler' must not be 'zero_bubble_v'"):
        adopted._check_settings(SimpleNamespace(config=config))


@pytest.mark.thorough
def test_rates_of_groups_are_recorded():
    """The step returns the default rate, as mindformers' own, whose monitor reads both from its register."""
    from mindformers.core.lr import ConstantWarmUpLR
    from mindformers.utils.parameter_register import parameter_register

    def schedule(rate):
        return ConstantWarmUpLR(learning_rate=rate, warmup_steps=2, total_steps=10)

    recorded = []
    for make_step in (
        OnCpu,
        lambda net, optimizer, **given: adopted.train_step(net, optimizer, gradient_accumulation_steps=K, **given),
    ):
        parameter_register._params.clear()
        network = small_llama()
        first, *others = network.trainable_params()
        groups = [{"params": [first], "lr": schedule(0.2)}, {"params": others, "lr": schedule(0.1)}]
        rates = {"lr_scheduler": schedule(0.1), "grouped_lr_scheduler": [{"lr_scheduler": schedule(0.2)}]}
        step = make_step(network, nn.Momentum(groups, schedule(0.1), 0.9), **rates).set_train()
        for batch in texts(2):
            outputs = numbers(step(batch)[:4])
        registered = {name: as_numpy(value) for name, value in parameter_register.items()}
        recorded.append((outputs, registered, {one.name: as_numpy(one) for one in network.trainable_params()}))
    parameter_register._params.clear()
    (theirs, by_theirs, whole), (ours, by_ours, weights) = recorded
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[3] == pytest.approx(0.05)
    assert by_ours.keys() == {"current_default_lr", "current_grouped_lr"}
    for name, value in by_ours.items():
        np.testing.assert_allclose(value, by_theirs[name], rtol=1e-6)
    assert apart(weights, whole) < ROUNDING


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, wrapper.MFTrainOneStepCell.__init__)
