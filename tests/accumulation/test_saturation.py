"""Overflows on a device that saturates, where no gradient looks infinite: the graphs for it, and steps in PyNative mode
with a simulated flag (saturating.py). Not run on hardware."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from gaccum_ms import GradAccumulator, backend
from gaccum_ms.accumulation import saturation
from tests.accumulation.saturation_graphs import CASES
from tests.support import paths
from tests.support.reference import make_step
from tests.support.saturating import Saturating, batch, device_that_saturates, register, yes
from tests.support.two_ranks import case


@ops.constexpr
def no():
    return False


# -- when --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ascend", "is_910a", "is_910b", "variable", "expected"),
    [
        (no, no, no, None, False),
        (no, no, no, "SATURATION_MODE", False),
        (yes, yes, no, None, True),
        (yes, no, yes, None, False),
        (yes, no, yes, "INFNAN_MODE", False),
        (yes, no, yes, "SATURATION_MODE", True),
    ],
)
def test_which_devices_saturate(monkeypatch, ascend, is_910a, is_910b, variable, expected):
    monkeypatch.setattr(backend, "ascend_target", ascend)
    monkeypatch.setattr(backend, "ascend_910a_target", is_910a)
    monkeypatch.setattr(backend, "ascend_910b_target", is_910b)
    monkeypatch.delenv("MS_ASCEND_CHECK_OVERFLOW_MODE", raising=False)
    if variable is not None:
        monkeypatch.setenv("MS_ASCEND_CHECK_OVERFLOW_MODE", variable)
    assert saturation.saturates() is expected


# -- the graphs that are built -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def graphs(tmp_path_factory) -> dict[str, str]:
    """The finished graph of each case."""
    out = tmp_path_factory.mktemp("graphs")
    env = {**os.environ, "PYTHONPATH": paths.python_path(), "GLOG_v": "3"}
    env |= {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_DUMP_IR_PASSES": "validate"}
    env["MS_DEV_SAVE_GRAPHS_PATH"] = str(out / "graphs")
    command = [sys.executable, str(paths.worker("saturation_graphs.py")), str(out)]
    finished = subprocess.run(command, env=env, cwd=out, capture_output=True, text=True, timeout=1500)
    for name in CASES:
        message = (out / f"{name}.txt").read_text() if (out / f"{name}.txt").exists() else finished.stderr
        assert re.search(r"Unsupported op \[NPU\w+\] on CPU", message), message
    return {name: (out / f"{name}.ir").read_text() for name in CASES}


class Entry:
    """The graph that a call runs, and the order of its nodes."""

    def __init__(self, text: str) -> None:
        body = next(part for part in text.split("\nsubgraph @") if re.match(r"\S*_construct_\d+\(\) \{", part))
        found = re.findall(r"^  (%\d+)\(.*?\) = (.*)$", body, re.MULTILINE)
        self.nodes = {name: (what, set(re.findall(r"%\d+\b", what))) for name, what in found}

    def named(self, pattern: str) -> set[str]:
        return {name for name, (what, _) in self.nodes.items() if re.match(pattern, what)}

    def before(self, name: str) -> set[str]:
        """All nodes on which a node depends."""
        waited: set[str] = set()
        open_ones = [name]
        while open_ones:
            for one in self.nodes[open_ones.pop()][1] & self.nodes.keys() - waited:
                waited.add(one)
                open_ones.append(one)
        return waited


CLEAR, GET = r"PrimFunc_NPUClearFloatStatusV2\(", r"PrimFunc_NPUGetFloatStatusV2\("
LOOP = r"call @\S*add_up"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["clipping", "dropping"])
def test_the_flag_is_cleared_before_the_loop_and_read_before_the_update(graphs, name):
    """A finite norm proves nothing here: with clipping, the flag is read too."""
    entry = Entry(graphs[name])
    (clear,), (get,) = entry.named(CLEAR), entry.named(GET)
    loops = entry.named(LOOP)
    assert loops
    assert all(clear in entry.before(loop) for loop in loops)
    assert loops <= entry.before(get)
    assert entry.named(r"PrimFunc_Div\(") & entry.before(get), "the finished gradient"
    assert any(get in entry.before(switch) for switch in entry.named(r"Switch\("))


@pytest.mark.thorough
def test_micro_batches_are_looked_at_by_the_flag_too(graphs):
    """`amp.all_finite` of MindSpore reads it in the loop, besides the reading at the end."""
    assert len(re.findall(GET, graphs["dropping"])) == 2
    assert len(re.findall(CLEAR, graphs["dropping"])) == 2


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["several batches", "loop"])
def test_an_open_window_keeps_what_each_batch_found(graphs, name):
    """It is read once after each batch; in a hand-written loop, it is cleared at the call's end."""
    text, entry = graphs[name], Entry(graphs[name])
    assert len(re.findall(GET, text)) == 1
    assert len(re.findall(CLEAR, text)) == 1
    (clear,) = entry.named(CLEAR)
    (get,) = entry.named(GET)
    kept = entry.named(r"PrimFunc_AssignAdd\(%para\d+_gaccum_ms\.saturated_batches")
    assert kept
    assert all(get in entry.before(one) for one in kept)
    assert clear in entry.before(get) if name == "several batches" else kept <= entry.before(clear)


