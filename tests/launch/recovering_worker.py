"""A training in data parallel mode that resumes automatically when it is started again.

    python -m gaccum_ms.launch -n 4 --max-restarts 20 recovering_worker.py OUT UPDATES MODE

Each update has four batches, shared by any number of ranks. OUT/trained.<rank> has one line for each batch that the
rank trained, with the attempt, the update, and a digest of the samples. Its last weights are in OUT/rank<N>.npz.
"""

import hashlib
import json
import os
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, train
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import GradAccumulationCell, UpdateCheckpoint, resume

BATCH, BATCHES, EPOCHS = 4, 4, 2


class Trained(train.Callback):
    """Records the samples of each batch."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.attempt = int(os.environ["GACCUM_MS_RESTART_COUNT"])

    def on_train_step_end(self, run_context):
        parameters = run_context.original_args()
        samples = parameters.train_dataset_element[0].asnumpy()
        updates = int(parameters.train_network.update_count.asnumpy())
        row = [self.attempt, updates, hashlib.sha256(samples.tobytes()).hexdigest()[:8], len(samples)]
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")


def main(out, updates, mode):
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    ms.manual_seed(1)  # MindSpore 2.7 would begin each process with another state
    init()
    rank, ranks = get_rank(), get_group_size()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    random = np.random.default_rng(0)
    x = random.normal(size=(int(updates) // EPOCHS * BATCHES * BATCH, 5)).astype(np.float32)
    y = np.tanh(x).sum(axis=1, keepdims=True)
    data_set = ms.dataset.NumpySlicesDataset((x, y), shuffle=False, num_shards=ranks, shard_id=rank).batch(BATCH)
    net = nn.SequentialCell(nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 1))
    optimizer = nn.Momentum(net.trainable_params(), 0.05, momentum=0.9)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2, accumulation_steps=BATCHES // ranks)
    model = ms.Model(cell, optimizer=optimizer)
    folder = f"{out}/saved/{rank}"
    finished = resume(model, folder, data_set)
    callbacks = [Trained(Path(out) / f"trained.{rank}"), UpdateCheckpoint(1, prefix="net", directory=folder)]
    if finished < EPOCHS:  # a rank may have been killed after the last epoch
        model.train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=finished, dataset_sink_mode=False)
    np.savez(f"{out}/rank{rank}.npz", **{one.name: one.asnumpy() for one in model.train_network.get_parameters()})


if __name__ == "__main__":
    main(*sys.argv[1:])
