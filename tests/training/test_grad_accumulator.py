"""GradAccumulator in hand-written loops: eager, compiled, and inside a user's own compiled function."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.dataset import GeneratorDataset

from gaccum_ms import (
    Accumulators,
    ClipByGlobalNorm,
    GradAccumulationCell,
    GradAccumulator,
    SkipSpikes,
    Transform,
    WeightAverage,
    WindowMonitor,
    resume,
)
from tests.support.reference import (
    OPTIMIZERS,
    Regression,
    Run,
    as_numpy,
    assert_equivalent,
    batches,
    fails_once,
    relative_error,
    train,
)
from tests.support.reuse import Reused
from tests.support.state import assert_close, assert_identical, everything, manager
from tests.training.test_step import TRACES, trace

# How a loop runs: "jit" is a user's compiled function around everything.
WAYS = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE, "jit": ms.PYNATIVE_MODE}

UNEQUAL = (13, 5, 9)  # samples of a window's batches
DATA = batches(27, 2)  # each is one window
TOLERANCE = 1e-5  # as in test_equivalence.py


def trained(optimizer) -> dict[str, np.ndarray]:
    """Everything that an update changes: the weights, and the optimizer's state with its position in the schedule."""
    return {p.name: as_numpy(p) for p in [*optimizer.parameters, *optimizer.get_parameters()]}


def make_scale(scale: str | float | None) -> nn.Cell | Tensor | None:
    return manager() if scale == "manager" else scale and Tensor(scale, ms.float32)


@Reused
def reused_accumulator(optimizer, way, scale, **options) -> GradAccumulator:
    weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
    optimizer = OPTIMIZERS[optimizer]([weight]) if optimizer else nn.SGD([weight], 1.0)
    accumulator = GradAccumulator(optimizer, 2, jit=False, scale_sense=make_scale(scale), **options)
    if scale is not None:
        accumulator.scale(Tensor(1.0, ms.float32))  # the test's gradients include the scale
    return accumulator


def make_accumulator(steps=2, optimizer=None, way="pynative", scale=None, **options) -> GradAccumulator:
    """An accumulator for a weight (10, 20) and SGD with rate 1: the weight decreases by the update's gradient."""
    ms.set_context(mode=WAYS[way])
    # Accumulators of bfloat16 are made anew: MindSpore cannot assign them on CPU.
    make = reused_accumulator.make if "accumulators" in options else reused_accumulator
    accumulator = make(optimizer, way, scale, **options)
    accumulator.set_accumulation_steps(steps)
    return accumulator


def gradient(a, b=0.0):
    return (Tensor([a, b], ms.float32),)


def moved(accumulator) -> list[float]:
    return ([10.0, 20.0] - as_numpy(accumulator.weights[0]).astype(np.float64)).round(5).tolist()


def place(accumulator) -> tuple[int, int]:
    return int(accumulator.update_count.asnumpy()), int(accumulator.window_position.asnumpy())


# -- equivalence -------------------------------------------------------------------------------------------------------


def parts_of(window, sizes=UNEQUAL):
    """A window's batches."""
    return list(zip(*(np.split(column, np.cumsum(sizes)[:-1]) for column in window), strict=True))


