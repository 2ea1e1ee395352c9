"""``micro_batch_size="auto"`` trains as with an explicit number. If memory runs out in training, the batch is undone,
and repeated with half the size.

Running out is injected into real graphs: MindSpore's Assert fails while the graph runs, after the first micro-batches
were added. One test uses a process with a real limit for MindSpore's allocator. The search is in test_search.py.
"""

from __future__ import annotations

import resource
import warnings

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor, nn, ops

from gaccum_ms import Accumulators, AutoSize, CountNotIgnored, WindowBatchNorm
from gaccum_ms.backend.out_of_memory import is_out_of_memory
from gaccum_ms.backend.parameters import overwrite
from tests.support import reference
from tests.support.alone import alone
from tests.support.reference import OPTIMIZERS, Regression, as_numpy, batches, relative_error, vector
from tests.support.state import assert_close, assert_identical
from tests.support.two_ranks import case

pytestmark = pytest.mark.filterwarnings("ignore:.*writes state in 'construct'")  # networks that count their runs

PLENTY = 1 << 40
MARK = 0.125  # the first feature of a marked sample, whose micro-batch "needs much memory"


class RunsOut(nn.Cell):
    """A network with its loss that runs out of memory, at run time, in micro-batches of more than `largest` samples
    that include a marked one."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.check = ops.Assert()
        self.largest = ms.Parameter(Tensor(1000, ms.int32), name="largest", requires_grad=False)

    def construct(self, x, y):
        is_marked = (x[:, 0] == MARK).any()
        fits = ops.logical_or(x.shape[0] <= self.largest + 0, ops.logical_not(is_marked))
        return ops.depend(self.network(x, y), self.check(fits, [self.largest + 0]))

    def set_largest(self, samples):
        overwrite(self.largest, Tensor(samples, ms.int32))


def says_assert_failed(error: BaseException) -> bool:
    ms.manual_seed(99)  # a failed try may have changed the default generator
    return "assert failed" in str(error)


class WithStatistics(nn.Cell):
    """Layers that keep state of each micro-batch, and one that reads its first sample: after a failed eager gradient,
    MindSpore accepts no int as an index."""

    def __init__(self):
        super().__init__()
        self.layers = nn.SequentialCell(nn.BatchNorm1d(12), nn.Dense(12, 6), WindowBatchNorm(6))
        self.gain = ms.Parameter(Tensor(2.0, ms.float32), name="gain", requires_grad=False)  # frozen
        self.register_buffer("seen", Tensor(0.0, ms.float32))

    def construct(self, x, y):
        ops.assign(self.seen, self.seen + 1)
        return ops.square(self.layers(x).sum(-1) * self.gain - y).mean() + 0 * x[0].sum()


def make_step(network, scale=None, **options):
    """A step of a network that returns its loss."""
    ms.set_seed(4)
    return reference.make_step(network, OPTIMIZERS["momentum"], scale, **options)


def run(step, data):
    """The losses."""
    return [float(step(*map(Tensor, batch)).asnumpy()) for batch in data]


def state(step):
    buffers = {f"buffer {name}": as_numpy(one) for name, one in step.network.named_buffers()}
    return buffers | {one.name: as_numpy(one) for one in step.get_parameters()}


def test_trains_as_with_the_number(pynative):
    """Micro-batches have six samples, so the last is smaller; the last batch is short. The last bits may differ: in
    them, CPU kernels depend on the weights' addresses."""
    data = [*batches(16, 2), *batches(5, 1, seed=8)]
    options = {"count": CountNotIgnored(), "accumulators": Accumulators(compensated=True)}
    auto = make_step(Regression(), micro_batch_size=AutoSize(PLENTY), **options)
    auto._runner.runner.cut_into(6)  # without a search
    number = make_step(Regression(), micro_batch_size=6, jit=False, **options)
    np.testing.assert_allclose(run(auto, data), run(number, data), rtol=1e-6)
    assert auto.micro_batch_size == 6
    for count in ("batch_count", "update_count"):
        assert getattr(auto, count).asnumpy() == getattr(number, count).asnumpy()
    assert_close(*({one.name: as_numpy(one) for one in step.weights} for step in (auto, number)), 1e-6)


