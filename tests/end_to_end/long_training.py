"""A training of a day: killed at random and resumed, it ends with the weights of one that was not, in flat memory.

    python -m tests.end_to_end.long_training --batches 20000 --kills 10     in full; test_long_training.py: a short one

Graph mode, windows of four batches, and all callbacks that go together. AdaptiveAccumulation does not: it chooses other
windows, and its averages are not in checkpoints. Each process appends the memory that is allocated to a file.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
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

from gaccum_ms import (
    AccumulationScheduler,
    FlushAccumulation,
    GradAccumulationCell,
    GradNoiseScale,
    ProgressBar,
    TrainingMetrics,
    UpdateCheckpoint,
    UpdateScheduler,
    WeightAverage,
    WindowMonitor,
    resume,
)
from tests.support import environment, paths

BATCH, EPOCH, STEPS = 8, 250, 4  # samples of a batch; batches of an epoch, unless it is short, and of a window
WARM_UP = 400  # batches of a process before its memory is compared
EACH = 20  # batches between two looks at the memory
TIME_LIMIT = 12 * 3600  # seconds, for a process


_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallInfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


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


class Memory(Callback):
    """Writes the memory that is allocated, with the number of batches of this process."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file, self.batches = file, 0

    def on_train_step_end(self, run_context):
        self.batches += 1
        if self.batches % EACH == 0:
            with self.file.open("a") as file:
                file.write(json.dumps([os.getpid(), self.batches, allocated()]) + "\n")


class Kill(Callback):
    """Kills the process within 20 ms of a batch's beginning: in the batch, in a callback, or while a file is saved."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def on_train_step_begin(self, run_context):
        if int(run_context.original_args().train_network.batch_count.asnumpy()) == self.batch:
            delay = random.Random(self.batch).uniform(0, 0.02)
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()


def train(folder: Path, batches: int, updates: int, kill_at: int, epoch: int) -> None:
    """One process: go on from the newest checkpoint to the end, or to the batch at which it is killed."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(5)
    network = Classifier()
    optimizer = optim.AdamW(network.trainable_params(), lr=0.01)
    cell = GradAccumulationCell(
        network,
        2,
        accumulation_steps=STEPS,
        aux=True,
        max_grad_norm=1.0,
        record_noise=True,
        transforms=(WeightAverage(0.99),),
    )
    model, data_set = ms.Model(cell, optimizer=optimizer), make_data_set(epoch)
    schedule = UpdateScheduler(optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9999))
    config = CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=3)
    accuracy = {"accuracy": lambda logits, y: (logits.argmax(axis=1) == y).mean()}
    with open(os.devnull, "w") as nowhere:
        callbacks = [
            AccumulationScheduler({0: STEPS}),
            FlushAccumulation(),
            schedule,
            GradNoiseScale(),
            WindowMonitor(folder / "windows.jsonl"),
            TrainingMetrics(accuracy, show=False),
            ProgressBar(nowhere, show=True),
            UpdateCheckpoint(updates, prefix="net", directory=str(folder / "saved"), config=config),
            Memory(folder / "memory.jsonl"),
            Kill(kill_at),
        ]
        finished = resume(model, folder / "saved", data_set)
        model.train(batches // epoch, data_set, callbacks=callbacks, initial_epoch=finished)
    parameters = {parameter.name: parameter.asnumpy() for parameter in model.train_network.get_parameters()}
    np.savez(folder / "end.npz", **parameters)


class Trained(NamedTuple):
    """What a training left, whose processes may have been killed."""

    parameters: dict[str, np.ndarray]
    records: list[dict[str, Any]]  # of its windows; those that were trained again, twice
    growth: list[float]  # bytes a batch, of each process that was there for long enough


def run(folder: Path, batches: int, updates: int, kills: Sequence[int] = (), epoch: int = EPOCH) -> Trained:
    """Train in one process after the other. `updates` : between two checkpoints. `kills` : the batches in which
    processes are killed. `epoch` : the batches of one."""
    folder.mkdir()
    variables = {**os.environ, "PYTHONPATH": paths.python_path()}
    for kill_at in (*sorted(kills), -1):
        numbers = {"batches": batches, "updates": updates, "kill-at": kill_at, "epoch": epoch}
        arguments = [str(folder), *(f"--{name}={number}" for name, number in numbers.items())]
        with (folder / "output").open("w") as output:
            code = subprocess.run(
                [sys.executable, __file__, *arguments],
                env=variables,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=TIME_LIMIT,
            ).returncode
        assert code == (-signal.SIGKILL if kill_at >= 0 else 0), (folder / "output").read_text()[-6000:]
    records = [json.loads(line) for line in (folder / "windows.jsonl").read_text().splitlines()]
    return Trained(dict(np.load(folder / "end.npz")), records, growth(folder / "memory.jsonl"))


def growth(file: Path) -> list[float]:
    """The slope of a line through each process's memory after its warm-up."""
    of_process: dict[int, list[list[int]]] = {}
    for line in file.read_text().splitlines():
        process, batches, memory = json.loads(line)
        if batches > WARM_UP:
            of_process.setdefault(process, []).append([batches, memory])
    return [float(np.polyfit(*np.transpose(rows), 1)[0]) for rows in of_process.values() if len(rows) * EACH >= WARM_UP]


def random_kills(seed: int, number: int, batches: int) -> list[int]:
    """Batches at which processes are killed, none of them the last."""
    return sorted(random.Random(seed).sample(range(1, batches - 1), number))


def compare(
    folder: Path, batches: int, kills: Sequence[int], updates: int, epoch: int = EPOCH
) -> tuple[Trained, Trained]:
    """The same training without interruption and with."""
    unbroken = run(folder / "unbroken", batches, updates, epoch=epoch)
    return unbroken, run(folder / "killed", batches, updates, kills, epoch)


def differences(unbroken: Trained, killed: Trained) -> list[str]:
    """The Parameters that are not bit-identical."""
    assert unbroken.parameters.keys() == killed.parameters.keys()
    names = unbroken.parameters.keys()
    return [name for name in names if unbroken.parameters[name].tobytes() != killed.parameters[name].tobytes()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", help="by default a temporary one")
    parser.add_argument("--batches", type=int, default=20_000, help="a multiple of an epoch's")
    parser.add_argument("--epoch", type=int, default=EPOCH, help="batches of an epoch")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the batches at which processes are killed")
    parser.add_argument("--updates", type=int, default=125, help="between two checkpoints")
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)  # one of the processes
    options = parser.parse_args()
    if options.kill_at is not None:
        environment.of_tests()
        train(options.folder, options.batches, options.updates, options.kill_at, options.epoch)
        return 0
    kills = random_kills(options.seed, options.kills, options.batches)
    with tempfile.TemporaryDirectory(prefix="long_training") as temporary:
        folder = options.folder or Path(temporary)
        unbroken, killed = compare(folder, options.batches, kills, options.updates, options.epoch)
    different, slopes = differences(unbroken, killed), [*unbroken.growth, *killed.growth]
    print(f"killed in batches {kills}: {f'other values of {different}' if different else 'all values are identical'}")
    print(f"bytes that each batch left, in each process: {', '.join(f'{slope:.0f}' for slope in slopes)}")
    return int(bool(different) or max(slopes, default=float("inf")) > 1024)


if __name__ == "__main__":
    sys.exit(main())
