"""``MaxTokens("auto")``: it finds what fits on all widths, and trains as with the same number given. If memory runs out
in training, it restores what the batch has changed, and splits it anew with half as many tokens."""

from __future__ import annotations

import gc
import re
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import (
    Accumulators,
    AutoSize,
    CountNotIgnored,
    GradAccumulationCell,
    MaxTokens,
    find_micro_batch_size,
    memory_report,
)
from gaccum_ms.backend.parameters import overwrite
from gaccum_ms.backend.snapshot import Snapshot
from gaccum_ms.memory.proc import forget_peak, own
from gaccum_ms.training.found_size import FoundSize
from tests.splitting.test_max_tokens import DATA, IGNORED, LENGTH, Causal, batch, max_tokens, run, step_of, whole_step
from tests.support.alone import alone
from tests.support.modes import eagerly
from tests.support.reference import as_numpy, make_step, relative_error
from tests.support.state import assert_identical, everything
from tests.training.test_auto_size import says_assert_failed, state

pytestmark = pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")  # networks that count their runs

PLENTY = 1 << 40
MARK = 1  # a token in the shortest samples: its micro-batch runs out of memory


class RunsOut(nn.Cell):
    """A network that runs out of memory, at run time, in micro-batches of more than `largest` tokens with a marked
    token among them. It counts its runs."""

    def __init__(self):
        super().__init__()
        self.network = Causal()
        self.check = ops.Assert()
        self.largest = ms.Parameter(Tensor(10**6, ms.int32), name="largest", requires_grad=False)
        self.times = ms.Parameter(Tensor(0.0, ms.float32), name="times", requires_grad=False)

    def construct(self, tokens, labels):
        is_marked = (tokens == MARK).any()
        fits = ops.logical_or(tokens.shape[0] * tokens.shape[1] <= self.largest + 0, ops.logical_not(is_marked))
        checked = ops.depend(self.check(fits, [self.largest + 0]), ops.assign_add(self.times, Tensor(1.0, ms.float32)))
        return ops.depend(self.network(tokens, labels), checked)

    def set_largest(self, tokens):
        overwrite(self.largest, Tensor(tokens, ms.int32))


def marked(batch):
    """The batch with the marked token in the two shortest samples only, which come last."""
    tokens, labels = batch[0].copy(), batch[1]
    tokens[tokens == MARK] = MARK + 1
    tokens[np.argsort((tokens != 0).sum(1))[:2], 0] = MARK
    return tokens, labels


MARKED = [marked(one) for one in DATA]


def auto_step(tokens, widths=2, **options):
    """A step that has this number as if found, without a search; and its network."""
    network = RunsOut()
    auto = AutoSize(PLENTY, says_assert_failed)
    step = step_of(max_tokens(max_tokens=auto, widths=widths), network, **options)
    step._runner.runner.cut_into(tokens)
    return network, step


def weights(step):
    return {one.name.rpartition("network.")[2]: as_numpy(one) for one in step.weights}


def assert_alike(step, other, tolerance):
    expected = weights(other)
    assert weights(step).keys() == expected.keys()
    for name, value in weights(step).items():
        assert relative_error(value, expected[name]) < tolerance, name


# -- what fits ---------------------------------------------------------------------------------------------------------


class Limited(nn.Cell):
    """Raises MindSpore's out-of-memory error for micro-batches of more than `tokens` tokens or `rows` rows."""

    def __init__(self, tokens=10**6, rows=10**6):
        super().__init__()
        self.network = Causal()
        self.tokens, self.rows = tokens, rows

    def construct(self, tokens, labels):
        if tokens.shape[0] * tokens.shape[1] > self.tokens or tokens.shape[0] > self.rows:
            raise RuntimeError("std::bad_alloc")
        return self.network(tokens, labels)


@pytest.fixture
def tried(monkeypatch):
    """The size of each trial."""
    from gaccum_ms.memory.trial import Trials

    sizes, one_trial = [], Trials.run
    monkeypatch.setattr(Trials, "run", lambda self, size: sizes.append(size) or one_trial(self, size))
    return sizes


@pytest.mark.core("one width")
@pytest.mark.parametrize(
    ("widths", "rows", "samples", "sizes"),
    [((LENGTH,), 1, 2, [1, 2]), ((12, LENGTH), 5, 20, [1, 2, 4, 3])],
    ids=["one width", "two widths"],
)
def test_finds_the_number_that_fits_on_all_widths_once(widths, rows, samples, sizes, tried):
    """Of 20 samples, four rows of width 24 would fit, which are 96 tokens; but at width 12, these are eight rows."""
    data = [batch(seed, samples) for seed in range(3)]
    split = max_tokens(max_tokens=AutoSize(PLENTY), widths=widths)
    step = step_of(split, Limited(rows=rows))
    assert step.split.max_tokens is None
    losses = run(step, data)
    assert split.max_tokens is None
    assert step.split.max_tokens == (sizes[1] if len(sizes) > 2 else sizes[0]) * LENGTH
    assert tried == sizes
    assert len(step._runner.runner._graph.compile_cache) == len(widths)
    with eagerly():
        whole = whole_step()
        np.testing.assert_allclose(losses, run(whole, data), rtol=1e-5)
    assert_alike(step, whole, 1e-5)


