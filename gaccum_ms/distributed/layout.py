"""The layout of a list of tensors over ranks: takes a rank's own parts, and puts all parts together.

A tensor is either whole, on one rank, or sliced over all ranks: each rank has a row of shape (1, columns) of the
flattened tensor. If the size does not divide by the ranks, the last rows begin earlier and overlap those before them,
and several ranks compute the same elements. Shapes, and so the graphs, are then equal on all ranks.

Parts are sent in few large buffers: one collective for each `BUFFER_BYTES` of one dtype, not one for each tensor.

Ranks must run their collectives in the same order. MindSpore orders collectives by the graph. If ranks have different
tensors, their graphs differ, and each collective must depend on the one before, as in `whole` .

Compiled code here follows the rules at the head of step.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.communication import get_group_size, get_rank

from gaccum_ms.backend import no_grad

BUFFER_BYTES = 2**26  # the size of one gathered buffer, which is temporary memory


def rank_and_ranks() -> tuple[int, int]:
    """This rank and the number of ranks; stand-alone, (0, 1)."""
    if ms.get_auto_parallel_context("parallel_mode") != ms.ParallelMode.DATA_PARALLEL:
        return 0, 1
    return get_rank(), get_group_size()


def balanced_owners(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """A rank for each tensor. The largest is placed first, each on the rank with the smallest load."""
    loads = [0] * ranks
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return tuple(owners)


def gather_json(value: Any) -> list[Any]:
    """The values of all ranks. A collective, outside of graphs."""
    codes = np.frombuffer(json.dumps(value).encode(), np.uint8).astype(np.float32)  # the CPU back end sends no bytes
    with no_grad():
        lengths = ops.AllGather()(ms.Tensor([float(codes.size)])).asnumpy().astype(int)
        row = np.pad(codes, (0, max(lengths) - codes.size))
        rows = ops.AllGather()(ms.Tensor(row[None])).asnumpy().astype(np.uint8)
    return [json.loads(row[:length].tobytes()) for row, length in zip(rows, lengths, strict=True)]


class Layout(nn.Cell):
    """The layout of a list of tensors over ranks. `owners` : for each tensor, the rank that has it whole; None: all
    ranks have slices."""

    def __init__(self, like: Sequence[ms.Parameter], owners: Sequence[int | None], rank: int, ranks: int) -> None:
        super().__init__(auto_prefix=False)
        self.rank = rank
        self.ranks = ranks
        self.owners = tuple(owners)
        self.shapes = tuple(tuple(tensor.shape) for tensor in like)
        self.dtypes = tuple(tensor.dtype for tensor in like)
        self.sizes = tuple(int(np.prod(shape, dtype=np.int64)) for shape in self.shapes)
        self.columns = tuple(
            -(-size // ranks) if owner is None else size for size, owner in zip(self.sizes, self.owners, strict=True)
        )
        self.starts = tuple(
            min(rank * columns, size - columns) for columns, size in zip(self.columns, self.sizes, strict=True)
        )
        self.own_indices = tuple(index for index, owner in enumerate(self.owners) if owner in (None, rank))
        self._fill_buffers()
        self.all_gather = ops.AllGather()

    def _fill_buffers(self) -> None:
        """Find, for each buffer, its dtype, its width, and the tensors in this rank's row; for each tensor, its buffer
        and its columns there."""
        numbers: dict[tuple[Any, bool, int], int] = {}
        loads: dict[tuple[Any, bool], list[int]] = {}
        ends: list[list[int]] = []  # columns filled in each buffer, on each rank
        members: list[list[int]] = []
        wires = []
        places = []
        for index, (dtype, owner) in enumerate(zip(self.dtypes, self.owners, strict=True)):
            wire = ms.float32 if dtype == ms.bfloat16 else dtype  # the CPU back end sends no bfloat16
            rows = range(self.ranks) if owner is None else (owner,)
            load = loads.setdefault((dtype, owner is None), [0] * self.ranks)
            limit = max(BUFFER_BYTES // self.ranks // ms.Tensor(0, wire).itemsize, 1)
            number = numbers.setdefault((dtype, owner is None, load[rows[0]] // limit), len(numbers))
            if number == len(ends):
                ends.append([0] * self.ranks)
                members.append([])
                wires.append(wire)
            start = ends[number][rows[0]]
            for row in rows:
                load[row] += self.columns[index]
                ends[number][row] = start + self.columns[index]
            places.append((number, start, start + self.columns[index]))
            if self.rank in rows:
                members[number].append(index)
        self.places = tuple(places)
        self.members = tuple(map(tuple, members))
        self.widths = tuple(map(max, ends))
        self.wires = tuple(wires)

    # -- compiled ------------------------------------------------------------------------------------------------------

    def own(self, values):
        """This rank's parts of the tensors; `own_indices` has theirs."""
        parts: tuple = ()
        for index in self.own_indices:
            part = values[index]
            if self.owners[index] is None:
                start = self.starts[index]
                part = part.reshape((-1,))[start : start + self.columns[index]].reshape((1, -1))
            parts = (*parts, part)
        return parts

    def whole(self, parts):
        """All tensors, put together from all ranks' `own` parts. A collective."""
        gathered: tuple = ()
        for number in range(len(self.members)):
            row = self.own_row(parts, number)
            if number > 0:
                row = ops.depend(row, gathered[number - 1])
            gathered = (*gathered, self.all_gather(row))
        wholes: tuple = ()
        for index in range(len(self.sizes)):
            number, start, end = self.places[index]
            owner = self.owners[index]
            if owner is None:
                flat = self.joined(gathered[number][:, start:end], index)
            else:
                flat = gathered[number][owner, start:end]
            wholes = (*wholes, ops.cast(flat.reshape(self.shapes[index]), self.dtypes[index]))
        return wholes

    def joined(self, rows, index):
        """A sliced tensor's elements, from the rows of all ranks."""
        full = self.sizes[index] // self.columns[index]
        rest = self.sizes[index] % self.columns[index]
        flat = rows[:full].reshape((-1,))
        if rest > 0:
            flat = ops.concat((flat, rows[full, self.columns[index] - rest :]))
        return flat

    def own_row(self, parts, number):
        """This rank's row of a buffer, shape (1, width)."""
        row: tuple = ()
        filled = 0
        for index in self.members[number]:
            row = (*row, ops.cast(parts[self.own_indices.index(index)], self.wires[number]).reshape((1, -1)))
            filled = filled + self.columns[index]
        if filled < self.widths[number]:
            row = (*row, ops.zeros((1, self.widths[number] - filled), self.wires[number]))
        return ops.concat(row, 1)
