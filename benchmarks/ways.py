"""The ways of training compared: each builds one program, a step that makes one update of the whole batch.

All use the same network, data, loss (cross entropy) and optimizer (Momentum). Frameworks are imported inside the
builders: what a way does not use must not be in its process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.networks import CLASSES, Network

LEARNING_RATE = 0.01
MOMENTUM = 0.9


@dataclass(frozen=True)
class Program:
    """A built training program. `step` returns only when the update is done; `weight` reads the first weight."""

    step: Callable[[], float]
    weight: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Way:
    """A way of training. `splits` is False where there are no micro-batches, so micro_size 1 is all there is."""

    title: str
    framework: str
    build: Callable[[Network, int, int], Program]
    splits: bool = True


def _data(network: Network, batch: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((batch, *network.sample_shape), dtype=np.float32)
    return inputs, rng.integers(0, CLASSES, batch).astype(np.int32)


def _mindspore_program(network: Network, batch: int, build_step: Callable[[Any, Any], Any]) -> Program:
    """The part that all ways of MindSpore share; `build_step` makes the training step of network-with-loss and
    optimizer."""
    import mindspore as ms
    from mindspore import nn

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")  # peak memory is that of the process, which says nothing about an accelerator's
    ms.set_seed(0)
    inputs, labels = (ms.Tensor(array) for array in _data(network, batch))
    net = network.mindspore()
    optimizer = nn.Momentum(net.trainable_params(), LEARNING_RATE, MOMENTUM)
    step = build_step(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer)
    return Program(
        step=lambda: float(step(inputs, labels).asnumpy()),  # reading the loss waits for the graph
        weight=lambda: net.trainable_params()[0].asnumpy().copy(),
    )


def _whole(network: Network, batch: int, _: int) -> Program:
    from mindspore import nn

    return _mindspore_program(network, batch, lambda net, optimizer: nn.TrainOneStepCell(net, optimizer).set_train())


def _ours(network: Network, batch: int, micro_size: int) -> Program:
    from gaccum_ms import GradAccumulationCell, TrainOneStepWithGradAccumulationCell

    def build_step(net: Any, optimizer: Any) -> Any:
        return TrainOneStepWithGradAccumulationCell(GradAccumulationCell(net, micro_size), optimizer).set_train()

    return _mindspore_program(network, batch, build_step)


def _framework(network: Network, batch: int, micro_size: int) -> Program:
    """`gaccum_ms` is not imported here: MindSpore as it is installed."""
    from mindspore import amp, nn

    def build_step(net: Any, optimizer: Any) -> Any:
        return amp.build_train_network(nn.GradAccumulationCell(net, micro_size), optimizer).set_train()

    return _mindspore_program(network, batch, build_step)


def _torch(network: Network, batch: int, micro_size: int) -> Program:
    import torch

    torch.manual_seed(0)
    inputs, labels = (torch.from_numpy(array) for array in _data(network, batch))
    labels = labels.long()
    net = network.torch()
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), LEARNING_RATE, MOMENTUM)
    # Sliced once, outside the step: slices are views, and cost nothing worth measuring.
    micro_batches = list(zip(inputs.chunk(micro_size), labels.chunk(micro_size), strict=True))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for micro_inputs, micro_labels in micro_batches:
            loss = loss_fn(net(micro_inputs), micro_labels) / micro_size
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return Program(step, lambda: next(net.parameters()).detach().numpy().copy())


# The first is what the others are compared with.
WAYS: dict[str, Way] = {
    "whole": Way("whole batch, nn.TrainOneStepCell", "mindspore", _whole, splits=False),
    "ours": Way("gaccum_ms", "mindspore", _ours),
    "mindspore": Way("MindSpore's nn.GradAccumulationCell", "mindspore", _framework),
    "torch": Way("PyTorch, eager loop", "torch", _torch),
}