@pytest.mark.thorough
def test_the_end_of_a_window_reads_the_flag_and_clears_it(graphs):
    """The finished gradient may have overflowed; the optimizer's overflows are not the next batch's."""
    text = graphs["window's end"]
    assert len(re.findall(GET, text)) == len(re.findall(CLEAR, text)) == 1
    entry = Entry(text)
    (get,) = entry.named(GET)
    assert any(get in entry.before(switch) for switch in entry.named(r"Switch\("))
    (clear,) = entry.named(CLEAR)
    assert get in entry.before(clear)


# -- steps -------------------------------------------------------------------------------------------------------------


def step_of(net, **options):
    scale = nn.DynamicLossScaleUpdateCell(64.0, 2, 100)
    loss = nn.WithLossCell(net, nn.MSELoss())
    return make_step(loss, lambda weights: nn.SGD(weights, 1e-3), scale, **{"micro_size": 4, **options})


def updates(net, call) -> bool:
    """Whether a call has changed the weight."""
    before = net.weight.asnumpy().copy()
    call()
    return not np.array_equal(before, net.weight.asnumpy())


@pytest.mark.parametrize(
    "options",
    [{"max_grad_norm": 1.0}, {"micro_size": 1}, {"count": lambda x, y: x.sum() * 0 + 2, "check": None}],
    ids=["clipping", "one micro-batch", "counts"],
)
def test_an_overflow_in_any_micro_batch_drops_the_window(pynative, options):
    with device_that_saturates():
        net = Saturating()
        step = step_of(net, **options)
        register.is_set = True  # left by earlier operations
        for overflowing in ([], [0], [7]):
            outputs = []
            assert updates(net, lambda: outputs.extend(step(*batch(*overflowing)))) is not bool(overflowing)  # noqa: B023
            loss, overflow, _ = outputs
            assert np.isfinite(loss.asnumpy())
            assert bool(overflow.asnumpy()) is bool(overflowing)
        assert float(step.scale_sense.asnumpy()) == 64 / 2 / 2
        assert int(step.update_count.asnumpy()) == 1


def test_without_the_flag_nobody_would_notice(pynative):
    """The control: saturated gradients are finite, and train."""
    net = Saturating()
    step = step_of(net)
    loss, overflow, _ = step(*batch(0))
    assert np.isfinite(loss.asnumpy())
    assert not overflow.asnumpy()


def test_a_window_of_several_batches_remembers(pynative):
    """The first batch overflows, and other code clears the flag before the second. Before the second batch of the third
    window, other code sets the flag, which must not affect the window."""
    with device_that_saturates():
        net = Saturating()
        step = step_of(net, accumulation_steps=2)
        for window in range(3):
            step(*batch(*([3] if window == 1 else [])))
            register.is_set = window == 2
            assert updates(net, lambda: step(*batch())) is (window != 1)
        assert float(step.scale_sense.asnumpy()) == 32


def test_a_loop_of_ones_own(pynative):
    """The backward sets the flag before the accumulator is called; the accumulator clears it for the next backward."""
    with device_that_saturates():
        net = Saturating()
        optimizer = nn.SGD(net.trainable_params(), 1e-3)
        accumulator = GradAccumulator(optimizer, 2, scale_sense=ms.Tensor(2.0), jit=False)
        forward = nn.WithLossCell(net, nn.MSELoss())
        grad_fn = ms.value_and_grad(lambda x, y: accumulator.scale(forward(x, y)), None, optimizer.parameters)

        def add(*overflowing):
            _, gradients = grad_fn(*batch(*overflowing))
            return accumulator(gradients)

        assert [add(), add()] == [False, True]
        assert [add(2), add()] == [False, False]
        assert [add(), add(2)] == [False, False]
        assert [add(), add()] == [False, True]


@pytest.mark.thorough
@pytest.mark.distributed
def test_an_overflow_on_one_rank_drops_the_window_on_all(rank_pair, tmp_path):
    first, second = (case(one, "overflow") for one in rank_pair.worker("tests.ranks.single_tests_worker", tmp_path))
    for name in ("one batch", "two batches"):
        np.testing.assert_array_equal(first[name], second[name])
        overflow, weight = first[name].T
        if name == "one batch":
            np.testing.assert_array_equal(overflow, [0, 1, 0])
        assert weight[0] != 1
        assert weight[1] == weight[0]
        assert weight[2] != weight[1]
