"""The benchmark: its arithmetic and verdicts on made-up numbers, its networks and ways compared with each other, the
real command with tiny settings, and a check with generous limits that accumulation costs little."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor, nn

from benchmarks import (
    collectives,
    controller,
    instructions,
    kernels,
    lengths,
    memory_limit,
    picture,
    report,
    rows,
    targets,
    tokens,
)
from benchmarks.__main__ import ALL
from benchmarks.controller import Worker, WorkerError
from benchmarks.networks import COMPARED, NETWORKS, VOCABULARY
from benchmarks.rows import Results, Row
from benchmarks.targets import Target
from benchmarks.ways import WAYS, Setting
from gaccum_ms.splitting.widths import best_widths, padding

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000
SHORT = "--rounds 1 --seconds 0 --turn 0.05 --first-calls 0"


# -- arithmetic and verdicts, on made-up numbers -----------------------------------------------------------------------

# The numbers behind all targets, each a little better than its limit: an update's seconds, relative to the whole
# batch's, and megabytes of growth, where the whole batch has 1000. PyTorch is twice as fast at convolutions.
GOOD: dict[str, float] = {
    **{"mlp ours 16": 1.9, "mlp torch 16": 1.8, "cnn ours 16": 0.89, "cnn torch 16": 0.43},
    **{"resnet18 ours 16": 1.01, "resnet18 torch 16": 0.49, "transformer ours 16": 0.95, "transformer torch 16": 0.96},
    **{f"{network} ours 1": 1.01 for network in COMPARED},
    **{f"{network} torch 1": 0.5 for network in COMPARED},
    **{"mlp jit 16": 2.0, "cnn jit 16": 0.9, "resnet18 jit 16": 1.1, "transformer jit 16": 1.0},
    **{f"{network} jit 1": 1.1 for network in COMPARED},
    **{"mlp noise 16": 1.98, "cnn noise 16": 0.93},
    **{f"{network} first call 64": 1.09 for network in COMPARED},
    **{f"{network} first call 16": 0.39 for network in COMPARED},
    **{"cnn growth": 90, "cnn torch growth": 95, "wide beyond": 44},
    **{"mlp ours 8 processes": 1.4, "cnn ours 8 processes": 1.4},
    **{"mlp share": 0.15, "mlp, clipping share": 0.15, "cnn share": 0.01, "cnn, clipping share": 0.01},
    **{"mlp dispatch": 0.25},
}


def made_up(numbers: dict[str, float]) -> Results:
    found: list[Row] = []
    for network in NETWORKS:
        group = {"batch": 256, "trains": True, "weight_bytes": 45 * MB, "base_peak": 500 * MB}
        # The machine was half as fast for groups of 16 as for groups of 1: only ratios within a group mean anything.
        whole = Row(network, "whole", 1, group="1", turns=[[1.0]] * 3, peak=1500 * MB, **group)
        found += [whole, replace(whole, group="16", turns=[[2.0]] * 3)]
        for way in ("ours", "torch", "jit", "noise"):
            for size in (1, 16):
                if (seconds := numbers.get(f"{network} {way} {size}")) is not None:
                    seconds *= 2 if size == 16 else 1
                    found.append(Row(network, way, size, group=str(size), turns=[[seconds]] * 3, **group))
        growths = {("ours", 16): "growth", ("torch", 16): "torch growth"}
        for row in found:
            if row.network == network and (key := growths.get((row.way, row.micro_size))):
                row.peak = int((500 + numbers.get(f"{network} {key}", 0)) * MB)
            if row.network == network and (row.way, row.micro_size) == ("torch", 1):
                row.peak = 1500 * MB
        if f"{network} beyond" in numbers:
            single = Row(network, "ours", 64, group="64", **group)
            single.peak = int((500 + numbers[f"{network} beyond"]) * MB)
            found.append(single)
        if f"{network} ours 8 processes" in numbers:
            found.append(Row(network, "ours", 16, 2, group="two ranks", turns=[[9.0]] * 3))
            found.append(Row(network, "ours", 16, 2, group="ranks", turns=[[1.0]] * 3))
            found.append(
                Row(network, "ours", 16, 8, group="ranks", turns=[[numbers[f"{network} ours 8 processes"]]] * 3)
            )
    first_calls = {}
    for network in COMPARED:
        first_calls |= {(network, "ours", 2): [1.0, 1.0, 9.0], (network, "mindspore", 16): [9.0, 1.0, 1.0]}
        for size in (16, 64):
            first_calls[network, "ours", size] = [numbers[f"{network} first call {size}"]] * 3
    profiled = {
        network: {what: numbers.get(f"{network} {what}", 0.0) for what in ("share", "dispatch")}
        for network in ("mlp", "mlp, clipping", "cnn", "cnn, clipping")
    }
    return Results("head", found, first_calls, profiled)


def failed(numbers: dict[str, float]) -> list[str]:
    return [target.text for target in targets.targets(made_up(numbers)) if not target.passed]


def test_targets_pass_on_good_numbers():
    assert failed(GOOD) == []
    assert all(target.line().startswith("PASS") for target in targets.targets(made_up(GOOD)))


@pytest.mark.parametrize(
    ("bad", "target"),
    [
        # If a number is part of several targets, a second number keeps the other targets within their limits.
        ({"mlp ours 16": 2.02, "mlp torch 16": 2.02}, "mlp: update at 16, of the whole batch's"),
        ({"cnn ours 16": 0.91, "cnn torch 16": 0.5}, "cnn: update at 16, of the whole batch's"),
        ({"resnet18 ours 16": 1.03, "resnet18 torch 16": 0.6}, "resnet18: update at 16, of the whole batch's"),
        ({"transformer ours 16": 1.03, "transformer torch 16": 2}, "transformer: update at 16, of the whole batch's"),
        ({"mlp torch 16": 1.72}, "mlp: update at 16, of PyTorch's at 16"),
        ({"transformer torch 16": 0.94}, "transformer: update at 16, of PyTorch's at 16"),
        ({"cnn torch 16": 0.42}, "cnn: update at 16, of PyTorch's at 16; as a part of the same ratio of whole batches"),
        ({"resnet18 torch 1": 0.52}, "resnet18: update at 16, of PyTorch's at 16; as a part of the same ratio"),
        *[({f"{one} ours 1": 1.03}, f"{one}: update at 1, of nn.TrainOneStepCell's") for one in COMPARED],
        *[({f"{one} jit 1": 1.12}, f"{one}: PyNative mode with jit=True at 1,") for one in COMPARED],
        *[({f"{one} jit 16": 2.2}, f"{one}: PyNative mode with jit=True at 16,") for one in COMPARED],
        *[({f"{one} noise 16": 2.01}, f"{one}: recording noise at 16, of the update") for one in ("mlp", "cnn")],
        *[({f"{one} first call 64": 1.11}, f"{one}: first call at 64, of that at 2") for one in COMPARED],
        *[({f"{one} first call 16": 0.41}, f"{one}: first call at 16, of MindSpore's own") for one in COMPARED],
        ({"cnn growth": 101, "cnn torch growth": 101}, "cnn: memory growth at 16, of the whole batch's"),
        ({"cnn torch growth": 89}, "cnn: the same, at most PyTorch's own"),
        ({"wide beyond": 46}, "wide: memory at 64 micro-batches of one sample, beyond"),
        *[({f"{one} ours 8 processes": 1.6}, f"{one}: 8 processes, of 2 processes") for one in ("mlp", "cnn")],
        *[({f"{one} share": 0.151}, f"{one}: time in accumulation's") for one in ("mlp", "mlp, clipping")],
        *[({f"{one} share": 0.011}, f"{one}: time in accumulation's") for one in ("cnn", "cnn, clipping")],
        ({"mlp dispatch": 0.251}, "mlp: time of an update at 16 that is in no kernel"),
    ],
)
def test_each_bad_number_fails_its_own_target_alone(bad, target):
    assert [text.startswith(target) for text in failed({**GOOD, **bad})] == [True]


def test_what_was_not_measured_does_not_pass():
    found = targets.targets(Results("head", first_calls={("cnn", "ours", 2): [1.0], ("cnn", "ours", 64): []}))
    assert len(found) == len(targets.targets(made_up(GOOD)))
    assert not any(target.passed for target in found)
    assert all(target.line().startswith("not measured") for target in found)


def test_a_complete_run_measures_all_that_there_are_targets_for():
    found = Results("", first_calls={(network, *one): [1.0] for network in COMPARED for one in targets.FIRST_CALLS})
    for part in ALL:
        for network in part.networks:
            batch = NETWORKS[network].batch
            for group in controller.groups(network, part.ways, part.micro_sizes, part.processes, batch, "tuned"):
                name = str(len(found.rows))
                found.rows += [Row(one.network, one.way, one.micro_size, one.processes, name) for one in group]
    for row in found.rows:
        row.turns, row.peak, row.base_peak, row.weight_bytes = [[1.0]], 2, 1, 1
    profiled = [network + clipped for network in kernels.PROFILED for clipped in targets.CLIPPED]
    found.kernels = {name: {"share": 0.0, "dispatch": 0.0} for name in profiled}
    lines = [target.line() for target in targets.targets(found)]
    assert [line for line in lines if line.startswith("not measured")] == []
    found.rows = [row for row in found.rows if row.network != "wide"]
    assert [target.text[:5] for target in targets.targets(found) if target.value is None] == ["wide:"]


def test_a_program_that_failed_is_noted_with_what_it_said():
    assert controller.last_words("") == ""
    assert controller.last_words("one\n\n  two\n") == "two"
    assert controller.last_words("ValueError: what\n---\nC++ Call Stack\n") == "ValueError: what"
    torch = "[rank0]: Traceback\n[rank0]: RuntimeError: why\n====\nx.errors.ChildFailedError:\n====\n"
    assert controller.last_words(torch) == "RuntimeError: why"


def test_a_target_is_met_at_its_limit():
    assert Target("", 1.05, 1.05).passed
    assert not Target("", 1.0501, 1.05).passed
    assert not Target("", 1.0, None).passed


def test_a_target_says_how_far_its_rounds_are_apart():
    whole = Row("cnn", "whole", 1, group="16", turns=[[1.0], [1.0], [2.0]])
    ours = Row("cnn", "ours", 16, group="16", turns=[[0.8], [0.9], [2.4]])
    earlier = Row("cnn", "whole", 1, group="1", turns=[[9.0]] * 3)
    (line,) = (
        target.line()
        for target in targets.targets(Results("", [earlier, whole, ours]))
        if target.text == "cnn: update at 16, of the whole batch's"
    )
    assert line.startswith("PASS")
    assert line.endswith(": 0.900 (at most 0.900), 3 rounds: 0.80 to 1.20")


def test_ratio_pairs_the_rounds():
    """The machine halves its speed in the second round: the ratio of each round is 2, and so is their median."""
    whole = Row("mlp", "whole", 1, turns=[[1.0, 1.0, 50.0], [2.0], [1.0]])
    ours = Row("mlp", "ours", 4, turns=[[2.0], [4.0], [2.0, 2.0, 90.0]])
    assert rows.time_ratio([], ours, whole) == 2.0
    assert ours.seconds == 2.0
    assert rows.time_ratio([], Row("mlp", "ours", 4, turns=[[2.0]]), whole) is None


def test_ratio_of_two_groups_is_by_the_whole_batch_in_each():
    """The machine was four times as slow for the second group. Another network's whole batch cannot replace it."""
    first, second = ([Row("mlp", "whole", 1, group=group, turns=[[t]])] for group, t in (("1", 1.0), ("2", 4.0)))
    ours, torch = Row("mlp", "ours", 4, group="1", turns=[[3.0]]), Row("mlp", "torch", 4, group="2", turns=[[8.0]])
    assert rows.time_ratio([*first, *second], ours, torch) == 1.5
    assert rows.time_ratio([*first], ours, torch) is None
    assert rows.time_ratio([*first, Row("cnn", "whole", 1, group="2", turns=[[4.0]])], ours, torch) is None


