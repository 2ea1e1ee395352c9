"""A rank that trains in data parallel mode: ``training_rank.py HOW OUT NUMBER MODE [FAILING_RANK]`` .

HOW is ``steps`` or ``updates`` , NUMBER how many, MODE ``graph`` or ``pynative`` .

``steps`` does not wait for the other ranks at its end. During training, it writes its process id and its last step to
OUT/<N>, for tests that kill it, and the sum of its weights to OUT/rank<N> at the end. FAILING_RANK raises at step 5,
when the others are in that step's AllReduce.

``updates`` resumes when it is started again. Each update has four batches, shared by any number of ranks.
OUT/trained.<N> has one line for each batch that the rank trained, with the attempt, the update, and a digest of the
samples. Its last weights are in OUT/rank<N>.npz. Then the same processes train once more, from the first batch to the
last, without a checkpoint: OUT/undisturbed.<N> and OUT/undisturbed<N>.npz.
"""

import hashlib
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


def steps(out, number, failing_rank):
    rank, net = get_rank(), nn.Dense(4, 1)
    cell = GradAccumulationCell(nn.WithLossCell(net, nn.MSELoss()), 2)
    step = TrainOneStepWithGradAccumulationCell(cell, nn.SGD(net.trainable_params(), 0.1))
    random = np.random.default_rng(rank)
    for done in range(number):
        if rank == failing_rank and done == 5:
            raise ValueError(f"no step {done} on rank {rank}")
        x = random.normal(size=(6, 4)).astype(np.float32)
        step(Tensor(x), Tensor(x.sum(axis=1, keepdims=True)))
        fresh = out / f".{rank}"
        fresh.write_text(f"{os.getpid()} {done}")
        fresh.rename(out / f"{rank}")
    total = sum(float(ops.sum(parameter).asnumpy()) for parameter in net.trainable_params())
    (out / f"rank{rank}").write_text(f"{get_group_size()} {total!r}")


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
        if self.attempt == 0 and updates == int(os.environ.get("TEST_STOP_AT", -1)):
            time.sleep(1000)  # until the test has ended a host


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


def train_all(number, rows, saved=None):
    """Train to the end, from the checkpoint in the folder `saved` if there is one, and return all Parameters."""
    ms.set_seed(1)
    ms.manual_seed(1)  # MindSpore 2.7 would begin each process with another state
    rank, ranks = get_rank(), get_group_size()
    columns = samples_of_an_epoch(number)
    data_set = ms.dataset.NumpySlicesDataset(columns, shuffle=False, num_shards=ranks, shard_id=rank).batch(BATCH)
    network, optimizer = make_network()
    cell = GradAccumulationCell(network, 2, accumulation_steps=BATCHES // ranks)
    model = ms.Model(cell, optimizer=optimizer)
    finished, callbacks = 0, [Trained(rows)]
    if saved:
        finished = resume(model, saved, data_set)
        callbacks.append(UpdateCheckpoint(1, prefix="net", directory=saved))
    if finished < EPOCHS:  # a rank may have been killed after the last epoch
        model.train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=finished, dataset_sink_mode=False)
    return {parameter.name: parameter.asnumpy() for parameter in model.train_network.get_parameters()}


def updates(out, number, failing_rank):
    rank = get_rank()
    np.savez(out / f"rank{rank}.npz", **train_all(number, out / f"trained.{rank}", f"{out}/saved/{rank}"))
    rows, last = out / f"undisturbed.{rank}", out / f"undisturbed{rank}.npz"
    if not last.exists():
        rows.unlink(missing_ok=True)  # of an attempt that was killed here
        np.savez(last, **train_all(number, rows))


def main(how, out, number, mode, failing_rank=-1):
    ms.set_device("CPU")
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    ms.set_seed(1)
    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    {"steps": steps, "updates": updates}[how](Path(out), int(number), int(failing_rank))


if __name__ == "__main__":
    main(*sys.argv[1:])