@functools.cache
def joined_batch() -> Run:
    """The reference: MindSpore's own step on whole windows. PyNative mode compiles nothing."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    network = Regression()
    return train(nn.TrainOneStepCell, network, OPTIMIZERS["momentum"](network.trainable_params()), DATA)


@pytest.mark.parametrize(
    ("way", "weight", "scale"),
    [("pynative", "samples", 8.0), ("jit", None, None), ("graph", None, "manager"), ("pynative", "counts", None)],
    ids=["samples", "jit", "graph, scaled", "counted"],
)
def test_successive_batches_equal_the_joined_batch(way, weight, scale):
    """The loop that a user writes: loss and gradients of a batch, then a call of the accumulator. Batches of a window
    have as many samples each, or weigh by them."""
    expected = joined_batch()
    ms.set_context(mode=WAYS[way])
    network = Regression()
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    accumulator = GradAccumulator(optimizer, 3, jit=False, scale_sense=make_scale(scale))

    def forward(x, y):
        loss = network(x, y)
        return accumulator.scale(loss), loss

    if weight == "samples":
        grad_fn = accumulator.value_and_grad(forward, has_aux=True)
    else:
        grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

    def train_step(x, y, *count):
        (_, loss), gradients = grad_fn(x, y)
        return loss, accumulator(gradients, *count)

    call = ms.jit(train_step) if way == "jit" else train_step
    sizes, losses = UNEQUAL if weight else (9, 9, 9), []
    for window in DATA:
        results = []
        for part in parts_of(window, sizes):
            count = [float(len(part[0]))] if weight == "counts" else []
            results.append(call(*map(Tensor, [*part, *count])))
        assert [bool(updated) for _, updated in results] == [False, False, True]
        losses.append(np.average([float(loss.asnumpy()) for loss, _ in results], weights=sizes))
    assert_equivalent(Run(np.array(losses), trained(optimizer)), expected, TOLERANCE)


# -- results of a call, and values that it does not change -------------------------------------------------------------


def test_returns_true_at_updates_alone_and_tells_its_place(mode):
    accumulator = make_accumulator(3, way=mode)
    seen = []
    for kind in (tuple, list) * 3 + (tuple,):
        updated = accumulator(kind(gradient(1.0)))
        assert updated is True or updated is False
        seen.append((updated, *place(accumulator)))
    window = [(False, 1), (False, 2), (True, 0)]
    assert seen == [(done, (i + 1) // 3, position) for i, (done, position) in enumerate([*window, *window, window[0]])]


# -- flush, clear, no_update -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"), [([(), ()], 4.0), ([(1,), (np.int64(3),)], 5.0)], ids=["alike", "counted"]
)
def test_flush_divides_a_tail_by_what_it_counts(counts, expected, mode):
    accumulator = make_accumulator(4, way=mode)
    before = everything(accumulator)
    assert accumulator.flush() is False
    assert_identical(everything(accumulator), before)
    accumulator(gradient(2.0), *counts[0])
    accumulator(gradient(6.0), *counts[1])
    assert accumulator.flush() is True
    assert moved(accumulator) == [expected, 0.0]
    assert place(accumulator) == (1, 0)
    assert [accumulator(gradient(1.0), *counts[0]) for _ in range(4)] == [False, False, False, True]
    assert moved(accumulator) == [expected + 1, 0.0]


def test_a_cleared_window_might_never_have_been():
    values = []
    for cleared in (True, False):
        accumulator = make_accumulator(3, "momentum", accumulators=Accumulators(ms.bfloat16, compensated=True))
        if cleared:
            accumulator(gradient(7.3, 1e-3), 5)
            accumulator(gradient(float("nan")), 2)
            accumulator.clear()
            assert place(accumulator) == (0, 0)
            assert accumulator.flush() is False
        assert [accumulator(gradient(x, -x), x) for x in (1.1, 2.2, 3.3)] == [False, False, True]
        values.append(everything(accumulator))
    assert values[0].pop("gaccum_ms.batch_count") == values[1].pop("gaccum_ms.batch_count") + 2 == 5
    assert_identical(*values)


def test_an_update_that_fails_drops_its_window_and_the_next_is_right(pynative):
    """Its last batch may be given again, and must not count twice."""
    accumulator = make_accumulator(2, way="pynative", transforms=(fails_once(KeyboardInterrupt()),))
    accumulator(gradient(7.0))
    with pytest.warns(UserWarning, match=r"the 1 batch\(es\) before it"), pytest.raises(KeyboardInterrupt):
        accumulator(gradient(9.0))
    assert place(accumulator) == (0, 0)
    assert [accumulator(gradient(x)) for x in (1.0, 3.0)] == [False, True]
    assert moved(accumulator) == [2.0, 0.0]


def test_no_update_lets_a_window_go_on_until_the_first_call_after_it(mode):
    accumulator = make_accumulator(2, way=mode)
    before = trained(accumulator.optimizer)
    with accumulator.no_update():
        assert [accumulator(gradient(x)) for x in (1.0, 2.0, 3.0)] == [False] * 3
        assert_identical(trained(accumulator.optimizer), before)
        assert place(accumulator) == (0, 3)
    assert accumulator(gradient(10.0)) is True
    assert moved(accumulator) == [4.0, 0.0]
    with pytest.raises(KeyError), accumulator.no_update():
        with pytest.raises(ZeroDivisionError), accumulator.no_update():
            raise ZeroDivisionError
        assert [accumulator(gradient(x)) for x in (1.0, 2.0)] == [False, False]
        raise KeyError
    assert accumulator(gradient(3.0)) is True
    assert moved(accumulator) == [6.0, 0.0]


# -- clipping ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_norm", "expected", "mode"),
    [(1.0, [0.6, 0.8], "graph"), (6.0, [3.0, 4.0], "pynative")],
    indirect=["mode"],
)
def test_clips_the_windows_mean_gradient_once(max_norm, expected, mode):
    """The mean of (6, 0) and (0, 8) is (3, 4), of norm 5; each clipped to 1 their mean would be (0.5, 0.5)."""
    accumulator = make_accumulator(2, way=mode, max_grad_norm=max_norm, scale=1024.0)
    for one in ([6.0, 0.0], [0.0, 8.0]):
        accumulator((Tensor(one, ms.float32) * 1024.0,))
    assert moved(accumulator) == expected
    np.testing.assert_allclose(accumulator.grad_norm.asnumpy(), 5.0, rtol=1e-6)


# -- loss scaling and overflow -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("way", "position", "value"), [("pynative", 0, float("inf")), ("graph", 2, float("nan"))])
def test_an_overflow_drops_its_window_and_halves_the_scale(position, value, way):
    accumulator = make_accumulator(3, "adam", way, scale="manager")
    assert [accumulator(gradient(1024.0)) for _ in range(3)] == [False, False, True]
    before = trained(accumulator.optimizer)
    poisoned = [gradient(value if i == position else 2048.0) for i in range(3)]
    assert [accumulator(one, loss=2.0) for one in poisoned] == [False] * 3
    record = accumulator.record()
    assert (record.updated, record.update, record.loss) == (False, 1, 2.0)
    assert_identical(trained(accumulator.optimizer), before)
    assert place(accumulator) == (1, 0)
    assert float(accumulator.scale_sense.asnumpy()) == 512.0
    assert float(accumulator.scale(Tensor(2.0, ms.float32)).asnumpy()) == 1024.0
    assert [accumulator(gradient(512.0)) for _ in range(3)] == [False, False, True]
    assert np.isfinite(as_numpy(accumulator.weights[0])).all()
    assert (as_numpy(accumulator.weights[0])[0] != before["weight"][0]).all()


def test_a_scale_that_no_loss_was_multiplied_by_is_refused(pynative):
    """Gradients would be divided by a scale that they do not contain."""
    weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
    accumulator = GradAccumulator(nn.SGD([weight], 1.0), 1, scale_sense=Tensor(8.0, ms.float32), jit=False)
    assert not accumulator.flush()
    before = everything(accumulator)
    message = r"'GradAccumulator', losses must be multiplied .* accumulator.scale\(loss\)"
    with pytest.raises(RuntimeError, match=message):
        accumulator(gradient(8.0))
    assert_identical(everything(accumulator), before)
    accumulator.scale(Tensor(1.0, ms.float32))
    assert bool(accumulator(gradient(8.0)))
    assert moved(accumulator) == [1.0, 0.0]


def test_a_loop_may_multiply_by_the_scale_itself(pynative):
    weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
    accumulator = GradAccumulator(nn.SGD([weight], 1.0), 1, scale_sense=Tensor(8.0, ms.float32), jit=False)

    def loss(x):
        return (weight * x).sum() * accumulator.scale_sense

    gradient_of = ms.grad(loss, None, accumulator.weights)

    @ms.jit
    def train_step(x):
        return accumulator(gradient_of(x))

    train_step(Tensor([1.0, 2.0], ms.float32))
    assert moved(accumulator) == [1.0, 2.0]


def test_drop_micro_batch_beside_transforms():
    """MindSpore compiled no check of the inputs beside that of the finished gradients."""
    transforms = (SkipSpikes(norm=100.0), ClipByGlobalNorm(100.0), WeightAverage(0.9))
    accumulator = reused_accumulator.make(None, "graph", None, overflow="drop_micro_batch", transforms=transforms)
    assert [accumulator(gradient(*one)) for one in ((1.0, 2.0), (np.nan, 1.0))] == [False, True]
    assert moved(accumulator) == [1.0, 2.0]
    assert float(accumulator.dropped_micro_batches.asnumpy()) == 1
    assert [accumulator(gradient(*one)) for one in ((np.inf, 1.0), (np.nan, 1.0))] == [False, False]
    assert moved(accumulator) == [1.0, 2.0]


# -- records -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["graph", "pynative"])
def test_records_are_those_of_the_steps_monitor(way):
    ms.set_context(mode=WAYS[way])
    data = [part for window in DATA for part in parts_of(window)]
    network, network_of_step = Regression(), Regression()
    optimizer, optimizer_of_step = (
        nn.Momentum(one.trainable_params(), nn.ExponentialDecayLR(0.1, 0.5, 1), 0.9)
        for one in (network, network_of_step)
    )
    monitor = WindowMonitor()
    cell = GradAccumulationCell(network_of_step, 1, accumulation_steps=3, max_grad_norm=0.5)
    data_set = GeneratorDataset(data, ["x", "y"], shuffle=False)
    ms.Model(cell, optimizer=optimizer_of_step).train(1, data_set, callbacks=[monitor], dataset_sink_mode=False)
    accumulator = GradAccumulator(optimizer, 3, jit=way != "pynative", max_grad_norm=0.5)
    grad_fn, records = accumulator.value_and_grad(network), []
    for batch in data:
        loss, gradients = grad_fn(*map(Tensor, batch))
        if accumulator(gradients, loss=loss):
            records.append(accumulator.record(epoch=1))
    assert len(records) == len(monitor.records) == len(DATA)
    for record, expected in zip(records, monitor.records, strict=True):
        assert record.seconds > 0
        assert record.counts == UNEQUAL
        fields, wanted = (dataclasses.replace(one, seconds=1.0) for one in (record, expected))
        for name, value in dataclasses.asdict(wanted).items():
            assert getattr(fields, name) == (value if value is None else pytest.approx(value, rel=1e-5)), name


def test_a_loss_in_a_record_is_the_windows_mean_without_what_is_left_out(pynative):
    options = {"scale": "manager", "overflow": "drop_micro_batch", "max_grad_norm": float("inf")}
    accumulator = make_accumulator(3, **options)
    with pytest.raises(RuntimeError, match=r"'record' needs a window that has ended, but got none. Call it after"):
        accumulator.record()
    accumulator(gradient(3.0 * 1024), 1, loss=2.0)
    accumulator(gradient(float("inf")), 7, loss=Tensor(float("nan")))
    assert accumulator(gradient(3.0 * 1024), 3, loss=Tensor(6.0, ms.float16)) is True
    assert moved(accumulator) == [3.0, 0.0]
    record = accumulator.record()
    assert (record.loss, record.losses[0], record.losses[2]) == (5.0, 2.0, 6.0)
    assert (record.count, record.counts, record.dropped_micro_batches) == (4.0, (1.0, 7.0, 3.0), 1)
    assert (record.grad_norm, record.loss_scale, record.update, record.epoch) == (3.0, 1024.0, 1, None)
    accumulator(gradient(1.0), loss=1.0)
    assert repr(accumulator.record()) == repr(record)  # until the next window ends
    accumulator.clear()
    accumulator(gradient(512.0))
    assert accumulator.flush() is True
    record = accumulator.record(epoch=2)
    assert math.isnan(record.loss)
    assert (record.losses, record.counts, record.batches, record.update, record.epoch) == ((), (1.0,), 1, 2, 2)


def test_records_of_a_loop_within_jit(tmp_path, pynative):
    """Also after an earlier checkpoint is loaded."""
    accumulator, earlier = make_accumulator(2), str(tmp_path / "earlier.ckpt")
    ms.save_checkpoint(accumulator, earlier)

    @ms.jit
    def add(samples, loss):
        return accumulator((samples.mean() * ops.ones(2, ms.float32),), samples.shape[0], loss=loss)

    for update, load in ((1, None), (2, resume), (1, lambda one, file: ms.load_checkpoint(file, one)), (1, None)):
        for number in (1, 3):
            add(Tensor([float(number)] * number), Tensor(10.0 * number * update))
        record = accumulator.record()
        assert (record.loss, record.losses, record.count) == (25.0 * update, (), 4.0)
        assert (record.update, record.updated, record.batches) == (update, True, 2)
        if load:
            load(accumulator, earlier)
    assert moved(accumulator) == [2.5, 2.5]


# -- accumulators, number of steps, compilation ------------------------------------------------------------------------


class Traced(nn.SGD):
    def construct(self, gradients):
        trace(1)
        return super().construct(gradients)


def test_compiles_once_whatever_changes():
    """Gradients, counts, position, number of steps, cleared and longer windows are values, not constants."""
    accumulator = GradAccumulator(Traced([ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")], 1.0), 2)
    TRACES.clear()
    for i in range(12):
        with accumulator.no_update() if i == 4 else contextlib.nullcontext():
            updated = accumulator(gradient(float(i)), Tensor(i + 1.0) if i % 2 else i + 1)
        if i < 4:
            assert updated == (i % 2 == 1)
        if i == 5:
            accumulator.clear()
        if i % 4 == 3:
            accumulator.set_accumulation_steps(i)
        if i == 1:  # the end of a window has a graph of its own
            compiled = len(TRACES)
    assert 1 <= compiled == len(TRACES)
    assert len(accumulator.compile_cache) == len(accumulator.end_window.compile_cache) == 1


SOURCE_IN_NO_FILE = """
def typed(gradients):
    return gradients
