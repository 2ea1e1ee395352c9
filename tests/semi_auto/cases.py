"""The training steps that compile_worker.py compiles for eight devices: networks, options, layouts."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.nn.wrap.cell_wrapper import GradAccumulationCell as FrameworksCell
from mindspore.nn.wrap.cell_wrapper import _TrainGradAccuStepCell
from mindspore.parallel import Layout
from mindspore.parallel.auto_parallel import AutoParallel
from mindspore.parallel.nn import MicroBatchInterleaved

from gaccum_ms import (
    ClipByGlobalNorm,
    ClipByValue,
    EvenSplit,
    GradAccumulation,
    GradAccumulationCell,
    PerSampleLoss,
    SkipSpikes,
    TrainOneStepWithGradAccumulationCell,
    Transform,
    WeightAverage,
)

SAMPLES = 16  # of each device; few, because the files abbreviate longer constants by "..."
X, Y = (SAMPLES, 12), (SAMPLES, 1)


def weight(seed, *shape):
    return ms.Parameter(Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5))


class Net(nn.Cell):
    """Two layers and squared errors. `split` lays them on (data, model) parallel devices."""

    def __init__(self, reduction="mean", split=None):
        super().__init__()
        self.first, self.bias, self.second = weight(1, 12, 32), weight(2, 32), weight(3, 32, 1)
        self.first.name, self.bias.name, self.second.name = "first", "bias", "second"
        self.reduction = reduction
        self.matmul_1, self.add, self.relu, self.matmul_2 = ops.MatMul(), ops.Add(), ops.ReLU(), ops.MatMul()
        self.sub, self.square, self.mean = ops.Sub(), ops.Square(), ops.ReduceMean()
        if split:
            data, model = split
            self.matmul_1.shard(((data, 1), (1, model)))
            self.add.shard(((data, model), (model,)))
            self.relu.shard(((data, model),))
            self.matmul_2.shard(((data, model), (model, 1)))
            self.sub.shard(((data, 1), (data, 1)))
            self.square.shard(((data, 1),))
            self.mean.shard(((data, 1),))

    def construct(self, x, y):
        hidden = self.relu(self.add(self.matmul_1(x, self.first), self.bias))
        squares = self.square(self.sub(self.matmul_2(hidden, self.second), y))
        if self.reduction == "none":
            return ops.reduce_sum(squares, 1)
        return ops.reduce_sum(squares) if self.reduction == "sum" else self.mean(squares)


class Mask(nn.Cell):
    """The samples that loss number `term` of `Masked` is over: labels above zero, or large ones. As a count: their
    number. `split` as in `Net` ."""

    def __init__(self, term, split=None):
        super().__init__()
        self.term = term
        self.square, self.greater, self.cast, self.sum = ops.Square(), ops.Greater(), ops.Cast(), ops.ReduceSum()
        if split:
            self.greater.shard(((split[0], 1), ()))
            for one in (self.square, self.cast, self.sum):
                one.shard(((split[0], 1),))

    def of(self, y):
        above = self.greater(y, 0.0) if self.term == 0 else self.greater(self.square(y), 0.5)
        return self.cast(above, ms.float32)

    def construct(self, x, y):
        return self.sum(self.of(y))


class Masked(Net):
    """One or two losses, each over a mask: a numerator, and with ``returns="ratio"`` a denominator too, or means."""

    def __init__(self, losses=1, returns="ratio", aux=False, split=None, as_list=False):
        super().__init__(split=split)
        self.losses, self.returns, self.aux, self.as_list = losses, returns, aux, as_list
        self.masks = nn.CellList([Mask(term, split) for term in range(2)])
        self.weigh, self.sums = [ops.Mul() for _ in range(2)], [ops.ReduceSum() for _ in range(2)]
        if split:
            for weigh, one in zip(self.weigh, self.sums, strict=True):
                weigh.shard(((split[0], 1),) * 2)
                one.shard(((split[0], 1),))

    def construct(self, x, y):
        hidden = self.relu(self.add(self.matmul_1(x, self.first), self.bias))
        out = self.matmul_2(hidden, self.second)
        error = (self.sub(out, y), out)
        outputs = ()
        for term in range(self.losses):
            mask = self.masks[term]
            numerator = self.sums[term](self.weigh[term](self.square(error[term]), mask.of(y)))
            if self.returns == "sum":
                outputs = (*outputs, numerator)
            elif self.returns == "mean":
                outputs = (*outputs, numerator / mask(x, y))
            else:
                outputs = (*outputs, numerator, mask(x, y))
        if self.aux:  # numerators of the second loss, and each sample's output
            outputs = (*outputs, self.sums[1](self.square(out)), out)
        if self.as_list:
            return [*outputs]
        return outputs[0] if len(outputs) == 1 else outputs


class Scaled(Masked):
    """`Masked` of labels that a third input scales, which all samples share."""

    def construct(self, x, y, scale):
        return super().construct(x, y * scale)


class OverLabels(Masked):
    """The first denominator is the labels' sum, which may be negative or infinite."""

    def construct(self, x, y):
        outputs = super().construct(x, y)
        return (outputs[0], ops.reduce_sum(y), *outputs[2:])