def test_what_is_kept_is_read_again(tmp_path):
    results = made_up(GOOD)
    results.save(tmp_path / "kept.json")
    assert Results.load(tmp_path / "kept.json") == results


def test_table_compares_with_pytorch_at_the_same_micro_size_and_processes():
    found = [
        Row("mlp", "torch", 4, 1, "one", turns=[[0.5]]),
        Row("mlp", "torch", 1, 2, "two", turns=[[9.0]]),
        Row("mlp", "torch", 4, 2, "another two", turns=[[7.0]]),
        Row("mlp", "torch", 4, 2, "two", turns=[[2.0]]),
        Row("mlp", "ours", 4, 2, "two", turns=[[3.0]]),
        Row("cnn", "torch", 4, 1, "bare", turns=[[7.0]]),
        Row("cnn", "torch_forward_backward", 4, 1, "bare", turns=[[2.0]]),
        Row("cnn", "forward_backward", 4, 1, "bare", turns=[[5.0]]),
    ]
    titles = tuple(WAYS[way].title for way in ("ours", "forward_backward"))
    shown = [line[40:].split()[4] for line in report.table(found).splitlines() if line.startswith(titles)]
    assert shown == ["1.50", "2.50"]


def test_memory_at_micro_batches_of_one_sample_is_not_compared_with_itself():
    log: list[str] = []
    row = Row("mlp", "ours", 8, batch=8, peak=1)
    controller.measure_base_peaks([row], threads="tuned", limit=600, log=log.append)
    assert log == []
    assert row.growth is None