"""


class CountsUpdates(Transform):
    def __init__(self):
        super().__init__()
        self.made = 0

    def change(self, gradients):
        self.made += 1
        return tuple(gradient * (self.made / self.made) for gradient in gradients)


class ListMomentum(nn.Optimizer):
    def __init__(self, parameters, rate):
        super().__init__(rate, parameters)
        self.moments = [ops.zeros_like(parameter) for parameter in self.parameters]

    def construct(self, gradients):
        for index, parameter in enumerate(self.parameters):
            self.moments[index] = 0.5 * self.moments[index] + gradients[index]
            ops.assign(parameter, parameter - self.get_lr() * self.moments[index])
        return True


def test_compiles_by_default_and_says_where_it_cannot(pynative):
    typed = {"__name__": "__main__"}
    exec(SOURCE_IN_NO_FILE, typed)
    # fmt: off
    cases = [
        (nn.SGD, (), {}, None),
        (nn.SGD, (typed["typed"],), {}, "'typed', whose source is in no file"),
        (nn.SGD, (lambda gradients: gradients,), {}, "a lambda within other code, in line"),
        (nn.SGD, (CountsUpdates(),), {}, r"writes self\.made of 'CountsUpdates'\. So the accumulator runs eagerly"),
        (ListMomentum, (), {}, r"writes self\.moments\[0\] of 'ListMomentum'\. So the accumulator runs eagerly"),
        (nn.SGD, (CountsUpdates(),), {"jit": False}, None),
    ]
    # fmt: on
    for optimizer, transforms, options, problem in cases:
        weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
        expected = contextlib.nullcontext() if problem is None else pytest.warns(UserWarning, match=problem)
        with expected as warned:
            accumulator = GradAccumulator(optimizer([weight], 1.0), 2, transforms=transforms, **options)
        assert problem is None or len(warned) == 1
        assert [accumulator(gradient(x)) for x in (1.0, 3.0)] == [False, True]
        assert moved(accumulator) == [2.0, 0.0]
        assert bool(accumulator.compile_cache) == (problem is None and not options)


def test_an_optimizer_with_state_in_a_list_is_refused_within_a_graph(pynative):
    weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
    with pytest.warns(UserWarning, match="runs eagerly"):
        accumulator = GradAccumulator(ListMomentum([weight], 1.0), 1)
    with pytest.raises(ValueError, match=r"writes self\.moments\[0\] of 'ListMomentum'"):
        ms.jit(lambda gradients: accumulator(gradients))((Tensor([1.0, 2.0]),))
    assert weight.asnumpy().tolist() == [10.0, 20.0]


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_goes_on_from_a_checkpoint_in_mid_window(tmp_path):
    """By `resume` in the middle of training, or MindSpore's own functions."""
    options = {"accumulators": Accumulators(ms.bfloat16, compensated=True), "max_grad_norm": 0.5, "scale": "manager"}
    saved, fresh = (make_accumulator(3, "adam", **options) for _ in range(2))
    for number in (1, 2):
        saved(gradient(1e3 * number, -number), 4)
    path = str(tmp_path / "window.safetensors")
    ms.save_checkpoint(saved, path, format="safetensors")
    assert ms.load_param_into_net(fresh, ms.load_checkpoint(path, format="safetensors")) == ([], [])
    assert_identical(everything(fresh), everything(saved))
    for number in (5, 6):
        fresh(gradient(1e3, number), number)
    resume(fresh, path)
    assert place(fresh) == (0, 2)
    assert_identical(everything(fresh), everything(saved))
    for number in range(1, 5):
        updates = [one(gradient(1e3 * number, -number), number) for one in (saved, fresh)]
        assert updates == [number in (1, 4)] * 2
        assert_close(everything(fresh), everything(saved))


