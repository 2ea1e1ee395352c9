"""The equivalence contract: k micro-batches give the results of one whole batch. One matrix."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import nn

from tests.support.device import DEVICE
from tests.support.modes import MODES, eagerly
from tests.support.reference import (
    OPTIMIZERS,
    Regression,
    accumulated,
    assert_equivalent,
    batches,
    make_network,
    train,
    whole_batch,
)

DIVISIBLE, RAGGED = 24, 13
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
# Float32 sums in another order differ by rounding; float16 and bfloat16 round each micro-batch's gradient to 11 and 8
# bits. Adam divides by the root of its second moment, which magnifies the rounding of gradients near zero.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
ADAM_TOLERANCE = 1e-4
UPDATES = 4

# One network in both modes; then networks, optimizers and precisions that differ in kind.
MATRIX = [
    ("dense", 1, RAGGED, "sgd", "graph", "float32"),
    ("dense", 3, RAGGED, "sgd", "graph", "float32"),
    ("dense", 3, RAGGED, "sgd", "pynative", "float32"),
    ("conv", 8, DIVISIBLE, "adam_weight_decay", "graph", "float32"),
    ("embedding", 3, RAGGED, "dynamic_lr", "pynative", "float32"),
    ("unused", 3, RAGGED, "grouped", "graph", "float32"),
    ("dense", 8, RAGGED, "momentum", "graph", "float16"),
    ("cast_weights", 2, RAGGED, "plain_sgd", "pynative", "bfloat16"),
]


def compare(
    make_step, mode, tolerance=TOLERANCE["float32"], kind="dense", samples=RAGGED, optimizer="sgd", dtype="float32"
):
    """Train by this step, and by MindSpore's on whole batches: the results must be equal."""
    ms.set_context(mode=MODES[mode])
    reference = whole_batch(kind, optimizer, samples, DTYPES[dtype], UPDATES)
    network = make_network(kind, DTYPES[dtype])
    optimizer = OPTIMIZERS[optimizer](network.trainable_params())
    assert_equivalent(train(make_step, network, optimizer, batches(samples, UPDATES)), reference, tolerance)


@pytest.mark.device(
    "the equivalence matrix: networks, micro-batches, optimizers, modes, float32, float16 and bfloat16",
    ran="an H100, 2026-11-27, without bfloat16",
)
@pytest.mark.parametrize(("kind", "micro_size", "samples", "optimizer", "mode", "dtype"), MATRIX)
def test_equals_the_whole_batch(kind, micro_size, samples, optimizer, mode, dtype):
    if (DEVICE, dtype) == ("GPU", "bfloat16"):
        pytest.skip("MindSpore casts no bfloat16 on GPU")
    tolerance = ADAM_TOLERANCE if optimizer.startswith("adam") else TOLERANCE[dtype]
    compare(accumulated(micro_size=micro_size), mode, tolerance, kind, samples, optimizer, dtype)


@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"micro_size": 3, "jit": True}], ids=["size", "jit"])
def test_other_options_equal_the_whole_batch(options):
    compare(accumulated(**options), "pynative")


def test_short_last_batches_and_frozen_parameters():
    """An epoch's last batch has fewer samples than micro_size. Frozen Parameters do not change."""
    data = [batches(samples, 1, seed)[0] for seed, samples in enumerate((RAGGED, 2, RAGGED))]

    def trained(make_step):
        network = Regression()
        network.hidden.requires_grad = False
        return train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), data)

    run = trained(accumulated(micro_size=4))
    assert_equivalent(run, eagerly()(trained)(nn.TrainOneStepCell), TOLERANCE["float32"])
    assert (run.state["hidden"] == Regression().hidden.asnumpy()).all()
