"""Whether a network computes in 16 bits, and so rounds more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
from mindspore import nn

NARROW = (ms.float16, ms.bfloat16)


def computes_in_16_bits(networks: Iterable[nn.Cell], dtypes: Iterable[Any]) -> bool:
    """`dtypes` : those of weights, accumulators and inputs."""
    if any(dtype in NARROW for dtype in dtypes):
        return True
    cells = [cell for network in networks for _, cell in network.cells_and_names()]
    flags = [cell.get_flags() for cell in cells]
    return any(flag.get("fp16") or flag.get("bf16") for flag in flags) or any(
        str(getattr(cell, "mixed_precision_type", None)).endswith(("FP16", "BF16", "AUTO")) for cell in cells
    )