# -- bad input: one clear error, and nothing has changed ---------------------------------------------------------------


class Plain(nn.Optimizer):
    """An optimizer that would take complex weights, as few of MindSpore's do."""

    def construct(self, gradients):
        return True


def test_refuses_bad_arguments(parallel_context):
    optimizer = nn.SGD([ms.Parameter(Tensor([1.0]), name="weight")], 1.0)
    wave = ms.Parameter(Tensor(np.array([1 + 1j], np.complex64)), name="wave")  # of which the real part would be added
    for arguments, error, message in (
        ({"optimizer": nn.ReLU()}, TypeError, "argument 'optimizer' must be an nn.Optimizer, but got 'ReLU'"),
        ({"optimizer": Plain(0.1, [wave])}, TypeError, "optimizer's parameters must be real, .*: wave. Keep real"),
        ({"accumulation_steps": 0}, ValueError, "argument 'accumulation_steps' must be at least 1, but got 0"),
        ({"accumulation_steps": 2.0}, TypeError, "argument 'accumulation_steps' must be an int, but got 2.0 of type"),
        ({"accumulation_steps": True}, TypeError, "argument 'accumulation_steps' must be an int, but got True"),
        ({"max_grad_norm": -1.0}, ValueError, "argument 'max_grad_norm' must be positive, but got -1.0"),
        ({"accumulators": ms.float16}, TypeError, "argument 'accumulators' must be gaccum_ms.Accumulators"),
        ({"overflow": "drop"}, ValueError, "argument 'overflow' must be one of .* but got 'drop'"),
        ({"jit": None}, TypeError, "argument 'jit' must be a bool, but got None"),
        ({"scale_sense": 1024.0}, TypeError, "argument 'scale_sense' must be a Cell or a Tensor"),
        ({"scale_sense": Tensor([1.0, 2.0], ms.float32)}, ValueError, "shape of 'scale_sense' must be "),
        ({"scale_sense": Tensor(0.0, ms.float32)}, ValueError, "argument 'scale_sense' must be positive"),
    ):
        with pytest.raises(error, match=f"For 'GradAccumulator', the {message}"):
            GradAccumulator(**{"optimizer": optimizer, "accumulation_steps": 2, **arguments})
    accumulator = GradAccumulator(optimizer, 2)
    with pytest.raises(ValueError, match="For 'GradAccumulator', the argument 'accumulation_steps' must be at least 1"):
        accumulator.set_accumulation_steps(0)
    assert int(accumulator.accumulation_steps.asnumpy()) == 2
    parallel_context(parallel_mode="auto_parallel")
    with pytest.raises(RuntimeError, match=r"'GradAccumulator', the parallel mode must be .*, but got 'auto_parallel'"):
        GradAccumulator(optimizer, 2)