class LazyMasked(Masked):
    @ms.lazy_inline
    def __init__(self, **options):
        super().__init__(**options)


def laid(matmul_1, matmul_2, frozen=()):
    """A network with these shardings of its products, by numbers or by a Layout's names."""
    network = Net()
    network.matmul_1.shard(matmul_1)
    network.matmul_2.shard(matmul_2)
    for name in frozen:
        getattr(network, name).requires_grad = False
    return network


class Dense(nn.Cell):
    """A network of layers. `returns` : the loss as a mean, a "ratio", "two sums" or "two ratios" ."""

    def __init__(self, layers=1, returns="mean"):
        super().__init__()
        self.returns = returns
        self.layers = nn.SequentialCell([nn.SequentialCell(nn.Dense(12, 12), nn.ReLU()) for _ in range(layers)])
        self.last = nn.Dense(12, 1)

    def construct(self, x, y):
        squares = ops.square(self.last(self.layers(x)) - y)
        if self.returns == "mean":
            return ops.reduce_mean(squares)
        mask = ops.cast(y > 0, ms.float32)
        ratio = ops.reduce_sum(squares * mask), ops.reduce_sum(mask)
        other = ops.reduce_sum(squares), ops.reduce_sum(squares * 0 + 1)
        if self.returns == "two sums":
            return ratio[0], other[0]
        return ratio if self.returns == "ratio" else (*ratio, *other)


class LazyDense(Dense):
    """Uses MindSpore's way to compile a network once for all its calls."""

    @ms.lazy_inline
    def __init__(self, layers=1, returns="mean"):
        super().__init__(layers, returns)


class TiedCast(nn.Dense):
    """A layer in float16, each of whose casts of a weight is tied to its input."""

    def construct(self, x):
        x = ops.cast(x, ms.float16)
        weight, bias = ops.cast(ops.depend(self.weight, x), ms.float16), ops.cast(ops.depend(self.bias, x), ms.float16)
        return self.bias_add(self.matmul(x, weight), bias)


class TiedCasts(Dense):
    def __init__(self, returns):
        super().__init__(returns=returns)
        self.layers, self.last = nn.SequentialCell([nn.SequentialCell(TiedCast(12, 12), nn.ReLU())]), TiedCast(12, 1)


class Momentum(Transform):
    """A transform of a user, with a number for each element of a weight."""

    elementwise = True

    def prepare(self, network):
        moments = [self.state_like(f"moment.{weight.name}", weight, 0.5) for weight in self.weights]
        self.moments = ms.ParameterTuple(moments)
        self.map = ops.HyperMap()

    def change(self, gradients):
        return self.map(moved, self.moments, gradients)


moved = ops.MultitypeFuncGraph("moved")


@moved.register("Tensor", "Tensor")
def moved_one(moment, gradient):
    changed = 0.9 * moment + gradient
    return ops.depend(changed, ops.assign(moment, changed))


def positive(x, y):
    """A count that depends on the data: the number of labels above zero."""
    return ops.reduce_sum(ops.cast(y > 0, ms.float32))


def sgd(network):
    return nn.SGD(network.trainable_params(), 0.1)


def plain(network):
    return nn.TrainOneStepCell(network, sgd(network)).set_train()


def frameworks(network, micro_size, wrapper=FrameworksCell):
    return _TrainGradAccuStepCell(wrapper(network, micro_size), sgd(network)).set_train()


def ours(network, micro_size, scale=None, stages=1, model=False, **options):
    """`stages` : of an AutoParallel with a pipeline, which the parallel context does not have."""
    cell = GradAccumulationCell(network, micro_size, **options)
    if stages > 1:
        ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel")
        cell = AutoParallel(cell)
        cell.pipeline(stages=stages)
    if model:
        return ms.Model(cell, optimizer=sgd(network)).train_network
    return TrainOneStepWithGradAccumulationCell(cell, sgd(network), scale)


def half(micro_size, network=Dense):
    """Weights in float32, computed in float16."""
    network = network(returns="ratio")
    if type(network) is Dense:
        network.to_float(ms.float16)
    return ours(network, micro_size, manager(), reduction="ratio", max_grad_norm=0.01)


