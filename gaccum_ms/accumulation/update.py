"""The end of a window: what is done once per update, after the reduction over ranks. The head of step.py has the order,
and the rules of compiled code.

The loss scale multiplies the seed of each micro-batch's backward and is divided out here. The reduced gradient is
checked for overflow: a NaN or infinity of one rank is then on all ranks, so they agree without further communication.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.saturation import clear_flag, read_flag, saturates
from gaccum_ms.backend import graphs
from gaccum_ms.backend.parameters import counter, hold_weights, overwrite, own, state_parameter
from gaccum_ms.cpu.kernels import all_finite
from gaccum_ms.layers.window_batchnorm import window_statistics
from gaccum_ms.options import compatibility
from gaccum_ms.options.rules import UPDATE, Setup
from gaccum_ms.transforms import norms
from gaccum_ms.transforms.chain import Chain, without_front_clip

if TYPE_CHECKING:
    from gaccum_ms.options.options import Options

_divide = ops.MultitypeFuncGraph("gaccum_ms_divide")
_cast_like = ops.MultitypeFuncGraph("gaccum_ms_cast_like")
_as_float32 = ops.MultitypeFuncGraph("gaccum_ms_as_float32")
_cast = ops.Cast()  # for each weight, one function less in a graph than `ops.cast`


@_divide.register("Tensor", "Tensor")
def _divide_one(divisor, gradient):
    return ops.cast(gradient, ms.float32) / divisor


@_cast_like.register("Tensor", "Tensor")
def _cast_like_one(gradient, weight):
    return _cast(gradient, weight.dtype)


@_as_float32.register("Tensor")
def _as_float32_one(gradient):
    return _cast(gradient, ms.float32)


def _check_scale(owner: str, value: ms.Tensor) -> None:
    if not 0 < float(value.asnumpy().reshape(())) < float("inf"):
        raise ValueError(f"For '{owner}', the argument 'scale_sense' must be positive and finite, but got {value}.")


def _scale_parameter(owner: str, scale_sense: nn.Cell | ms.Tensor) -> tuple[ms.Parameter, nn.Cell | None]:
    """The scale as a Parameter, and the manager Cell that adjusts it, as `nn.TrainOneStepWithLossScaleCell` takes
    them."""
    manager = scale_sense if isinstance(scale_sense, nn.Cell) else None
    if manager is not None:
        value = ms.Tensor(manager.get_loss_scale(), ms.float32)
    elif isinstance(scale_sense, ms.Tensor):
        value = scale_sense.astype(ms.float32)
    else:
        raise TypeError(
            f"For '{owner}', the argument 'scale_sense' must be a Cell or a Tensor, but got {scale_sense!r} of type "
            f"'{type(scale_sense).__name__}'. Give mindspore.Tensor(1024.0, mindspore.float32) for a fixed scale; for "
            f"one that is adjusted nn.DynamicLossScaleUpdateCell(...), or a LossScaleManager's get_update_cell()."
        )
    if value.shape not in ((), (1,)):
        raise ValueError(f"For '{owner}', the shape of 'scale_sense' must be () or (1,), but got {value.shape}.")
    _check_scale(owner, value)
    return ms.Parameter(value, name=own("scale_sense"), requires_grad=False), manager


class Update(nn.Cell):
    """Update the weights with a window's gradients. `window` : its ledger, which has the counts, and is reset."""

    def __init__(
        self,
        owner: str,
        optimizer: nn.Optimizer,
        weights: ms.ParameterTuple,
        window: nn.Cell,
        options: Options,
        scale_sense: nn.Cell | ms.Tensor | None,
        network: nn.Cell | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)
        compatibility.check(UPDATE, owner, Setup(options, optimizer))  # its rules look at options alone
        self.owner = owner
        self.optimizer = optimizer
        hold_weights(self, weights)
        self.window = window
        max_grad_norm, transforms = without_front_clip(options.max_grad_norm, options.transforms)
        self.has_norm = max_grad_norm is not None or options.record_noise
        if max_grad_norm == math.inf:  # the norm is only recorded
            max_grad_norm = None
        self.max_grad_norm = max_grad_norm
        self.has_transforms = bool(transforms)
        # Gradients have their accumulators' dtype or, where they were multiplied or divided, float32.
        dtypes = {options.accumulators.dtype or weight.dtype for weight in weights}
        of_weights = {weight.dtype for weight in weights}
        self.casts_to_weights = dtypes | of_weights != {ms.float32}
        if transforms:
            self.has_low_precision = dtypes != {ms.float32}
            self.transforms = Chain(owner, transforms, max_grad_norm is not None, weights, network)
        self.drops = options.drops
        self.is_sharded = window.is_sharded
        self.sens = 1.0  # see `leave_scale_to_optimizer`
        self.scaled = scale_sense is not None
        # The optimizer divides gradients by this factor, its own `loss_scale` . Until then they are too large by it;
        # norms are of gradients without it.
        self.scale_in_gradients = 1.0 if self.scaled else float(getattr(optimizer, "loss_scale", 1.0))
        self.looks_for_overflow = self.scaled or self.drops
        self.manager: Any = None
        if scale_sense is not None:
            self.scale_sense, self.manager = _scale_parameter(owner, scale_sense)
        self.returns_more = self.scaled or options.aux  # than the loss
        self.statistics: Any = window_statistics(network) if network is not None else None
        self.has_statistics = self.statistics is not None
        if self.has_norm:
            self.grad_norm = state_parameter("grad_norm")
        # If the norm is finite, the gradients are, and stay so in float32: they need no second check.
        self.norm_tells = max_grad_norm is not None and not window.is_sharded and of_weights == {ms.float32}
        self.update_count = counter("update_count")
        self.map = ops.HyperMap()
        self.adds_flags = saturates() and ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL
        if self.adds_flags:
            self.sum_of_flags = ops.AllReduce()

    def scale(self):
        """The factor of all seeds, of shape ()."""
        if self.scaled:
            return self.scale_sense.reshape(()) + 0.0  # a copy: the manager later overwrites the Parameter
        return ms.Tensor(self.sens, ms.float32)

    def returned(self, loss, overflow, scale, outputs):
        """What the step returns for a batch, compiled or not."""
        if not self.returns_more:
            return loss
        return (loss, overflow, scale, *outputs) if self.scaled else (loss, *outputs)

    @property
    def user_scale(self) -> float:
        """The part of `scale_in_gradients` that is in the user's loss already."""
        return self.scale_in_gradients / self.sens

    @property
    def links(self) -> tuple[nn.Cell, ...]:
        """The transforms, without clipping at the front."""
        return tuple(self.transforms.links) if self.has_transforms else ()

    def leave_scale_to_optimizer(self, scale: float) -> None:
        """Leave a scale in the gradients; an optimizer with ``loss_scale`` divides by it."""
        self.sens = self.scale_in_gradients = scale

    def set_scale(self, scale: ms.Tensor) -> None:
        """Set the loss scale, outside of a graph."""
        if not self.scaled or not isinstance(scale, ms.Tensor) or scale.shape != self.scale_sense.shape:
            raise TypeError(
                f"For '{self.owner}', 'set_sense_scale' needs that 'scale_sense' was given, and a Tensor of its shape, "
                f"but got {scale!r}."
            )
        _check_scale(self.owner, scale)
        overwrite(self.scale_sense, scale.astype(ms.float32))

    def construct(self, gradients, divisor, loss, counted):
        """Takes what the ledger's `close` returns. Returns the loss, and whether the window overflowed."""
        if self.scaled or self.window.needs_division:
            gradients = self._divided(gradients, divisor)
        if self.has_norm:
            gradients, loss = self._clipped(gradients, loss)
        finished = self.map(_cast_like, gradients, self.weights) if self.casts_to_weights else gradients
        overflow = ms.Tensor(False, ms.bool_)
        if self.looks_for_overflow:
            overflow = self._overflow(finished, loss, divisor)
        if not self.has_transforms:
            gradients = finished
        elif self.has_low_precision:
            gradients = self.map(_as_float32, gradients)
        if isinstance(counted, ms.Tensor) or self.scaled:
            if ops.logical_and(counted, ops.logical_not(overflow)):
                loss = self._update(gradients, loss)
        else:
            loss = self._update(gradients, loss)
        loss = ops.depend(loss, self._adjust_scale(overflow, counted, loss)) if self.manager is not None else loss
        loss = self.statistics.reset(loss) if self.has_statistics else loss
        return self.window.reset(loss), overflow

    def _update(self, gradients, loss):
        if not self.has_transforms:
            return self._move(gradients, loss)
        gradients, allowed = self.transforms.change(gradients, self.scale_in_gradients)
        gradients = self.map(_cast_like, gradients, self.weights)
        if not self.transforms.vetoes:
            return self._move_with_transforms(gradients, loss)
        if allowed:
            loss = self._move_with_transforms(gradients, loss)
        return loss

    def _move_with_transforms(self, gradients, loss):
        loss = self._move(self.transforms.before_update(gradients), loss)
        return self.transforms.after_update(loss)

    def _move(self, gradients, loss):
        updated = self.optimizer(gradients)
        loss = ops.depend(loss, (updated, ops.assign_add(self.update_count, ms.Tensor(1, ms.int32))))
        return self.statistics.move(loss) if self.has_statistics else loss

    def _divided(self, gradients, divisor):
        if self.is_sharded:  # a product: the compiler's pass for norms does not look through quotients
            return self.map(ops.partial(norms.scale_by, self.sens / divisor), gradients)
        return self.map(ops.partial(_divide, divisor / self.sens), gradients)

    def _clipped(self, gradients, loss):
        norm = norms.global_norm(gradients)
        loss = ops.depend(loss, ops.assign(self.grad_norm, norm / self.scale_in_gradients))
        if self.max_grad_norm is not None:
            gradients = norms.clip_by_norm(gradients, norm, self.max_grad_norm * self.scale_in_gradients)
        return gradients, loss

    def _overflow(self, gradients, loss, divisor):
        """Whether an overflow forbids the update. It does if the finished gradient (equal on all ranks), its norm or
        its divisor is not finite, or if every micro-batch that counts something overflowed, with `min_count` too."""
        # An infinite divisor (total count times scale) would turn finite gradients into zeros.
        finite = ops.isfinite(divisor)
        if self.max_grad_norm is not None:
            finite = ops.logical_and(ops.isfinite(ops.depend(self.grad_norm, loss)), finite)
        if saturates():
            finite = ops.logical_and(self._nothing_saturated(gradients), finite)
        elif not self.norm_tells:
            finite = ops.logical_and(all_finite(gradients), finite)
        overflow = ops.logical_not(finite)
        if self.is_sharded:
            overflow = self.window.on_any_rank(overflow)
        if self.drops:
            nothing_left = ops.depend(self.window.window_count, loss) == 0
            overflow = ops.logical_or(overflow, ops.logical_and(self._dropped(loss), nothing_left))
        return overflow

    def _nothing_saturated(self, after):
        """Whether nothing saturated on any rank, in the window's batches and until `after` is computed."""
        flag = read_flag(after)
        if self.window.spans_batches:
            flag = flag + self.window.saturated_batches
        if self.adds_flags:
            flag = self.sum_of_flags(flag)
        return (flag == 0).all()

    def _dropped(self, after):
        return ops.depend(self.window.dropped_micro_batches, after) > 0

    def _adjust_scale(self, overflow, counted, loss):
        """Call the manager, which adjusts the scale. The scale stays as it is if the window's count was bad, or if the
        window has nothing to divide by and nothing overflowed."""
        if self.drops:
            overflow = ops.logical_or(overflow, self._dropped(loss))
        overflow = ops.depend(overflow, loss)
        if not self.window.may_skip:
            return self.manager(self.scale_sense, overflow)
        total = ops.depend(self.window.window_count, loss) + 0.0
        if ops.logical_and((total >= 0).all(), ops.logical_or(counted, overflow)):
            overflow = ops.depend(overflow, self.manager(self.scale_sense, overflow))
        return overflow