def test_refuses_bad_batches_before_anything_changes():
    refused = [
        (((),), ValueError, r"number and shapes of the optimizer's parameters, \[\(2,\)\], but got \[\]"),
        (((Tensor([1.0]),),), ValueError, r"\[\(2,\)\], but got \[\(1,\)\]"),
        ((gradient(1.0)[0],), TypeError, "'gradients' must be a tuple of Tensors, but got Tensor"),
        (((np.ones(2, np.float32),),), TypeError, "'gradients' must be a tuple of Tensors"),
        ((gradient(1.0), -1), ValueError, "'count' must be finite and not negative, but got -1"),
        ((gradient(1.0), float("nan")), ValueError, "'count' must be finite and not negative, but got nan"),
        ((gradient(1.0), True), TypeError, r"'count' must be a number or a Tensor of shape \(\), but got True"),
        ((gradient(1.0), Tensor([3.0])), TypeError, r"'count' must be a number or a Tensor of shape \(\)"),
        ((gradient(1.0), 1, Tensor([1.0, 2.0])), TypeError, "'loss' must be a number or a Tensor with one, .* got Te"),
        ((gradient(1.0), 1, 3.0), ValueError, r"'loss' must be given with every batch .* got one after 1 batch\(es\)"),
        ((gradient(1.0),), ValueError, r"every batch of a window or with none, .* but got count=None and gradients "),
    ]
    accumulator = make_accumulator(2, "momentum")
    accumulator(gradient(1.0), 2)
    before = everything(accumulator)
    for inputs, error, message in refused:
        with pytest.raises(error, match=f"For 'GradAccumulator', .*{message}"):
            accumulator(*inputs)
        assert_identical(everything(accumulator), before)
    assert accumulator(gradient(3.0), 2) is True


