"""MaxTokens: micro-batches of as many tokens as fit, for a cell's `split` ."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from gaccum_ms.checks.arguments import check_positive_int, checked_widths
from gaccum_ms.checks.batches import checked_arrays, whole_numbers
from gaccum_ms.splitting.auto_size import AutoSize, auto_size_of
from gaccum_ms.splitting.splitter import MicroBatches, Splitter
from gaccum_ms.splitting.token_plan import NOBODY, plan_tokens
from gaccum_ms.splitting.token_rows import Rows
from gaccum_ms.splitting.widths import best_widths
from gaccum_ms.splitting.worst_case import WorstCase

_NAME = "MaxTokens"


class MaxTokens(Splitter):
    r"""
    Split each batch by the lengths of its samples, into micro-batches with a bounded number of tokens.

    A batch of sequences is padded to its longest one. `MaxTokens` sorts its samples by length, trims them to few
    widths, and fills micro-batches of :math:`\lfloor \text{max\_tokens} / w \rfloor` rows at each width :math:`w` . So
    there are at most `widths` shapes, and compilations, for all batches. Unused rows hold padding only. Weights,
    optimizer state and loss equal those of the whole padded batch if `count` counts no padding and the network reads
    none: :func:`audit` finds a network that does.

    fairseq's ``--max-tokens`` fills whole batches up to a number of tokens (Ott et al., 2019, `arXiv:1904.01038
    <https://arxiv.org/abs/1904.01038>`_).

    Args:
        max_tokens (Union[int, AutoSize, str]): The largest number of tokens in a micro-batch, padding included.
            :class:`AutoSize` , or ``"auto"`` for short: the largest number that fits into memory. The attribute
            ``max_tokens`` of the step's ``split`` is ``None`` before the first batch, and then the number. It is at
            least the largest width, and at most large enough for all samples of a width in one micro-batch: more would
            be padding.
        length (Callable): The lengths of a batch's samples: a function of its inputs that returns a Tensor or array of
            shape :math:`(N,)`. Everything behind a sample's length is padding.
        widths (Union[int, Sequence[int]]): The widths to trim to, or the largest number of widths. With a number, the
            widths with the least padding are chosen at the first batch; the largest is the first batch's width, or
            `max_tokens` if that is smaller. Default: ``4`` .

    Keyword Args:
        lengths (Sequence[int], optional): The lengths of all samples of the data set. The widths are chosen for these
            instead of the first batch's. Default: ``None`` .
        padding (Sequence[float], optional): The padding value of each input. Default: ``None`` : the value that the
            input holds behind the shortest sample of the first batch with padding; 0 for inputs that are not trimmed. A
            batch without padding before that has no rows of padding: its last micro-batch may have fewer rows.
        axes (Mapping[int, Sequence[int]], optional): For the inputs at these positions, the axes to trim, such as
            ``{2: (1, 2)}`` for masks of shape :math:`(N, W, W)`. Default: ``None`` : axis 1 of each input in which it
            is as long as axis 1 of the first input.

    Inputs:
        - **\*inputs** (Tensor) - The inputs of the batch, of shape :math:`(N, ...)`; the first of shape
          :math:`(N, W, ...)`.

    Outputs:
        list[tuple[Tensor]], the inputs of each micro-batch. ``plan`` is then the :class:`TokenPlan` of this batch, to
        print. A training step does not change this object, which several steps may have: its ``split`` is a
        copy with the step's own ``plan`` , ``widths`` and ``max_tokens`` . Outputs of a network with `aux` come back in
        the batch's order; those whose axis 1 is as long as each micro-batch is wide are padded with zeros, or cut, to
        :math:`W` .

    Raises:
        TypeError: If an argument is of a wrong type.
        RuntimeError: If it is called by itself with ``"auto"`` , before the training has found a number.
        ValueError: If `max_tokens` or a width is less than 1, or `widths` are not ascending; if the inputs of a batch
            differ in their number of samples; if the lengths of a batch are not one whole number from 0 to :math:`W`
            for each sample; if a sample is longer than `max_tokens` or the largest width; if `padding` does not have
            one value for each input, or must be given, because a batch without padding is narrower than its width and
            none before it had padding; in a training, if a row of padding counts something.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from mindspore import Tensor
        >>> from gaccum_ms import MaxTokens
        >>> lengths = [2, 7, 3, 2, 8, 1]
        >>> ids = np.array([[1] * length + [0] * (8 - length) for length in lengths], np.int32)
        >>> split = MaxTokens(16, length=lambda ids: (ids > 0).sum(1), widths=2)
        >>> print([micro_batch[0].shape for micro_batch in split(Tensor(ids))])
        [(2, 8), (5, 3)]
        >>> print(split.plan)
          width   rows   micro-batches   samples   padding
              3      5               1         4     46.7%
              8      2               1         2      6.2%
            all                      2         6     25.8%
        padded to 8, without a plan: 52.1%
    """

    trims = True

    def __init__(
        self,
        max_tokens: int | str | AutoSize,
        length: Callable,
        widths: int | Sequence[int] = 4,
        *,
        lengths: Sequence[int] | None = None,
        padding: Sequence[float] | None = None,
        axes: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        size: Any = auto_size_of(max_tokens)
        self.auto = size if isinstance(size, AutoSize) else None
        self.max_tokens: int | None = None
        self.widths: tuple[int, ...] | None = None  # that may be compiled, ascending; None until the first batch
        if not self.auto:
            check_positive_int(_NAME, "max_tokens", size)
            self.max_tokens = size
        if not callable(length):
            raise TypeError(
                f"For '{_NAME}', the argument 'length' must be a function of the batch's inputs, but got {length!r}."
            )
        self._length = length
        self._axes = dict(axes or {})
        self._number = 0
        if isinstance(widths, int):
            check_positive_int(_NAME, "widths", widths)
            self._number = widths
        else:
            self.widths = checked_widths(widths, self.max_tokens)
        if lengths is not None and self._number:
            array = whole_numbers("lengths", np.asarray(lengths), None)
            self.widths = best_widths(np.maximum(array, 1), self._number)
            self._check_longest(array, self.widths, self.max_tokens)
        # The padding value of each input; None until one is known.
        self._fillers: tuple[float, ...] | None = None if padding is None else tuple(padding)
        self._filler_row: tuple[ms.Tensor, ...] | None = None  # a row of padding, until it is checked
        self._is_checked = False
        self._before_any_batch = copy.copy(self)

    def __call__(self, *inputs: Any) -> MicroBatches:
        if self.max_tokens is None:
            raise RuntimeError(
                f"For '{_NAME}', 'max_tokens' must be known before a batch is split, but got 'auto', which the "
                f"training step finds at its first batch. Train a batch, or give a number."
            )
        rows, widths = self._read(inputs, self.max_tokens)
        if self.auto:  # another rank, with narrower batches, may have found fewer tokens
            self.max_tokens = max(self.max_tokens, widths[-1])
        self._check_longest(rows.lengths, widths, self.max_tokens)
        fillers = self._fillers_of(rows)
        if fillers is None:
            self._check_needs_none(rows, widths)
        else:
            rows = rows._replace(fillers=fillers)
            self._filler_row = None if self._is_checked else rows.micro_batch(np.array([NOBODY]), widths[-1])
        self.widths, self._fillers = widths, fillers
        self.plan = plan_tokens(rows.lengths, rows.before, widths, self.max_tokens, fills=fillers is not None)
        return [rows.micro_batch(samples, width) for width, samples in self.plan.micro_batches]

    def working_copy(self) -> MaxTokens:
        return copy.copy(self._before_any_batch)

    def worst_case(self, *inputs: Any) -> WorstCase:
        """The micro-batches that a search for the number of tokens tries with a batch. Nothing changes here."""
        rows, widths = self._read(inputs, None)
        self._check_longest(rows.lengths, widths)
        return WorstCase(rows, widths)

    def in_order(self, outputs: Sequence[np.ndarray]) -> np.ndarray:
        """An output of all micro-batches of the last batch, joined in the batch's order, and at its width if axis 1
        counts tokens: if it is as long as each micro-batch is wide."""
        plan: Any = self.plan
        widths = [width for width, _ in plan.micro_batches]
        if all(output.shape[1:2] == (width,) for output, width in zip(outputs, widths, strict=True)):
            outputs = [_at_width(output, plan.before) for output in outputs]
        return np.concatenate(outputs)[plan.order]

    def check_padding(self, counted: Callable[..., Sequence[tuple[str, float]]]) -> None:
        """Done once."""
        if self._filler_row is None:
            return
        for name, number in counted(*self._filler_row):
            if number != 0:
                raise ValueError(
                    f"For '{_NAME}', {name} must be 0 for rows that hold padding alone, with which micro-batches are "
                    f"filled up, but got {number:g} for a row of {list(self._fillers or ())}. Give 'padding', what "
                    f"each input holds where there is nothing, such as the label that is ignored."
                )
        self._filler_row, self._is_checked = None, True

    def _read(self, inputs: Sequence[Any], max_tokens: int | None) -> tuple[Rows, tuple[int, ...]]:
        """A batch, and the widths to trim it to."""
        arrays = checked_arrays(inputs)
        samples, before = arrays[0].shape[:2]
        lengths = self._lengths(inputs, samples, before)
        axes = [
            self._axes.get(position, (1,) if array.ndim > 1 and array.shape[1] == before else ())
            for position, array in enumerate(arrays)
        ]
        if self._fillers is not None and len(self._fillers) != len(arrays):
            raise ValueError(
                f"For '{_NAME}', the argument 'padding' must have one value for each input, but got "
                f"{len(self._fillers)} and {len(arrays)} input(s)."
            )
        # Until the padding is known, values that the inputs hold somewhere, for trials of sizes alone.
        fillers = self._fillers or tuple(array.flat[0] if array.size else 0 for array in arrays)
        widths = self.widths
        if widths is None:
            largest = before if max_tokens is None or self.auto else min(before, max_tokens)
            widths = best_widths(lengths, self._number, largest=max(lengths.max(), largest))
        return Rows(arrays, axes, fillers, lengths, before), widths

    def _lengths(self, inputs: Sequence[Any], samples: int, before: int) -> np.ndarray:
        """The length of each sample, at least 1: an empty sample has a row too."""
        lengths = self._length(*inputs)
        array = np.asarray(lengths.asnumpy() if isinstance(lengths, ms.Tensor) else lengths)
        return np.maximum(whole_numbers("length", array, samples, before), 1)

    def _check_longest(self, lengths: np.ndarray, widths: tuple[int, ...], max_tokens: int | None = None) -> None:
        longest = int(lengths.max())
        if longest > widths[-1] or (max_tokens is not None and longest > max_tokens):
            raise ValueError(
                f"For '{_NAME}', the largest width and 'max_tokens' must be at least the length of the longest sample, "
                f"but got widths {list(widths)}, max_tokens={self.max_tokens or 'auto'} and a sample of {longest} "
                f"tokens. Cut such samples; or give a larger 'max_tokens', or 'widths' or 'lengths' that include them."
            )

    def _fillers_of(self, rows: Rows) -> tuple[Any, ...] | None:
        """The padding value of each input: what is known, or what this batch holds behind its shortest sample; None if
        no sample has padding."""
        short = int(np.argmin(rows.lengths))
        length = rows.lengths[short]
        if self._fillers is not None or length == rows.before:
            return self._fillers
        fillers = []
        for array, trimmed in zip(rows.arrays, rows.axes, strict=True):
            place = [short, *(length if axis in trimmed else 0 for axis in range(1, array.ndim))]
            fillers.append(array[tuple(place)] if trimmed else 0)
        return tuple(fillers)

    def _check_needs_none(self, rows: Rows, widths: tuple[int, ...]) -> None:
        """Refuse a batch without padding that must be widened, while nobody knows by what."""
        width = next(width for width in widths if width >= rows.before)
        if width > rows.before:
            raise ValueError(
                f"For '{_NAME}', the argument 'padding' must be given, because samples are padded to a width of "
                f"{width}, but got none, and {rows.lengths.size} sample(s) of {rows.before} tokens each, and no batch "
                f"before that shows the padding. Give what each input holds where there is nothing, such as "
                f"padding=(0, -100) for tokens and labels."
            )


def _at_width(output: np.ndarray, width: int) -> np.ndarray:
    """The output with axis 1 padded with zeros, or cut, to a width."""
    cut = output[:, :width]
    return np.pad(cut, [(0, 0), (0, width - cut.shape[1])] + [(0, 0)] * (cut.ndim - 2))
