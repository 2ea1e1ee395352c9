"""mindformers' own Trainer on a small Llama: ``mindformers_worker.py OUT`` writes weights, losses and the
arguments of its monitor."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["LOG_MF_PATH"] = str(Path(sys.argv[1]) / "log_of_mindformers")

import mindspore as ms
import numpy as np
from mindformers.tools.register import MindFormerConfig
from mindformers.trainer.causal_language_modeling import CausalLanguageModelingTrainer
from mindspore import nn

from gaccum_ms.adopt import mindformers as adopted
from tests.support.reference import as_numpy
from tests.support.small_llama import TEXTS, small_llama, tokens

MICRO = 2  # texts in a micro-batch


def configuration(out: Path) -> MindFormerConfig:
    return MindFormerConfig(
        run_mode="train",
        output_dir=str(out / "output"),
        use_parallel=False,
        use_legacy=True,
        use_legacy_format=True,
        do_eval=False,
        profile=False,
        resume_training=False,
        load_checkpoint="",
        micro_batch_interleave_num=1,
        trainer={"type": "CausalLanguageModelingTrainer", "model_name": "llama"},
        runner_config={
            "epochs": 1,
            "batch_size": MICRO,
            "gradient_accumulation_steps": TEXTS // MICRO,
            "sink_mode": False,
        },
        runner_wrapper={"type": "MFTrainOneStepCell", "scale_sense": 1.0, "use_clip_grad": True, "max_grad_norm": 0.3},
        parallel={"parallel_mode": 0},
        context={"mode": 0, "device_target": "CPU"},
        optimizer={"type": "AdamW"},
        model={"model_config": {"type": "LlamaConfig"}, "arch": {"type": "LlamaForCausalLM"}},
        train_dataset={"input_columns": ["input_ids"], "batch_size": MICRO},
        train_dataset_task={"type": "CausalLanguageModelDataset"},
        callbacks=[{"type": "MFLossMonitor"}],
        parallel_config={"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1, "micro_batch_num": 1},
        checkpoint={"load_path": "", "no_load_optim": False},
        recompute_config={"recompute": False},
        monitor_config={},
        moe_config={"expert_num": 1},
    )


class Watch(ms.Callback):
    """Records the step's outputs, as the other callbacks get them."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def on_train_step_end(self, run_context):
        self.outputs.append([float(value.asnumpy().reshape(())) for value in run_context.original_args().net_outputs])


def main(out: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    os.chdir(out)
    adopted.use_in_trainer()
    adopted.use_in_trainer()  # a second call does nothing
    network = small_llama()
    config = configuration(out)
    texts = tokens(2)
    data = ms.dataset.NumpySlicesDataset({"input_ids": texts.reshape(-1, texts.shape[-1])}, shuffle=False)
    watch = Watch()
    CausalLanguageModelingTrainer(model_name="llama").train(
        config=config,
        network=network,
        dataset=data.batch(TEXTS),
        optimizer=nn.Momentum(network.trainable_params(), [0.1, 0.2, 0.3], 0.9),
        callbacks=[watch],
        is_full_config=True,
    )
    weights = {f"weight/{one.name}": as_numpy(one) for one in network.trainable_params()}
    steps = np.array(config.runner_config.gradient_accumulation_steps)
    np.savez(out / "results.npz", outputs=np.array(watch.outputs), steps=steps, **weights)


main(Path(sys.argv[1]))