def test_gradients_that_know_their_samples_are_not_mixed_with_others():
    """A count goes before samples."""
    accumulator = make_accumulator(2)
    grad_fn = accumulator.value_and_grad(lambda x: (x.sum() * accumulator.weights[0]).sum())
    with pytest.raises(TypeError, match=r"first input of a function of 'value_and_grad' must be a Tensor .* got 3"):
        grad_fn(3)
    _, gradients = grad_fn(Tensor([1.0, 2.0, 3.0]))
    accumulator(gradients)
    with pytest.raises(ValueError, match=r"weigh by batches after 1 batch\(es\) that weigh by samples. Nothing was"):
        accumulator(gradient(1.0))
    assert accumulator(gradients) is True
    assert [accumulator(gradients, 1), accumulator(gradient(2.0, 2.0), 3)] == [False, True]
    assert moved(accumulator) == [9.0, 9.0]
    assert float(accumulator.window_count.asnumpy()) == 4


def test_gradients_that_a_loop_changes_weigh_by_their_samples(pynative):
    """Those of two calls are added, as an adversarial part, or a second loss, adds them."""
    expected = joined_batch()
    network = Regression()
    optimizer = OPTIMIZERS["momentum"](network.trainable_params())
    accumulator = GradAccumulator(optimizer, 3, jit=False)
    grad_fns = [accumulator.value_and_grad(network) for _ in range(2)]
    losses = []
    for window in DATA:
        results = []
        for part in parts_of(window):
            (loss, gradients), (_, others) = (grad_fn(*map(Tensor, part)) for grad_fn in grad_fns)
            results.append(float(loss))
            accumulator(tuple(ops.nan_to_num(one + other) / 2 for one, other in zip(gradients, others, strict=True)))
        losses.append(np.average(results, weights=UNEQUAL))
    assert_equivalent(Run(np.array(losses), trained(optimizer)), expected, TOLERANCE)