def documented(network):
    """The program of MindSpore's tutorial."""
    cell = AutoParallel(GradAccumulation(network, 4))
    cell.hsdp()
    return ms.Model(cell, optimizer=sgd(network)).train_network


def predicting(network):
    """The wrapped network, called by itself."""
    return GradAccumulation(network, 2).set_train(False)


def manager():
    return nn.DynamicLossScaleUpdateCell(1024, 2, 10)


AUTO_PARALLEL = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}
SUM = {"gradients_mean": False}
OPTIMIZER_PARALLEL = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 0},
}
SHARDED_GRADIENTS = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "gradient_accumulation_shard": True},
}
SPLIT = (4, 2)
SPLIT_DATA = {"dataset_strategy": ((4, 1), (4, 1)), **SUM}

WEIGHT_SHARDS = {
    "enable_parallel_optimizer": True,
    "parallel_optimizer_config": {"parallel_optimizer_threshold": 0, "optimizer_weight_shard_size": 4},
}
# Shardings by numbers: layers on different numbers of devices, and no data parallel. By names: on (4, 2) devices.
UNEVEN = ((8, 1), (1, 1)), ((4, 1), (1, 1))
NO_DATA_PARALLEL = ((1, 1), (1, 8)), ((1, 8), (8, 1))
DEVICES = Layout((4, 2), ("data", "model"))
NAMED = (
    (DEVICES("data", "None"), DEVICES("None", "model")),
    (DEVICES("data", "model"), DEVICES("model", "None")),
)
# Of MindSpore's own unit tests of its cell, on eight devices: (network, settings).
MINDSPORES = {
    "no data parallel": (lambda: laid(*NO_DATA_PARALLEL), {"full_batch": True, **SUM, **OPTIMIZER_PARALLEL}),
    "frozen": (lambda: laid(*UNEVEN, frozen=["second"]), SUM | OPTIMIZER_PARALLEL),
    "interleaved": (lambda: MicroBatchInterleaved(Net(), 2), SUM),
    "named axes": (lambda: laid(*NAMED), {"dataset_strategy": (DEVICES("data", "None"),) * 2, **SUM}),
}

# The layouts that every option is compiled for: (lazy_inline, how layers lie on devices, settings).
LAYOUTS = {
    "dp": (False, None, SUM),
    "split": (False, SPLIT, SPLIT_DATA),
    "op": (False, None, SUM | OPTIMIZER_PARALLEL),
    "ws": (False, None, SUM | WEIGHT_SHARDS),
    "sg": (True, None, SUM | SHARDED_GRADIENTS),
    "unlazy sg": (False, None, SUM | SHARDED_GRADIENTS),  # we make it compiled once
    "lazy dp": (True, None, SUM),
    "lazy split": (True, SPLIT, SPLIT_DATA),
    "auto": (False, None, SUM | AUTO_PARALLEL),
}


def masked(
    layout,
    losses=1,
    returns="ratio",
    counted=False,
    scale=None,
    aux=False,
    transforms=tuple,
    micro_size=4,
    as_list=False,
    **options,
):
    """Our step of `Masked` in one of the layouts."""
    lazy, split, _ = LAYOUTS[layout]
    network = (LazyMasked if lazy else Masked)(losses=losses, returns=returns, aux=aux, split=split, as_list=as_list)
    if counted:
        counts = tuple(Mask(term, split) for term in range(losses))
        options["count"] = counts if losses > 1 else counts[0]
    return ours(network, micro_size, scale and scale(), reduction=returns, aux=aux, transforms=transforms(), **options)


# The options, in each layout. TWO: two losses with these weights.
TWO = {"losses": 2, "loss_weights": (1.0, 0.3)}
SUMS = {"returns": "sum", "counted": True}
MEANS = {"returns": "mean", "counted": True}
SCALE_AND_CLIP = {"scale": manager, "max_grad_norm": 0.1}
OPTIONS = {
    "ratio": {},
    "ratio, clip": {"max_grad_norm": 0.1},
    "ratio, scale": SCALE_AND_CLIP,
    "ratio, scale alone": {"scale": manager},
    "ratio, clamped": {"min_count": 1000.0},
    "ratio, aux": {"aux": True},
    "sum, count": SUMS,
    "mean, count, aux": MEANS | {"aux": True},
    "two sums, list": SUMS | TWO | {"as_list": True},
    "two sums, scale, clamped": SUMS | TWO | SCALE_AND_CLIP | {"min_count": 60.0},
    "two means": MEANS | TWO,
    "two ratios": TWO,
    "two ratios, clip": {"max_grad_norm": 0.1} | TWO,
    "windows, clip": {"accumulation_steps": 2, "max_grad_norm": 0.1},
    "windows, scale": {"accumulation_steps": 2} | SCALE_AND_CLIP,
    "windows, aux": {"accumulation_steps": 2, "aux": True},
    "windows, sum, count, clamped": {"accumulation_steps": 2, "min_count": 1000.0} | SUMS,
    "spikes": {"transforms": lambda: (SkipSpikes(norm=100.0, history=8), ClipByGlobalNorm(0.1))},
    "spikes, average": {
        "transforms": lambda: (
            SkipSpikes(norm=100.0, history=8),
            ClipByGlobalNorm(0.1),
            ClipByValue(0.01),
            WeightAverage(0.75),
        )
    },
    "transforms": {
        "transforms": lambda: (
            SkipSpikes(norm=100.0, history=8),
            ClipByGlobalNorm(0.1),
            Momentum(),
            ClipByValue(0.46),
            WeightAverage(0.75),
        )
    },
}

