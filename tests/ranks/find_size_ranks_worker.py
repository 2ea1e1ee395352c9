"""One rank of the search: rank 1 has less memory than rank 0. Run by tests/memory/test_search.py."""

from __future__ import annotations

import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore.communication import get_rank, init
from support.reference import OPTIMIZERS, accumulated, batches, make_network, train
from support.two_ranks import leave
from test_search import Limited

from gaccum_ms import GradAccumulationCell, find_micro_batch_size


def main(out: Path) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    rank = get_rank()
    data = batches(16, 3, seed=rank)
    results = {}
    for name, largest in (("less on rank 1", (16, 6)[rank]), ("nothing on rank 1", (16, 0)[rank])):
        network = Limited(make_network("dense"), largest)
        optimizer = OPTIMIZERS["momentum"](network.trainable_params())
        batch = [ms.Tensor(value) for value in data[0]]
        try:
            size = find_micro_batch_size(GradAccumulationCell(network, 1), optimizer, batch, memory_limit=1 << 40)
        except RuntimeError as error:
            results[name] = np.array(str(error))
        else:
            results[name] = np.array(size)
            # The network of the search, and a new one, train with the number that was found.
            for way, trained in (("searched", network.network), ("given", make_network("dense"))):
                run = train(
                    accumulated(micro_batch_size=size),
                    trained,
                    OPTIMIZERS["momentum"](trained.trainable_params()),
                    data,
                )
                results |= {f"{way}/{key}": value for key, value in run.state.items()}
    leave(out, rank, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
