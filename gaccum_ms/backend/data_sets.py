"""What a data set gives this rank in an epoch, and whether ranks share its samples in turn.

MindSpore documents no way to ask for the rows of a batch's source, or for its sampler: both are read from the
operations that a data set consists of.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms

# Operations that leave the samples in their order. Others may shuffle, filter or join each rank's own samples.
_KEEP_ORDER = {"Batch", "Map", "PaddedBatch", "Project", "Rename", "Repeat", "Skip", "SyncWait", "Take", "Zip"}
_BATCHES = ("BatchDataset", "PaddedBatchDataset")


class EpochOfRank(NamedTuple):
    """What one rank gets in an epoch. A number is 0 if it is not known."""

    batches: int
    samples: int
    batch_samples: int  # in each batch but the last
    order: str  # what depends on the number of ranks in the order of samples; empty: nothing


def epoch_of(data_set: Any, ranks: int, batches: int | None = None) -> EpochOfRank:
    """`batches` : those of an epoch, if the data set has not the number."""
    batches = data_set.get_dataset_size() if batches is None else batches
    batching = _batching(data_set)
    size = max(batching.get_batch_size(), 0) if batching is not None else 0  # -1: a function decides
    samples = batches * size
    if size and not batching.drop_remainder and counts_quickly(data_set):
        epochs, rest = divmod(batches, batching.get_dataset_size())
        samples = epochs * batching.children[0].get_dataset_size() + rest * size
    return EpochOfRank(batches, samples, size, _order(data_set, ranks))


def counts_quickly(data_set: Any) -> bool:
    """Whether the number of rows is known without reading them."""
    if data_set.children:
        return _operation(data_set) in _KEEP_ORDER | {"Shuffle"} and all(map(counts_quickly, data_set.children))
    return isinstance(data_set, ms.dataset.MappableDataset) and getattr(data_set, "source_len", 0) != -1


def samples_of_first_batch(data_set: Any) -> int:
    """The length of the first axis of the first batch, which is read for it, if the source itself yields batches;
    else 0."""
    if _batching(data_set) is not None:
        return 0
    shapes = data_set.output_shapes()
    return int(shapes[0][0]) if shapes and shapes[0] else 0


def _batching(data_set: Any) -> Any:
    """The operation that makes batches of rows; None if the source itself yields batches."""
    while type(data_set).__name__ not in _BATCHES:
        if len(data_set.children) != 1:
            return None
        data_set = data_set.children[0]
    return data_set


def _operation(data_set: Any) -> str:
    return type(data_set).__name__.removesuffix("Dataset")


def _order(data_set: Any, ranks: int) -> str:
    """What depends on the number of ranks; empty if nothing does."""
    name = type(data_set).__name__
    if data_set.children:
        if _operation(data_set) == "Shuffle":
            return "'shuffle' orders the samples of each rank alone"
        if _operation(data_set) not in _KEEP_ORDER:
            return f"'{name}' may order the samples of each rank alone"
        return next(filter(None, (_order(child, ranks) for child in data_set.children)), "")
    sampler = getattr(data_set, "sampler", None)
    if not isinstance(data_set, ms.dataset.MappableDataset) or isinstance(data_set, ms.dataset.MindDataset):
        return f"'{name}' need not give its samples to the ranks in turn"
    if isinstance(sampler, ms.dataset.DistributedSampler):
        in_turn = sampler.num_shards == ranks and sampler.offset == -1 and sampler.child_sampler is None
        return "" if in_turn else f"the sampler of '{name}' is not for {ranks} rank(s)"
    if ranks == 1 and isinstance(sampler, ms.dataset.SequentialSampler):
        return ""
    if ranks == 1 and isinstance(sampler, ms.dataset.RandomSampler):
        return f"'{name}' without num_shards shuffles in another order than with it (give num_shards=1, shard_id=0)"
    return f"'{name}' has no num_shards={ranks}, so that its order on other ranks is not known"