class OfWindow(nn.Cell):
    """A graph of its own, which adds to a window or ends it. With `jit` , it is compiled in PyNative mode too."""

    def __init__(self, window: Any, update: Update, jit: bool) -> None:
        super().__init__(auto_prefix=False)
        self._jit = jit
        self.window = window
        self.update = update

    def run_alone(self, *inputs: Any) -> Any:
        """Call it from Python."""
        return graphs.run(self, self._jit, *inputs)


class WindowEnd(OfWindow):
    """Reduce what an open window has accumulated, and update: at its last batch, or earlier, as a flush."""

    def __init__(self, window: Any, update: Update, jit: bool) -> None:
        super().__init__(window, update, jit)
        # Whether a full window may make no update. Its end then is a graph of its own: a branch within the branch of a
        # full window would leak (see the head of step.py).
        self.branches = window.leaves_out or update.scaled or update.has_transforms

    def construct(self, after):
        """Returns whether the window overflowed. `after` : a Tensor that depends on all that must come first."""
        after = ops.neg(after)  # a kernel that uses it: see the head of step.py
        overflow = self.end(*self.window.result(self.update.scale(), after))
        return clear_flag(overflow)  # for the next batch of a loop, whose backward is the user's

    def of_full(self, after):
        """As `construct` , for a window that is full, within a larger graph."""
        gradients, divisor, loss, counted = self.window.result(self.update.scale(), after)
        return self.end(gradients, divisor, loss, counted if self.branches else True)

    def end(self, gradients, divisor, loss, counted):
        mean, overflow = self.update(gradients, divisor, loss, counted)
        return ops.depend(overflow, ops.assign(self.window.open.window_loss, mean))

    def flush(self) -> bool:
        """End the window now. All ranks must call this; a rank without batches takes part with a count of zero. Returns
        whether there was an update."""
        if not self.window.open.batches and not self.window.sum_over_ranks.reduces:
            return False
        with graphs.recorded_calls(self.update.optimizer, self._jit) as calls:
            try:
                return self.updates_after(ms.Tensor(0.0, ms.float32))
            except BaseException:
                if calls:  # else nothing is lost: the window stays
                    self.window.open.drop_used()
                    if self.update.has_statistics:
                        self.update.statistics.reset_eagerly()
                raise

    def updates_after(self, after: ms.Tensor) -> bool:
        """Run it from Python; returns whether there was an update."""
        before = int(self.update.update_count.asnumpy())
        self.run_alone(after)
        return int(self.update.update_count.asnumpy()) > before
