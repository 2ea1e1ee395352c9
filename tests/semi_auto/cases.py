"""The training steps that compile_worker.py compiles for eight devices: networks, options, layouts, pipelines."""

from __future__ import annotations

import itertools

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
from tests.support.state import manager

SAMPLES = 16  # of each device; few, because the files abbreviate longer constants by "..."
X, Y = (SAMPLES, 12), (SAMPLES, 1)


def weight(seed, *shape):
    return ms.Parameter(Tensor(np.random.default_rng(seed).normal(size=shape).astype(np.float32) * 0.5))


class Layer(nn.Cell):
    """A product and a bias, and a ReLU if there are several columns. `split` : in how many parts samples, rows and
    columns lie."""

    def __init__(self, seed, rows, columns, split=None, has_bias=True):
        super().__init__()
        self.weight, self.has_bias, self.has_relu = weight(seed, rows, columns), has_bias, columns > 1
        if has_bias:
            self.bias = weight(seed + 10, columns)
        self.matmul, self.add, self.relu = ops.MatMul(), ops.Add(), ops.ReLU()
        if split:
            data, rows, columns = split
            self.matmul.shard(((data, rows), (rows, columns)))
            self.add.shard(((data, columns), (columns,)))
            self.relu.shard(((data, columns),))

    def construct(self, x):
        x = self.matmul(x, self.weight)
        x = self.add(x, self.bias) if self.has_bias else x
        return self.relu(x) if self.has_relu else x


class Mask(nn.Cell):
    """The samples that loss number `term` is over: labels above zero, or large ones. As a count: their number. `split`
    as in `Net` ."""

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


class Net(nn.Cell):
    """Two layers, or four on several stages, and squared errors.

    Args:
        returns (str): "plain", the mean over all samples; "total", their sum; "none", each sample's. Over a mask's
            samples: a "mean", a "sum", or a "ratio", which is a numerator and a denominator.
        stages (int): Of a pipeline.
        split (tuple): Lays the layers on (data, model) parallel devices.
        losses (int): The second one is of the outputs alone.
        further (int): How many outputs are beside the losses: the second loss's numerator, and each sample's output.
        as_list (bool): Whether a list is returned.
    """

    def __init__(self, returns="plain", stages=1, split=None, losses=1, further=0, as_list=False):
        super().__init__()
        self.returns, self.losses, self.further, self.as_list = returns, losses, further, as_list
        widths = (12, 8, 8, 8, 1) if stages > 1 else (12, 32, 1)
        splits = [(split[0], 1, split[1]), (split[0], split[1], 1)] * 2 if split else [None] * 4
        layers = [
            Layer(number, *shape, split=splits[number], has_bias=stages > 1 or number == 0)
            for number, shape in enumerate(itertools.pairwise(widths))
        ]
        self.layers = nn.CellList(layers)
        if stages > 1:
            for number, layer in enumerate(layers):
                layer.pipeline_stage = number * stages // 4
        self.masks = nn.CellList([Mask(term, split) for term in range(losses)])
        self.sub, self.weigh, self.square = ops.Sub(), ops.Mul(), ops.Square()
        self.mean, self.sum = ops.ReduceMean(), ops.ReduceSum()
        if split:
            for operator, inputs in (self.sub, 2), (self.weigh, 2), (self.square, 1), (self.mean, 1), (self.sum, 1):
                operator.shard(((split[0], 1),) * inputs)

    def construct(self, x, y):
        out = x
        for layer in self.layers:
            out = layer(out)
        errors = (self.sub(out, y), out)
        squares = self.square(errors[0])
        outputs = ()
        if self.returns == "plain":
            outputs = (self.mean(squares),)
        elif self.returns == "total":
            outputs = (ops.reduce_sum(squares),)
        elif self.returns == "none":
            outputs = (ops.reduce_sum(squares, 1),)
        else:
            for term in range(self.losses):
                mask = self.masks[term]
                numerator = self.sum(self.weigh(self.square(errors[term]), mask.of(y)))
                if self.returns == "mean":
                    numerator = numerator / mask(x, y)
                outputs = (*outputs, numerator, mask(x, y)) if self.returns == "ratio" else (*outputs, numerator)
        if self.further > 0:
            outputs = (*outputs, self.sum(self.square(out)))
        if self.further > 1:
            outputs = (*outputs, out)
        if self.as_list:
            return [*outputs]
        return outputs[0] if len(outputs) == 1 else outputs