def test_calls_of_several_sizes_need_a_count():
    accumulator = make_accumulator(2)
    grad_fn = accumulator.value_and_grad(lambda x: (x.sum() * accumulator.weights[0]).sum())
    (_, first), (_, second) = grad_fn(Tensor([1.0, 2.0, 3.0])), grad_fn(Tensor([1.0, 2.0]))
    both = tuple(one + other for one, other in zip(first, second, strict=True))
    with pytest.raises(ValueError, match=r"'count' must be given .* with 3 and 2 samples.* Nothing was added"):
        accumulator(both)
    assert place(accumulator) == (0, 0)
    assert [accumulator(first), accumulator(second)] == [False, True]  # these know it themselves
    assert moved(accumulator) == [(3 * 6 + 2 * 3) / 5] * 2
    for size in (3, 2):
        grad_fn(Tensor([1.0] * size))
    accumulator(both, 5)


FORGETS = {
    "a call": lambda accumulator, grad_fn: accumulator(gradient(1.0), 1),
    "a call that fails": lambda accumulator, grad_fn: accumulator(gradient(1.0), -1),
    "a flush": lambda accumulator, grad_fn: accumulator.flush(),
    "a clear": lambda accumulator, grad_fn: accumulator.clear(),
}


@pytest.mark.parametrize("event", FORGETS)
def test_a_batch_that_is_skipped_shifts_nothing(event):
    """Its samples are forgotten with what ended it."""
    accumulator = make_accumulator(1)
    grad_fn = accumulator.value_and_grad(lambda x: (x.sum() * accumulator.weights[0]).sum())
    grad_fn(Tensor([1.0, 2.0, 3.0]))
    with contextlib.suppress(TypeError, ValueError):
        FORGETS[event](accumulator, grad_fn)
    _, gradients = grad_fn(Tensor([1.0, 2.0]))
    assert accumulator(tuple(gradients)) is True
    assert float(accumulator.window_count.asnumpy()) == 2
    assert accumulator(gradient(1.0)) is True
    assert accumulator.record().counted == "batches"