def test_table_says_why_a_number_is_missing_and_what_does_not_train():
    found = [
        Row("mlp", "torch", 4, note="not installed"),
        Row("mlp", "mindspore", 4, turns=[[0.5]], first_call=2.0, trains=False),
    ]
    missing, untrained = report.table(found).splitlines()[-2:]
    assert missing.endswith("not installed")
    assert missing.split()[-9:-2] == ["-"] * 7
    assert "500.0" in untrained
    assert untrained.endswith("NO")


def test_a_group_is_the_whole_batch_and_all_ways_at_one_micro_size():
    found = controller.groups("mlp", list(WAYS), [1, 4, 16, 64], [1], 32, "tuned")
    assert [[one.way for one in group] for group in found] == [
        ["whole", *(way for way in list(WAYS)[1:] if size in (WAYS[way].micro_sizes or (size,)))] for size in (1, 4, 16)
    ]  # 64 exceeds the batch
    assert [{one.micro_size for one in group[1:]} for group in found] == [{1}, {4}, {16}]
    assert all(group[0].micro_size == 1 for group in found)


def test_ranks_share_a_batch_and_take_turns():
    """32 samples on 8 ranks are 4 for each: no rank can have 16 micro-batches."""
    others = ["ours", "torch", "mindspore", "boost", "mindcv"]
    found = controller.groups("mlp", list(WAYS), [1, 16, 64], [2, 8], 32, "tuned")
    assert [[(one.way, one.micro_size, one.processes) for one in group] for group in found] == [
        [("whole", 1, 2), ("whole", 1, 8)] + [one for way in others for one in [(way, size, 2), (way, min(size, 4), 8)]]
        for size in (1, 16)
    ]
    (two,) = controller.groups("mlp", ["whole", "ours"], [1, 16, 64], [2], 32, "tuned")
    assert [(one.way, one.micro_size) for one in two] == [("whole", 1), ("ours", 1), ("ours", 16)]
    joint, _ = Setting("mlp", "ours", 1, 32).data(0)
    shares = [Setting("mlp", "ours", 1, 32, processes=8).data(rank)[0] for rank in range(8)]
    np.testing.assert_array_equal(np.concatenate(shares), joint)


