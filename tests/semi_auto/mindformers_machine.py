"""The simulation of devices (machine.py, pipeline_machine.py) for the graphs of mindformers' models: more operators,
and the parts of their weights on devices."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.semi_auto import machine
from tests.semi_auto.finished_graph import Node
from tests.semi_auto.pipeline_machine import Stage

# -- operators ---------------------------------------------------------------------------------------------------------


def _softmax(x: np.ndarray, axes: Any) -> np.ndarray:
    exp = np.exp(x - x.max(axes, keepdims=True))
    return exp / exp.sum(axes, keepdims=True)


def _sums_of_segments(value: np.ndarray, ids: np.ndarray, number: int) -> np.ndarray:
    sums = np.zeros((number, *value.shape[ids.ndim :]), value.dtype)
    np.add.at(sums, ids[ids >= 0], value[ids >= 0])
    return sums


def _gather(table: np.ndarray, indices: np.ndarray, axis: int, *_: Any) -> np.ndarray:
    """Zeros outside of the table, which is one device's part."""
    assert axis == 0
    outside = (indices < 0) | (indices >= len(table))
    rows = np.take(table, np.where(outside, 0, indices), 0)
    rows[outside] = 0
    return rows


def _strided_slice(value: np.ndarray, begin: tuple, end: tuple, strides: tuple, *masks: int) -> np.ndarray:
    open_begin, open_end, *others = (*masks, 0, 0)
    assert not any(others), masks
    return value[
        tuple(
            slice(None if open_begin >> axis & 1 else first, None if open_end >> axis & 1 else last, stride)
            for axis, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True))
        )
    ]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _transposed(x: np.ndarray, is_transposed: bool) -> np.ndarray:
    return np.swapaxes(x, -1, -2) if is_transposed else x


def _scores(query: np.ndarray, key: np.ndarray, mask: Any, scale: float) -> np.ndarray:
    scores = query @ np.swapaxes(key, -1, -2) * np.float32(scale)
    return scores if mask is None else np.where(mask.astype(bool), np.float32(-1e9), scores)


def _attention(query, key, value, _shift, _drop, _padding, mask, _prefix, _own, _others, _heads, _keep, scale, *_):
    """Its largest score and sum of each row, and a softmax, which only its backward reads; and the result."""
    empty = np.zeros(0, np.float32)
    return empty, empty, empty, _softmax(_scores(query, key, mask, scale), -1) @ value


def _attention_grad(query, key, value, gradient, _shift, _drop, _padding, mask, *others):
    scale = others[9]  # behind four results, the prefix, two lengths, the heads, and what dropout keeps
    softmax = _softmax(_scores(query, key, mask, scale), -1)
    of_scores = _softmax_grad(gradient @ np.swapaxes(value, -1, -2), softmax, -1) * np.float32(scale)
    of_query, of_key = of_scores @ key, np.swapaxes(of_scores, -1, -2) @ query
    return of_query, of_key, np.swapaxes(softmax, -1, -2) @ gradient, np.zeros(0, np.float32)


def _softmax_grad(gradient: np.ndarray, y: np.ndarray, axis: int) -> np.ndarray:
    return y * (gradient - (gradient * y).sum(axis, keepdims=True))


def _rms_norm(x: np.ndarray, scale: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    factor = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(epsilon))
    return x * factor * scale, factor


def _rms_norm_grad(gradient, x, factor, scale):
    scaled = gradient * scale
    of_x = factor * (scaled - x * factor**2 * (scaled * x).mean(-1, keepdims=True))
    return of_x, (gradient * x * factor).reshape(-1, x.shape[-1]).sum(0)


def _one_hot(index: np.ndarray, depth: int, on: Any, off: Any, axis: int) -> np.ndarray:
    assert axis == -1
    return np.where(index[..., None] == np.arange(depth), on, off)


# Operators with several results.
_SEVERAL: dict[str, Callable] = {
    "ArgMaxWithValue": lambda x, axis, keep: (x.argmax(axis, keepdims=keep), x.max(axis, keepdims=keep)),
    "FlashAttentionScore": _attention,
    "FlashAttentionScoreGrad": _attention_grad,
    "RmsNorm": _rms_norm,
    "RmsNormGrad": _rms_norm_grad,
}
machine._DTYPES.update({32: np.int8, 37: np.uint8})
machine._ARITHMETIC.update(
    {
        "AddExt": lambda x, y, factor: x + np.asarray(factor, x.dtype) * y,
        "BatchMatMul": lambda x, y, left, right: _transposed(x, left) @ _transposed(y, right),
        "Cos": np.cos,
        "Embedding": lambda indices, table, *_: _gather(table, indices, 0),
        "EmbeddingDenseBackward": lambda gradient, indices, number, *_: _sums_of_segments(gradient, indices, number),
        "Exp": np.exp,
        "FloorDiv": lambda x, y: x // y,
        "Gather": _gather,
        "Log": np.log,
        "OneHot": _one_hot,
        "OneHotExt": _one_hot,
        "Outer": np.outer,
        "PyExecute": lambda *_: np.float32(0),
        "ReduceMax": machine._reduce(np.max),
        "Rsqrt": lambda x: 1 / np.sqrt(x),
        "RsqrtGrad": lambda y, gradient: np.float32(-0.5) * gradient * y**3,
        "Sin": np.sin,
        "SubExt": lambda x, y, factor: x - np.asarray(factor, x.dtype) * y,
        "SiLU": lambda x: x * _sigmoid(x),
        "SiLUGrad": lambda gradient, x: gradient * _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
        "Softmax": _softmax,
        "SoftmaxBackward": _softmax_grad,
        "StridedSlice": _strided_slice,
        "UnsortedSegmentSum": _sums_of_segments,
    }
)

# -- devices -----------------------------------------------------------------------------------------------------------

_ALONE = {hashlib.sha256(str(rank).encode()).hexdigest()[:48] for rank in range(8)}  # names of groups of one rank


class Devices(Stage):
    """The devices of a stage."""

    def _resolve(self, text: str, environment: dict) -> list[Any]:
        values = super()._resolve(text, environment)
        if isinstance(values[0], machine.Elided) and values[0].dtype == np.int32:  # SkipSpikes' places
            return [np.arange(*values[0].shape, dtype=np.int32)] * self.ranks
        return values

    def _node(self, node: Node, arguments: list, environment: dict) -> list[Any]:
        if node.op in _SEVERAL:
            values = [[self._value(value, rank) for rank, value in enumerate(argument)] for argument in arguments]
            self.executed.append(node)
            return [_SEVERAL[node.op](*own) for own in zip(*values, strict=True)]
        slices_own_part = "forward_comm_node_unique_id" in node.attributes and "in_strategy" not in node.attributes
        if node.op == "StridedSlice" and slices_own_part and "pipeline_begin" not in node.attributes:
            # In a graph that micro-batches share, the slice of a rank's own part has lost its mark.
            node = node._replace(attributes=node.attributes + " redistribution_op")
        return super()._node(node, arguments, environment)

    def _collective(self, node: Node, values: list[np.ndarray]) -> list[np.ndarray]:
        name = re.search(r'\bgroup: "([^"]*)"', node.attributes)
        if name and name.group(1) in _ALONE:
            return values
        if node.op == "AllReduce" and 'op: "max"' in node.attributes:
            first = [rank - self.first_rank for rank in node.group]
            return [np.max([values[one] for one in group], axis=0) for group in machine.groups_like(first, self.ranks)]
        return super()._collective(node, values)
