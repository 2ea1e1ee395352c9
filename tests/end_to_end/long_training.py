"""A training of a day: killed at random and resumed, it ends with the weights of one that was not, in flat memory.

    python -m tests.end_to_end.long_training --batches 20000 --kills 10     in full; test_long_training.py: a short one

Graph mode, windows of four batches, and all callbacks that go together. AdaptiveAccumulation does not: it chooses other
windows, and its averages are not in checkpoints.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.experimental import optim
from mindspore.train import Callback, CheckpointConfig

import gaccum_ms
from tests.support import environment

BATCH, EPOCH, STEPS = 8, 250, 4  # samples of a batch; batches of an epoch, unless it is short, and of a window
WARM_UP = 400  # batches of a process before its memory is compared
TIME_LIMIT = 12 * 3600  # seconds, for a process


class MallInfo2(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def allocated() -> int:
    """The bytes that malloc has given out, which no free arena and no page that the system keeps can hide."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = MallInfo2
    info = mallinfo2()
    return info.uordblks + info.hblkhd


class Classifier(nn.Cell):
    """Returns its loss, and for the metrics its logits and the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.SequentialCell(nn.Dense(6, 16), nn.LayerNorm((16,)), nn.ReLU(), nn.Dense(16, 3))
        self.loss = nn.CrossEntropyLoss()

    def construct(self, x, y):
        logits = self.net(x)
        return self.loss(logits, y), logits, y


def make_data_set(epoch: int) -> Any:
    ms.dataset.config.set_seed(5)
    generator = np.random.default_rng(5)
    x = generator.normal(size=(epoch * BATCH, 6)).astype(np.float32)
    y = (x @ generator.normal(size=(6, 3))).argmax(axis=1).astype(np.int32)
    return ms.dataset.NumpySlicesDataset((x, y), shuffle=True).batch(BATCH)


class Watch(Callback):
    """Notes the memory that is allocated after each batch. Kills the process within 20 ms of a batch's beginning: in
    the batch, in a callback, or while a file is saved."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.kill_at, self.memory = kill_at, list[int]()

    def on_train_step_begin(self, run_context):
        if int(run_context.original_args().train_network.batch_count.asnumpy()) == self.kill_at:
            delay = random.Random(self.kill_at).uniform(0, 0.02)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def on_train_step_end(self, run_context):
        self.memory.append(allocated())

    def growth(self) -> float:
        """The slope of a line through the memory after the warm-up, in bytes a batch."""
        memory = self.memory[WARM_UP:]
        return float(np.polyfit(range(len(memory)), memory, 1)[0]) if len(memory) >= WARM_UP else 0.0


def train(folder: Path, batches: int, updates: int, kill_at: int, epoch: int) -> None:
    """One process: go on from the newest checkpoint to the end, or to the batch at which it is killed."""
    environment.of_tests()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(5)
    network = Classifier()
    optimizer = optim.AdamW(network.trainable_params(), lr=0.01)
    options = {"accumulation_steps": STEPS, "aux": True, "max_grad_norm": 1.0, "record_noise": True}
    cell = gaccum_ms.GradAccumulationCell(network, 2, transforms=(gaccum_ms.WeightAverage(0.99),), **options)
    model, data_set = ms.Model(cell, optimizer=optimizer), make_data_set(epoch)
    schedule = gaccum_ms.UpdateScheduler(optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9999))
    config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=3)
    watch = Watch(kill_at)
    accuracy = {"accuracy": lambda logits, y: (logits.argmax(axis=1) == y).mean()}
    with open(os.devnull, "w") as nowhere:
        callbacks = [
            gaccum_ms.AccumulationScheduler({0: STEPS}),
            gaccum_ms.FlushAccumulation(),
            schedule,
            gaccum_ms.GradNoiseScale(),
            gaccum_ms.WindowMonitor(folder / "windows.jsonl"),
            gaccum_ms.TrainingMetrics(accuracy, show=False),
            gaccum_ms.ProgressBar(nowhere, show=True),
            gaccum_ms.UpdateCheckpoint(updates, prefix="net", directory=str(folder / "saved"), config=config),
            watch,
        ]
        finished = gaccum_ms.resume(model, folder / "saved", data_set)
        model.train(batches // epoch, data_set, callbacks=callbacks, initial_epoch=finished)
    parameters = {parameter.name: parameter.asnumpy() for parameter in model.train_network.get_parameters()}
    np.savez(folder / "end.npz", **parameters)
    (folder / "growth").write_text(repr(watch.growth()))


class Trained(NamedTuple):
    """What a training left, whose processes may have been killed."""

    parameters: dict[str, np.ndarray]
    records: list[dict[str, Any]]  # of its windows; those that were trained again, twice
    growth: float  # bytes a batch, of the last process, if it trained for long enough


def run(folder: Path, batches: int, updates: int, kills: Sequence[int] = (), epoch: int = EPOCH) -> Trained:
    """Train in one process after the other. `updates` : between two checkpoints. `kills` : the batches in which
    processes are killed. `epoch` : the batches of one."""
    folder.mkdir()
    for kill_at in (*sorted(kills), -1):
        arguments = (folder, batches, updates, kill_at, epoch)
        process = multiprocessing.get_context("spawn").Process(target=train, args=arguments, daemon=True)
        process.start()
        process.join(TIME_LIMIT)
        assert process.exitcode == (-signal.SIGKILL if kill_at >= 0 else 0)
    records = [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]
    return Trained(dict(np.load(folder / "end.npz")), records, float((folder / "growth").read_text()))


def random_kills(seed: int, number: int, batches: int) -> list[int]:
    """Batches at which processes are killed, none of them the last."""
    return sorted(random.Random(seed).sample(range(1, batches - 1), number))


def differences(one: Trained, other: Trained) -> list[str]:
    """The Parameters that are not bit-identical."""
    assert one.parameters.keys() == other.parameters.keys()
    return [name for name, value in one.parameters.items() if value.tobytes() != other.parameters[name].tobytes()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=20_000, help=f"a multiple of an epoch's {EPOCH}")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the batches at which processes are killed")
    parser.add_argument("--updates", type=int, default=125, help="between two checkpoints")
    options = parser.parse_args()
    kills = random_kills(options.seed, options.kills, options.batches)
    with tempfile.TemporaryDirectory(prefix="long_training") as folder:
        unbroken = run(Path(folder, "unbroken"), options.batches, options.updates)
        killed = run(Path(folder, "killed"), options.batches, options.updates, kills)
    different = differences(unbroken, killed)
    print(f"killed in batches {kills}: {f'other values of {different}' if different else 'all values are identical'}")
    print(f"bytes that each batch left: {unbroken.growth:.0f}, and after the last kill {killed.growth:.0f}")
    return int(bool(different) or max(unbroken.growth, killed.growth) > 1024)


if __name__ == "__main__":
    sys.exit(main())
