"""A rank that trains in data parallel mode, and resumes when it is started again: ``training_rank.py OUT UPDATES`` .

Each update has four batches, shared by any number of ranks. OUT/trained.<N> has one line for each batch that the rank
trained: the attempt, and the updates that are complete. Its last weights are in OUT/rank<N>.npz. The variable
TEST_STOP_AT has the update of each attempt at which the ranks stand still, to be killed.
"""

import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import train
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import GradAccumulationCell, UpdateCheckpoint, resume
from tests.support.reference import OPTIMIZERS, Regression, batches

BATCH, BATCHES, EPOCHS = 4, 4, 2


class Trained(train.Callback):
    """Records each batch."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.attempt = int(os.environ["GACCUM_MS_RESTART_COUNT"])
        self.stop_at = [*map(int, os.environ["TEST_STOP_AT"].split()), -1, -1][self.attempt]

    def on_train_step_end(self, run_context):
        updates = int(run_context.original_args().train_network.update_count.asnumpy())
        with self.file.open("a") as file:
            file.write(json.dumps([self.attempt, updates]) + "\n")
        if updates == self.stop_at:
            time.sleep(1000)


def samples_of_an_epoch(number):
    return batches(number // EPOCHS * BATCHES * BATCH, 1)[0]


def main(out, number):
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    ms.set_seed(1)
    ms.manual_seed(1)  # MindSpore 2.7 would begin each process with another state
    rank, ranks = get_rank(), get_group_size()
    columns = samples_of_an_epoch(number)
    data_set = ms.dataset.NumpySlicesDataset(columns, shuffle=False, num_shards=ranks, shard_id=rank).batch(BATCH)
    network = Regression()
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    cell = GradAccumulationCell(network, 2, accumulation_steps=BATCHES // ranks)
    model, saved = ms.Model(cell, optimizer=optimizer), f"{out}/saved/{rank}"
    callbacks = [Trained(out / f"trained.{rank}"), UpdateCheckpoint(1, prefix="net", directory=saved)]
    finished = resume(model, saved, data_set)
    if finished < EPOCHS:  # a rank may have been killed after the last epoch
        model.train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=finished, dataset_sink_mode=False)
    np.savez(out / f"rank{rank}.npz", **{each.name: each.asnumpy() for each in model.train_network.get_parameters()})


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