class Scaled(Net):
    """Of labels that a third input scales, which all samples share."""

    def construct(self, x, y, scale):
        return super().construct(x, y * scale)


class OverLabels(Net):
    """The first denominator is the labels' sum, which may be negative or infinite."""

    def construct(self, x, y):
        outputs = super().construct(x, y)
        return (outputs[0], ops.reduce_sum(y), *outputs[2:])


class LazyNet(Net):
    @ms.lazy_inline
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)


class Product(nn.Cell):
    """With a table, which may be its own."""

    def __init__(self, table=None, **options):
        super().__init__()
        if table is not None:
            self.table = table
        self.matmul = ops.MatMul(**options)

    def construct(self, x, table):
        return self.matmul(x, table)


class Tied(nn.Cell):
    """Layers between a table and the same table, on the first stage, which has it, and the last."""

    def __init__(self, sharded=True):
        super().__init__()
        table = ms.Parameter(weight(20, 12, 8), "table", parallel_optimizer=sharded)
        self.enter, self.leave = Product(table), Product(transpose_b=True)
        self.layers = nn.CellList([Layer(seed, 8, 8) for seed in (1, 2)])
        self.enter.pipeline_stage = self.layers[0].pipeline_stage = 0
        self.leave.pipeline_stage = self.layers[1].pipeline_stage = 1
        self.mean = ops.ReduceMean()

    def construct(self, x, y):
        out = self.enter(x, self.enter.table)
        for layer in self.layers:
            out = layer(out)
        return self.mean(ops.square(self.leave(out, self.enter.table) - y))


def laid(matmul_1, matmul_2):
    """A network with these shardings of its products, by numbers or by a Layout's names."""
    network = Net()
    network.layers[0].matmul.shard(matmul_1)
    network.layers[1].matmul.shard(matmul_2)
    return network


