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
from mindspore import Tensor, nn, ops, train

from gaccum_ms.adopt import mindformers as adopted
from tests.support.adopted import K, apart, assert_takes_arguments_of
from tests.support.package import package
from tests.support.reference import as_numpy
from tests.support.small_llama import TEXTS, WORDS, small_llama, tokens

os.environ.setdefault("LOG_MF_PATH", tempfile.mkdtemp())  # otherwise mindformers writes into the working folder
EXTRA = "In the project's folder: pip install --no-deps -r tests/mindformers.txt"
wrapper = package("mindformers.wrapper.wrapper", EXTRA)
package("mindformers.models.llama", EXTRA)
from mindformers.tools.register import MindFormerConfig  # noqa: E402
from mindformers.trainer.causal_language_modeling import CausalLanguageModelingTrainer  # noqa: E402

ROUNDING = 2e-6
RATES = [0.1, 0.2, 0.3]


class OnCpu(wrapper.MFTrainOneStepCell):
    """mindformers' step, with a test for overflows that has kernels on CPU."""

    def start_overflow_check(self, pre_cond, compute_input):
        return pre_cond, compute_input

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(ms.amp.all_finite(compute_output))


def numbers(outputs):
    return [float(value.asnumpy().reshape(())) for value in outputs]


def configuration(folder):
    runner = {"epochs": 1, "batch_size": TEXTS // K, "gradient_accumulation_steps": K, "sink_mode": False}
    step = {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True, "max_grad_norm": 0.3}
    return MindFormerConfig(
        run_mode="train", output_dir=str(folder / "output"), use_parallel=False, resume_training=False, do_eval=False,
        profile=False, load_checkpoint="", use_legacy=True, use_legacy_format=True, micro_batch_interleave_num=1,
        runner_config=runner, runner_wrapper=step, context={"mode": 0, "device_target": "CPU"},
        trainer={"type": "CausalLanguageModelingTrainer", "model_name": "llama"}, optimizer={"type": "AdamW"},
        model={"model_config": {"type": "LlamaConfig"}, "arch": {"type": "LlamaForCausalLM"}},
        train_dataset={"input_columns": ["input_ids"], "batch_size": TEXTS // K},
        train_dataset_task={"type": "CausalLanguageModelDataset"}, callbacks=[{"type": "MFLossMonitor"}],
        parallel_config={"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1},
        parallel={"parallel_mode": 0}, checkpoint={"load_path": "", "no_load_optim": False}, monitor_config={},
        recompute_config={"recompute": False}, moe_config={"expert_num": 1},
    )  # fmt: skip


def test_by_the_trainers_setting_micro_batches_train_as_the_whole_batch(tmp_path, monkeypatch):
    """With mindformers' own Trainer and monitor. Other callbacks get the five outputs of mindformers' step: loss,
    overflow, scale, learning rate and norm."""
    monkeypatch.chdir(tmp_path)
    adopted.use_in_trainer()
    adopted.use_in_trainer()  # a second call does nothing
    networks, found = (small_llama(), small_llama()), []
    whole, ours = (nn.Momentum(network.trainable_params(), RATES, 0.9) for network in networks)
    step = OnCpu(networks[0], whole, use_clip_grad=True, max_grad_norm=0.3).set_train()
    expected = [numbers(step(Tensor(batch))) for batch in tokens(2)]
    note = train.LambdaCallback(on_train_step_end=lambda run: found.append(numbers(run.original_args().net_outputs)))
    config, texts = configuration(tmp_path), tokens(2).reshape(2 * TEXTS, -1)
    CausalLanguageModelingTrainer(model_name="llama").train(
        config=config,
        network=networks[1],
        dataset=ms.dataset.NumpySlicesDataset({"input_ids": texts}, shuffle=False).batch(TEXTS),
        optimizer=ours,
        callbacks=[note],
        is_full_config=True,
    )
    assert config.runner_config.gradient_accumulation_steps == K
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert apart(*({one.name: as_numpy(one) for one in network.trainable_params()} for network in networks)) < ROUNDING


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
