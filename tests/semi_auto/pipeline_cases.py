"""Training steps whose network lies on two or four stages of the eight devices."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import (
    ClipByGlobalNorm,
    ClipByValue,
    PerSampleLoss,
    SkipSpikes,
    WeightAverage,
)
from gaccum_ms.semi_auto.unrolled_window import UnrolledWindow
from tests.semi_auto.cases import (
    AUTO_PARALLEL,
    CASES,
    DEEP,
    OPTIMIZER_PARALLEL,
    SHARDED_GRADIENTS,
    SUM,
    Dense,
    LazyDense,
    Mask,
    X,
    Y,
    frameworks,
    manager,
    ours,
    weight,
)

WIDTHS = (12, 8, 8, 8, 1)


class Layer(nn.Cell):
    """A product and a bias, and all but the last a ReLU. `split` : into how many parts the devices split the samples,
    the rows and the columns."""

    def __init__(self, seed, rows, columns, split=None):
        super().__init__()
        self.weight, self.bias = weight(seed, rows, columns), weight(seed + 10, columns)
        self.weight.name, self.bias.name = "weight", "bias"
        self.matmul, self.add, self.relu, self.has_relu = ops.MatMul(), ops.Add(), ops.ReLU(), columns > 1
        if split:
            data, rows, columns = split
            self.matmul.shard(((data, rows), (rows, columns)))
            self.add.shard(((data, columns), (columns,)))
            self.relu.shard(((data, columns),))

    def construct(self, x):
        x = self.add(self.matmul(x, self.weight), self.bias)
        return self.relu(x) if self.has_relu else x


class Staged(nn.Cell):
    """Four layers on the stages, and squared errors. `returns` : "plain", a mean over all samples; over those of a mask
    a "mean", a "sum" or a "ratio"; "none", each sample's. `split` lays layers on (data, model) parallel devices."""

    def __init__(self, stages, returns="plain", split=None, aux=False):
        super().__init__()
        splits = [(split[0], 1, split[1]), (split[0], split[1], 1)] * 2 if split else [None] * 4
        layers = [Layer(seed, *WIDTHS[seed : seed + 2], split=splits[seed]) for seed in range(4)]
        self.layers = nn.CellList(layers)
        for number, layer in enumerate(layers):
            layer.pipeline_stage = number * stages // 4
        self.returns, self.aux = returns, aux
        self.mask = Mask(0, split)
        self.sub, self.square, self.mean, self.weigh, self.sum = (
            ops.Sub(),
            ops.Square(),
            ops.ReduceMean(),
            ops.Mul(),
            ops.ReduceSum(),
        )
        if split:
            for operator, inputs in (self.sub, 2), (self.square, 1), (self.mean, 1), (self.weigh, 2), (self.sum, 1):
                operator.shard(((split[0], 1),) * inputs)

    def construct(self, x, y):
        out = x
        for layer in self.layers:
            out = layer(out)
        squares = self.square(self.sub(out, y))
        if self.returns == "none":
            return ops.reduce_sum(squares, 1)
        if self.returns == "plain":
            loss = self.mean(squares)
            return (loss, self.sum(squares)) if self.aux else loss
        numerator = self.sum(self.weigh(squares, self.mask.of(y)))
        if self.returns == "sum":
            return numerator
        if self.returns == "mean":
            return numerator / self.mask(x, y)
        return (numerator, self.mask(x, y), self.sum(squares)) if self.aux else (numerator, self.mask(x, y))


class LazyStaged(Staged):
    @ms.lazy_inline
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)


class Enter(nn.Cell):
    """Has the table of `Tied` ."""

    def __init__(self, sharded):
        super().__init__()
        self.table, self.matmul = ms.Parameter(weight(20, 12, 8), "table", parallel_optimizer=sharded), ops.MatMul()

    def construct(self, x):
        return self.matmul(x, self.table)


class Leave(nn.Cell):
    """Uses it again."""

    def __init__(self):
        super().__init__()
        self.matmul = ops.MatMul(transpose_b=True)

    def construct(self, x, table):
        return self.matmul(x, table)