def test_picture_has_a_line_for_each_way():
    """A point is the median over a program's groups, each relative to its own whole batch."""
    found = [
        Row("mlp", "whole", 1, group="a", turns=[[1.0]]),
        Row("mlp", "whole", 1, group="b", turns=[[2.0]]),
        Row("mlp", "ours", 4, group="b", turns=[[2.0]]),
        Row("mlp", "ours", 1, group="a", turns=[[3.0]]),
        Row("mlp", "ours", 1, group="b", turns=[[10.0]]),
        Row("mlp", "ours", 16, group="a", note="failed"),
        Row("mlp", "ours", 16, 2, group="c", turns=[[1.0]]),
    ]
    (_, processes, time), *_ = picture.PANELS
    assert picture.points(found, "ours", processes, time) == [(1, 4.0), (4, 1.0)]
    assert picture.points(found, "torch", processes, time) == []
    assert set(picture.STYLES) == set(WAYS)
    assert len({color for color, _ in picture.STYLES.values()}) == len(WAYS)


# -- networks and ways, run --------------------------------------------------------------------------------------------


@pytest.mark.core("mlp")
@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if not network.package])
def test_both_frameworks_have_the_same_network(name):
    """The weights have the same order. With the same values, the outputs, the loss and the gradients are the same."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    torch.manual_seed(0)
    network = NETWORKS[name]
    inputs, labels = network.data(3)
    theirs, their_loss = network.torch().train(), network.torch_loss()
    ours, our_loss = network.mindspore().set_train(), network.mindspore_loss()
    weights = ours.trainable_params()
    assert [weight.shape for weight in weights] == [tuple(weight.shape) for weight in theirs.parameters()]
    for weight, value in zip(weights, theirs.parameters(), strict=True):
        weight.set_data(Tensor(value.detach().numpy().copy()))

    def forward(inputs, labels):
        logits = ours(inputs)
        return our_loss(logits, labels), logits

    compute = ms.value_and_grad(forward, None, weights, has_aux=True)
    (loss, logits), gradients = compute(Tensor(inputs), Tensor(labels))
    their_logits = theirs(torch.from_numpy(inputs))
    value = their_loss(their_logits, torch.from_numpy(labels).long())
    value.backward()
    np.testing.assert_allclose(logits.asnumpy(), their_logits.detach().numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(loss.asnumpy(), value.detach().numpy(), rtol=1e-4)
    for gradient, weight in zip(gradients, theirs.parameters(), strict=True):
        expected = weight.grad.numpy()
        # Usually 1e-5. If rounding moves an activation across a ReLU's edge, BatchNorm of 3 samples spreads the error.
        assert np.linalg.norm(gradient.asnumpy() - expected) <= 1e-2 * np.linalg.norm(expected), weight.shape


class Trained(NamedTuple):
    """The first weight before and after two updates, and three losses: theirs, and that after them."""

    before: np.ndarray
    after: np.ndarray
    losses: list[float]
    weight_bytes: int


def two_updates(way: str, micro_size: int) -> Trained:
    ms.set_context(mode=ms.GRAPH_MODE)
    program = WAYS[way].build(Setting("mlp", way, micro_size, 8, "default"))
    before = program.weight()
    ms.set_context(mode=ms.PYNATIVE_MODE if way == "jit" else ms.GRAPH_MODE)
    losses = [program.step() for _ in range(2)]
    after = program.weight()
    return Trained(before, after, [*losses, program.step()], program.weight_bytes)


@functools.cache
def whole_batch() -> Trained:
    return two_updates("whole", 1)


@pytest.mark.core(way="ours")
@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.framework == "mindspore"])
def test_each_way_of_mindspore_makes_the_whole_batchs_update(way):
    """There are two updates, because the second shows remains in accumulators or counts. MindSpore's own cell never
    trains here, and the bare forward and backward must not train."""
    if not controller.is_installed(WAYS[way]):
        pytest.skip(f"not installed: {', '.join(WAYS[way].packages)}")
    trained, whole = two_updates(way, 4), whole_batch()
    np.testing.assert_array_equal(trained.before, whole.before)
    assert trained.weight_bytes == whole.weight_bytes == 4 * (785 * 512 + 513 * 512 + 513 * 10)
    if way == "mindspore" or not WAYS[way].updates:
        np.testing.assert_array_equal(trained.after, whole.before)
        return
    change = np.abs(whole.after - whole.before).max()
    np.testing.assert_allclose(trained.after, whole.after, rtol=0, atol=1e-4 * change)
    np.testing.assert_allclose(trained.losses, whole.losses, rtol=1e-5)


def test_pytorchs_loop_makes_the_whole_batchs_update():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    split, whole, bare = (
        WAYS[way].build(Setting("mlp", way, micro_size, 8))
        for way, micro_size in (("torch", 4), ("torch", 1), ("torch_forward_backward", 4))
    )
    before = whole.weight()
    losses, expected, bare_losses = ([program.step() for _ in range(2)] for program in (split, whole, bare))
    np.testing.assert_allclose(
        split.weight(), whole.weight(), rtol=0, atol=1e-4 * np.abs(whole.weight() - before).max()
    )
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(bare.weight(), before)
    np.testing.assert_allclose(bare_losses, [expected[0]] * 2, rtol=1e-5)


def test_a_worker_that_fails_or_hangs_becomes_a_note():
    with pytest.raises(WorkerError, match=r"failed: .*no_such_way"):
        Worker(Setting("mlp", "no_such_way", 1, 8), limit=600)
    with pytest.raises(WorkerError, match="> 0 s"):
        Worker(Setting("mlp", "whole", 1, 8), limit=0.01)


def run_module(module: str, output: Path, options: str) -> subprocess.CompletedProcess[str]:
    """Run a command, and check that its file has what it prints."""
    command = [sys.executable, "-m", module, *options.split(), "--output", str(output)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    assert output.read_text() == finished.stdout
    return finished


def run_command(output: Path, options: str) -> list[str]:
    """Run the benchmark, check its picture, and return the lines of its result."""
    finished = run_module("benchmarks", output, options)
    if "no picture" in finished.stderr:
        pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert output.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    return finished.stdout.splitlines()


def measured(lines: list[str]) -> list[list[str]]:
    """Processes, micro_size, ms/update, x whole, the other ratio and the first call of each row that trained."""
    found = [line[40:].split()[:6] for line in lines if line.endswith("yes")]
    assert all(float(number) > 0 for row in found for number in row if number != "-")
    return found


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_command_measures_every_program(tmp_path):
    """On one process and on two."""
    options = f"--networks mlp --batch 8 --micro-sizes 2 --processes 1 2 {SHORT}"
    lines = run_command(tmp_path / "result.txt", f"{options} --ways whole ours")
    assert [row[:2] for row in measured(lines)] == [["1", "1"], ["1", "2"], ["2", "1"], ["2", "2"]]
    text = "\n".join(lines)
    assert "not measured  mlp: update at 16" in text
    assert "mindspore 2." in text
    assert "threads: gaccum_ms.tune_cpu()" in text
    kept = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(row["processes"], row["micro_size"]) for row in kept] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    mark = "gaccum_ms_benchmark"
    left = [process.info for process in psutil.process_iter(["cmdline"]) if mark in str(process.info["cmdline"])]
    assert not left, left

    again = run_command(tmp_path / "again.txt", f"--from {tmp_path / 'result.json'}")  # measures nothing
    assert again == lines


@pytest.mark.thorough
def test_first_calls_are_measured_in_turns(monkeypatch):
    """Our step and MindSpore's own cell take turns."""
    assert {way for way, _ in targets.FIRST_CALLS} == {"ours", "mindspore"}
    few = (("ours", 2), ("mindspore", 2))
    monkeypatch.setattr(controller, "FIRST_CALLS", few)
    log: list[str] = []
    found = controller.measure_first_calls("mlp", batch=8, threads="tuned", repeats=1, limit=600, log=log.append)
    assert list(found) == [("mlp", *program) for program in few]
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in found.values()), log
    log.clear()
    assert controller.measure_first_calls("mlp", batch=8, threads="tuned", repeats=2, limit=0.01, log=log.append) == {
        program: [] for program in found
    }
    begun = [line.partition(": first call of ")[2].split()[0] for line in log if "fresh process" in line]
    assert begun == ["ours", "mindspore", "mindspore", "ours"]


