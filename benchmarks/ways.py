"""The compared ways of training. Each builds one program, a step that makes one update of the whole batch.

All use the same network, data, loss (cross entropy) and optimizer (Momentum). Frameworks are imported inside the
builders, so that a process has only its own way's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from benchmarks.networks import NETWORKS

LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Setting:
    """The settings of one program, by names, so that they can be sent to its process. `batch` is over all ranks."""

    network: str
    way: str
    micro_size: int
    batch: int
    threads: str = "tuned"  # or "default": without tune_cpu()
    processes: int = 1
    module = "benchmarks.ways"  # in its process, this module has the class and its way

    @property
    def described(self) -> Way:
        return WAYS[self.way]

    def is_of(self, framework: str) -> bool:
        return self.described.packages[0] == framework

    def data(self, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """A rank's inputs and labels."""
        inputs, labels = NETWORKS[self.network].data(self.batch)
        share = self.batch // self.processes
        own = slice(rank * share, (rank + 1) * share)
        return inputs[own], labels[own]


@dataclass(frozen=True)
class Program:
    """A built training program. `step` returns only when the update is done; `weight` reads the first weight,
    `weight_bytes` is the size of all weights, `threads` describes its threads, `details` its updates."""

    step: Callable[[], float]
    weight: Callable[[], np.ndarray]
    weight_bytes: int
    threads: str
    details: Callable[[], dict[str, Any]] = dict


@dataclass(frozen=True)
class Way:
    """A way of training, and the packages that it needs; the first is its framework.

    If `micro_sizes` is given, it is measured only with these: a way without micro-batches has only 1. `parallel` is
    True if it supports data parallel mode.
    """

    title: str
    packages: tuple[str, ...]
    build: Callable[[Setting], Program]
    micro_sizes: tuple[int, ...] | None = None
    parallel: bool = False


# -- MindSpore ---------------------------------------------------------------------------------------------------------


def _mindspore_threads(threads: str, net: Any) -> str:
    """Set the same threads for all of MindSpore's ways. Importing `gaccum_ms` changes no step except our own."""
    if threads == "default":
        return "MindSpore's defaults"
    from gaccum_ms import tune_cpu

    return f"gaccum_ms.tune_cpu(): {tune_cpu(network=net)}"


def _join_ranks() -> int:
    """This process's rank, when all have joined. MindSpore's scheduler runs this program too, and stops here."""
    import mindspore as ms
    from mindspore.communication import get_rank, init

    init()
    ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    return get_rank()


def _mindspore_program(
    setting: Setting, build_step: Callable[[Any, Any], Any], *, successive: bool = False, graph: bool = True
) -> Program:
    """Shared by all ways of MindSpore. `build_step` makes the training step from network-with-loss and optimizer. The
    step gets the whole batch, or with `successive` one micro-batch in each call."""
    import mindspore as ms
    from mindspore import nn

    ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)
    device = os.environ.get("GACCUM_MS_DEVICE", "CPU")  # peak memory is the process's, not an accelerator's
    if ms.get_context("device_target") != device:  # it cannot be set again after a program was built
        ms.set_device(device)
    ms.set_seed(0)
    network = NETWORKS[setting.network]
    net = network.mindspore()
    threads = _mindspore_threads(setting.threads, net)
    rank = _join_ranks() if setting.processes > 1 else 0
    batches = [tuple(map(ms.Tensor, batch)) for batch in _batches(setting, rank, successive)]
    weights = net.trainable_params()
    optimizer = nn.Momentum(weights, LEARNING_RATE, MOMENTUM)
    step = build_step(nn.WithLossCell(net, network.mindspore_loss()), optimizer)

    def update() -> float:
        losses = [step(*batch) for batch in batches]
        return sum(float(loss.asnumpy()) for loss in losses) / len(losses)  # reading waits for the graph

    return Program(
        step=update,
        weight=lambda: weights[0].asnumpy().copy(),
        weight_bytes=sum(one.nbytes for one in weights),
        threads=threads,
    )


def _batches(setting: Setting, rank: int, successive: bool) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rank's share of the batch, or its micro-batches, sliced once outside the step."""
    inputs, labels = setting.data(rank)
    if not successive:
        return [(inputs, labels)]
    return list(zip(*(np.array_split(array, setting.micro_size) for array in (inputs, labels)), strict=True))


def _whole(setting: Setting) -> Program:
    from mindspore import nn

    return _mindspore_program(setting, lambda net, optimizer: nn.TrainOneStepCell(net, optimizer).set_train())


