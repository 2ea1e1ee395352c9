"""What a compiled update would not write: state that an optimizer, its schedule, a transform or a manager of the loss
scale keeps outside of Parameters. It is found before the update is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspore as ms
from mindspore import ops

from gaccum_ms.backend.newer_optimizers import without_shards
from gaccum_ms.backend.python_state import Root, written_state
from gaccum_ms.backend.user_warnings import warn_user
from gaccum_ms.checks.arguments import first_of
from gaccum_ms.distributed.ranks import compiler_distributes
from gaccum_ms.transforms.transform import Transform

if TYPE_CHECKING:
    from gaccum_ms.accumulation.update import Update

_RULE = (
    "the optimizer and 'transforms' must keep in Parameters what they change from update to update, because a compiled "
    "update does not write other values, or not at each update"
)
_REMEDY = "Keep it in a mindspore.Parameter, in a Transform by self.state(name, value)"


def lost_state(update: Update) -> str | None:
    """The state that a compiled update would not write, in words. Where MindSpore's compiler distributes, weights have
    no values before it has compiled, so nothing is known."""
    if compiler_distributes():
        return None
    weights = update.weights
    optimizer = without_shards(update.optimizer)
    own = tuple(optimizer.parameters)
    roots = [Root(type(optimizer).__name__, optimizer, lambda size: optimizer(_gradients(own, size, keep=True)))]
    if update.has_transforms:
        for name, link in zip(update.transforms.names, update.links, strict=True):
            roots.append(Root(name, link, functools.partial(_run_link, link, weights)))
    if update.manager is not None:
        manager, scale = update.manager, update.scale_sense
        name = type(manager).__name__
        roots.append(Root(name, manager, lambda _: manager(scale, ms.Tensor(False, ms.bool_))))
    written = written_state(roots, (*weights, *own))
    return first_of(written) if written else None


def refuse_lost_state(owner: str, state: str | None) -> None:
    """Refuse to compile it, if there is any."""
    if state is not None:
        raise ValueError(
            f"For '{owner}', {_RULE}, but got code that writes {state}. {_REMEDY}; or run it eagerly, in PyNative mode "
            f"with jit=False."
        )


def warn_of_lost_state(owner: str, state: str) -> None:
    """Say that an accumulator is not compiled."""
    warn_user(
        f"For '{owner}', {_RULE}, but got code that writes {state}. So the accumulator runs eagerly, which takes "
        f"longer, and checkpoints lack this state. {_REMEDY}; jit=False says that it is to run eagerly."
    )


def _gradients(weights: Sequence[ms.Parameter], size: float, keep: bool = False) -> tuple[ms.Tensor, ...]:
    return tuple(ops.full(weight.shape, size, dtype=weight.dtype if keep else ms.float32) for weight in weights)


def _run_link(link: Transform, weights: Sequence[ms.Parameter], size: float) -> None:
    gradients = _gradients(weights, size)
    link.allows(gradients)
    link.before_update(link.change(gradients))
    link.after_update(ms.Tensor(0.0, ms.float32))
