"""Shared by the adapters: translates the packages' arguments into those of our cell and step."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore.amp import DynamicLossScaler, LossScaler, StaticLossScaler

from gaccum_ms.cell import GradAccumulationCell
from gaccum_ms.checks.arguments import check_bool, check_transforms, described
from gaccum_ms.training.step import TrainOneStepWithGradAccumulationCell
from gaccum_ms.transforms.transform import Transform

OWNER = "gaccum_ms.adopt"  # in errors


class MovedAverage(Transform):
    """The package's own EMA, which its callbacks use, moved once per update. `method` moves it: ``"update"`` or
    ``"ema_update"`` ."""

    def __init__(self, ema: nn.Cell, method: str) -> None:
        super().__init__()
        if not isinstance(ema, nn.Cell) or not hasattr(ema, method):
            raise TypeError(
                f"For '{OWNER}', the argument 'ema' must be the package's EMA, a Cell with a method '{method}', but "
                f"got {described(ema)}."
            )
        self.ema = ema
        self.by_update = method == "update"

    # -- compiled ------------------------------------------------------------------------------------------------------

    def after_update(self, after):
        moved = self.ema.update() if self.by_update else self.ema.ema_update()
        return ops.depend(after, moved)


def scale_of(scale: Any, name: str = "scale_sense") -> nn.Cell | ms.Tensor:
    """A loss scale as our step takes it, from a number, a Tensor, a Cell that adjusts it, or a LossScaler."""
    if isinstance(scale, DynamicLossScaler):
        value = float(scale.scale_value.asnumpy())
        return nn.DynamicLossScaleUpdateCell(value, int(scale.scale_factor), int(scale.scale_window))
    if isinstance(scale, StaticLossScaler):
        return ms.Tensor(float(scale.scale_value.asnumpy()), ms.float32)
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return ms.Tensor(float(scale), ms.float32)
    if isinstance(scale, (nn.Cell, ms.Tensor)) and not isinstance(scale, LossScaler):
        return scale
    raise TypeError(
        f"For '{OWNER}', the argument '{name}' must be a number, a Tensor, a Cell that adjusts it, a StaticLossScaler "
        f"or a DynamicLossScaler, but got {described(scale)}."
    )


def build(
    network: nn.Cell,
    optimizer: nn.Optimizer,
    scale_sense: nn.Cell | ms.Tensor | None,
    kind: type[TrainOneStepWithGradAccumulationCell] = TrainOneStepWithGradAccumulationCell,
    drop_overflow_update: bool = True,
    links: tuple[Transform, ...] = (),
    **options: Any,
) -> TrainOneStepWithGradAccumulationCell:
    """Our step. `links` : the package's own transforms, behind the user's; `drop_overflow_update` : whether a window
    that is not finite is left out."""
    if not drop_overflow_update and isinstance(scale_sense, nn.Cell):
        raise ValueError(
            f"For '{OWNER}', updates in spite of an overflow need a fixed loss scale, because one that is adjusted "
            f"looks for the scale at which gradients overflow, but got a '{type(scale_sense).__name__}'. Let such "
            f"updates be dropped, or give a fixed scale."
        )
    own = options.get("transforms", ())
    check_transforms(OWNER, "transforms", own)
    options["transforms"] = (*own, *links)
    step = kind(GradAccumulationCell(network, **options), optimizer, scale_sense)
    if not drop_overflow_update:
        step.update.looks_for_overflow = False
    return step


def clip_norm_of(clip: Any, name: str, norm: float) -> float | None:
    """`max_grad_norm` , from a package's switch and norm."""
    check_bool(OWNER, name, clip)
    return norm if clip else None


def check_left_out(name: str, value: Any, remedy: str) -> None:
    """Refuse an argument that only the package's own step supports."""
    if value:
        raise ValueError(f"For '{OWNER}', the argument '{name}' must be left out, but got {described(value)}. {remedy}")
