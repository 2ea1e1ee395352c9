"""How the samples of one batch are laid out: which go into which micro-batch, and at what width."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NOBODY = -1  # in place of a sample's number: a row that counts nothing


@dataclass(frozen=True)
class TokenPlan:
    """
    How :class:`MaxTokens` has laid out a batch; prints as a table. ``tokens`` is their number without padding,
    ``padding`` the share of padding in all micro-batches, and ``padding_before`` that of the batch as it came.

    Args:
        lengths (ndarray): The lengths of the batch's samples, in tokens, of shape :math:`(N,)`.
        before (int): The width to which the batch is padded, in tokens.
        widths (tuple[int, ...]): The widths that may be compiled, ascending.
        max_tokens (int): Tokens of a micro-batch, padding included, at most.
        parts (tuple): Of each micro-batch its width, and the number in the batch of the sample in each row; -1 in rows
            that hold padding alone.

    Raises:
        ImportError: If :meth:`draw` is called and matplotlib is not installed.

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
    parts: tuple[tuple[int, np.ndarray], ...]

    @property
    def tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    @property
    def padding(self) -> float:
        """The share of padding in all micro-batches."""
        return 1 - self.tokens / sum(width * rows.size for width, rows in self.parts)

    @property
    def padding_before(self) -> float:
        """The share of padding in the batch as it came."""
        return 1 - self.tokens / (self.before * self.lengths.size)

    @property
    def order(self) -> np.ndarray:
        """Where each sample of the batch is, among the rows of all micro-batches."""
        rows = np.concatenate([rows for _, rows in self.parts])
        places = np.flatnonzero(rows != NOBODY)
        return places[np.argsort(rows[places], kind="stable")]

    def table(self) -> list[tuple[int, int, int, int, float]]:
        """Of each width that is used: the width, rows of a micro-batch, micro-batches, samples, and the share of
        padding."""
        found = []
        for width in self.widths:
            here = [rows for other, rows in self.parts if other == width]
            if here:
                samples = np.concatenate(here)
                samples = samples[samples != NOBODY]
                all_tokens = width * sum(rows.size for rows in here)
                share = 1 - self.lengths[samples].sum() / all_tokens
                found.append((width, here[0].size, len(here), samples.size, float(share)))
        return found

    def __str__(self) -> str:
        lines = [f"{'width':>7}{'rows':>7}{'micro-batches':>16}{'samples':>10}{'padding':>10}"]
        for width, rows, parts, samples, share in self.table():
            lines.append(f"{width:>7}{rows:>7}{parts:>16}{samples:>10}{share:>10.1%}")
        samples = self.lengths.size
        lines.append(f"{'all':>7}{'':>7}{len(self.parts):>16}{samples:>10}{self.padding:>10.1%}")
        lines.append(f"padded to {self.before}, without a plan: {self.padding_before:.1%}")
        return "\n".join(lines)

    def draw(self, path: str | Path) -> None:
        """Draw each micro-batch as its rows, tokens and padding apart, into a file such as ``plan.png`` .

        Args:
            path (str): The file; its ending says the format.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("For 'TokenPlan.draw', matplotlib must be installed: pip install matplotlib.") from error
        figure = Figure(figsize=(8, 4), layout="constrained")
        axes = figure.subplots()
        start = 0
        for width, rows in self.parts:
            places = start + np.arange(rows.size)
            real = np.where(rows == NOBODY, 0, self.lengths[rows])
            axes.bar(places, np.full(rows.size, width), width=1, color="tab:gray", alpha=0.4)
            axes.bar(places, real, width=1, color="tab:blue")
            axes.axvline(start - 0.5, color="black", linewidth=0.5)
            start += rows.size
        axes.set(xlabel="rows, micro-batch by micro-batch", ylabel="tokens", title=f"{self.padding:.1%} padding")
        figure.savefig(path)


def plan_tokens(lengths: np.ndarray, before: int, widths: Sequence[int], max_tokens: int) -> TokenPlan:
    """Lay out a batch in micro-batches of one number of rows for each width.

    From the largest width down: what is left of its last micro-batch takes the longest of the shorter samples, for
    which it is padding anyway. Only the last micro-batch of all may have rows without a sample. A width that would have
    few samples may cost more than it saves, so each choice among the widths is tried.

    Args:
        lengths (ndarray): The lengths of its samples, of which none is larger than the last width.
        before (int): The width to which it is padded.
        widths (Sequence[int]): Ascending.
        max_tokens (int): As in `MaxTokens` .
    """
    longest_first = np.argsort(-lengths, kind="stable")
    # Of each width: how many samples are longer than it.
    longer = [int((lengths > width).sum()) for width in widths]
    smallest = longer.index(0)  # that holds all
    choices = (
        (*few, smallest) for size in range(smallest + 1) for few in itertools.combinations(range(smallest), size)
    )
    layouts = [_layout(choice, widths, longer, max_tokens, lengths.size) for choice in choices]
    best = min(layouts, key=lambda layout: sum(number * rows * width for width, rows, number in layout))
    parts: list[tuple[int, np.ndarray]] = []
    taken = 0
    for width, rows, number in best:
        for _ in range(number):
            samples = longest_first[taken : taken + rows]
            taken += samples.size
            parts.append((width, np.concatenate([samples, np.full(rows - samples.size, NOBODY)])))
    return TokenPlan(lengths, before, tuple(widths), max_tokens, tuple(parts))


def _layout(
    choice: Sequence[int], widths: Sequence[int], longer: Sequence[int], max_tokens: int, samples: int
) -> list[tuple[int, int, int]]:
    """Width, rows and number of the micro-batches of each width that is chosen, the largest first."""
    found, taken = [], 0
    for place, next_one in itertools.zip_longest(choice[::-1], choice[-2::-1]):
        rows = max_tokens // widths[place]
        left = (samples if next_one is None else longer[next_one]) - taken
        number = max(0, -(-left // rows))
        taken += number * rows
        found.append((widths[place], rows, number))
    return found