@pytest.mark.thorough
def test_rounds_go_on_for_their_seconds_and_a_program_that_fails_has_no_rounds(monkeypatch):
    """The second program fails in its third round; the first has at least the required number of rounds."""
    turn, turns = Worker.turn, []

    def fails(worker: Worker, seconds: float) -> list[float]:
        turns.append(worker.setting.micro_size)
        if turns.count(2) == 3 and worker.setting.micro_size == 2:
            raise WorkerError("> 1 s")
        return turn(worker, seconds)

    monkeypatch.setattr(Worker, "turn", fails)
    settings = [Setting("mlp", "ours", size, 8) for size in (1, 2)]
    log: list[str] = []
    times = {"rounds": 3, "seconds": 0, "turn": 0.01, "limit": 60}
    good, bad = controller.measure(settings, "mlp", **times, log=log.append)
    assert (len(good.turns), good.note) == (3, "")
    assert (bad.turns, bad.note, bad.peak) == ([], "> 1 s", None)
    assert turns[:4] == [1, 2, 2, 1]  # each round begins with another program, and the first does not count
    assert log[-4:] == [f"mlp: round {number}" for number in range(4)]
    (longer,) = controller.measure(settings[:1], "mlp", **{**times, "seconds": 100}, log=log.append)
    assert len(longer.turns) == 15


def joint_loss(way: str) -> Callable[[Path], dict[str, np.ndarray]]:
    """A case of support/ranks.py: this rank's loss after two joint updates. Each rank has half of the batch."""

    def case(_: Path) -> dict[str, np.ndarray]:
        program = WAYS[way].build(Setting("mlp", way, 2, 8, "default", processes=2))
        return {way: np.array([program.step() for _ in range(3)][-1])}

    return case


