"""A training that can be killed, for test_resume.py: `resume_worker.py FOLDER KILL_AFTER [CHECKPOINT]`.

It saves a checkpoint into FOLDER/saved after every batch, appends each batch's results to FOLDER/seen.jsonl, and kills
itself after batch KILL_AFTER of the whole training (0: never). With CHECKPOINT it resumes from this file.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn, train
from mindspore.dataset import NumpySlicesDataset

from gaccum_ms import GradAccumulationCell, resume
from tests.support.reference import Regression, batches

BATCH, BATCHES, EPOCHS, STEPS = 6, 7, 3, 4
# Windows are batches 1-4, 5-8, 9-12, 13-16, 17-20, and one remains; with flush 1-4, 5-7, 8-11, 12-14, 15-18, 19-21.


class LoudRegression(Regression):
    """Its gradients overflow at some loss scale at which the divisor does not."""

    def construct(self, x, y):
        return super().construct(x, y) * 32


def make_model() -> ms.Model:
    """A model with much state: Adam, a rate that depends on global_step, a loss scale that goes up and down."""
    network = LoudRegression()
    optimizer = nn.Adam(network.trainable_params(), nn.CosineDecayLR(0.001, 0.05, 8), weight_decay=0.01)
    cell = GradAccumulationCell(network, 2, accumulation_steps=STEPS, max_grad_norm=0.5)
    manager = ms.amp.DynamicLossScaleManager(2.0**120, 2, 2)
    return ms.Model(cell, optimizer=optimizer, loss_scale_manager=manager)


def make_data_set():
    ms.dataset.config.set_seed(11)
    return NumpySlicesDataset(batches(BATCH * BATCHES, 1)[0], ["x", "y"], shuffle=True).batch(BATCH)


def everything(step: nn.Cell) -> dict[str, np.ndarray]:
    """All Parameters: weights, optimizer state, loss scale, accumulators, counts and records."""
    return {parameter.name: np.array(parameter.asnumpy()) for parameter in step.get_parameters()}


class Seen(train.Callback):
    """Each batch's results: its number, the step's outputs, a digest of all Parameters, and its samples."""

    def __init__(self, file: Path | None = None):
        super().__init__()
        self.file = file
        self.rows: list[list] = []
        self.inputs: list[bytes] = []

    def on_train_step_end(self, run_context):
        parameters = run_context.original_args()
        state = everything(parameters.train_network)
        digest = hashlib.sha256(b"".join(name.encode() + state[name].tobytes() for name in sorted(state)))
        outputs = [float(value.asnumpy()).hex() for value in parameters.net_outputs]
        self.rows.append([int(state["gaccum_ms.batch_count"]), *outputs, digest.hexdigest()])
        self.inputs.append(parameters.train_dataset_element[0].asnumpy().tobytes())
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")


def main(folder: Path, kill_after: int, checkpoint: Path | None = None) -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.manual_seed(5 if checkpoint is None else 6)  # a resumed run must get the first run's generator state
    model, data_set = make_model(), make_data_set()
    finished = 0 if checkpoint is None else resume(model, checkpoint, data_set)

    def kill(run_context):
        if int(run_context.original_args().train_network.batch_count.asnumpy()) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)

    config = train.CheckpointConfig(save_checkpoint_steps=1, keep_checkpoint_max=100)
    callbacks = [
        train.ModelCheckpoint("net", str(folder / "saved"), config),
        Seen(folder / "seen.jsonl"),
        train.LambdaCallback(on_train_step_end=kill),
    ]
    model.train(EPOCHS, data_set, callbacks=callbacks, initial_epoch=finished)
    np.savez(folder / "end.npz", **everything(model.train_network))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *map(Path, sys.argv[3:]))
