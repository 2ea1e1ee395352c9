"""What a network returns beside its loss: the loss's denominator, and outputs for the user. None of it enters the
gradient.

An output has the micro-batch's samples on axis 0, or shape (). Samples are concatenated in the batch's order
(window.py); scalars are added up and divided as the loss is.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import ops
from mindspore.ops.functional import typeof

from gaccum_ms.checks.batches import lacks_rows


def kinds_and_shapes(values):
    """The type of each, and the shape of each that is a Tensor, else None. A comprehension would take the compiler
    longer: it is a loop there."""
    kinds: tuple = ()
    shapes: tuple = ()
    for value in values:
        kinds = (*kinds, typeof(value))
        shapes = (*shapes, value.shape if isinstance(value, ms.Tensor) else None)
    return kinds, shapes


@ops.constexpr(check=False)  # the check warns about open shapes
def _check_outputs(kinds, shapes, ratio, aux, rows):
    """`rows` : the micro-batch's number of samples; None if it is open."""
    first_aux = 1 + ratio
    options, wanted = _wanted(ratio, aux)
    if len(kinds) < first_aux + aux or (len(kinds) > first_aux and not aux):
        raise ValueError(
            f"{wanted}, a tuple, but got {len(kinds)} output(s). Return such a tuple, or leave {options} out."
        )
    if ratio:
        is_number = type(kinds[1]).__name__ in ("Int", "UInt", "Float")
        if shapes[0] != () or not (is_number or shapes[1] == ()):
            pair = [f"'{kinds[at]}'" if shapes[at] is None else f"shape {shapes[at]}" for at in range(2)]
            raise ValueError(
                f"{wanted}, of which the numerator is a Tensor of shape () and the denominator one or a number, but "
                f"got {pair[0]} and {pair[1]}. Sum them over all axes."
            )
    for position in range(first_aux, len(kinds)):
        shape = shapes[position]
        if shape is None:
            raise TypeError(
                f"{wanted}, where each of 'aux' is a Tensor, but output {position} got '{kinds[position]}'. Return the "
                f"Tensors of a tuple or dict as outputs of their own."
            )
        _check_rows(wanted, position, shape, rows)


def _check_rows(wanted: str, position: int, shape: tuple[int | None, ...], rows: int | None) -> None:
    if shape and lacks_rows(shape, rows):
        raise ValueError(
            f"{wanted}, where each of 'aux' has the micro-batch's samples on axis 0, or shape (), but output "
            f"{position} got shape {shape} for {rows} sample(s). Return a mean of shape (), or an entry for each "
            f"sample; ops.swapaxes brings samples to axis 0."
        )


def check_outputs(outputs, ratio, aux, rows):
    """Check, when compiled, what a network returned for `rows` samples; None: nobody knows how many."""
    kinds, shapes = kinds_and_shapes(outputs if isinstance(outputs, (tuple, list)) else (outputs,))
    _check_outputs(kinds, shapes, ratio, aux, None if isinstance(rows, ms.Tensor) else rows)


def check_aux(shapes: Sequence[tuple[int, ...] | None], ratio: bool, rows: int) -> None:
    """Check the shapes of what a network returned for `rows` samples, of which only `aux` concerns samples."""
    wanted = _wanted(ratio, True)[1]
    for position, shape in enumerate(shapes):
        if position > ratio and shape is not None:
            _check_rows(wanted, position, shape, rows)


def _wanted(ratio: bool, aux: bool) -> tuple[str, str]:
    """The options, and what they need."""
    options = " and ".join(["reduction='ratio'"] * ratio + ["aux=True"] * aux)
    outputs = ", ".join(["numerator, denominator" if ratio else "loss"] + ["*aux"] * aux)
    return options, f"For 'GradAccumulationCell', with {options} the network must return ({outputs})"
