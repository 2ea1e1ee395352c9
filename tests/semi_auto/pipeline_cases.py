"""Training steps whose network lies on two or four stages of the eight devices."""

from __future__ import annotations

import mindspore as ms
from mindspore import nn, ops

from gaccum_ms import PerSampleLoss, Transform
from tests.semi_auto.cases import CASES, LAYOUTS, OPTIMIZER_PARALLEL, OPTIONS, SUM, Mask, X, Y, frameworks, ours, weight

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


OPTIONS_OF_STAGES = OPTIONS | {
    "plain, clip": {"returns": "plain", "max_grad_norm": 0.1},
    "per sample": {"returns": "none"},
    "mean, count": {"returns": "mean", "counted": True},
}


def layout_of(layout, stages):
    """As in cases.py: lazy_inline, the devices of a stage as (data, model) parallel ones, settings."""
    lazy, split, settings = LAYOUTS[layout]
    if split:
        split, settings = (4 // stages, 2), {"dataset_strategy": ((4 // stages, 1),) * 2, **SUM}
    return lazy, split, {"pipeline_stages": stages, "shapes": (X, Y), **settings}


def staged(stages, layout, returns="ratio", counted=False, aux=False, scale=None, transforms=tuple, **options):
    """Our step of `Staged` in one of the layouts."""
    lazy, split, _ = layout_of(layout, stages)
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
        layout_of(layout, stages)[2],
    )
    for name, options in OPTIONS_OF_STAGES.items()
    for layout in LAYOUTS
    for stages in (2, 4)
}
TWO = {"pipeline_stages": 2, "shapes": (X, Y), **SUM}
WIDE = {"shapes": (X, X)}


def folded():
    """Layers in the order of stages 0, 1, 0, 1."""
    network = LazyStaged(2)
    for number, layer in enumerate(network.layers):
        layer.pipeline_stage, layer.pipeline_segment = number % 2, number // 2
    return network


def frozen():
    """Nothing is trained on the last stage."""
    network = Staged(2)
    for parameter in network.layers[2:].get_parameters():
        parameter.requires_grad = False
    return network


def unstaged():
    network = Staged(2)
    del network.layers[1]._pipeline_stage
    return network


class PerSampleOutputs(Staged):
    def construct(self, x, y):
        return super().construct(x, y), x


class Momentum(Transform):
    """Keeps a number for each element of each weight."""

    elementwise = True

    def prepare(self, network):
        self.sums = ms.ParameterTuple([self.state_like(f"sum.{weight.name}", weight) for weight in self.weights])


def scheduled(scheduler):
    return {"pipeline_config": {"pipeline_interleave": True, "pipeline_scheduler": scheduler}}


PIPELINES |= {
    "framework": (lambda: frameworks(Staged(2), 4, nn.PipelineCell), TWO),
    "AutoParallel": (
        lambda: ours(Staged(2), 4, stages=2, model=True),
        {"AutoParallel": True, "stages": 2, "shapes": (X, Y)},
    ),
    "full batch": (lambda: ours(Staged(2), 4), {**TWO, "full_batch": True, "shapes": ((64, 12), (64, 1))}),
    "half": (lambda: ours(Staged(2).to_float(ms.float16), 4), TWO),
    "gpipe": (lambda: ours(LazyStaged(2), 4), TWO | scheduled("gpipe")),
    "folded": (lambda: ours(folded(), 4), TWO | scheduled("1f1b")),
    "tied, whole": (lambda: ours(Tied(2, False), 4, max_grad_norm=1.0), TWO | WIDE | OPTIMIZER_PARALLEL),
    "tied, op": (lambda: ours(Tied(2), 4, max_grad_norm=1.0), TWO | WIDE | OPTIMIZER_PARALLEL),
    "too few": (lambda: ours(Staged(4), 2), {**TWO, "pipeline_stages": 4}),
    "one without a stage": (lambda: ours(unstaged(), 4), TWO),
    "frozen": (lambda: ours(frozen(), 4), TWO),
    "outputs of samples": (lambda: ours(PerSampleOutputs(2), 4, aux=True), TWO),
    "state of all weights": (lambda: ours(Staged(2), 4, transforms=(Momentum(),)), TWO),
    "several losses": (lambda: ours(Staged(2), 4, loss_weights=(1.0, 0.3)), TWO),
}
CASES = CASES | {name if name.endswith("stages") else f"pipeline, {name}": case for name, case in PIPELINES.items()}
