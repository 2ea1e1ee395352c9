"""Refuses layers with sparse gradients before training: they cannot be added to dense accumulators.

MindSpore represents the gradient of two primitives as (indices, values). Graph mode detects this only after our code is
compiled into the graph, and PyNative mode returns the values alone. So the network is searched before training: all
cells and primitives that it holds, and the code of its `construct` .
"""

from __future__ import annotations

from mindspore import nn, ops

from gaccum_ms.backend.code_of_cells import uses
from gaccum_ms.backend.held_cells import held_cells

_SPARSE = (ops.SparseGatherV2, ops.EmbeddingLookup)


def refuse_sparse_gradients(network: nn.Cell) -> None:
    """Raise for layers with sparse gradients, such as `nn.EmbeddingLookup` with ``sparse=True`` , its default."""
    names = [name for name, cell in held_cells(network) if _is_sparse(cell)]
    if names:
        raise ValueError(
            f"For 'GradAccumulationCell', gradients must be dense, but got layers with sparse ones: "
            f"{', '.join(names)}. Use nn.Embedding, or nn.EmbeddingLookup with target='DEVICE' and sparse=False: an "
            f"accumulator is as large as its table all the same."
        )


def _is_sparse(cell: nn.Cell) -> bool:
    if isinstance(cell, nn.EmbeddingLookup):  # holds both primitives, and uses one
        return cell.sparse
    return uses(cell, _SPARSE)
