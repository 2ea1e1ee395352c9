"""The operators of finished graphs in NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

# By MindSpore's TypeId.
_DTYPES = {30: np.bool_, 32: np.int8, 34: np.int32, 35: np.int64, 37: np.uint8, 42: np.float16, 43: np.float32}


class Elided(NamedTuple):
    """A constant too long for the file to hold."""

    shape: tuple[int, ...]
    dtype: np.dtype


def _slices(begin: tuple, end: tuple, strides: tuple, *masks: int) -> tuple[slice, ...]:
    open_begin, open_end, *others = (*masks, 0, 0)
    assert not any(others), masks
    return tuple(
        slice(None if open_begin >> axis & 1 else first, None if open_end >> axis & 1 else last, stride)
        for axis, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True))
    )


def _strided_slice_grad(gradient: np.ndarray, shape: tuple, *slices: Any) -> np.ndarray:
    whole = np.zeros(shape, gradient.dtype)
    whole[_slices(*slices)] = gradient
    return whole


def _reduce(function: Callable) -> Callable:
    def reduced(value: np.ndarray, axes: Any, keep: Any, *_: Any) -> np.ndarray:
        axes = axes if isinstance(axes, tuple) else () if axes is None else (int(axes),)
        return function(value, axis=axes or None, keepdims=bool(keep)).astype(value.dtype)

    return reduced


def _filled(values: Sequence[Any]) -> list[np.ndarray]:
    """With zeros for constants that the file does not hold: they stand for gradients that are in accumulators."""
    return [np.zeros(*value) if isinstance(value, Elided) else value for value in values]


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


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _product(x: np.ndarray, y: np.ndarray, is_x_transposed: bool, is_y_transposed: bool) -> np.ndarray:
    return (np.swapaxes(x, -1, -2) if is_x_transposed else x) @ (np.swapaxes(y, -1, -2) if is_y_transposed else y)


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


# By MindSpore's names of what NumPy names alike: LogicalAnd is logical_and, LessScalar is less.
_ALIKE = (
    "BroadcastTo", "Cos", "Equal", "Exp", "ExpandDims", "Greater", "GreaterEqual", "GreaterEqualScalar",
    "GreaterScalar", "IsFinite", "IsNan", "Less", "LessEqual", "LessEqualScalar", "LessScalar", "Log", "LogicalAnd",
    "LogicalNot", "LogicalOr", "Maximum", "Minimum", "NotEqual", "Outer", "Reciprocal", "Reshape", "Sin", "Sqrt",
    "Square", "Tile", "Transpose",
)  # fmt: skip


def _numpys(name: str) -> Callable:
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", name.removesuffix("Scalar")).lower()
    return getattr(np, words.replace("is_", "is"))


OPERATORS: dict[str, Callable] = {
    **{name: _numpys(name) for name in _ALIKE},
    **{f"Reduce{name}": _reduce(getattr(np, name.lower())) for name in ("All", "Any", "Max", "Mean", "Sum")},
    **dict.fromkeys(("Add", "Adds"), np.add),
    **dict.fromkeys(("Div", "RealDiv"), np.divide),
    **dict.fromkeys(("FloorMod", "RemainderTensorScalar"), np.remainder),
    **dict.fromkeys(("OneHot", "OneHotExt"), _one_hot),
    **dict.fromkeys(("Stack", "StackExt"), lambda values, axis=0, *_: np.stack(values, axis)),
    "SumExt": _reduce(np.sum),
    "StridedSlice": lambda value, *slices: value[_slices(*slices)],
    "StridedSliceGrad": _strided_slice_grad,
    "Split": lambda value, axis, parts: np.split(value, parts, axis),
    "SplitWithSize": lambda value, sizes, axis: np.split(value, np.cumsum(sizes)[:-1], axis),
    "Concat": lambda values, axis: np.concatenate(values, axis),
    "Unstack": lambda value, axis=0, *_: np.moveaxis(value, axis, 0),
    "TensorMove": lambda value, *_: np.array(value),
    "MatMulExt": lambda x, y: x @ y,
    **dict.fromkeys(("MatMul", "BatchMatMul"), _product),
    "BiasAdd": lambda x, bias, *_: x + bias,
    "BiasAddGrad": lambda gradient, *_: gradient.sum(0).astype(gradient.dtype),
    "ReLU": lambda x: np.maximum(x, 0),
    "ReluGrad": lambda gradient, y: gradient * (y > 0),
    "PowTensorScalar": lambda x, power: x**power,
    "AddN": lambda values: sum(_filled(values[1:]), *_filled(values[:1])),
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Muls": lambda x, y: _filled([x])[0] * np.asarray(y, x.dtype),
    "Divs": lambda x, y: x / np.asarray(y, x.dtype),
    "Neg": np.negative,
    "FloatStatus": lambda x: np.array([0.0 if np.isfinite(x).all() else 1.0], np.float32),
    "EqScalar": lambda x, y: x == y,
    "Select": lambda condition, yes, no: np.where(condition, yes, no),
    "Cast": lambda x, dtype, *_: x.astype(_DTYPES[dtype]),
    "OnesLike": lambda x, *_: np.ones_like(x),
    "ZerosLike": lambda x, *_: np.zeros_like(x),
    "FullLike": lambda x, value, *_: np.full_like(x, value),
    "Identity": lambda x: x,
    # Of the models of mindformers.
    "ArgMaxWithValue": lambda x, axis, keep: (x.argmax(axis, keepdims=keep), x.max(axis, keepdims=keep)),
    "FlashAttentionScore": _attention,
    "FlashAttentionScoreGrad": _attention_grad,
    "RmsNorm": _rms_norm,
    "RmsNormGrad": _rms_norm_grad,
    "AddExt": lambda x, y, factor: x + np.asarray(factor, x.dtype) * y,
    "Embedding": lambda indices, table, *_: _gather(table, indices, 0),
    "EmbeddingDenseBackward": lambda gradient, indices, number, *_: _sums_of_segments(gradient, indices, number),
    "FloorDiv": lambda x, y: x // y,
    "Gather": _gather,
    "PyExecute": lambda *_: np.float32(0),
    "Rsqrt": lambda x: 1 / np.sqrt(x),
    "RsqrtGrad": lambda y, gradient: np.float32(-0.5) * gradient * y**3,
    "SubExt": lambda x, y, factor: x - np.asarray(factor, x.dtype) * y,
    "SiLU": lambda x: x * _sigmoid(x),
    "SiLUGrad": lambda gradient, x: gradient * _sigmoid(x) * (1 + x * (1 - _sigmoid(x))),
    "Softmax": _softmax,
    "SoftmaxBackward": _softmax_grad,
    "UnsortedSegmentSum": _sums_of_segments,
}