PARALLEL = [name for name, way in WAYS.items() if way.parallel and name not in ("whole", "mindspore", "torch")]
CASES = {way: joint_loss(way) for way in PARALLEL}


@pytest.mark.thorough
@pytest.mark.distributed
@pytest.mark.parametrize("way", PARALLEL)
def test_two_ranks_make_the_whole_batchs_updates(way, rank_pair, tmp_path):
    """The mean of their losses is the batch's, also after two joint updates. MindSpore's own cell never trains here.
    Above, the command starts two ranks itself."""
    if not controller.is_installed(WAYS[way]):
        pytest.skip(f"not installed: {', '.join(WAYS[way].packages)}")
    losses = [results[way] for results in rank_pair.worker("test_benchmarks", tmp_path)]
    assert np.mean(losses) == pytest.approx(whole_batch().losses[-1], rel=1e-5)


@pytest.mark.thorough
@pytest.mark.distributed
def test_two_processes_of_pytorch_make_the_whole_batchs_updates():
    """PyTorch begins with other weights than MindSpore."""
    if not controller.is_installed(WAYS["torch"]):
        pytest.skip("PyTorch is not installed")
    losses = []
    for setting in (Setting("mlp", "torch", 2, 8, processes=2), Setting("mlp", "torch", 1, 8)):
        with Worker(setting, limit=600) as worker:
            losses.append(worker.loss())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


# -- regression --------------------------------------------------------------------------------------------------------


Fastest = dict[tuple[str, int], float]  # the seconds of the fastest update, by way and micro_size


def within_bounds(fastest: Fastest) -> bool:
    return (
        fastest["ours", 1] <= 2 * fastest["whole", 1]
        and fastest["ours", 16] <= 1.5 * fastest["boost", 16]  # boost calls each micro-batch from Python
    )


def seconds_to_compile(way: str, micro_size: int) -> float:
    """The CPU time of this thread in a first call. It compiles; kernels run in other threads, which wait for each other
    when other tests run."""
    program = WAYS[way].build(Setting("mlp", way, micro_size, 256, threads="default"))
    begin = time.thread_time()
    program.step()
    return time.thread_time() - begin


@pytest.mark.thorough
def test_accumulation_costs_little():
    """The limits are far above the ratios of a quiet machine, so that only a mistake exceeds them, and each time:
    micro-steps that run eagerly, a graph that grows with the number of micro-batches as MindSpore's own cell does, a
    copy of the gradients for each micro-batch. The fastest updates count, because other tests run meanwhile. An update
    of 16 micro-batches is compared with boost's, which has as many small kernels: beside other programs, small kernels
    take much longer than the whole batch's few kernels."""
    programs = [("whole", 1), ("ours", 1), ("ours", 16), ("ours", 64), ("boost", 16)]
    with ExitStack() as stack:
        workers = {one: stack.enter_context(Worker(Setting("mlp", *one, 256), limit=600)) for one in programs}
        fastest = dict.fromkeys(programs, math.inf)
        for number in range(15):
            for one, worker in workers.items():
                fastest[one] = min(fastest[one], *worker.turn(0.1))
            if number >= 3 and within_bounds(fastest):
                break
        peaks = {size: workers["ours", size].peak() for size in (16, 64)}
        weight_bytes = workers["ours", 64].about["weight_bytes"]
    assert within_bounds(fastest)
    assert peaks[64] - peaks[16] <= 12 * weight_bytes  # 48 more micro-batches
    few, many, unrolled = (
        seconds_to_compile("ours", 2),
        seconds_to_compile("ours", 64),
        seconds_to_compile("mindspore", 16),
    )
    assert many <= 2 * few < unrolled


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_the_command_says_where_an_update_goes(tmp_path, monkeypatch, capsys):
    """Adding up and clipping count as accumulation; products count as the network."""
    measured: dict[str, dict[str, Any]] = {}
    measure = kernels.measure

    def noted(setting: Setting, rounds: int) -> dict[str, dict[str, Any]]:
        measured.update(measure(setting, rounds))
        return measured

    monkeypatch.setattr(kernels, "measure", noted)
    options = ["--networks", "mlp", "--micro-size", "4", "--batch", "16", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["kernels", *options, "--output", str(tmp_path / "kernels.txt")])
    kernels.main()
    printed = capsys.readouterr().out
    assert (tmp_path / "kernels.txt").read_text() == printed
    lines = [line[23:].split() for line in printed.splitlines() if line.startswith("mlp")]
    assert len(lines) == 2  # without clipping and with
    for row in lines:
        update, in_kernels, in_none, share = (float(number.rstrip("%")) for number in row[:4])
        assert 0 < in_kernels < update * 30  # timed separately, perhaps on a busy machine
        assert in_none < 100
        assert 0 < share < 100
        assert in_none == pytest.approx(100 * (1 - in_kernels / update), rel=0.02, abs=1)
        assert "ApplyProximalGradientDescent" in row
        assert "MatMul" not in row, "is the network's"
    assert "targets" not in printed, "are for another number of micro-batches"
    plain, clipping = (set(row["types"]) for row in measured.values())
    assert {"ApplyProximalGradientDescent", "InplaceCopy", "Gather", "Less"} <= plain
    assert not {"MatMul", "ApplyMomentum", "BiasAdd"} & clipping
    assert {"ReduceSum", "Sqrt"} <= clipping - plain


