"""Whether a network has or calls a convolution of MindSpore."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.backend.code_of_cells import values_of
from gaccum_ms.backend.held_cells import held_cells
from gaccum_ms.cpu.instructions import limit_instructions

# Conv2D, conv1d, Conv3dTranspose, conv_transpose2d, Convolution, conv_tbc; not Convert.
_CONVOLUTION = re.compile(r"conv(\d|olution|_?transpose|_?tbc)", re.IGNORECASE)


def limit_instructions_for(network: nn.Cell) -> None:
    """Limit oneDNN (see instructions.py) before the first kernel, if a network on CPU has convolutions."""
    if ms.get_context("device_target") == "CPU" and convolves(network):
        limit_instructions()


def limit_instructions_for_weights(weights: Iterable[ms.Parameter]) -> None:
    """The same if only the weights are known."""
    if ms.get_context("device_target") == "CPU" and _have_kernels(weights):
        limit_instructions()


def convolves(network: nn.Cell) -> bool:
    """Whether the network holds or calls a layer, operator or function that convolves, or holds kernels."""
    return _have_kernels(network.get_parameters()) or any(
        _is_convolution(value) for _, cell in held_cells(network) for value in (cell, *values_of(cell))
    )


def _have_kernels(weights: Iterable[ms.Parameter]) -> bool:
    """Weights of four axes or more are convolution kernels."""
    return any(weight.ndim >= 4 for weight in weights)


def _is_convolution(value: Any) -> bool:
    if isinstance(value, ops.Primitive):
        return bool(_CONVOLUTION.search(value.name))
    named = type(value).__mro__ if isinstance(value, nn.Cell) else (value,) if callable(value) else ()
    return any(
        _CONVOLUTION.search(getattr(each, "__name__", "")) and str(each.__module__).startswith("mindspore.")
        for each in named
    )
