"""GradAccumulator in hand-written loops: eager, compiled, and inside a user's own compiled function."""

from __future__ import annotations

import contextlib
import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators, ClipByGlobalNorm, GradAccumulator, SkipSpikes, Transform, WeightAverage, resume
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
    vector,
)
from tests.support.reuse import Reused
from tests.support.state import assert_identical, everything, manager
from tests.training.test_step import TRACES, trace

# How a loop runs: "jit" is a user's compiled function around everything.
WAYS = {"graph": ms.GRAPH_MODE, "pynative": ms.PYNATIVE_MODE, "jit": ms.PYNATIVE_MODE}

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


@pytest.mark.parametrize(
    ("way", "weight", "scale"),
    [("pynative", "samples", 8.0), ("jit", None, None), ("graph", None, "manager"), ("pynative", "counts", None)],
    ids=["samples", "jit", "graph, scaled", "counted"],
)
def test_successive_batches_equal_the_joined_batch(way, weight, scale):
    """The loop that a user writes: loss and gradients of a batch, then a call of the accumulator. Batches of a window
    have as many samples each, or weigh by them."""
    ms.set_context(mode=ms.PYNATIVE_MODE)  # compiles nothing
    network = Regression()
    expected = train(nn.TrainOneStepCell, network, OPTIMIZERS["momentum"](network.trainable_params()), DATA)
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
    sizes, losses = (13, 5, 9) if weight else (9, 9, 9), []
    for window in DATA:
        results = []
        for part in zip(*(np.split(column, np.cumsum(sizes)[:-1]) for column in window), strict=True):
            count = [float(len(part[0]))] if weight == "counts" else []
            results.append(call(*map(Tensor, [*part, *count])))
        assert [bool(updated) for _, updated in results] == [False, False, True]
        losses.append(np.average([float(loss.asnumpy()) for loss, _ in results], weights=sizes))
    assert_equivalent(Run(np.array(losses), trained(optimizer)), expected, TOLERANCE)


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

    def loss(x):  # a loop may multiply by the scale itself
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


def test_compiles_by_default_and_says_where_it_cannot(pynative):
    typed = {"__name__": "__main__"}
    exec(SOURCE_IN_NO_FILE, typed)
    for transforms, options, problem in (
        ((), {}, None),
        ((typed["typed"],), {}, "'typed', whose source is in no file"),
        ((lambda gradients: gradients,), {}, "a lambda within other code, in line"),
        ((CountsUpdates(),), {}, r"writes self\.made of 'CountsUpdates'\. So the accumulator runs eagerly"),
        ((CountsUpdates(),), {"jit": False}, None),
    ):
        weight = ms.Parameter(Tensor([10.0, 20.0], ms.float32), name="weight")
        expected = contextlib.nullcontext() if problem is None else pytest.warns(UserWarning, match=problem)
        with expected as warned:
            accumulator = GradAccumulator(nn.SGD([weight], 1.0), 2, transforms=transforms, **options)
        assert problem is None or len(warned) == 1
        assert [accumulator(gradient(x)) for x in (1.0, 3.0)] == [False, True]
        assert moved(accumulator) == [2.0, 0.0]
        assert bool(accumulator.compile_cache) == (problem is None and not options)


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
        ({"accumulators": ms.float16}, TypeError, "argument 'accumulators' must be gaccum_ms.Accumulators"),
        ({"jit": None}, TypeError, "argument 'jit' must be a bool, but got None"),
        ({"scale_sense": 1024.0}, TypeError, "argument 'scale_sense' must be a Cell or a Tensor"),
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


def summing(steps):
    """An accumulator, and its function whose gradient is the sum of the samples."""
    accumulator = make_accumulator(steps)
    return accumulator, accumulator.value_and_grad(lambda x: (x.sum() * accumulator.weights[0]).sum())


def test_gradients_that_know_their_samples_are_not_mixed_with_others():
    """A count goes before samples."""
    accumulator, grad_fn = summing(2)
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


def test_calls_of_several_sizes_need_a_count():
    accumulator, grad_fn = summing(2)
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


def test_a_batch_that_is_skipped_shifts_nothing():
    """Its samples are forgotten with what ended it."""
    accumulator, grad_fn = summing(1)
    for end in (accumulator.clear, accumulator.flush, lambda: accumulator(gradient(1.0), 1)):
        grad_fn(Tensor([1.0, 2.0, 3.0]))
        end()
        _, gradients = grad_fn(Tensor([1.0, 2.0]))
        assert accumulator(tuple(gradients)) is True
        assert float(accumulator.window_count.asnumpy()) == 2


def test_a_scale_that_the_optimizer_removes_is_left_out_of_norms(pynative):
    """A loop that multiplies its loss by the optimizer's `loss_scale` clips the gradient that the optimizer applies."""
    weights = []
    for scale in (1.0, 128.0):
        network = Regression()
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9, loss_scale=scale)
        accumulator = GradAccumulator(optimizer, 2, jit=False, max_grad_norm=0.5)
        gradient = ms.grad(lambda x, y, n=network, s=scale: n(x, y) * s * 50.0, None, optimizer.parameters)
        for x, y in batches(6, 4):
            accumulator(gradient(Tensor(x), Tensor(y.astype(np.float32))))
        weights.append(vector(network.get_parameters()))
    assert relative_error(weights[1], weights[0]) < 1e-6
    assert np.abs(weights[0] - vector(Regression().get_parameters())).max() > 1e-3