_KERNELS = """
import sys, tempfile
from pathlib import Path
from benchmarks.kernels import kernel_seconds
from benchmarks.ways import WAYS, Setting
program = WAYS[sys.argv[1]].build(Setting("mlp", sys.argv[1], 1, 16))
program.step()
with tempfile.TemporaryDirectory() as folder:
    for kind, *_ in kernel_seconds(program, 1, Path(folder)):
        print("kernel", kind)
"""


@pytest.mark.thorough
def test_one_micro_batch_is_the_plain_step_and_three_kernels_of_one_number(tmp_path, programs):
    """Batches and updates are counted, and a share is divided out; nothing is accumulated."""
    script, kinds = tmp_path / "count_kernels.py", []
    script.write_text(_KERNELS)
    for way in ("ours", "whole"):  # each in a process of its own: the profiler leaves its mark
        finished = programs.run(script, way, folder=tmp_path)
        assert finished.returncode == 0, finished.stderr
        kinds.append(Counter(line.split()[1] for line in finished.stdout.splitlines() if line.startswith("kernel ")))
    ours, whole = kinds
    assert whole["MatMul"] >= 8
    assert ours - whole == Counter(AssignAdd=2, Div=1)
    assert not whole - ours


# -- instructions ------------------------------------------------------------------------------------------------------


def test_nothing_set_is_compared_with_the_best_value():
    """Only values with times count. The ratio is taken in each round, not of the medians over all rounds."""

    def row(*seconds: float) -> Row:
        return Row("cnn", "ours", 4, group="one", turns=[[one] for one in seconds])

    rows = {"": row(1, 2, 4), "AVX": row(3, 3, 3), "AVX2": row(1, 1, 4), "ALL": row()}
    found = instructions.target("cnn", rows)
    assert found.value == 1
    assert found.rounds == [1, 2, 1]
    assert "ONEDNN_MAX_CPU_ISA=AVX2, the best" in found.line()
    assert found.line().startswith("PASS")
    assert instructions.target("cnn", rows | {"": row(1.2, 1.2, 4.8)}).line().startswith("FAIL")
    assert instructions.target("cnn", rows | {"": row()}).line().startswith("not measured")