def frozen(network):
    """Only the first half of the layers is trained."""
    layers = list(network.layers)  # a CellList of some would name them anew
    for parameter in (one for layer in layers[len(layers) // 2 :] for one in layer.get_parameters()):
        parameter.requires_grad = False
    return network


def folded():
    """Layers in the order of stages 0, 1, 0, 1."""
    network = LazyNet(stages=2)
    for number, layer in enumerate(network.layers):
        layer.pipeline_stage, layer.pipeline_segment = number % 2, number // 2
    return network


def unstaged():
    network = Net(stages=2)
    del network.layers[1]._pipeline_stage
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

    def change(self, gradients):
        changed = ()
        for index in range(len(gradients)):
            moved = 0.9 * self.moments[index] + gradients[index]
            changed = (*changed, ops.depend(moved, ops.assign(self.moments[index], moved)))
        return changed


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


def skips_and_clips():
    return SkipSpikes(norm=100.0, history=8), ClipByGlobalNorm(0.1)


AUTO_PARALLEL = {"parallel_mode": "auto_parallel", "search_mode": "sharding_propagation"}
SUM = {"gradients_mean": False}


def optimizer_parallel(**more):
    config = {"parallel_optimizer_threshold": 0, **more}
    return {"enable_parallel_optimizer": True, "parallel_optimizer_config": config}


OPTIMIZER_PARALLEL = optimizer_parallel()
SHARDED_GRADIENTS = optimizer_parallel(gradient_accumulation_shard=True)
# Shardings by numbers: layers on different numbers of devices, and no data parallel. By names: on (4, 2) devices.
UNEVEN = ((8, 1), (1, 1)), ((4, 1), (1, 1))
NO_DATA_PARALLEL = ((1, 1), (1, 8)), ((1, 8), (8, 1))
DEVICES = Layout((4, 2), ("data", "model"))
NAMED = (
    (DEVICES("data", "None"), DEVICES("None", "model")),
    (DEVICES("data", "model"), DEVICES("model", "None")),
)

# The layouts of every option: (lazy_inline, whether layers are split over devices, settings).
LAYOUTS = {
    "dp": (False, False, SUM),
    "split": (False, True, SUM),
    "op": (False, False, SUM | OPTIMIZER_PARALLEL),
    "ws": (False, False, SUM | optimizer_parallel(optimizer_weight_shard_size=4)),
    "sg": (True, False, SUM | SHARDED_GRADIENTS),
    "unlazy sg": (False, False, SUM | SHARDED_GRADIENTS),  # we make it compiled once
    "lazy dp": (True, False, SUM),
    "auto": (False, False, SUM | AUTO_PARALLEL),
}


def layout_of(layout, stages):
    """lazy_inline, the devices of a stage as (data, model) parallel ones, settings."""
    lazy, is_split, settings = LAYOUTS[layout]
    if is_split:
        settings = settings | {"dataset_strategy": ((4 // stages, 1),) * 2}
    if stages > 1:
        settings = settings | {"pipeline_stages": stages, "shapes": (X, Y)}
    return lazy, (4 // stages, 2) if is_split else None, settings


def step_of(
    layout, stages, returns="ratio", losses=1, aux=False, as_list=False, counted=False, scale=None, chain=tuple, **more
):
    """Our step of `Net` in one of the layouts. `scale` and `chain` make a loss scale and transforms."""
    lazy, split, _ = layout_of(layout, stages)
    further = 0 if not aux else 1 if stages > 1 else 2
    network = (LazyNet if lazy else Net)(returns, stages, split, losses, further, as_list)
    if counted:
        counts = tuple(Mask(term, split) for term in range(losses))
        more["count"] = counts if losses > 1 else counts[0]
    reduction = returns if returns in ("sum", "ratio") else "mean"
    network = PerSampleLoss(network) if returns == "none" else network
    return ours(network, 4, scale and scale(), reduction=reduction, aux=aux, transforms=chain(), **more)


# The options, in each layout. TWO: two losses with these weights.
TWO = {"losses": 2, "loss_weights": (1.0, 0.3)}
SUMS = {"returns": "sum", "counted": True}
MEANS = {"returns": "mean", "counted": True}
SCALE_AND_CLIP = {"scale": manager, "max_grad_norm": 0.1}
OPTIONS = {
    "ratio": {},
    "ratio, clip": {"max_grad_norm": 0.1},
    "ratio, scale": SCALE_AND_CLIP,
    "ratio, clamped": {"min_count": 1000.0},
    "ratio, aux": {"aux": True},
    "sum, count": SUMS,
    "mean, count, aux": MEANS | {"aux": True},
    "plain, clip": {"returns": "plain", "max_grad_norm": 0.1},
    "per sample": {"returns": "none"},
    "two sums, list, clamped": SUMS | TWO | {"as_list": True, "min_count": 60.0},
    "two means, scale": MEANS | TWO | {"scale": manager},
    "two ratios": TWO,
    "two ratios, clip": {"max_grad_norm": 0.1} | TWO,
    "windows, clip, aux": {"accumulation_steps": 2, "max_grad_norm": 0.1, "aux": True},
    "windows, scale": {"accumulation_steps": 2} | SCALE_AND_CLIP,
    "windows, sum, count, clamped": {"accumulation_steps": 2, "min_count": 1000.0} | SUMS,
    "spikes": {"chain": skips_and_clips},
    "spikes, average": {"chain": lambda: (*skips_and_clips(), ClipByValue(0.01), WeightAverage(0.75))},
    "transforms": {"chain": lambda: (*skips_and_clips(), Momentum(), ClipByValue(0.46), WeightAverage(0.75))},
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


def scheduled(scheduler):
    return {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": scheduler}}


# On two stages: (how the step is made, further settings).
TWO_STAGES = {"pipeline_stages": 2, "shapes": (X, Y), **SUM}
WIDE = {"shapes": (X, X), **OPTIMIZER_PARALLEL}
PIPELINES = {
    "framework": (lambda: frameworks(Net(stages=2), 4, nn.PipelineCell), {}),
    "AutoParallel": (lambda: ours(Net(stages=2), 4, stages=2, model=True), {"AutoParallel": True}),
    "full batch": (lambda: ours(Net(stages=2), 4), {"full_batch": True, "shapes": ((64, 12), (64, 1))}),
    "half": (lambda: ours(Net(stages=2).to_float(ms.float16), 4), {}),
    "gpipe": (lambda: ours(LazyNet(stages=2), 4), scheduled("gpipe")),
    "folded": (lambda: ours(folded(), 4), scheduled("1f1b")),
    "tied, whole": (lambda: ours(Tied(False), 4, max_grad_norm=1.0), WIDE),
    "tied, op": (lambda: ours(Tied(), 4, max_grad_norm=1.0), WIDE),
    "too few": (lambda: ours(Net(stages=4), 2), {"pipeline_stages": 4}),
    "one without a stage": (lambda: ours(unstaged(), 4), {}),
    "frozen": (lambda: ours(frozen(Net(stages=2)), 4), {}),
    "outputs of samples": (lambda: ours(Net(stages=2, further=2), 4, aux=True), {}),
    "state of all weights": (lambda: ours(Net(stages=2), 4, transforms=(Momentum(),)), {}),
    "several losses": (lambda: ours(Net(stages=2), 4, loss_weights=(1.0, 0.3)), {}),
}
# name: (how the step is made, MindSpore's parallel settings)
CASES = {
    "plain": (lambda: plain(Net()), {}),
    "framework, 4": (lambda: frameworks(Net(), 4), {}),
    **{f"ours, {k}": (lambda k=k: ours(Net(), k), {}) for k in (1, 4)},
    "per sample, 4": (lambda: ours(PerSampleLoss(Net("none")), 4), {}),
    "sum": (lambda: ours(Net("total"), 4, reduction="sum"), SUM),
    "full batch": (lambda: ours(Net(), 4), {"full_batch": True, **SUM}),
    "context by init": (lambda: ours(Net(), 4), {"context by init": True}),
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
    # Of MindSpore's own unit tests of its cell.
    "no data parallel": (
        lambda: ours(laid(*NO_DATA_PARALLEL), 4),
        {"full_batch": True, **SUM, **OPTIMIZER_PARALLEL},
    ),
    "frozen": (lambda: ours(frozen(laid(*UNEVEN)), 4), SUM | OPTIMIZER_PARALLEL),
    "interleaved": (lambda: ours(MicroBatchInterleaved(Net(), 2), 4), SUM),
    "named axes": (lambda: ours(laid(*NAMED), 4), {"dataset_strategy": (DEVICES("data", "None"),) * 2, **SUM}),
    **{
        f"{name}, {layout}{f', {stages} stages' if stages > 1 else ''}": (
            lambda layout=layout, stages=stages, options=options: step_of(layout, stages, **options),
            layout_of(layout, stages)[2],
        )
        for name, options in OPTIONS.items()
        for layout in LAYOUTS
        for stages in (1, 2, 4)
    },
    **{f"pipeline, {name}": (make, TWO_STAGES | settings) for name, (make, settings) in PIPELINES.items()},
    # By the mean over samples, or the sum, with nothing to count.
    "windows, mean, dp": (lambda: ours(Net(), 4, accumulation_steps=2), SUM),
    "windows, sum, op": (
        lambda: ours(Net("total"), 4, reduction="sum", accumulation_steps=2),
        SUM | OPTIMIZER_PARALLEL,
    ),
    "shared": (
        lambda: ours(Scaled("ratio"), 4, reduction="ratio", split=EvenSplit(shared=(2,))),
        {"dataset_strategy": ((8, 1), (8, 1), (1, 1)), "shapes": (X, Y, (1, 1)), **SUM},
    ),
    "over labels": (lambda: ours(OverLabels("ratio"), 4, reduction="ratio"), SUM),
    "predict": (lambda: GradAccumulation(Net(), 2).set_train(False), {"full_batch": True}),
}
