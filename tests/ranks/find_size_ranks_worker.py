"""The case of test_search.py on ranks (support/ranks.py): rank 1 has less memory than rank 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore.communication import get_rank

from gaccum_ms import GradAccumulationCell, find_micro_batch_size
from tests.memory.test_search import Limited
from tests.ranks.cases import error_of, named
from tests.support.reference import OPTIMIZERS, accumulated, batches, make_network, train
from tests.support.two_ranks import Results


def found(largest: int, batch: list[ms.Tensor]) -> tuple[Any, Limited]:
    """The size that is found, or the error, and the network of the search."""
    network, sizes = Limited(make_network("dense"), largest), []
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    arguments = GradAccumulationCell(network, 1), optimizer, batch
    error = error_of(lambda: sizes.append(find_micro_batch_size(*arguments, memory_limit=1 << 40)))
    return error or sizes[0], network


def search(out: Path) -> Results:
    """A search in graph mode. What comes after it compiles nothing."""
    rank = get_rank()
    data = batches(16, 3, seed=rank)
    batch = [ms.Tensor(value) for value in data[0]]
    size, network = found((16, 6)[rank], batch)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    results = named("search", {"less on rank 1": size, "nothing on rank 1": found((16, 0)[rank], batch)[0]})
    # The network of the search, and a new one, train with the number that was found.
    for way, trained in (("searched", network.network), ("given", make_network("dense"))):
        optimizer = OPTIMIZERS["momentum"](trained.trainable_params())
        run = train(accumulated(micro_batch_size=int(size)), trained, optimizer, data)
        results |= named(f"search/{way}", run.state)
    return results


CASES = {"search": search}