def test_the_search_alone_ignores_the_cells_own_number_and_changes_nothing(tried, pynative):
    network = Limited(rows=5)
    cell = GradAccumulationCell(network, split=max_tokens(widths=(12, LENGTH)), count=CountNotIgnored(IGNORED))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    before = everything(network)
    assert find_micro_batch_size(cell, optimizer, tuple(map(Tensor, DATA[0])), PLENTY) == 2 * LENGTH
    assert tried == [1, 2, 4, 3]
    assert cell.split.max_tokens == 48
    assert cell.split.plan is None
    assert_identical(everything(network), before)


TEXTS, WIDTHS = 64, (64, 256)


class Tagger(nn.Cell):
    """Some 50 KB of intermediate values for each token."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(4, 4000), nn.Tanh(), nn.Dense(4000, 5))
        self.loss = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, x, y):
        return self.loss(self.layers(x).reshape((-1, 5)), y.reshape((-1,)))


def trained(tokens: int | str, room: int) -> tuple[int, int]:
    """In a new process: the number of tokens of a training, and its peak above the memory before it. If it finds its
    number, it may have so many bytes more than the process has."""
    ms.set_context(mode=ms.GRAPH_MODE)
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, WIDTHS[-1] + 1, TEXTS)
    y = rng.integers(0, 5, (TEXTS, WIDTHS[-1])).astype(np.int32)
    y[np.arange(WIDTHS[-1]) >= lengths[:, None]] = IGNORED
    data = [Tensor(rng.normal(size=(*y.shape, 4)).astype(np.float32)), Tensor(y)]
    network = Tagger()
    forget_peak()
    before = own("VmRSS")
    size = AutoSize(before + room) if tokens == "auto" else tokens
    split = MaxTokens(size, lambda x, y: (y.asnumpy() != IGNORED).sum(1), widths=WIDTHS, padding=(0, IGNORED))
    step = make_step(network, nn.Adam, split=split, count=CountNotIgnored(IGNORED))
    for _ in range(2):
        step(*data).asnumpy()
    return step.split.max_tokens, own("VmHWM") - before


def test_what_is_found_fits():
    """Training keeps the limit; with twice the tokens it would not."""
    room = 200_000_000
    tokens, peak = alone(trained, "auto", room)
    assert WIDTHS[-1] < tokens < TEXTS * WIDTHS[-1]
    assert peak <= room
    assert alone(trained, 2 * tokens, room)[1] > room


def test_the_worst_case_is_a_full_micro_batch_of_each_width():
    tokens, labels = DATA[0]
    lengths = (tokens != 0).sum(1)
    worst = max_tokens(widths=(4, 12, LENGTH)).worst_case(Tensor(tokens), Tensor(labels))
    number = [(lengths <= 4).sum(), ((lengths > 4) & (lengths <= 12)).sum(), (lengths > 12).sum()]
    assert worst.multiple_of == LENGTH
    assert worst.most == max(-(-count * width // LENGTH) for count, width in zip(number, (4, 12, LENGTH), strict=True))
    parts = worst.of(4 * LENGTH)()
    assert [part[0].shape for part in parts] == [(24, 4), (8, 12), (4, LENGTH)]
    for width, (of_tokens, of_labels) in zip((4, 12, LENGTH), parts, strict=True):
        found = (of_tokens.asnumpy() != 0).sum(1)
        assert found.max() == lengths[lengths <= width].max()
        assert (of_labels.asnumpy() != IGNORED).any()
        longer = {tuple(row[:width]) for row in tokens[lengths > width]}
        assert not longer & set(map(tuple, of_tokens.asnumpy())), "trimmed by nobody"
    short = np.where(np.arange(LENGTH) < 4, tokens[:7], 0)
    assert max_tokens(widths=(4, LENGTH)).worst_case(Tensor(short), Tensor(labels[:7])).most == 2, "28 of 24 tokens"


# -- when memory runs out in training ----------------------------------------------------------------------------------


def fail_in_the_second_batch(monkeypatch, options):
    """Fails twice, in the last micro-batch. What the batch has changed is restored each time, bit for bit."""
    network, step = auto_step(96, widths=1, **options)
    restored, shrink = [], FoundSize._shrink

    def note_and_shrink(self, *arguments):
        restored.append((state(step), ms.get_rng_state().asnumpy().copy()))
        return shrink(self, *arguments)

    monkeypatch.setattr(FoundSize, "_shrink", note_and_shrink)
    losses = run(step, MARKED[:1])
    graph = weakref.ref(step._runner.runner._graph)
    network.set_largest(30)
    ms.manual_seed(7)
    before, generator = state(step), ms.get_rng_state().asnumpy().copy()
    with pytest.warns(UserWarning, match=r"memory ran out \(RuntimeError\) for 20 samples") as warned:
        losses += run(step, MARKED[1:2])
    assert [re.findall(r"max_tokens=\d+|goes on with \d+", str(one.message)) for one in warned] == [
        ["max_tokens=96", "goes on with 48"],
        ["max_tokens=48", "goes on with 24"],
    ]
    gc.collect()
    assert graph() is None, "the old graphs are released"
    assert len(restored) == 2
    assert any("times" in name for name in before)
    for after, generator_after in restored:
        assert_identical(after, before)
        np.testing.assert_array_equal(generator_after, generator)
    return step, losses


@pytest.mark.thorough
def test_halves_and_goes_on(monkeypatch, pynative):
    """Weights, optimizer state, the accumulators with the window's first batch and their compensations, the network's
    state, the window's position and sums, and the default generator are restored. No batch is lost or counted twice."""
    options = {"accumulation_steps": 2, "accumulators": Accumulators(compensated=True)}
    step, losses = fail_in_the_second_batch(monkeypatch, options)
    split = step.split
    assert split.max_tokens == split.plan.max_tokens == 24
    losses += run(step, MARKED[2:4])
    assert len(step._runner.runner._graph.compile_cache) == 1
    whole = step_of(max_tokens(), Causal(), **options)
    np.testing.assert_allclose(losses, run(whole, MARKED[:4]), rtol=1e-5)
    assert_alike(step, whole, 1e-5)
    assert int(step.batch_count.asnumpy()) == 4
    assert int(step.update_count.asnumpy()) == 2


