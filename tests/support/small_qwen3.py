"""A small Qwen3 of mindformers, one of its models that are made of a GPTModel. CPU lacks kernels to train it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from mindspore import Tensor, nn

from tests.support.small_llama import WORDS

DTYPES = "compute_dtype", "params_dtype", "layernorm_compute_dtype", "softmax_compute_dtype", "rotary_dtype"


class Settings(dict):
    """mindformers reads a model's parallel settings from such an object."""

    to_dict = dict.copy


@contextlib.contextmanager
def new_models() -> Iterator[None]:
    """Context manager with mindformers' context for models of a GPTModel. There is none before and after."""
    from mindformers.core.context.build_context import MFContextOperator, build_mf_context

    build_mf_context({"context": {}, "parallel": {}, "use_legacy": False})
    try:
        yield
    finally:
        MFContextOperator.reset_instance()


class ByName(nn.Cell):
    """The network with its inputs by position, which mindformers' Trainer gives by name."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.network = network

    def construct(self, input_ids, labels):
        return self.network(input_ids=input_ids, labels=labels)


def small_qwen3(per_token: bool, layers: int, seq_length: int, parallel: dict) -> nn.Cell:
    """`parallel` : how it lies on devices."""
    from mindformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from mindformers.models.qwen3.modeling_qwen3_train import TrainingQwen3ForCausalLM
    from mindformers.parallel_core.training_graph.device_matrix import LayoutManager

    # With these two switched on, some numbers would be of lower precision. Dropout would be 0.1.
    settings = {
        "use_flash_attention": False, "fused_norm": False,
        "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 48, "num_hidden_layers": layers,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": seq_length,
        "seq_length": seq_length, "pad_token_id": 0, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "calculate_per_token_loss": per_token, "parallel_config": Settings(parallel),
        **dict.fromkeys(DTYPES, "float32"),
    }  # fmt: skip
    if LayoutManager._instance is not None:  # it would keep the layout of the process's first model
        for name in ("_layout", "_layout_type", "_config"):
            setattr(LayoutManager._instance, name, None)
    with new_models():
        network = TrainingQwen3ForCausalLM(config=Qwen3Config(**settings))
    random = np.random.default_rng(7)
    for weight in network.trainable_params():
        weight.set_data(Tensor((random.normal(size=weight.shape) * 0.3).astype(np.float32), weight.dtype))
    return network
