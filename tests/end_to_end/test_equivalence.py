"""The equivalence contract: k micro-batches give the results of one whole batch. One matrix, and its negative
controls."""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import nn

from gaccum_ms.accumulation.weighing import BySamples
from gaccum_ms.accumulation.window import Window
from tests.support.modes import MODES
from tests.support.reference import (
    OPTIMIZERS,
    accumulated,
    assert_equivalent,
    batches,
    make_network,
    step_with,
    train,
    whole_batch,
)

DIVISIBLE, RAGGED = 24, 13
DTYPES = {"float32": ms.float32, "float16": ms.float16, "bfloat16": ms.bfloat16}
# Float32 sums in another order differ by rounding; float16 and bfloat16 round each micro-batch's gradient to 11 and 8
# bits. Adam divides by the root of its second moment, which magnifies the rounding of gradients near zero.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}
ADAM_TOLERANCE = 1e-4


UPDATES = {"graph": 10, "pynative": 3}  # PyNative calls take longer


def _matrix():
    """One network with every micro_size, divisible and ragged. Each other network divisible and ragged, and in graph
    mode and in PyNative mode. Then some combinations in low precision."""
    for micro_size in (1, 2, 3, 8):
        for samples in (DIVISIBLE, RAGGED):
            yield "dense", micro_size, samples, "sgd", "graph", "float32"
    yield "conv", 3, RAGGED, "dynamic_lr", "graph", "float32"
    yield "conv", 8, DIVISIBLE, "adam_weight_decay", "graph", "float32"
    yield "batchnorm_eval", 3, RAGGED, "adam", "graph", "float32"
    yield "embedding", 3, RAGGED, "momentum", "graph", "float32"
    yield "unused", 3, RAGGED, "grouped", "graph", "float32"
    yield "dense", 3, RAGGED, "sgd", "pynative", "float32"
    yield "conv", 2, RAGGED, "adam_weight_decay", "pynative", "float32"
    yield "batchnorm_eval", 2, DIVISIBLE, "grouped", "pynative", "float32"
    yield "embedding", 8, DIVISIBLE, "adam", "pynative", "float32"
    yield "unused", 2, DIVISIBLE, "momentum", "pynative", "float32"
    yield "dense", 1, RAGGED, "dynamic_lr", "pynative", "float32"
    for micro_size, mode in ((8, "graph"), (2, "pynative")):
        yield "dense", micro_size, RAGGED, "momentum", mode, "float16"
        yield "cast_weights", micro_size, RAGGED, "plain_sgd", mode, "bfloat16"


@pytest.mark.device("the equivalence matrix: networks, micro-batches, optimizers, modes, float32, float16 and bfloat16")
@pytest.mark.core(
    *(f"dense-{micro_size}-13-sgd-graph-float32" for micro_size in (1, 3, 8)),
    "conv-8-24-adam_weight_decay-graph-float32",
    "batchnorm_eval-3-13-adam-graph-float32",
    "embedding-3-13-momentum-graph-float32",
    "unused-3-13-grouped-graph-float32",
    "dense-3-13-sgd-pynative-float32",
    "dense-1-13-dynamic_lr-pynative-float32",
    "dense-8-13-momentum-graph-float16",
    "cast_weights-2-13-plain_sgd-pynative-bfloat16",
)
@pytest.mark.parametrize(("kind", "micro_size", "samples", "optimizer", "mode", "dtype"), list(_matrix()))
def test_equals_the_whole_batch(kind, micro_size, samples, optimizer, mode, dtype):
    ms.set_context(mode=MODES[mode])
    reference = whole_batch(kind, optimizer, samples, MODES[mode], DTYPES[dtype], UPDATES[mode])
    network = make_network(kind, DTYPES[dtype])
    run = train(
        accumulated(micro_size=micro_size),
        network,
        OPTIMIZERS[optimizer](network.trainable_params()),
        batches(samples, UPDATES[mode]),
    )
    assert_equivalent(run, reference, ADAM_TOLERANCE if optimizer.startswith("adam") else TOLERANCE[dtype])


@pytest.mark.core(micro_batch_size=5)
@pytest.mark.parametrize(("micro_batch_size", "mode"), [(1, "pynative"), (5, "graph"), (50, "pynative")])
def test_micro_batch_size_equals_the_whole_batch(micro_batch_size, mode):
    ms.set_context(mode=MODES[mode])
    network = make_network("dense")
    run = train(
        accumulated(micro_batch_size=micro_batch_size),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED, UPDATES[mode]),
    )
    reference = whole_batch("dense", "sgd", RAGGED, MODES[mode], ms.float32, UPDATES[mode])
    assert_equivalent(run, reference, TOLERANCE["float32"])


@pytest.mark.core(mode="graph")
def test_short_last_batches_and_frozen_parameters(mode):
    """An epoch's last batch has fewer samples than micro_size. Frozen Parameters do not change."""
    data = [batches(samples, 1, seed)[0] for seed, samples in enumerate((RAGGED, 2, RAGGED, 2))]
    runs = []
    for make_step in (nn.TrainOneStepCell, accumulated(micro_size=4)):
        network = make_network("dense")
        network.hidden.weight.requires_grad = False
        runs.append(train(make_step, network, OPTIMIZERS["momentum"](network.trainable_params()), data))
    assert_equivalent(runs[1], runs[0], TOLERANCE["float32"])
    assert (runs[1].state["hidden.weight"] == make_network("dense").hidden.weight.asnumpy()).all()


def test_jit_in_pynative_mode_equals_the_whole_batch(pynative):
    reference = whole_batch("dense", "sgd", RAGGED, ms.PYNATIVE_MODE, ms.float32, UPDATES["pynative"])
    network = make_network("dense")
    run = train(
        accumulated(micro_size=3, jit=True),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED, UPDATES["pynative"]),
    )
    assert_equivalent(run, reference, TOLERANCE["float32"])


class FactorK(BySamples):
    """The sum over micro-batches in place of the mean."""

    def items(self, size):
        return 13


class LastMicroBatchOnly(BySamples):
    def run_and_add(self, is_first, seed_per_item, prepared, size, *micro_batch):
        return super().run_and_add(is_first, self.store.reset(seed_per_item), prepared, size, *micro_batch)


class NeverReset(Window):
    def reset(self, after):
        return after


class MeanOfMeans(BySamples):
    """Each micro-batch weighs the same, however many samples it has."""

    def items(self, size):
        return 13 / 3


@pytest.mark.core("MeanOfMeans-graph", "NeverReset-pynative")
@pytest.mark.parametrize(
    ("broken", "mode"),
    [
        (FactorK, "graph"),
        (LastMicroBatchOnly, "graph"),
        (NeverReset, "graph"),
        (MeanOfMeans, "graph"),
        (NeverReset, "pynative"),
        (MeanOfMeans, "pynative"),
    ],
)
def test_negative_control_a_broken_step_is_caught(broken, mode):
    ms.set_context(mode=MODES[mode])
    reference = whole_batch("dense", "sgd", RAGGED, MODES[mode], ms.float32, UPDATES[mode])
    kinds = {"window" if issubclass(broken, Window) else "weighing": broken}
    network = make_network("dense")
    run = train(
        accumulated(step_with(**kinds), micro_size=3),
        network,
        OPTIMIZERS["sgd"](network.trainable_params()),
        batches(RAGGED, UPDATES[mode]),
    )
    with pytest.raises(AssertionError):
        assert_equivalent(run, reference, TOLERANCE["float32"])