@pytest.mark.thorough
def test_the_command_runs_a_network_with_nothing_set_and_with_a_value(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")  # must have no effect
    options = "--networks mlp --values AVX2 --batch 8 --rounds 1 --turn 0.01"
    lines = run_module("benchmarks.instructions", tmp_path / "result.txt", options).stdout.splitlines()
    assert not any("SSE41" in line for line in lines)
    rows = [line for line in lines if line.endswith(" s")]
    assert [row[:24].strip() for row in rows] == ["nothing set", "AVX2"]


def test_a_programs_environment_is_the_users_and_the_value(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    for network in NETWORKS:
        assert "ONEDNN_MAX_CPU_ISA" not in controller.environment(Setting(network, "ours", 1, 8))
        with_value = controller.environment(Setting(network, "ours", 1, 8, instructions="AVX"))
        assert with_value["ONEDNN_MAX_CPU_ISA"] == "AVX"


# -- collectives -------------------------------------------------------------------------------------------------------


def counted(ours: bool, steps: int, executed: float, in_graph: int, sent: int, micro_size: int = 1) -> dict[str, Any]:
    row = {"network": "mlp", "parameters": 6, "ours": ours, "micro_size": micro_size, "accumulation_steps": steps}
    return {**row, "executed": executed, "in_graph": in_graph, "bytes": sent}


SENT = [
    counted(False, 1, 6, 6, 100),
    *(counted(True, steps, 1, 1, 100 + 12 * (steps > 1)) for steps in (1, 1, 4, 4)),
]


@pytest.mark.parametrize(
    "bad",
    [
        counted(True, 1, 4, 1, 100, 4),  # one for each micro-batch
        counted(True, 1, 4, 4, 100, 4),
        counted(True, 1, 1, 1, 400, 4),
        counted(True, 4, 1, 1, 124, 4),
    ],
)
def test_a_number_that_depends_on_micro_size_fails(bad):
    assert collectives.targets(SENT)[0].startswith("PASS")
    assert collectives.targets([*SENT, bad])[0].startswith("FAIL")


def test_more_collectives_than_mindspores_fail():
    assert collectives.targets([counted(False, 1, 6, 6, 100), counted(True, 1, 7, 7, 100)])[0].startswith("FAIL")


def test_ratios_of_reductions_pair_the_rounds():
    rows = [
        {"gradients": "some", "reducer": "first", "collectives": 6, "seconds": [0.001, 0.004, 0.001]},
        {"gradients": "some", "reducer": "second", "collectives": 1, "seconds": [0.002, 0.002, 0.0005]},
    ]
    first, second = (line.split()[-3:] for line in collectives.times_table(rows).splitlines()[-2:])
    assert first == ["6", "1.00", "1.00"]
    assert second == ["1", "2.00", "0.50"]


@pytest.mark.thorough
def test_the_command_counts_what_two_processes_send(tmp_path):
    """The MLP's weights and biases are sent as float32. With accumulation_steps, three float32 sums are added."""
    options = "--networks mlp --micro-sizes 2 --accumulation-steps 1 2 --rounds 0"
    finished = run_module("benchmarks.collectives", tmp_path / "result.txt", options)
    size = 4 * (785 * 512 + 513 * 512 + 513 * 10)
    lines = [line.split() for line in finished.stdout.splitlines()]
    rows = [line[-5:] for line in lines if line and line[-1] in (f"{size}", f"{size + 12}")]
    assert rows == [
        ["1", "1", "6", "6", f"{size}"],
        ["2", "1", "1", "1", f"{size}"],
        ["2", "2", "1", "1", f"{size + 12}"],
    ]
    assert "PASS" in finished.stdout
    planned = [line[2:5] for line in lines if line[:2] == ["GPT-2", "medium"]]
    assert ["4", "MiB", "147"] in planned
    assert ["25", "MiB", "50"] in planned


def test_limits_lie_between_what_needs_a_quarter_and_half_of_the_batch():
    assert memory_limit.neighbours(32) == [8, 11, 16, 32]
    assert memory_limit.limit_of({8: 1000, 11: 1500, 16: 1200, 32: 1400}, 32) == 1100
    # If memory does not tell the sizes apart, all of them must fit.
    assert memory_limit.limit_of({8: 1000, 11: 1005, 16: 1010, 32: 1050}, 32) == 1071


# -- lengths -----------------------------------------------------------------------------------------------------------


def _small_network():
    ms.set_seed(3)
    return nn.SequentialCell([nn.Embedding(VOCABULARY, 4), nn.Dense(4, VOCABULARY)])


@functools.cache
def measured_steps() -> tuple[dict[str, nn.Cell], dict[str, list[tuple[float, float]]]]:
    """The steps of all ways, and their measured seconds for two lengths."""
    steps = lengths.steps(_small_network, 2)
    return steps, lengths.measure(steps, 2, 4)


@pytest.mark.thorough
def test_an_open_length_is_compiled_once():
    _, seconds = measured_steps()
    assert [len(each) for each in seconds.values()] == [2] * 4
    compiled = [sum(clock for clock, _ in seconds[way][1:]) for way in ("nn.TrainOneStepCell", "gaccum_ms, set_inputs")]
    assert compiled[1] < compiled[0]  # the first compiles again, the second does not


@pytest.mark.thorough
def test_all_ways_of_the_lengths_benchmark_train_alike():
    """All ways do the same work: a bare loop that did not clear, or did not add, would compile faster. Each step has
    made the same two updates before, while it was measured."""
    steps, _ = measured_steps()
    tokens = np.arange(4 * lengths.SHORTEST).reshape(4, lengths.SHORTEST) % VOCABULARY  # this length is compiled
    losses = {way: [float(step(*[Tensor(tokens, ms.int32)] * 2)) for _ in range(3)] for way, step in steps.items()}
    for way, values in losses.items():
        np.testing.assert_allclose(values, losses["nn.TrainOneStepCell"], rtol=1e-5, err_msg=way)
    assert losses["a bare loop"][2] < losses["a bare loop"][0]


# -- micro-batches by length -------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_tokens_benchmark_measures_each_split(capsys):
    small = "--batch 24 --longest 32 --even-tokens 128 --max-tokens 128 --widths 2 --layers 1 --rounds 1"
    tokens.main(small.split())
    title, *lines = capsys.readouterr().out.splitlines()
    columns = title.split()[:5]
    table = {line[:26].strip(): dict(zip(columns, line[26:].split(), strict=False)) for line in lines}
    assert list(table) == tokens.installed_ways()
    padding = {name: float(row["padding"].rstrip("%")) for name, row in table.items()}
    assert padding["MaxTokens"] < padding["even split"]
    assert padding["MaxTokens, equal lengths"] == padding["even split, equal lengths"] == 0
    assert all(float(row["tokens/s"]) > 0 for row in table.values())


@functools.cache
def corpus() -> Any:
    return tokens.corpus_of(128)


@pytest.mark.thorough
def test_the_tokens_benchmark_trains_both_splits_alike():
    sizes = tokens.Sizes(batch=4, longest=128, even_tokens=256, max_tokens=256, widths=2, layers=1)
    losses = []
    for by_length in (False, True):
        ms.set_seed(3)
        data = tokens.Data(corpus(), sizes, equal=False)
        way = tokens.MindSporeWay(data, by_length)
        losses.append([way.update(data.next()) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-4)


@pytest.mark.thorough
def test_four_widths_leave_a_quarter_of_padding():
    """The shares of docs/by_length.md. test_plan.py shows that no other widths leave less."""
    lengths = np.array(corpus().lengths)
    shares = [padding(lengths, best_widths(lengths, number)) for number in (4, 8, 10)]
    assert shares == pytest.approx([0.24, 0.12, 0.10], abs=0.01)  # another Python has other docstrings
