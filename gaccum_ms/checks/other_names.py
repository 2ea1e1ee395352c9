"""The names that other packages give to our arguments: an error names ours, in place of Python's bare TypeError."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

_P = ParamSpec("_P")

# Ours, and those of Hugging Face, Accelerate, DeepSpeed, Lightning, mindcv, mindone, mindformers, mindyolo, and of
# MindSpore's boost.GradientAccumulation and ops.clip_by_global_norm.
_OTHERS = {
    "accumulation_steps": (
        "gradient_accumulation_steps",
        "gradient_accumulation_step",
        "grad_accumulation_steps",
        "grad_accum_steps",
        "accumulate_grad_batches",
        "max_accumulation_step",
        "accumulation_step",
        "accumulate_step",
        "accumulate",
    ),
    "micro_size": ("micro_batch_num", "num_micro_batches", "num_microbatches"),
    "micro_batch_size": ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", "microbatch_size"),
    "max_grad_norm": ("gradient_clip_val", "gradient_clipping", "clip_grad_norm", "clip_norm", "max_norm"),
    "scheduler": ("lr_scheduler",),
}
_OF_CELLS = _OTHERS.keys() - {"scheduler"}
_OURS = {other: ours for ours, others in _OTHERS.items() for other in others}


def explains_other_names(init: Callable[_P, None]) -> Callable[_P, None]:
    """A constructor that names our argument if it gets another package's."""
    owner, known = init.__qualname__.partition(".")[0], inspect.signature(init).parameters
    options_are_the_cells = "network" in known and "micro_size" not in known

    @functools.wraps(init)
    def explaining(*args: _P.args, **kwargs: _P.kwargs) -> None:
        for name, value in kwargs.items():
            ours = _OURS.get(name, "")
            if name not in known and (ours in known or (options_are_the_cells and ours in _OF_CELLS)):
                raise TypeError(_explained(owner, name, ours, value, options_are_the_cells))
        init(*args, **kwargs)

    return explaining


def _explained(owner: str, name: str, ours: str, value: Any, is_the_cells: bool) -> str:
    remedy = f"{ours}={value!r}"
    if is_the_cells:
        remedy = f"GradAccumulationCell(network, {remedy})"
    elif ours == "accumulation_steps" and owner == "GradAccumulationCell":
        remedy += f", for batches that share an update; or micro_size={value!r}, micro-batches of each batch"
    return f"For '{owner}', the argument '{name}' must be given as '{ours}', but got {name}={value!r}. Give {remedy}."