@pytest.mark.thorough
def test_something_changes_where_it_is_not_put_back(monkeypatch, pynative):
    """The control."""
    monkeypatch.setattr(Snapshot, "restore", lambda self: None)
    with pytest.raises(AssertionError, match=r"times|window_|accu"):
        fail_in_the_second_batch(monkeypatch, {"accumulation_steps": 4})


@pytest.mark.thorough
def test_not_below_the_largest_width(pynative):
    """One error, and nothing is lost: the window keeps its batches, and the batch can be given again."""
    network, step = auto_step(40, widths=1, accumulation_steps=4)
    run(step, MARKED[:2])
    network.set_largest(LENGTH - 1)
    before = state(step)
    with (
        pytest.warns(UserWarning, match=r"max_tokens=40, .* goes on with 24"),
        pytest.raises(RuntimeError, match=r"one sample must fit, but got .* not enough on rank\(s\) \[0\]"),
    ):
        run(step, MARKED[2:3])
    assert_identical(state(step), before)
    network.set_largest(10**6)
    even = step_of(max_tokens(widths=1), Causal(), accumulation_steps=4)
    run(step, MARKED[2:4]), run(even, MARKED[:4])
    assert_alike(step, even, 1e-5)


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_is_refused(pynative):
    network = Causal()
    with pytest.raises(TypeError, match="'max_tokens' must be an int, but got 'automatic'"):
        max_tokens(max_tokens="automatic")
    with pytest.raises(ValueError, match=r"'widths' must be ascending, from 1 on, but got \[8, 4\]"):
        max_tokens(max_tokens="auto", widths=[8, 4])
    with pytest.raises(RuntimeError, match="'max_tokens' must be known before a batch is split, but got 'auto'"):
        max_tokens(max_tokens="auto")(*map(Tensor, DATA[0]))
    cell = GradAccumulationCell(network, split=max_tokens(max_tokens="auto"), count=CountNotIgnored(IGNORED))
    optimizer, batch = nn.SGD(network.trainable_params(), 0.1), tuple(map(Tensor, DATA[0]))
    with pytest.raises(ValueError, match="each number is a row of the report, but got 'split' of class 'MaxTokens'"):
        memory_report(cell, optimizer, *batch)
    with pytest.raises(ValueError, match="must be so many samples of the batch"):
        function = GradAccumulationCell(network, split=lambda *batch: [batch])
        find_micro_batch_size(function, optimizer, batch)
    with pytest.raises(ValueError, match=r"got widths \[4, 9\] and a sample of 24 tokens"):
        run(step_of(max_tokens(max_tokens="auto", widths=[4, 9])), DATA[:1])
