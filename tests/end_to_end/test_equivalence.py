"""The equivalence contract: k micro-batches leave what one whole batch leaves. One matrix, and what breaks it."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import nn
from support.modes import MODES
from support.reference import (
    OPTIMIZERS,
    accumulated,
    assert_equivalent,
    batches,
    make_network,
    step_with,
    train,
    whole_batch,
)

from gaccum_ms.accumulation.weighing import BySamples
from gaccum_ms.accumulation.window import Window

DIVISIBLE, RAGGED = 24, 13
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
# Float32 sums in another order differ by rounding; float16 and bfloat16 round each micro-batch's gradient, 11 and 8
# bits. Adam divides by the root of its second moment, which magnifies the rounding of gradients near zero.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
ADAM_TOLERANCE = 1e-4


def _matrix():
    """One network x micro_size x ragged in full, the others in pairs; then every optimizer, mode and dtype on lines
    through it."""
    for micro_size in (1, 2, 3, 8):
        for samples in (DIVISIBLE, RAGGED):
            yield "dense", micro_size, samples, "sgd", "graph", "float32"
    for kind in ("conv", "batchnorm_eval", "embedding", "unused"):
        for micro_size, samples in ((1, RAGGED), (2, DIVISIBLE), (3, RAGGED), (8, DIVISIBLE)):
            yield kind, micro_size, samples, "sgd", "graph", "float32"
    for optimizer in OPTIMIZERS:
        for mode in MODES:
            if (optimizer, mode) != ("sgd", "graph") and optimizer != "plain_sgd":
                yield "dense", 3, RAGGED, optimizer, mode, "float32"
    for kind in ("conv", "batchnorm_eval", "embedding", "unused"):
        yield kind, 3, RAGGED, "sgd", "pynative", "float32"
    for mode in MODES:
        for micro_size in (2, 8):
            yield "dense", micro_size, RAGGED, "momentum", mode, "float16"
            yield "cast_weights", micro_size, RAGGED, "plain_sgd", mode, "bfloat16"


@pytest.mark.device("the equivalence matrix: networks, micro-batches, optimizers, modes, float32, float16 and bfloat16")
@pytest.mark.core(
    *(f"dense-{micro_size}-13-sgd-graph-float32" for micro_size in (1, 2, 3, 8)),
    *(f"{kind}-3-13-sgd-graph-float32" for kind in ("conv", "batchnorm_eval", "embedding", "unused")),
    "dense-3-24-sgd-graph-float32",
    "conv-8-24-sgd-graph-float32",
    *(f"dense-3-13-{optimizer}-graph-float32" for optimizer in ("momentum", "adam", "dynamic_lr", "grouped")),
    *(f"dense-3-13-{optimizer}-pynative-float32" for optimizer in ("sgd", "adam_weight_decay")),
    "conv-3-13-sgd-pynative-float32",
    "dense-8-13-momentum-graph-float16",
    "cast_weights-8-13-plain_sgd-pynative-bfloat16",
)
@pytest.mark.parametrize(("kind", "micro_size", "samples", "optimizer", "mode", "dtype"), list(_matrix()))
def test_equals_the_whole_batch(kind, micro_size, samples, optimizer, mode, dtype):
    ms.set_context(mode=MODES[mode])
    reference = whole_batch(kind, optimizer, samples, MODES[mode], DTYPES[dtype])
    network = make_network(kind, DTYPES[dtype])
    run = train(
        accumulated(micro_size=micro_size),
        network,
        OPTIMIZERS[optimizer](network.trainable_params()),
        batches(samples),
    )
    assert_equivalent(run, reference, ADAM_TOLERANCE if optimizer.startswith("adam") else TOLERANCE[dtype])


@pytest.mark.core(micro_batch_size=[5, 50])
@pytest.mark.parametrize("micro_batch_size", [1, 5, 13, 50])
def test_micro_batch_size_equals_the_whole_batch(micro_batch_size):
    network = make_network("dense")
    run = train(
        accumulated(micro_batch_size=micro_batch_size),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED),
    )
    assert_equivalent(run, whole_batch("dense", "sgd", RAGGED, ms.GRAPH_MODE), TOLERANCE["float32"])


def test_short_last_batches(mode):
    """Epochs of 16 + 16 + 5 + 2 samples, the last smaller than micro_size."""
    data = [batches(samples, 1, seed)[0] for seed, samples in enumerate((16, 16, 5, 2, 16, 16, 5, 2))]
    runs = []
    for make_step in (nn.TrainOneStepCell, accumulated(micro_size=4)):
        network = make_network("dense")
        runs.append(train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), data))
    assert_equivalent(runs[1], runs[0], TOLERANCE["float32"])


@pytest.mark.core(mode="graph")
def test_frozen_parameters_stay(mode):
    runs = []
    for make_step in (nn.TrainOneStepCell, accumulated(micro_size=3)):
        network = make_network("dense")
        network.hidden.weight.requires_grad = False
        runs.append(train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), batches(RAGGED)))
    assert_equivalent(runs[1], runs[0], TOLERANCE["float32"])
    assert (runs[1].state["hidden.weight"] == make_network("dense").hidden.weight.asnumpy()).all()


def test_jit_in_pynative_mode_equals_the_whole_batch(pynative):
    network = make_network("conv")
    run = train(
        accumulated(micro_size=3, jit=True),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED),
    )
    assert_equivalent(run, whole_batch("conv", "sgd", RAGGED, ms.PYNATIVE_MODE), TOLERANCE["float32"])


class FactorK(BySamples):
    """The sum over micro-batches in place of the mean."""

    def items(self, size):
        return 13


class LastMicroBatchOnly(BySamples):
    def turn(self, noted, unit, prepared, size, *micro_batch):
        return super().turn(noted, self.store.reset(unit), prepared, size, *micro_batch)


class NeverReset(Window):
    def reset(self, after):
        return after


class MeanOfMeans(BySamples):
    """Each micro-batch weighs the same, however many samples it has."""

    def items(self, size):
        return 13 / 3


@pytest.mark.core(mode="graph")
@pytest.mark.parametrize(
    "kinds",
    [{"weighing": FactorK}, {"weighing": LastMicroBatchOnly}, {"window": NeverReset}, {"weighing": MeanOfMeans}],
)
def test_negative_control_a_broken_step_is_caught(kinds, mode):
    network = make_network("dense")
    run = train(
        accumulated(step_with(**kinds), micro_size=3),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED),
    )
    with pytest.raises(AssertionError):
        assert_equivalent(run, whole_batch("dense", "sgd", RAGGED, MODES[mode]), TOLERANCE["float32"])
