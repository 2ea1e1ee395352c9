"""What a network returns beside its loss: the loss's denominator, and outputs for the user. None of it enters the
gradient.

An output has the micro-batch's samples on axis 0, or shape (). Samples are concatenated in the batch's order
(micro_batches.py); scalars are added up and divided as the loss is.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms.accumulation.micro_step import float32_loss, kinds_and_shapes
from gaccum_ms.checks.batches import lacks_rows
from gaccum_ms.losses import counts
from gaccum_ms.options.options import Options

_WANTED = {
    (True, False): "(numerator, denominator)",
    (False, True): "(loss, *aux)",
    (True, True): "(numerator, denominator, *aux)",
}
_OUTPUT = "each of 'aux' has the micro-batch's samples on axis 0, or shape ()"
_REMEDY = "Return a mean of shape (), or an entry for each sample; ops.swapaxes brings samples to axis 0."


@ops.constexpr(check=False)  # the check warns about open shapes
def _check_outputs(kinds, shapes, ratio, aux, rows):
    """`rows` : the micro-batch's number of samples; None if it is open."""
    first_aux = 1 + ratio
    options, wanted = _wanted(ratio, aux)
    if kinds is None or len(kinds) < first_aux + aux or (len(kinds) > first_aux and not aux):
        got = "one output" if kinds is None else f"a tuple of {len(kinds)}"
        raise ValueError(f"{wanted}, a tuple, but got {got}. Return such a tuple, or leave {options} out.")
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
            f"{wanted}, where {_OUTPUT}, but output {position} got shape {shape} for {rows} sample(s). {_REMEDY}"
        )


def check_aux(shapes: Sequence[tuple[int, ...] | None], ratio: bool, rows: int) -> None:
    """Check the shapes of what a network returned for `rows` samples, of which only `aux` concerns samples."""
    wanted = _wanted(ratio, True)[1]
    for position, shape in enumerate(shapes):
        if position > ratio and shape is not None:
            _check_rows(wanted, position, shape, rows)


def _wanted(ratio: bool, aux: bool) -> tuple[str, str]:
    """The options, and what they need."""
    options = "reduction='ratio'" * ratio + " and " * (ratio and aux) + "aux=True" * aux
    return options, f"For 'GradAccumulationCell', with {options} the network must return {_WANTED[ratio, aux]}"


class LossWithOutputs(nn.Cell):
    """The network returns a tuple: its loss (with ``reduction="ratio"`` a sum and the count of its items), and with
    `aux` more outputs. A micro-batch's part of the sums is the loss times its seed, together with the rest."""

    def __init__(self, options: Options, network: nn.Cell, weights: ms.ParameterTuple) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.loss_is_mean = options.loss_is_mean
        self.ratio = options.returns_ratio
        self.aux = options.aux
        self.first_aux = 1 + self.ratio
        self.joined_in_python = options.splits_in_python
        # Only the first output has a gradient.
        self.backward = ops.value_and_grad(self.seeded_outputs, None, weights, has_aux=True)

    def prepare(self, sums, unit, inputs, plan):
        return sums, (), inputs

    def run(self, seed, prepared, size, *micro_batch):
        """Returns (the loss times its seed, the denominator of a ratio, outputs), and the gradients."""
        return self.backward(seed, size, *micro_batch)

    def seeded_outputs(self, seed, rows, *micro_batch):
        outputs = self.network(*micro_batch)
        kinds = None
        shapes = None
        if isinstance(outputs, (tuple, list)):
            kinds, shapes = kinds_and_shapes(outputs)
        known_rows = None if self.joined_in_python or isinstance(rows, ms.Tensor) else rows
        _check_outputs(kinds, shapes, self.ratio, self.aux, known_rows)
        result: tuple = (float32_loss(outputs[0]) * seed,)
        if self.ratio:
            result = (*result, counts.valid_or_nan(outputs[1]))
        for index in range(self.first_aux, len(outputs)):
            output = outputs[index]
            result = (*result, output if output.ndim > 0 else ops.cast(output, ms.float32) * seed)
        return result

    # -- not compiled --------------------------------------------------------------------------------------------------

    @property
    def network_of_rows(self) -> nn.Cell | None:
        """The network whose outputs are joined."""
        return self.network if self.aux else None

    def check_shapes(self, shapes: Sequence[tuple[int, ...] | None], rows: int) -> None:
        """Check the shapes of its outputs for `rows` samples."""
        check_aux(shapes, self.ratio, rows)
