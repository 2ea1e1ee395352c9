"""BalancedSampler: deals each global batch to the ranks, with nearly equal work for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from mindspore import dataset

from gaccum_ms.checks.arguments import check_bool, check_not_negative_int, check_positive_int

_NAME = "BalancedSampler"
_EVEN = 1e-3  # groups are even when the largest sum is above the mean by at most this share of it


class BalancedSampler(dataset.Sampler):
    r"""
    Sampler for `mindspore.dataset.GeneratorDataset
    <https://www.mindspore.cn/docs/en/master/api_python/dataset/mindspore.dataset.GeneratorDataset.html>`_ that gives
    each rank its group of each global batch. All groups have nearly the same number of tokens.

    All ranks compute the same order from seed and epoch, and cut it into global batches of :math:`\text{batch\_size}
    \times \text{num\_shards}` samples. Each global batch is dealt from its longest sample to its shortest, back and
    forth over the ranks. Swaps of samples between ranks then even out what is left. Each sample comes once per epoch,
    on one rank. Call ``.batch(batch_size)`` on the data set, which must not have `num_shards` .

    Args:
        lengths (Sequence[int]): The lengths of all samples of the data set, in its order.
        batch_size (int): The number of samples in a batch on one rank.
        num_shards (int): The number of ranks.
        shard_id (int): This rank's number, from 0.

    Keyword Args:
        shuffle (bool): Whether to shuffle before each epoch. Default: ``True`` .
        seed (int): The seed of the shuffling. Default: ``0`` .

    Note:
        The last global batch of an epoch may be smaller. It is dealt as evenly as its number of samples allows. If it
        has fewer samples than there are ranks, some ranks have one batch less: :class:`FlushAccumulation` evens this
        out.

    Raises:
        TypeError: If an argument has another type than above.
        ValueError: If `lengths` is empty, not one-dimensional or not numeric, or has a negative or non-finite value; if
            `batch_size` or `num_shards` is less than 1; if `seed` is negative; if `shard_id` is not from 0 to
            `num_shards` - 1.

    Supported Platforms:
        ``Ascend`` ``GPU`` ``CPU``

    Examples:
        >>> from gaccum_ms import BalancedSampler
        >>> lengths = [9, 1, 8, 2, 7, 3, 6, 4]
        >>> for rank in range(2):
        ...     sampler = BalancedSampler(lengths, 4, num_shards=2, shard_id=rank, shuffle=False)
        ...     print([lengths[index] for index in sampler])
        [9, 6, 4, 1]
        [8, 7, 3, 2]
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        num_shards: int,
        shard_id: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
    ) -> None:
        check_positive_int(_NAME, "batch_size", batch_size)
        check_positive_int(_NAME, "num_shards", num_shards)
        check_not_negative_int(_NAME, "shard_id", shard_id)
        check_not_negative_int(_NAME, "seed", seed)
        if shard_id >= num_shards:
            raise ValueError(
                f"For '{_NAME}', the argument 'shard_id' must be from 0 to {num_shards - 1}, but got {shard_id}."
            )
        check_bool(_NAME, "shuffle", shuffle)
        array = np.asarray(lengths)
        if array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
            raise ValueError(
                f"For '{_NAME}', the argument 'lengths' must have one number for each sample, but got shape "
                f"{array.shape} of {array.dtype}."
            )
        array = array.astype(np.float64)
        if not np.isfinite(array).all() or array.min() < 0:
            raise ValueError(
                f"For '{_NAME}', the argument 'lengths' must be finite and not negative, but got {array.min()} to "
                f"{array.max()}."
            )
        self._costs = array
        self._batch_size, self._shards, self._shard = batch_size, num_shards, shard_id
        self._shuffle, self._seed = shuffle, seed
        self._epoch = 0
        super().__init__(len(self))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, counted from 0. Each new iterator of the data set begins with it: call
        this method after a resume, and in a loop of your own that makes an iterator for each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        samples = np.arange(self._costs.size)
        if self._shuffle:
            samples = np.random.default_rng((self._seed, self._epoch)).permutation(samples)
        self._epoch += 1
        at_once = self._batch_size * self._shards
        batches = (samples[start : start + at_once] for start in range(0, samples.size, at_once))
        return iter(
            [int(batch[place]) for batch in batches for place in dealt(self._costs[batch], self._shards)[self._shard]]
        )

    def __len__(self) -> int:
        full, rest = divmod(self._costs.size, self._batch_size * self._shards)
        return full * self._batch_size + len(range(self._shard, rest, self._shards))


def dealt(costs: np.ndarray, groups: int) -> list[list[int]]:
    """The indices of the costs, dealt to `groups` groups with equal numbers of costs and nearly equal sums: from the
    largest to the smallest, back and forth over the groups; what is still uneven is mended by swaps."""
    order = np.argsort(-costs, kind="stable")
    places = np.arange(costs.size) % (2 * groups)
    group_of = np.minimum(places, 2 * groups - 1 - places)
    result = [order[group_of == group].tolist() for group in range(groups)]
    _swap(costs, result)
    return sorted(result, key=lambda places: (-len(places), min(places, default=costs.size)))


def _swap(costs: np.ndarray, groups: list[list[int]]) -> None:
    """Let the largest group swap a cost for a smaller one of another group, until the groups are even or no swap helps.

    The other part is the smallest one that has such a cost. The pair is the one that brings both sums closest.
    """
    while True:
        sums = [float(costs[group].sum()) for group in groups]
        *others, largest = np.argsort(sums, kind="stable").tolist()
        if sums[largest] <= (1 + _EVEN) * np.mean(sums):
            return
        for other in filter(groups.__getitem__, others):
            gap = sums[largest] - sums[other]
            moved = costs[groups[largest]][:, None] - costs[groups[other]]
            i, j = np.unravel_index(np.abs(moved - gap / 2).argmin(), moved.shape)
            # Both bounds keep away from 0 and gap: rounded sums could otherwise swap the same pair for ever.
            if _EVEN * gap < moved[i, j] < (1 - _EVEN) * gap:
                groups[largest][i], groups[other][j] = groups[other][j], groups[largest][i]
                break
        else:
            return
