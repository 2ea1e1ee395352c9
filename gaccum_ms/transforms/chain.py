"""The chain of `transforms` that a finished gradient passes, and the check that its links go together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.distributed.ranks import compiler_distributes
from gaccum_ms.transforms.clip_by_global_norm import ClipByGlobalNorm
from gaccum_ms.transforms.norms import scale_by
from gaccum_ms.transforms.skip_spikes import SkipSpikes
from gaccum_ms.transforms.transform import Transform


@ops.constexpr
def _check_changed(name, number, shapes, wanted):
    if number < 0 or shapes != wanted:
        got = "no tuple" if number < 0 else f"{number} of shapes {shapes}"
        raise ValueError(
            f"For 'GradAccumulationCell', each of 'transforms' must return a tuple with one gradient of the shape of "
            f"each weight, {wanted}, but got {got} from '{name}'. Return what is not to be changed as it came."
        )


class _ByFunction(Transform):
    """A link around a function."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        # In a tuple, because graph mode treats a function that is an attribute as a method.
        self.functions = (function,)
        if isinstance(function, nn.Cell):
            self.cell = function  # its Parameters are the step's

    def change(self, gradients):
        return self.functions[0](gradients)


class Chain(nn.Cell):
    """All links. `clipped` : whether gradients are clipped before the chain."""

    def __init__(
        self,
        owner: str,
        transforms: Sequence[Any],
        clipped: bool,
        weights: ms.ParameterTuple,
        network: nn.Cell | None,
    ) -> None:
        super().__init__(auto_prefix=False)
        links = [link if isinstance(link, Transform) else _ByFunction(link) for link in transforms]
        if compiler_distributes():
            _take_one_norm(owner, links, clipped)
        for link in links:
            if link.in_step:
                raise ValueError(
                    f"For '{owner}', each of 'transforms' must belong to one training step, whose state it has, but "
                    f"got a '{type(link).__name__}' that another step has, or that stands there twice. Make "
                    f"another one."
                )
            link.begin(weights, network)
        _check_names(owner, links, weights)
        self.links = nn.CellList(links, auto_prefix=False)
        self.names = tuple(name_of(link) for link in transforms)
        self.shapes = tuple(tuple(weight.shape) for weight in weights)
        self.may_forbid = tuple(type(link).allows is not Transform.allows for link in links)
        self.vetoes = any(self.may_forbid)
        self.map = ops.HyperMap()

    # -- compiled ------------------------------------------------------------------------------------------------------

    def change(self, gradients, scale):
        """The changed gradients, and whether an update is allowed. `scale` : a factor of the gradients, which is taken
        out for the links."""
        if scale != 1.0:
            gradients = self.map(ops.partial(scale_by, 1.0 / scale), gradients)
        allowed = ms.Tensor(True, ms.bool_)
        for index in range(len(self.links)):  # no `enumerate` : see micro_batches.py
            link = self.links[index]
            if self.may_forbid[index]:
                allowed = ops.logical_and(allowed, link.allows(gradients))
            gradients = self.checked(link.change(gradients), self.names[index])
        if scale != 1.0:
            gradients = self.map(ops.partial(scale_by, scale), gradients)
        return gradients, allowed

    def checked(self, gradients, name):
        shapes: tuple = ()
        number = -1
        if isinstance(gradients, (tuple, list)):
            number = len(gradients)
            for index in range(number):
                shapes = (*shapes, gradients[index].shape)
        _check_changed(name, number, shapes, self.shapes)
        return tuple(gradients)

    def before_update(self, gradients):
        for link in self.links:
            gradients = link.before_update(gradients)
        return gradients

    def after_update(self, after):
        for link in self.links:
            after = link.after_update(after)
        return after


def without_front_clip(max_grad_norm: float | None, transforms: Sequence[Any]) -> tuple[float | None, tuple]:
    """`max_grad_norm` and `transforms` . A ClipByGlobalNorm at the front is turned into `max_grad_norm` : its norm is
    then recorded, and shows whether the gradient is finite."""
    transforms = tuple(transforms)
    if max_grad_norm is None and transforms and isinstance(transforms[0], ClipByGlobalNorm):
        return transforms[0].max_norm, transforms[1:]
    return max_grad_norm, transforms


def others(transforms: Sequence[Any]) -> tuple:
    """New links with the same arguments, for a step that is only a trial."""
    return tuple(link.another() if isinstance(link, Transform) else link for link in transforms)


def _take_one_norm(owner: str, links: Sequence[Transform], taken: bool) -> None:
    """Let a clip use the norm that SkipSpikes has taken, and refuse any other second norm, or one of a gradient that is
    more than multiplied. The compiler's pass sums the squares over devices only for the first norm of a gradient that
    backward returned, or of a product with it: another would silently be of one device's part."""
    judge: SkipSpikes | None = None
    changed = False
    for link in links:
        if isinstance(link, ClipByGlobalNorm) and judge is not None and not changed:
            link.take_norm_of(judge)
        elif isinstance(link, (ClipByGlobalNorm, SkipSpikes)):
            if taken or changed:
                raise ValueError(
                    f"For '{owner}', in semi-auto and auto parallel mode one norm is taken of the gradient, before "
                    f"another link changes it, because the compiler sums only this one over devices, but got a "
                    f"'{type(link).__name__}' behind other norms or changes. Put it first, without other norms; a "
                    f"'ClipByGlobalNorm' may follow a 'SkipSpikes'."
                )
            taken = True
            judge = link if isinstance(link, SkipSpikes) else None
        changed = changed or type(link).change is not Transform.change


def _check_names(owner: str, links: Sequence[Transform], weights: Sequence[ms.Parameter]) -> None:
    """Refuse equal names: MindSpore finds a checkpoint's values only by name."""
    ids: dict[str, int] = {weight.name: id(weight) for weight in weights}
    for link in links:
        for parameter in link.get_parameters():
            if ids.setdefault(parameter.name, id(parameter)) != id(parameter):
                raise ValueError(
                    f"For '{owner}', each of 'transforms' must keep its state by names of its own, as checkpoints "
                    f"know it by, but got two Parameters named '{parameter.name}', the second of a "
                    f"'{type(link).__name__}'. Give one of the two, or names of your own."
                )


def clips_before_spikes(clipped: bool, transforms: Sequence[Any]) -> bool:
    """Whether a SkipSpikes gets a gradient that is clipped by its norm. `clipped` : whether it is before the chain."""
    for link in transforms:
        if isinstance(link, SkipSpikes) and clipped:
            return True
        clipped = clipped or isinstance(link, ClipByGlobalNorm)
    return False


def is_elementwise(link: Any) -> bool:
    """Whether a transform treats each element of a gradient by itself."""
    return getattr(link, "elementwise", False)


def sees_parts(link: Any) -> bool:
    """Whether a transform is right where a gradient is one device's part."""
    return is_elementwise(link) or isinstance(link, (ClipByGlobalNorm, SkipSpikes))


def name_of(link: Any) -> str:
    """How errors call a transform."""
    return type(link).__name__ if isinstance(link, nn.Cell) else getattr(link, "__name__", repr(link))