def marked(batch):
    """The batch with its last sample but one marked."""
    x, y = batch[0].copy(), batch[1]
    x[-2, 0] = MARK
    return x, y


def halving_step(network=None, search=False, size=16, **options):
    """A network whose `set_largest` makes memory run out, and its step, whose size a search finds or `size` sets."""
    loss = RunsOut(network or Regression())
    step = make_step(loss, micro_batch_size=AutoSize(PLENTY, says_assert_failed), **options)
    if not search:
        step._runner.runner.cut_into(size)
    return loss, step


def test_halves_and_goes_on():
    """No batch is lost or counted twice: the weights equal those of training on whole batches. In a window of two
    batches, the second fails, when the first is already added up. Other errors are raised, as without "auto"."""
    data = [marked(one) for one in batches(16, 4)]
    loss, step = halving_step(accumulation_steps=2, size=8)
    losses = run(step, data[:1])
    loss.set_largest(5)
    words = r"memory ran out \(RuntimeError\) for 16 samples .*micro_batch_size=8, .* goes on with 4"
    with pytest.warns(UserWarning, match=words):
        losses += run(step, data[1:2])
    assert step.micro_batch_size == 4
    losses += run(step, data[2:])
    ms.set_context(mode=ms.PYNATIVE_MODE)
    whole = make_step(Regression(), micro_size=1, accumulation_steps=2)
    np.testing.assert_allclose(losses, run(whole, data), rtol=1e-5)
    assert relative_error(vector(step.weights), vector(whole.weights)) < 1e-5
    assert int(step.batch_count.asnumpy()) == 4
    assert int(step.update_count.asnumpy()) == int(whole.update_count.asnumpy())
    ms.set_context(mode=ms.GRAPH_MODE)
    step._runner._fails = lambda error: False
    loss.set_largest(1)
    with pytest.raises(RuntimeError, match="assert failed"):
        run(step, data[:1])
    assert step.micro_batch_size == 4


def test_a_short_batch_is_halved_from_its_own_size(pynative):
    """Half of the size that was found would give the same micro-batch again."""
    loss, step = halving_step(size=16)
    short = [marked(one) for one in batches(3, 1)]
    run(step, short)
    loss.set_largest(2)
    with pytest.warns(UserWarning, match="for 3 samples .*micro_batch_size=16, .* goes on with 2"):
        run(step, short)
    assert step.micro_batch_size == 2


@pytest.mark.filterwarnings("ignore:.*(BatchNorm|failed half-way):UserWarning")
def test_not_even_one_sample(pynative):
    """All is put back bit for bit: accumulators and their compensations, statistics of BatchNorm and WindowBatchNorm,
    counts, and the default generator, from which the failed try has drawn. The window keeps its batches, and the batch
    can be given again."""
    data = [marked(one) for one in batches(2, 4)]
    loss, step = halving_step(
        WithStatistics(), size=1, accumulation_steps=4, accumulators=Accumulators(compensated=True)
    )
    run(step, data[:2])
    loss.set_largest(0)
    ms.manual_seed(7)
    before, generator = state(step), ms.get_rng_state().asnumpy().copy()
    assert "buffer network.seen" in before
    with pytest.raises(RuntimeError, match=r"one sample must fit, but got .* not enough on rank\(s\) \[0\]"):
        run(step, data[2:3])
    assert_identical(state(step), before)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), generator)
    loss.set_largest(1000)
    run(step, data[2:])
    assert [int(one.asnumpy()) for one in (step.batch_count, step.update_count, step.window_position)] == [4, 1, 0]


class FourthPower(nn.Cell):
    """Computes a tensor of 64 bytes times the features times the fourth power of the samples: 67 MB for 32 samples of
    one feature, and 1.07 GB, more than there is, for 64 samples, or for 32 samples of sixteen features. It is a single
    tensor, because MindSpore keeps the memory of smaller ones if a later one fails."""

    def __init__(self):
        super().__init__()
        self.weight = ms.Parameter(Tensor(np.linspace(1, 2, 16), ms.float32), name="weight")

    def construct(self, x):
        tiled = ops.tile(self.weight, (x.shape[0] ** 4 * x.shape[1],))
        return tiled.mean() * x.mean() + 0.5 * ops.square(self.weight).sum()


