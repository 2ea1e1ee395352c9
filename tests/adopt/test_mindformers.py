"""mindformers' MFTrainOneStepCell and Trainer: its setting takes effect with our step, on a small Llama of its own.

mindformers 2.0 cannot be installed beside MindSpore 2.10 from the package index: it needs hyper-parallel~=1.0.0, which
is not there, and cannot be imported without it. These tests import mindformers 1.9.0.
"""

from __future__ import annotations

import functools
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
from tests.support.paths import worker
from tests.support.reference import as_numpy
from tests.support.small_llama import WORDS, small_llama, tokens

os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp())  # otherwise mindformers writes into the working folder
EXTRA = "In the project's folder: pip install --no-deps -r tests/mindformers.txt"
wrapper = package("mindformers.wrapper.wrapper", EXTRA)
package("mindformers.models.llama", EXTRA)

ROUNDING = 2e-6
RATES = [0.1, 0.2, 0.3]


class OnCpu(wrapper.MFTrainOneStepCell):
    """mindformers' step, with a test for overflows that has kernels on CPU."""

    def start_overflow_check(self, pre_cond, compute_input):
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(ms.amp.all_finite(compute_output))


def train(make_step):
    """The results on two batches: the weights, and each batch's loss, overflow, scale, learning rate and norm."""
    network = small_llama()
    optimizer = nn.Momentum(network.trainable_params(), RATES, 0.9)
    step = make_step(network, optimizer, use_clip_grad=True, max_grad_norm=0.3).set_train()
    outputs = [[float(value.asnumpy().reshape(())) for value in step(Tensor(batch))] for batch in tokens(2)]
    return {one.name: as_numpy(one) for one in network.trainable_params()}, outputs


@pytest.fixture(scope="module")
def whole_batches():
    """mindformers' own step."""
    return train(OnCpu)


def test_micro_batches_train_as_the_whole_batch_with_all_five_outputs(whole_batches):
    ours, outputs = train(functools.partial(adopted.train_step, gradient_accumulation_steps=K))
    assert apart(ours, whole_batches[0]) < ROUNDING
    np.testing.assert_allclose(outputs, whole_batches[1], rtol=1e-5)


@pytest.mark.distributed
def test_the_trainers_setting_takes_effect(whole_batches, programs, tmp_path):
    """With mindformers' own Trainer and monitor."""
    done = programs.run(worker("mindformers_worker.py"), str(tmp_path), folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = np.load(tmp_path / "results.npz")
    assert int(result["steps"]) == K
    ours = {name.removeprefix("weight/"): value for name, value in result.items() if name.startswith("weight/")}
    assert apart(ours, whole_batches[0]) < ROUNDING
    np.testing.assert_allclose(result["outputs"], whole_batches[1], rtol=1e-5)


class Parts(nn.Cell):
    """Returns a loss as mindformers' newer models do: two pairs of a sum and its number of tokens, and two more sums.
    Texts have padding."""

    def __init__(self):
        super().__init__()
        random = np.random.default_rng(7)
        self.table = ms.Parameter(Tensor(random.normal(size=(WORDS, 4)), ms.float32), name="table")

    def get_gpt_transformer_config(self):
        return None

    def construct(self, texts):
        valid = (texts != 0).astype(ms.float32).expand_dims(-1)
        vectors = ops.gather(self.table, texts, 0)
        sums = [(ops.square(vectors - shift) * valid).sum().reshape((1,)) for shift in (0.0, 0.5, 1.0, 2.0)]
        number = valid.sum().reshape((1,))
        return sums[0], number, sums[1], number, sums[2], sums[3]


def test_losses_in_parts_and_tokens_that_weigh_alike(monkeypatch):
    """The models of `use_legacy: False` in mindformers' configuration."""
    for module in (wrapper, package("mindformers.core.context.build_context", EXTRA)):
        monkeypatch.setattr(module, "is_legacy_model", lambda: False)
    results = []
    for make_step in (OnCpu, functools.partial(adopted.train_step, gradient_accumulation_steps=K)):
        network = Parts()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        step = make_step(network, optimizer, calculate_per_token_loss=True).set_train()
        losses = [float(step(Tensor(batch))[0].asnumpy().reshape(())) for batch in tokens(2, padded=True)]
        results.append((as_numpy(network.table), losses))
    (theirs, reference), (ours, own) = results
    np.testing.assert_allclose(ours, theirs, atol=ROUNDING)
    np.testing.assert_allclose(own, reference, rtol=1e-5)


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


def test_parts_of_a_loss_that_mindformers_monitor_would_read_are_refused(monkeypatch):
    build_context = package("mindformers.core.context.build_context", EXTRA)
    monkeypatch.setattr(build_context, "is_legacy_model", lambda: False)
    network = nn.Dense(2, 2)
    network.is_moe_model, network.is_mtp_model = bool, lambda: True
    trainer = SimpleNamespace(config=SimpleNamespace(print_separate_loss=True))
    with pytest.raises(ValueError, match="'print_separate_loss' must be False for a model with experts"):
        adopted._refuse_parts_of_loss(trainer, network)
    trainer.config.print_separate_loss = False
    adopted._refuse_parts_of_loss(trainer, network)


def test_rates_of_groups_are_recorded(pynative):
    """Where mindformers' monitor reads them, after two updates of a warm-up; the step returns the default rate."""
    from mindformers.core.lr import ConstantWarmUpLR
    from mindformers.utils.parameter_register import parameter_register

    def schedule(rate):
        return ConstantWarmUpLR(learning_rate=rate, warmup_steps=2, total_steps=10)

    parameter_register._params.clear()
    network = nn.Dense(2, 1)  # in a micro-batch of one sample, its output is the loss
    groups = [{"params": [network.weight], "lr": schedule(0.2)}, {"params": [network.bias], "lr": schedule(0.1)}]
    rates = {"lr_scheduler": schedule(0.1), "grouped_lr_scheduler": [{"lr_scheduler": schedule(0.2)}]}
    optimizer = nn.Momentum(groups, schedule(0.1), 0.9)
    step = adopted.train_step(network, optimizer, gradient_accumulation_steps=K, **rates).set_train()
    for _ in range(2):
        outputs = step(Tensor(np.ones((K, 2), np.float32)))
    registered = {name: as_numpy(value).tolist() for name, value in parameter_register.items()}
    parameter_register._params.clear()
    assert float(outputs[3]) == pytest.approx(0.05)
    assert registered == {"current_default_lr": pytest.approx(0.05), "current_grouped_lr": [pytest.approx(0.1)]}


def test_arguments():
    assert_takes_arguments_of(adopted.train_step, wrapper.MFTrainOneStepCell.__init__)
