"""The cases of test_search.py and test_auto_size.py on ranks (support/ranks.py): rank 1 has less memory than rank 0."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import mint, nn
from mindspore.communication import get_rank

from gaccum_ms import GradAccumulationCell, find_micro_batch_size
from tests.memory.test_search import Limited
from tests.ranks.cases import error_of, named
from tests.support.reference import OPTIMIZERS, Regression, accumulated, batches, make_network, train, vector
from tests.support.two_ranks import Results
from tests.training.test_auto_size import WithStatistics, halving_step, make_step, marked, run, state


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
        results |= named(way, train(accumulated(micro_batch_size=int(size)), trained, optimizer, data).state)
    return results


def halve(out: Path) -> Results:
    """Rank 1 runs out of memory in the third batch."""
    # A rank that compiles alone, for half the size, must not wait for the others to send it their weights.
    ms.set_auto_parallel_context(parameter_broadcast=True)
    rank = get_rank()
    data = [marked(one) for one in batches(16, 4, seed=rank)]
    results = {}

    def compare(kind, flush=False, **options):
        # In a flush, rank 0 has no batch at all.
        own = data[:0] if flush and rank == 0 else data
        loss, step = halving_step(search=flush, **options)
        sizes = []
        for number, batch in enumerate(own):
            if number == 2 and rank == 1:
                loss.set_largest(8)
            run(step, [batch])
            sizes.append(step.micro_batch_size)
        if flush:
            assert step.flush()
            sizes.append(step.micro_batch_size)
        ms.set_context(mode=ms.PYNATIVE_MODE)  # nothing to compile
        whole = make_step(Regression(), micro_size=1, **options)
        run(whole, own)
        if flush:
            assert whole.flush()
        ms.set_context(mode=ms.GRAPH_MODE)
        results.update(named(kind, {"sizes": sizes}))
        for name, one in (("auto", step), ("whole", whole)):
            results.update(named(kind, {name: vector(one.weights), f"{name}_updates": one.update_count.asnumpy()}))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "For 'GradAccumulationCell', memory ran out")
        compare("window", accumulation_steps=2)
        compare("flush", accumulation_steps=8, flush=True)

        # Not even one sample fits in the second batch, which ends the window.
        warnings.filterwarnings("ignore", ".*BatchNorm")
        loss, step = halving_step(WithStatistics(), size=2, accumulation_steps=2)
        run(step, data[:1])
        if rank == 1:
            loss.set_largest(0)
        before = state(step)
        results["error"] = np.array(error_of(lambda: run(step, data[1:2])))
        results |= named("before", before) | named("after", state(step))
        layers = nn.SequentialCell(nn.Dense(12, 8), mint.nn.SyncBatchNorm(8))
        results["refused"] = np.array(error_of(lambda: make_step(layers, micro_batch_size="auto")))
    return results


CASES = {
    **dict.fromkeys(("search", "searched", "given"), search),
    **dict.fromkeys(("window", "flush", "error", "before", "after", "refused"), halve),
}
