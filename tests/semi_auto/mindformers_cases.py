"""The training steps that mindformers' Trainer gives to `Model.train` in semi-auto mode after `use_in_trainer()` . A
small Llama, or a Qwen3, lies on eight devices.

mindformers is imported where a case is made, so that only the ranks that compile import it.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from tests.semi_auto.cases import AUTO_PARALLEL, OPTIMIZER_PARALLEL, SUM
from tests.support.small_llama import small_llama
from tests.support.small_qwen3 import ByName, new_models, small_qwen3

MICRO = 4  # micro-batches
WORDS_OF_TEXT = 6  # longer texts would make constants that the files abbreviate
LAYOUTS = {"dp": (8, 1), "op": (8, 1), "two stages": (4, 2)}  # (data parallel, stages)
LAYERS = 2
TEXTS = 32  # on all devices
RATE, GROUP_RATE = 10.0, 20.0  # large, so that weights' rounding is small beside their movement
CLIP = {"use_clip_grad": True, "max_grad_norm": 0.1}


def parallel_of(layout):
    """mindformers' settings of a layout."""
    data, stages = LAYOUTS[layout]
    return {"data_parallel": data, "pipeline_stage": stages, "micro_batch_num": MICRO if stages > 1 else 1}


def model_of(layout, per_token, is_qwen3):
    """How it lies on devices is known to the model."""
    from mindformers.modules.transformer.transformer import TransformerOpParallelConfig

    length, parallel = WORDS_OF_TEXT - 1, parallel_of(layout)
    if is_qwen3:
        return small_qwen3(per_token, LAYERS, length, parallel | {"model_parallel": 1})
    laid = TransformerOpParallelConfig(**parallel)
    return small_llama(per_token, num_layers=LAYERS, seq_length=length, num_heads=4, parallel_config=laid)


def schedule(rate=RATE):
    from mindformers.core.lr import ConstantWarmUpLR

    return ConstantWarmUpLR(learning_rate=rate, warmup_steps=0, total_steps=10)


def configuration(layout, per_token, wrapper, parallel, broadcasts, columns, **more):
    """mindformers' configuration. `wrapper` : more of `runner_wrapper` ; `parallel` : of `parallel_config` ;
    `columns` : of the data set."""
    from mindformers.tools.register import MindFormerConfig

    data, stages = LAYOUTS[layout]
    given = {
        "run_mode": "train", "output_dir": "output", "use_parallel": False, "use_legacy": True,
        "use_legacy_format": True, "do_eval": False, "profile": False, "resume_training": False, "load_checkpoint": "",
        "micro_batch_interleave_num": 1, "calculate_per_token_loss": per_token, "optimizer": {"type": "AdamW"},
        "trainer": {"type": "CausalLanguageModelingTrainer", "model_name": "llama"},
        "runner_config": {
            "epochs": 1, "batch_size": 1, "gradient_accumulation_steps": MICRO if stages == 1 else 1,
            "sink_mode": bool(broadcasts), "sink_size": 1,
        },
        "runner_wrapper": {"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": False} | dict(wrapper),
        "parallel": {"parallel_mode": 1, "dataset_strategy": [[data, 1]] * len(columns)},
        "context": {"mode": 0, "device_target": "CPU"},
        "model": {"model_config": {"type": "LlamaConfig"}, "arch": {"type": "LlamaForCausalLM"}},
        "train_dataset": {"input_columns": columns, "construct_args_key": columns, "batch_size": 1},
        "train_dataset_task": {"type": "CausalLanguageModelDataset"}, "callbacks": [{"type": "MFLossMonitor"}],
        "parallel_config": parallel_of(layout) | dict(parallel), "recompute_config": {"recompute": False},
        "checkpoint": {"load_path": "", "no_load_optim": False}, "monitor_config": {}, "moe_config": {"expert_num": 1},
    }  # fmt: skip
    return MindFormerConfig(**(given | more))


class Caught(Exception):
    """The Trainer has made the step."""


