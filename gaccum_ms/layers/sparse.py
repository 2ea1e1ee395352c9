"""Sparse gradients cannot be added into dense accumulators: refused before training, with the remedy."""

from __future__ import annotations

from mindspore import nn, ops


def _is_sparse(cell: nn.Cell) -> bool:
    """Whether the cell looks up rows with the one primitive whose gradient MindSpore keeps as (indices, values)."""
    return any(isinstance(value, ops.SparseGatherV2) for value in vars(cell).values())


def refuse_sparse_gradients(network: nn.Cell) -> None:
    """Raise for layers with sparse gradients, such as `nn.EmbeddingLookup` with ``sparse=True`` , its default.

    Raises:
        ValueError: If the network holds such a layer.
    """
    names = [name for name, cell in network.cells_and_names() if _is_sparse(cell)]
    if names:
        raise ValueError(
            f"For 'GradAccumulationCell', gradients must be dense, but got layers with sparse ones: "
            f"{', '.join(names)}. Use nn.Embedding, or nn.EmbeddingLookup with target='DEVICE' and sparse=False: an "
            f"accumulator is as large as its table all the same."
        )
