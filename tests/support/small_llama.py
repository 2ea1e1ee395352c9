"""A Llama of mindformers that can be trained on CPU, and texts for it."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

TEXTS = 6  # in a batch
WORDS = 64
RATE = 0.1


def small_llama(per_token: bool = False, **options) -> nn.Cell:
    """`options` : more of LlamaConfig's."""
    from mindformers.models.llama import LlamaConfig, LlamaForCausalLM

    # `use_rope_slice` and no `fused_rms_norm` : CPU lacks the other kernels.
    given = {
        "seq_length": 8, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "vocab_size": WORDS, "multiple_of": 8,
        "pad_token_id": 0, "compute_dtype": "float32", "param_init_type": "float32", "use_flash_attention": False,
        "use_past": False, "use_rope_slice": True, "fused_rms_norm": False, "calculate_per_token_loss": per_token,
    }  # fmt: skip
    network = LlamaForCausalLM(LlamaConfig(**(given | options)))
    random = np.random.default_rng(7)
    for one in network.trainable_params():
        one.set_data(Tensor(random.normal(size=one.shape) * 0.3, one.dtype))
    return network


def tokens(batches: int, padded: bool = False) -> np.ndarray:
    """Distinct random texts; the padded ones in a batch have different lengths."""
    random = np.random.default_rng(3)
    result = random.integers(1, WORDS, size=(batches, TEXTS, 9)).astype(np.int32)
    if padded:
        for batch in result:
            for text, length in zip(batch, random.permutation(TEXTS) + 3, strict=True):
                text[length:] = 0
    return result
