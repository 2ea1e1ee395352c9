"""A Qwen3 of mindformers, one of its models that are made of a GPTModel, which can be trained on CPU."""

from __future__ import annotations

from unittest import mock

import numpy as np
from mindspore import Tensor, nn

from tests.support.small_llama import WORDS

DTYPES = "compute_dtype", "params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype"


class Settings(dict):
    """mindformers reads a model's parallel settings from such an object."""

    to_dict = dict.copy


class NewModels:
    """mindformers' context with ``use_legacy: False`` , which models of a GPTModel need."""

    @staticmethod
    def get_context(name: str):
        return False if name == "use_legacy" else None


def new_models() -> mock._patch:
    """Context manager in which mindformers has that context, as after `build_context` ."""
    from mindformers.core.context.build_context import MFContextOperator

    return mock.patch.object(MFContextOperator, "get_mf_ctx_instance", NewModels)


class ByName(nn.Cell):
    """The network with its inputs by position, which mindformers' Trainer gives by name."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, input_ids, labels):
        return self.network(input_ids=input_ids, labels=labels)


def small_qwen3(per_token: bool = False, layers: int = 1, seq_length: int = 5, parallel: dict | None = None) -> nn.Cell:
    """`parallel` : how it lies on devices, if on several."""
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
    from mindformers.parallel_core.training_graph.device_matrix import LayoutManager

    # No `fused_norm` and no flash attention: CPU lacks the kernels. Dropout would be 0.1.
    given = {
        "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": seq_length,
        "seq_length": seq_length, "pad_token_id": 0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "use_flash_attention": False, "fused_norm": False, "calculate_per_token_loss": per_token,
        "parallel_config": Settings(parallel or {"data_parallel": 1, "model_parallel": 1, "pipeline_stage": 1}),
        **dict.fromkeys(DTYPES, "float32"),
    }  # fmt: skip
    if LayoutManager._instance is not None:  # it would keep the layout of the process's first model
        for name in ("_layout", "_layout_type", "_config"):
            setattr(LayoutManager._instance, name, None)
    with new_models():
        network = TrainingQwen3ForCausalLM(config=Qwen3Config(**given))
    random = np.random.default_rng(7)
    for weight in network.trainable_params():
        weight.set_data(Tensor((random.normal(size=weight.shape) * 0.3).astype(np.float32), weight.dtype))
    return network
