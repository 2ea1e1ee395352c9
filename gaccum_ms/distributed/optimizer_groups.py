"""The user's parameters of a ShardedOptimizer, in groups or not, and each rank's part of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import nn

_NAME = "ShardedOptimizer"
PLACEHOLDER = "placeholder."  # stands in a group none of whose parameters is this rank's

# MindSpore's optimizers that update each element independently. Subclasses are excluded, because they may not.
_ELEMENTWISE = {
    nn.ASGD,
    nn.AdaMax,
    nn.Adadelta,
    nn.Adagrad,
    nn.Adam,
    nn.AdamOffload,
    nn.AdamWeightDecay,
    nn.FTRL,
    nn.LazyAdam,
    nn.Momentum,
    nn.ProximalAdagrad,
    nn.RMSProp,
    nn.Rprop,
    nn.SGD,
}


def _is_grouped(params: list) -> bool:
    return any(isinstance(group, dict) for group in params)


def in_order(params: list) -> list[ms.Parameter]:
    """The weights in the order of the optimizer's `parameters` ."""
    groups = [group for group in params if isinstance(group, dict)] if _is_grouped(params) else [{"params": params}]
    weights = [weight for group in groups for weight in group.get("params", ())]
    if not weights or not all(isinstance(weight, ms.Parameter) for weight in weights):
        raise TypeError(
            f"For '{_NAME}', the argument 'params' must be a list of Parameters, or of dicts with such a list as "
            f"'params', but got {params!r:.200}."
        )
    order = next((list(group["order_params"]) for group in groups if group.get("order_params")), weights)
    return order if len(order) == len(weights) else weights  # MindSpore then raises the error


def takes_slices(optimizer: Any, params: list, partition: str | None) -> bool:
    """Whether the optimizer may get slices. An unknown optimizer gets whole parameters."""
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    centralizes = any(isinstance(group, dict) and group.get("grad_centralization") for group in params)
    if partition != "slices":
        return partition is None and kind in _ELEMENTWISE and not centralizes
    mindspores = getattr(kind, "__module__", "").startswith("mindspore.")
    if centralizes or (mindspores and kind not in _ELEMENTWISE):
        reason = "'grad_centralization'" if centralizes else f"'{kind.__name__}'"
        raise ValueError(
            f"For '{_NAME}', partition='slices' needs an optimizer that treats each element by itself, but got "
            f"{reason}, which looks at whole parameters. Use partition='parameters'."
        )
    return True


def own_groups(params: list, weights: list, own: dict[int, ms.Parameter], rank: int) -> list:
    """The optimizer's `params` with this rank's part of each group. A group that would be empty gets a placeholder, so
    that all ranks have the rates of all groups, under the same names."""
    places = {id(weight): index for index, weight in enumerate(weights)}
    placeholders = []

    def parts(group: Sequence[ms.Parameter], number: int) -> list[ms.Parameter]:
        own_parts = [own[places[id(weight)]] for weight in group if places[id(weight)] in own]
        if not own_parts:
            name = f"{PLACEHOLDER}{rank}.{number}"
            own_parts = [ms.Parameter(ms.Tensor([0.0]), name=name, layerwise_parallel=True)]
            placeholders.extend(own_parts)
        return own_parts

    if not _is_grouped(params):
        return parts(params, 0)
    groups = [
        {**group, "params": parts(group["params"], number)} if "params" in group else group
        for number, group in enumerate(params)
    ]
    own_in_order = [*own.values(), *placeholders]
    return [{"order_params": own_in_order} if "order_params" in group else group for group in groups]


def rate_places(params: list, weights: list, groups: list, inner: Any) -> tuple[int, ...]:
    """For each weight, the index of an inner parameter of the same group, which has the same learning rate."""
    inner_ids = [id(parameter) for parameter in inner.parameters]
    if not _is_grouped(params):
        return (0,) * len(weights)
    places = {}
    for group, own_group in zip(params, groups, strict=True):
        for weight in group.get("params", ()):
            places[id(weight)] = inner_ids.index(id(own_group["params"][0]))
    return tuple(places[id(weight)] for weight in weights)
