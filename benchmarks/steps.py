"""Hand-written training cells for MindSpore's ways. Graph mode reads their source from this file."""

from __future__ import annotations

from mindspore import boost, nn, ops


class BoostStep(nn.TrainOneStepCell):
    """The step around `boost.GradientAccumulation` in MindSpore's tutorial. It updates every `micro_size` calls."""

    def __init__(self, network: nn.Cell, optimizer: nn.Optimizer, micro_size: int) -> None:
        super().__init__(network, optimizer)
        self.gradient_accumulation = boost.GradientAccumulation(micro_size, optimizer)

    def construct(self, *inputs):
        loss = self.network(*inputs)
        seed = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad_reducer(self.grad(self.network, self.weights)(*inputs, seed))
        return self.gradient_accumulation(loss, grads)


class ForwardBackward(nn.Cell):
    """Returns loss and gradients, so that the compiler keeps all of them."""

    def __init__(self, network: nn.Cell) -> None:
        super().__init__(auto_prefix=False)
        self.value_and_grad = ops.value_and_grad(network, None, network.trainable_params())

    def construct(self, *inputs):
        return self.value_and_grad(*inputs)