def _ours(setting: Setting, **options: Any) -> Program:
    """`options` : more of the cell's options. The details have the seconds that the proof at the first batch took."""
    from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell

    seconds: list[float] = []

    def build_step(net: Any, optimizer: Any) -> Any:
        cell = GradAccumulationCell(net, setting.micro_size, **options)
        step = TrainOneStepWithGradAccumulationCell(cell, optimizer).set_train()
        proof, look = step.advice.proof, step.advice.proof.look

        def timed_look(*arguments: Any) -> Any:
            start = time.perf_counter()
            text = look(*arguments)
            seconds.append(time.perf_counter() - start)
            return text

        proof.look = timed_look
        return step

    program = _mindspore_program(setting, build_step, graph="jit" not in options)
    return dataclasses.replace(program, details=lambda: {"proof": sum(seconds)})


def _framework(setting: Setting) -> Program:
    from mindspore import amp, nn

    def build_step(net: Any, optimizer: Any) -> Any:
        return amp.build_train_network(nn.GradAccumulationCell(net, setting.micro_size), optimizer).set_train()

    return _mindspore_program(setting, build_step)


def _boost(setting: Setting) -> Program:
    from benchmarks.mindspore_networks import BoostStep

    def build_step(net: Any, optimizer: Any) -> Any:
        return BoostStep(net, optimizer, setting.micro_size).set_train()

    return _mindspore_program(setting, build_step, successive=True)


def _mindcv(setting: Setting) -> Program:
    import mindspore as ms
    from mindcv.utils import TrainStep

    def build_step(net: Any, optimizer: Any) -> Any:
        # As mindcv's create_trainer does for loss_scale_type="fixed", loss_scale=1.0.
        scale = ms.Tensor(1.0, ms.float32)
        return TrainStep(net, optimizer, scale, gradient_accumulation_steps=setting.micro_size).set_train()

    return _mindspore_program(setting, build_step, successive=True)


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def _torch(setting: Setting) -> Program:
    import torch

    torch.manual_seed(0)
    network = NETWORKS[setting.network]
    net, loss_fn = network.torch(), network.torch_loss()
    rank = 0
    if setting.processes > 1:
        torch.distributed.init_process_group("gloo")  # with torchrun's variables
        rank = torch.distributed.get_rank()
        net = torch.nn.parallel.DistributedDataParallel(net)
    micro_batches = [
        (torch.from_numpy(inputs), torch.from_numpy(labels).long())
        for inputs, labels in _batches(setting, rank, successive=True)
    ]
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for number, (inputs, labels) in enumerate(micro_batches, 1):
            shared = setting.processes == 1 or number == len(micro_batches)  # gradients are reduced once
            with contextlib.nullcontext() if shared else net.no_sync():
                loss = loss_fn(net(inputs), labels) / setting.micro_size
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    weights: Sequence[Any] = list(net.parameters())
    return Program(
        step=step,
        weight=lambda: weights[0].detach().numpy().copy(),
        weight_bytes=sum(one.nbytes for one in weights),
        threads=f"torch.get_num_threads() = {torch.get_num_threads()}",
    )


_OF_MINDSPORE = ("mindspore",)
_FEW_SIZES = (1, 16)  # enough for these ways

# The first is the reference of the others.
WAYS: dict[str, Way] = {
    "whole": Way("whole batch, nn.TrainOneStepCell", _OF_MINDSPORE, _whole, micro_sizes=(1,), parallel=True),
    "ours": Way("gaccum_ms", _OF_MINDSPORE, _ours, parallel=True),
    "jit": Way("gaccum_ms, PyNative, jit=True", _OF_MINDSPORE, partial(_ours, jit=True), _FEW_SIZES),
    "unchecked": Way("gaccum_ms, check=None", _OF_MINDSPORE, partial(_ours, check=None), (16,)),
    "eager": Way("gaccum_ms, PyNative", _OF_MINDSPORE, partial(_ours, jit=None), (16,)),
    "noise": Way("gaccum_ms, recording noise", _OF_MINDSPORE, partial(_ours, record_noise=True), (16,)),
    "torch": Way("PyTorch, eager loop", ("torch",), _torch, parallel=True),
    "mindspore": Way("MindSpore's nn.GradAccumulationCell", _OF_MINDSPORE, _framework, parallel=True),
    "boost": Way("boost.GradientAccumulation", _OF_MINDSPORE, _boost, parallel=True),
    "mindcv": Way("mindcv.utils.TrainStep", ("mindspore", "mindcv"), _mindcv, parallel=True),
}
