"""The layout of one batch: the micro-batch of each sample, and the width of each micro-batch."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NOBODY = -1  # instead of a sample's index: a row of padding


@dataclass(frozen=True)
class TokenPlan:
    """
    The layout of a batch by :class:`MaxTokens` ; prints as a table. ``tokens`` is the number of tokens without padding,
    ``padding`` the share of padding in all micro-batches, and ``padding_before`` the share of padding in the batch
    before it was split.

    Args:
        lengths (ndarray): The lengths of the batch's samples, in tokens, of shape :math:`(N,)`.
        before (int): The width to which the batch is padded, in tokens.
        widths (tuple[int, ...]): The widths that may be compiled, ascending.
        max_tokens (int): The largest number of tokens in a micro-batch, padding included.
        micro_batches (tuple): For each its width, and the index in the batch of each row's sample; -1: padding.

    Raises:
        TypeError: If a field is left out.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> import numpy as np
        >>> from gaccum_ms import TokenPlan
        >>> plan = TokenPlan(np.array([4, 2]), 4, (2, 4), 4, ((4, np.array([0])), (2, np.array([1, -1]))))
        >>> print(plan.tokens, plan.padding, plan.padding_before)
        6 0.25 0.25
    """

    lengths: np.ndarray
    before: int
    widths: tuple[int, ...]
    max_tokens: int
    micro_batches: tuple[tuple[int, np.ndarray], ...]

    @property
    def tokens(self) -> int:
        """The number of tokens, without padding."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> float:
        """The share of padding in all micro-batches."""
        return 1 - self.tokens / sum(width * rows.size for width, rows in self.micro_batches)

    @property
    def padding_before(self) -> float:
        """The share of padding in the batch before it was split."""
        return 1 - self.tokens / (self.before * self.lengths.size)

    @property
    def order(self) -> np.ndarray:
        """The position of each sample of the batch among the rows of all micro-batches."""
        rows = np.concatenate([rows for _, rows in self.micro_batches])
        places = np.flatnonzero(rows != NOBODY)
        return places[np.argsort(rows[places], kind="stable")]

    def table(self) -> list[tuple[int, int, int, int, float]]:
        """For each used width: the width, and the numbers of rows in a micro-batch, micro-batches and samples, and the
        share of padding."""
        rows_of_table = []
        for width in self.widths:
            here = [rows for other, rows in self.micro_batches if other == width]
            if here:
                samples = np.concatenate(here)
                samples = samples[samples != NOBODY]
                all_tokens = width * sum(rows.size for rows in here)
                share = 1 - self.lengths[samples].sum() / all_tokens
                rows_of_table.append((width, here[0].size, len(here), samples.size, float(share)))
        return rows_of_table

    def __str__(self) -> str:
        lines = [f"{'width':>7}{'rows':>7}{'micro-batches':>16}{'samples':>10}{'padding':>10}"]
        for width, rows, number, samples, share in self.table():
            lines.append(f"{width:>7}{rows:>7}{number:>16}{samples:>10}{share:>10.1%}")
        samples = self.lengths.size
        lines.append(f"{'all':>7}{'':>7}{len(self.micro_batches):>16}{samples:>10}{self.padding:>10.1%}")
        lines.append(f"padded to {self.before}, without a plan: {self.padding_before:.1%}")
        return "\n".join(lines)


def plan_tokens(
    lengths: np.ndarray, before: int, widths: Sequence[int], max_tokens: int, fills: bool = True
) -> TokenPlan:
    """Lay out a batch in micro-batches. All micro-batches of a width have the same number of rows, except that without
    `fills` the last one has no rows of padding.

    The micro-batches are filled from the largest width down. The free rows of a width's last micro-batch take the
    longest of the shorter samples: otherwise these rows would be padding. Only the very last micro-batch may have rows
    without a sample. A width with few samples may cost more than it saves, so each choice of widths is tried.
    `before` : the width to which the batch is padded; `widths` : ascending."""
    longest_first = np.argsort(-lengths, kind="stable")
    # For each width, the number of longer samples.
    longer = [int((lengths > width).sum()) for width in widths]
    smallest = longer.index(0)  # the smallest width that holds all samples
    choices = (
        (*few, smallest) for size in range(smallest + 1) for few in itertools.combinations(range(smallest), size)
    )
    layouts = [_layout(choice, widths, longer, max_tokens, lengths.size) for choice in choices]
    best = min(layouts, key=lambda layout: sum(number * rows * width for width, rows, number in layout))
    micro_batches: list[tuple[int, np.ndarray]] = []
    taken = 0
    for width, rows, number in best:
        for _ in range(number):
            samples = longest_first[taken : taken + rows]
            taken += samples.size
            free = rows - samples.size if fills else 0
            micro_batches.append((width, np.concatenate([samples, np.full(free, NOBODY)])))
    return TokenPlan(lengths, before, tuple(widths), max_tokens, tuple(micro_batches))


def _layout(
    choice: Sequence[int], widths: Sequence[int], longer: Sequence[int], max_tokens: int, samples: int
) -> list[tuple[int, int, int]]:
    """For each chosen width, the largest first: the width, the rows of a micro-batch, and the micro-batches."""
    layout, taken = [], 0
    for place, next_one in itertools.zip_longest(choice[::-1], choice[-2::-1]):
        rows = max_tokens // widths[place]
        left = (samples if next_one is None else longer[next_one]) - taken
        number = max(0, -(-left // rows))
        taken += number * rows
        layout.append((widths[place], rows, number))
    return layout