def by_trainer(
    layout, per_token=False, wrapper=(), parallel=(), has_groups=False, broadcasts=0, after=None, is_qwen3=False, **more
):
    """The step. `broadcasts` : the Trainer's `dataset_broadcast_opt_level` ; `after` : called with the step and the
    callbacks."""
    import mindformers.trainer.base_trainer as base
    from mindformers.trainer.causal_language_modeling import CausalLanguageModelingTrainer

    from gaccum_ms.adopt import mindformers

    mindformers.use_in_trainer()

    class Trainer(CausalLanguageModelingTrainer):
        def create_model_wrapper(self, network, optimizer):
            if has_groups:
                self.lr_scheduler = schedule()
                self.grouped_lr_scheduler = [{"params": ["attention"], "lr_scheduler": schedule(GROUP_RATE)}]
            ms.set_context(device_target="GPU")
            try:
                return super().create_model_wrapper(network, optimizer)
            finally:
                ms.set_context(device_target="CPU")

    result = {}

    def train(model, *arguments, **named):
        result["step"], result["callbacks"] = model.train_network, named["callbacks"]
        raise Caught

    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")  # the model and the Trainer run operators
    network = model_of(layout, per_token, is_qwen3)
    optimizer = nn.SGD(groups_of(network) if has_groups else network.trainable_params(), schedule())
    columns = ["input_ids", "labels"] if is_qwen3 else ["input_ids"]
    data = ms.dataset.NumpySlicesDataset(dict.fromkeys(columns, np.ones((MICRO, 2), np.int32)), shuffle=False)
    folder = os.getcwd()
    with (
        new_models() if is_qwen3 else contextlib.nullcontext(),
        # As after build_context: graph mode.
        mock.patch.object(base, "mf_get_context", lambda key: broadcasts if "broadcast" in key else 0),
        mock.patch.object(base.Model, "train", train),
        tempfile.TemporaryDirectory() as output,
        contextlib.suppress(Caught),
    ):
        os.chdir(output)
        try:
            Trainer(model_name="llama").train(
                dataset=data.batch(MICRO),
                config=configuration(layout, per_token, wrapper, parallel, broadcasts, columns, **more),
                network=network,
                optimizer=optimizer,
                callbacks=[],
                is_full_config=True,
            )
        finally:
            os.chdir(folder)
            ms.set_context(device_target="GPU")
    if after is not None:
        after(result["step"], result["callbacks"])
    return result["step"].set_train()


def settings(layout, is_qwen3=False):
    """Qwen3 gets labels of their own, one word further."""
    data, stages = LAYOUTS[layout]
    inputs = 1 + is_qwen3
    given = {"dataset_strategy": ((data, 1),) * inputs, "full_batch": False, "pipeline_stages": stages, **SUM}
    given |= {"shapes": ((TEXTS // data, WORDS_OF_TEXT - is_qwen3),) * inputs, "dtype": np.int32}
    return given | OPTIMIZER_PARALLEL if "op" in layout else given


def groups_of(network):
    """Attention, and the other weights."""
    groups = {True: [], False: []}
    for weight in network.trainable_params():
        groups["attention" in weight.name].append(weight)
    return [{"params": groups[True], "lr": schedule(GROUP_RATE)}, {"params": groups[False], "lr": schedule()}]


SCALE = {"type": "DynamicLossScaleUpdateCell", "loss_scale_value": 1024, "scale_factor": 2, "scale_window": 10}
ALL_OPTIONS = {
    "wrapper": {"scale_sense": SCALE, **CLIP},
    "has_groups": True,
    "use_skip_data_by_global_norm": True,
    "monitor_config": {"global_norm_spike_threshold": 100.0},
}


def says(step, callbacks):
    """Say, as an error, what mindformers' callbacks make of a step, and what computes the sums of a batch after one of
    them has let windows span batches."""
    from mindformers.core.callback import MFLossMonitor
    from mindformers.core.callback.callback import TopkBiasBalanceCallback
    from mindformers.wrapper.wrapper import get_real_models
    from mindspore.train.callback import RunContext
    from mindspore.train.callback._callback import InternalCallbackParam

    (monitor,) = (one for one in callbacks if isinstance(one, MFLossMonitor))
    params = InternalCallbackParam()
    params.train_network, params.cur_step_num = step, 1
    TopkBiasBalanceCallback().on_train_step_end(RunContext(params))  # it walks down to the model
    model, loss = get_real_models(step), monitor._fix_loss_for_parallel(12.0)
    step.let_windows_span_batches()
    raise RuntimeError(f"{type(model).__name__}, loss {loss}, {type(step.window.batch_sums).__name__}")


class Quotient(nn.Cell):
    """The mean loss of a model that returns its sum and its tokens."""

    def __init__(self, network):
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, *inputs):
        outputs = self.network(*inputs)
        return (outputs[0] / ops.reduce_sum(outputs[1])).reshape(())


def whole(is_qwen3):
    """MindSpore's step of the whole batch."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    try:
        network = model_of("dp", True, is_qwen3)
    finally:
        ms.set_context(device_target="GPU")
    loss = Quotient(ByName(network) if is_qwen3 else network)
    return nn.TrainOneStepCell(loss, nn.SGD(network.trainable_params(), RATE)).set_train()


CASES = {
    name: (
        lambda layout=layout, options=options: by_trainer(layout, **options),
        settings(layout, "is_qwen3" in options) | more,
    )
    for name, layout, options, more in (
        ("mean", "dp", {}, AUTO_PARALLEL),
        ("per token", "op", {"per_token": True, "broadcasts": 3}, {}),
        ("options", "two stages", ALL_OPTIONS | {"per_token": True}, {}),
        ("qwen3", "two stages", {"per_token": True, "is_qwen3": True}, {}),
        ("says", "dp", {"broadcasts": 3, "after": says}, {}),
        ("parts of sequences", "dp", {"parallel": {"seq_split_num": 2}}, {}),
    )
}
CASES |= {
    f"{model}, whole": (lambda is_qwen3=is_qwen3: whole(is_qwen3), settings("dp", is_qwen3))
    for model, is_qwen3 in (("llama", False), ("qwen3", True))
}