# Of seven layers: what the network returns, and the options of our step; None for MindSpore's.
DEEP = {
    "framework": ("mean", None),
    "mean": ("mean", {}),
    "count": ("mean", {"count": positive}),
    "two sums": ("two sums", {"reduction": "sum", "count": (positive, positive), "loss_weights": (1.0, 0.3)}),
    "two ratios": ("two ratios", {"reduction": "ratio", "loss_weights": (1.0, 0.3)}),
}


def deep(net, kind, micro_size):
    """A step of seven layers, which `DEEP` describes."""
    returns, options = DEEP[kind]
    network = net(6, returns)
    return frameworks(network, micro_size) if options is None else ours(network, micro_size, **options)


# name: (how the step is made, MindSpore's parallel settings)
CASES = {
    "plain": (lambda: plain(Net()), {}),
    "framework, 4": (lambda: frameworks(Net(), 4), {}),
    **{f"ours, {k}": (lambda k=k: ours(Net(), k), {}) for k in (1, 4)},
    "per sample, 4": (lambda: ours(PerSampleLoss(Net("none")), 4), {}),
    "sum": (lambda: ours(Net("sum"), 4, reduction="sum"), SUM),
    "full batch": (lambda: ours(Net(), 4), {"full_batch": True, **SUM}),
    "context by init": (lambda: ours(Net(), 4), {"device_num": None}),
    "sharded gradients, mean": (lambda: ours(LazyDense(), 4), SHARDED_GRADIENTS),
    "half": (lambda: half(4), SUM),
    "half, whole": (lambda: half(1), SUM),
    "half, tied": (lambda: half(4, TiedCasts), SUM | {"gpu": True}),
    "half, gpu": (lambda: half(4), SUM | {"gpu": True}),
    "lazy, one micro-batch, clip": (lambda: ours(LazyDense(), 1, max_grad_norm=0.01), SUM),
    "lazy, gpu": (lambda: ours(LazyDense(), 4), SUM | {"gpu": True}),
    **{
        f"{lazy}deep, {kind}, {k}": (lambda net=net, kind=kind, k=k: deep(net, kind, k), SUM)
        for lazy, net in (("", Dense), ("lazy ", LazyDense))
        for kind in DEEP
        for k in (4, 16)
    },
    "documented": (lambda: documented(Net()), {"AutoParallel": True}),
    "AutoParallel, pipeline": (lambda: ours(Net(), 4, stages=2), {"AutoParallel": True}),
    "AutoParallel around the step": (lambda: AutoParallel(ours(Net(), 4)), {"AutoParallel": True}),
    **{name: (lambda make=make: ours(make(), 4), settings) for name, (make, settings) in MINDSPORES.items()},
    **{
        f"{name}, {layout}": (lambda layout=layout, options=options: masked(layout, **options), LAYOUTS[layout][2])
        for layout in LAYOUTS
        for name, options in OPTIONS.items()
    },
    # By the mean over samples, or the sum, with nothing to count.
    "windows, mean, dp": (lambda: ours(Net(), 4, accumulation_steps=2), SUM),
    "windows, sum, op": (
        lambda: ours(Net("sum"), 4, reduction="sum", accumulation_steps=2),
        SUM | OPTIMIZER_PARALLEL,
    ),
    "shared": (
        lambda: ours(Scaled(), 4, reduction="ratio", split=EvenSplit(shared=(2,))),
        {"dataset_strategy": ((8, 1), (8, 1), (1, 1)), "shapes": (X, Y, (1, 1)), **SUM},
    ),
    "over labels": (lambda: ours(OverLabels(), 4, reduction="ratio"), SUM),
    "predict": (lambda: predicting(Net()), {"full_batch": True}),
}