def train_in_a_small_address_space() -> tuple[list[int], list[str], np.ndarray, np.ndarray]:
    """In a new process: the sizes of four batches, MindSpore's errors, and the weights with what they must be."""
    ms.set_context(mode=ms.GRAPH_MODE)
    errors, sizes = [], []

    def notes_and_says(error: BaseException) -> bool:
        errors.append(repr(error)[:300])
        return is_out_of_memory(error)

    def momentum(weights):
        return nn.Momentum(weights, 0.1, 0.9)

    # A training of few samples makes MindSpore's threads, before there is a limit.
    reference.make_step(FourthPower(), momentum, micro_size=1)(Tensor(np.ones((4, 1), np.float32))).asnumpy()
    network = FourthPower()
    step = reference.make_step(network, momentum, micro_batch_size=AutoSize(1 << 50, notes_and_says))
    room = psutil.Process().memory_info().vms + 900_000_000
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    expected, moment = as_numpy(network.weight), 0.0
    for features in (1, 1, 16, 16):
        batch = np.full((64, features), 0.1 * features, np.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "For 'GradAccumulationCell', memory ran out")
            step(Tensor(batch)).asnumpy()
        sizes.append(step.micro_batch_size)
        moment = 0.9 * moment + batch.mean() / 16 + expected
        expected = expected - 0.1 * moment
    return sizes, errors, as_numpy(network.weight), expected


def test_a_real_limit_of_the_address_space():
    """MindSpore fails to allocate memory in the search, and later for a batch of longer samples; training goes on."""
    sizes, errors, weights, expected = alone(train_in_a_small_address_space)
    assert sizes[:2] == [32, 32]
    assert sizes[2] in (8, 16)
    assert len(errors) > 1
    assert all("bad_alloc" in error or "Memory not enough" in error for error in errors), errors
    # A mean over 268 million float32 is not exact; counting a batch twice, or half of it, would be an error of 5 %.
    np.testing.assert_allclose(weights, expected, rtol=5e-3)


def test_options_that_are_refused():
    with pytest.raises(TypeError, match="'micro_batch_size' must be an int, but got 'automatic'"):
        make_step(Regression(), micro_batch_size="automatic")
    with pytest.raises(ValueError, match="For 'AutoSize', the argument 'memory_limit' must be at least 1"):
        AutoSize(memory_limit=0)
    with pytest.raises(TypeError, match="'AutoSize', the argument 'is_out_of_memory' must be a function of an error"):
        AutoSize(is_out_of_memory=3)


@pytest.mark.distributed
def test_ranks_halve_together(rank_pair, tmp_path):
    """Rank 1 runs out of memory, rank 0 does not: both halve the size once, and train as on whole batches."""
    ranks = rank_pair.worker("tests.ranks.memory_worker", tmp_path)
    for rank, results in enumerate(ranks):
        assert "SyncBatchNorm layers" in str(results["refused"])
        for kind in ("window", "flush"):
            outcome = case(results, kind)
            assert relative_error(outcome["auto"], outcome["whole"]) < 1e-5, kind
            assert outcome["auto_updates"] == outcome["whole_updates"], kind
        # In a window of two batches, rank 0 is informed at the window's end.
        assert case(results, "window")["sizes"].tolist() == [[16, 16, 16, 8], [16, 16, 8, 8]][rank]
        assert case(results, "flush")["sizes"].tolist()[-1] == 8
        assert "not enough on rank(s) [1]" in str(results["error"])
        before, after = case(results, "before"), case(results, "after")
        assert any("moving_mean" in name for name in before)
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value, err_msg=name)
    for kind in ("window", "flush"):
        np.testing.assert_array_equal(*(case(results, kind)["auto"] for results in ranks), err_msg=kind)