# -- an optimizer that removes a scale ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["max_grad_norm", "transforms"])
def test_a_scale_that_the_optimizer_removes_is_left_out_of_norms(by, pynative):
    """A loop that multiplies its loss by the optimizer's `loss_scale` clips the gradient that the optimizer applies."""
    clip = {"max_grad_norm": 0.5} if by == "max_grad_norm" else {"transforms": (largest_half,)}
    weights = []
    for scale in (1.0, 128.0):
        network = Regression()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9, loss_scale=scale)
        accumulator = GradAccumulator(optimizer, 2, jit=False, **clip)
        gradient = ms.grad(lambda x, y, n=network, s=scale: n(x, y) * s * 50.0, None, optimizer.parameters)
        for x, y in batches(6, 4):
            accumulator(gradient(Tensor(x), Tensor(y.astype(np.float32))))
        weights.append(np.concatenate([as_numpy(one).ravel() for one in network.get_parameters()]))
    before = np.concatenate([as_numpy(one).ravel() for one in Regression().get_parameters()])
    assert relative_error(weights[1], weights[0]) < 1e-6
    assert np.abs(weights[0] - before).max() > 1e-3


def largest_half(gradients):
    """Clips each number, as a transform."""
    return tuple(ops.clamp(one, -0.5, 0.5) for one in gradients)