class Tied(nn.Cell):
    """Layers between a table and the same table, on the first stage and the last."""

    def __init__(self, stages, sharded=True):
        super().__init__()
        self.enter, self.leave = Enter(sharded), Leave()
        self.layers = nn.CellList([Layer(seed, 8, 8) for seed in (1, 2)])
        self.enter.pipeline_stage = self.layers[0].pipeline_stage = 0
        self.leave.pipeline_stage = self.layers[1].pipeline_stage = stages - 1
        self.mean = ops.ReduceMean()

    def construct(self, x, y):
        out = self.enter(x)
        for layer in self.layers:
            out = layer(out)
        return self.mean(ops.square(self.leave(out, self.enter.table) - y))


# (lazy_inline, the devices of a stage as (data, model) parallel, settings)
LAYOUTS = {
    "dp": lambda stages: (False, None, SUM),
    "split": lambda stages: (False, (4 // stages, 2), {"dataset_strategy": ((4 // stages, 1),) * 2, **SUM}),
    "op": lambda stages: (False, None, SUM | OPTIMIZER_PARALLEL),
    "sg": lambda stages: (True, None, SUM | SHARDED_GRADIENTS),
    "lazy dp": lambda stages: (True, None, SUM),
    "auto": lambda stages: (False, None, SUM | AUTO_PARALLEL),
}
OPTIONS = {
    "plain": {},
    "plain, clip": {"max_grad_norm": 1.0},
    "plain, scale": {"scale": manager, "max_grad_norm": 1.0},
    "plain, scale alone": {"scale": manager},
    "plain, aux": {"aux": True},
    "per sample": {"returns": "none"},
    "ratio": {"returns": "ratio"},
    "ratio, clip": {"returns": "ratio", "max_grad_norm": 1.0},
    "ratio, scale": {"returns": "ratio", "scale": manager, "max_grad_norm": 1.0},
    "ratio, clamped": {"returns": "ratio", "min_count": 60.0},
    "ratio, aux": {"returns": "ratio", "aux": True},
    "sum, count": {"returns": "sum", "counted": True},
    "mean, count": {"returns": "mean", "counted": True},
    "clip by value": {"transforms": lambda: (ClipByValue(0.02),)},
    "spikes": {"transforms": lambda: (SkipSpikes(norm=100.0, history=8), ClipByGlobalNorm(1.0))},
    "skipped": {"transforms": lambda: (SkipSpikes(norm=0.1, history=8),)},
    "average": {"transforms": lambda: (WeightAverage(0.75),)},
}


def staged(stages, layout, returns="plain", counted=False, aux=False, scale=None, transforms=tuple, **options):
    """Our step of `Staged` in one of the layouts."""
    lazy, split, _ = LAYOUTS[layout](stages)
    network = (LazyStaged if lazy else Staged)(stages, returns, split, aux)
    if returns == "none":
        network = PerSampleLoss(network)
    if counted:
        options["count"] = Mask(0, split)
    reduction = returns if returns in ("sum", "ratio") else "mean"
    options |= {"reduction": reduction, "aux": aux, "transforms": transforms()}
    return ours(network, 4, scale and scale(), **options)


PIPELINES = {
    f"{name}, {layout}, {stages} stages": (
        lambda stages=stages, layout=layout, options=options: staged(stages, layout, **options),
        {"pipeline_stages": stages, "shapes": (X, Y), **LAYOUTS[layout](stages)[2]},
    )
    for name, options in OPTIONS.items()
    for layout in LAYOUTS
    for stages in (2, 4)
}
TWO = {"pipeline_stages": 2, "shapes": (X, Y), **SUM}
WIDE = {"shapes": (X, X)}


def half(stages):
    return Staged(stages).to_float(ms.float16)


def folded():
    """Layers in the order of stages 0, 1, 0, 1."""
    network = LazyStaged(2)
    for number, layer in enumerate(network.layers):
        layer.pipeline_stage, layer.pipeline_segment = number % 2, number // 2
    return network


def frozen(stage):
    network = Staged(2)
    for layer in network.layers[2 * stage : 2 * stage + 2]:
        for parameter in layer.get_parameters():
            parameter.requires_grad = False
    return network


def unstaged(*layers):
    network = Staged(2)
    for number in layers:
        del network.layers[number]._pipeline_stage
    return network


class PerSampleOutputs(Staged):
    def construct(self, x, y):
        return super().construct(x, y), x


class SumsFirst(UnrolledWindow):
    """A deliberate bug: the stages wait for one another before backward."""

    def backwards(self, inputs, scale):
        numbers = self.over_stages(self.batch_sums(*inputs), scale)
        seeds = ops.stack((scale, *((ops.zeros_like(scale),) * (numbers.shape[0] - 1))))
        gradients = self.backward(self.batch_sums, self.weights)(*inputs, seeds)
        return (*self.batch_sums.sums(ops.unstack(numbers), inputs), (), gradients)


def deep(net, kind, micro_size, stages):
    """A step of eight layers of cases.py, on the stages."""
    returns, options = DEEP[kind]
    network = net(7, returns)
    for number, layer in enumerate([*network.layers, network.last]):
        layer.pipeline_stage = number * stages // 8
    if options is None:
        return frameworks(network, micro_size, nn.PipelineCell)
    return ours(network, micro_size, **options)


def with_bug(step, window=UnrolledWindow, **attributes):
    step.window.__class__ = window
    vars(step.window).update(attributes)
    return step


def scheduled(scheduler):
    return {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": scheduler}}


PIPELINES |= {
    "framework": (lambda: frameworks(Staged(2), 4, nn.PipelineCell), TWO),
    "AutoParallel": (lambda: ours(Staged(2), 4, stages=2), {"AutoParallel": True, "stages": 2, "shapes": (X, Y)}),
    "AutoParallel, model": (
        lambda: ours(Staged(2), 4, stages=2, model=True),
        {"AutoParallel": True, "stages": 2, "shapes": (X, Y)},
    ),
    "model": (lambda: ours(Staged(2), 4, model=True), TWO),
    "full batch": (lambda: ours(Staged(2), 4), {**TWO, "full_batch": True, "shapes": ((64, 12), (64, 1))}),
    "half": (lambda: ours(half(2), 4), TWO),
    "gpipe": (lambda: ours(LazyStaged(2), 4), TWO | scheduled("gpipe")),
    "1f1b": (lambda: ours(LazyStaged(2), 4), TWO | scheduled("1f1b")),
    "folded": (lambda: ours(folded(), 4), TWO | scheduled("1f1b")),
    "tied": (lambda: ours(Tied(2), 4, max_grad_norm=1.0), TWO | WIDE),
    "tied, whole": (lambda: ours(Tied(2, False), 4, max_grad_norm=1.0), TWO | WIDE | OPTIMIZER_PARALLEL),
    "tied, op": (lambda: ours(Tied(2), 4, max_grad_norm=1.0), TWO | WIDE | OPTIMIZER_PARALLEL),
    "too few": (lambda: ours(Staged(4), 2), {**TWO, "pipeline_stages": 4}),
    "no stage": (lambda: ours(unstaged(0, 1, 2, 3), 4), TWO),
    "one without a stage": (lambda: ours(unstaged(1), 4), TWO),
    **{f"frozen {stage}": (lambda stage=stage: ours(frozen(stage), 4), TWO) for stage in (0, 1)},
    "tied, counted twice": (
        lambda: with_bug(ours(Tied(2), 4, max_grad_norm=1.0), owned=(True,) * 5),
        TWO | WIDE,
    ),
    "sums first": (lambda: with_bug(staged(4, "dp", "ratio"), SumsFirst), {**TWO, "pipeline_stages": 4}),
    "half, framework": (lambda: frameworks(half(2), 4, nn.PipelineCell), TWO),
    "outputs of samples": (lambda: ours(PerSampleOutputs(2), 4, aux=True), TWO),
    "several losses": (lambda: ours(Staged(2), 4, loss_weights=(1.0, 0.3)), TWO),
    **{
        f"{lazy}deep {stages}, {kind}, {size}": (
            lambda net=net, kind=kind, size=size, stages=stages: deep(net, kind, size, stages),
            {**TWO, "pipeline_stages": stages},
        )
        for lazy, net in (("", Dense), ("lazy ", LazyDense))
        for kind in ("framework", "mean", "ratio")
        for size in (4, 16)
        for stages in (2, 4)
    },
}
PIPELINES = {name if name.endswith("stages") else f"pipeline, {name}": case for name, case in PIPELINES.items()}
ALL_CASES = CASES | PIPELINES
