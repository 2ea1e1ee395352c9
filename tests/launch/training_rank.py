"""A rank that trains in data parallel mode: ``training_rank.py HOW OUT NUMBER MODE`` .

HOW is ``steps`` or ``updates`` , NUMBER how many, MODE ``graph`` or ``pynative`` .

``steps`` does not wait for the other ranks at its end. During training, it writes its process id and its last step to
OUT/<N>, for tests that kill it, and the sum of its weights to OUT/rank<N> at the end.

``updates`` resumes when it is started again. Each update has four batches, shared by any number of ranks.
OUT/trained.<N> has one line for each batch that the rank trained: the attempt, and the updates that are complete. Its
last weights are in OUT/rank<N>.npz. The variable TEST_STOP_AT has the update of each attempt at which the ranks stand
still, to be killed.
"""

import json
import os
import sys
import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops, train
from mindspore.communication import get_group_size, get_rank, init

from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell, UpdateCheckpoint, resume

BATCH, BATCHES, EPOCHS = 4, 4, 2


def steps(out, number):
    rank, net = get_rank(), nn.Dense(4, 1)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.1))
    random = np.random.default_rng(rank)
    for done in range(number):
        x = random.normal(size=(6, 4)).astype(np.float32)
        step(Tensor(x), Tensor(x.sum(axis=1, keepdims=True)))
        fresh = out / f".{rank}"
        fresh.write_text(f"{os.getpid()} {done}")
        fresh.rename(out / f"{rank}")
    total = sum(float(ops.sum(parameter).asnumpy()) for parameter in net.trainable_params())
    (out / f"rank{rank}").write_text(f"{get_group_size()} {total!r}")


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
    random = np.random.default_rng(0)
    x = random.normal(size=(number // EPOCHS * BATCHES * BATCH, 5)).astype(np.float32)
    return x, np.tanh(x).sum(axis=1, keepdims=True)


def make_network():
    """A network with its loss, and its optimizer."""
    random = np.random.default_rng(1)
    net = nn.SequentialCell(nn.Dense(5, 7), nn.Tanh(), nn.Dense(7, 1))
    for parameter in net.get_parameters():
        parameter.set_data(Tensor(random.normal(size=parameter.shape) * 0.4, ms.float32))
    return nn.WithLossCell(net, nn.MSELoss()), nn.Momentum(net.trainable_params(), 0.05, momentum=0.9)


def updates(out, number):
    ms.set_seed(1)
    ms.manual_seed(1)  # MindSpore 2.7 would begin each process with another state
    rank, ranks = get_rank(), get_group_size()
    columns = samples_of_an_epoch(number)
    data_set = ms.dataset.NumpySlicesDataset(columns, shuffle=False, num_shards=ranks, shard_id=rank).batch(BATCH)
    network, optimizer = make_network()
    cell = GradAccumulationCell(network, 2, accumulation_steps=BATCHES // ranks)
    model, saved = ms.Model(cell, optimizer=optimizer), f"{out}/saved/{rank}"
    callbacks = [Trained(out / f"trained.{rank}"), UpdateCheckpoint(1, prefix="net", directory=saved)]
    finished = resume(model, saved, data_set)
    if finished < EPOCHS:  # a rank may have been killed after the last epoch
        model.train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=finished, dataset_sink_mode=False)
    np.savez(out / f"rank{rank}.npz", **{each.name: each.asnumpy() for each in model.train_network.get_parameters()})


def main(how, out, number, mode):
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    {"steps": steps, "updates": updates}[how](Path(out), int(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
