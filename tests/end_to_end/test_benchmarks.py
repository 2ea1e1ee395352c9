"""The benchmarks: their arithmetic and verdicts on made-up numbers, their networks and ways compared with each other,
and the real commands with tiny settings."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import mindspore as ms
import numpy as np
import psutil
import pytest
from mindspore import Tensor

from benchmarks import controller, memory_limit, report, rows, targets, tokens
from benchmarks.__main__ import ALL
from benchmarks.controller import Worker, WorkerError
from benchmarks.networks import COMPARED, NETWORKS
from benchmarks.rows import Row
from benchmarks.ways import WAYS, Setting

ROOT = Path(__file__).resolve().parents[2]
MB = 1_000_000


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
}


def made_up(numbers: dict[str, float]) -> list[Row]:
    measured: list[Row] = []
    for network in NETWORKS:
        group = {"batch": 256, "trains": True, "weight_bytes": 45 * MB, "base_peak": 500 * MB}
        # The machine was half as fast for groups of 16 as for groups of 1: only ratios within a group mean anything.
        whole = Row(network, "whole", 1, group="1", turns=[[1.0]] * 3, peak=1500 * MB, **group)
        measured += [whole, replace(whole, group="16", turns=[[2.0]] * 3)]
        for way in ("ours", "torch", "jit", "noise"):
            for size in (1, 16):
                if (seconds := numbers.get(f"{network} {way} {size}")) is not None:
                    seconds *= 2 if size == 16 else 1
                    measured.append(Row(network, way, size, group=str(size), turns=[[seconds]] * 3, **group))
        growths = {("ours", 16): "growth", ("torch", 16): "torch growth"}
        for row in measured:
            if row.network == network and (key := growths.get((row.way, row.micro_size))):
                row.peak = int((500 + numbers.get(f"{network} {key}", 0)) * MB)
                row.first_call = numbers.get(f"{network} first call 16")
            if row.network == network and (row.way, row.micro_size) == ("torch", 1):
                row.peak = 1500 * MB
        measured.append(Row(network, "mindspore", 16, group="16", first_call=1.0, **group))
        measured.append(Row(network, "ours", 4, group="4", first_call=1.0, **group))
        single = Row(network, "ours", 64, group="64", first_call=numbers.get(f"{network} first call 64"), **group)
        if f"{network} beyond" in numbers:
            single.peak = int((500 + numbers[f"{network} beyond"]) * MB)
        measured.append(single)
        if f"{network} ours 8 processes" in numbers:
            measured.append(Row(network, "ours", 16, 2, group="two ranks", turns=[[9.0]] * 3))
            measured.append(Row(network, "ours", 16, 2, group="ranks", turns=[[1.0]] * 3))
            seconds = numbers[f"{network} ours 8 processes"]
            measured.append(Row(network, "ours", 16, 8, group="ranks", turns=[[seconds]] * 3))
    return measured


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
        *[({f"{name} ours 1": 1.03}, f"{name}: update at 1, of nn.TrainOneStepCell's") for name in COMPARED],
        *[({f"{name} jit 1": 1.12}, f"{name}: PyNative mode with jit=True at 1,") for name in COMPARED],
        *[({f"{name} jit 16": 2.2}, f"{name}: PyNative mode with jit=True at 16,") for name in COMPARED],
        *[({f"{name} noise 16": 2.14}, f"{name}: recording noise at 16, of the update") for name in ("mlp", "cnn")],
        *[({f"{name} first call 64": 1.11}, f"{name}: first call at 64, of that at 4") for name in COMPARED],
        *[({f"{name} first call 16": 0.41}, f"{name}: first call at 16, of MindSpore's own") for name in COMPARED],
        ({"cnn growth": 101, "cnn torch growth": 101}, "cnn: memory growth at 16, of the whole batch's"),
        ({"cnn torch growth": 89}, "cnn: the same, at most PyTorch's own"),
        ({"wide beyond": 46}, "wide: memory at 64 micro-batches of one sample, beyond"),
        *[
            ({f"{network} ours 8 processes": 1.6}, f"{network}: 8 processes, of 2 processes")
            for network in ("mlp", "cnn")
        ],
    ],
)
def test_each_bad_number_fails_its_own_target_alone(bad, target):
    assert [text.startswith(target) for text in failed({**GOOD, **bad})] == [True]


def test_what_was_not_measured_does_not_pass():
    measured = targets.targets([Row("cnn", "ours", 4, first_call=1.0)])
    assert len(measured) == len(targets.targets(made_up(GOOD)))
    assert not any(target.passed for target in measured)
    assert all(target.line().startswith("not measured") for target in measured)


def test_a_complete_run_measures_all_that_there_are_targets_for():
    measured: list[Row] = []
    for part in ALL:
        for network in part.networks:
            batch = NETWORKS[network].batch
            for group in controller.groups(network, part.ways, part.micro_sizes, part.processes, batch):
                name = str(len(measured))
                measured += [
                    Row(network, setting.way, setting.micro_size, setting.processes, name) for setting in group
                ]
    for row in measured:
        row.turns, row.peak, row.base_peak, row.weight_bytes, row.first_call = [[1.0]], 2, 1, 1, 1.0
    assert [target.text for target in targets.targets(measured) if target.value is None] == []
    measured = [row for row in measured if row.network != "wide"]
    assert [target.text[:5] for target in targets.targets(measured) if target.value is None] == ["wide:"]


def test_a_program_that_failed_is_noted_with_what_it_said():
    assert controller.last_words("") == ""
    assert controller.last_words("one\n\n  two\n") == "two"
    assert controller.last_words("ValueError: what\n---\nC++ Call Stack\n") == "ValueError: what"
    torch = "[rank0]: Traceback\n[rank0]: RuntimeError: why\n====\nx.errors.ChildFailedError:\n====\n"
    assert controller.last_words(torch) == "RuntimeError: why"


def test_a_target_says_how_far_its_rounds_are_apart():
    whole = Row("cnn", "whole", 1, group="16", turns=[[1.0], [1.0], [2.0]])
    ours = Row("cnn", "ours", 16, group="16", turns=[[0.8], [0.9], [2.4]])
    earlier = Row("cnn", "whole", 1, group="1", turns=[[9.0]] * 3)
    (line,) = (
        target.line()
        for target in targets.targets([earlier, whole, ours])
        if target.text == "cnn: update at 16, of the whole batch's"
    )
    assert line.startswith("PASS")
    assert line.endswith(": 0.900 (at most 0.900), 3 rounds: 0.80 to 1.20")


def test_ratio_pairs_the_rounds():
    """The machine becomes slower. Of an update's rounds, the median of the ratios counts, not the ratio of medians."""
    whole = Row("mlp", "whole", 1, turns=[[1.0, 1.0, 50.0], [2.0], [8.0]])
    ours = Row("mlp", "ours", 4, turns=[[2.0], [3.0], [16.0, 16.0, 90.0]])
    assert rows.time_ratio(ours, whole) == 2.0
    assert ours.seconds == 3.0
    assert rows.time_ratio(Row("mlp", "ours", 4, turns=[[2.0]]), whole) is None


def test_table_says_why_a_number_is_missing_and_what_does_not_train():
    measured = [
        Row("mlp", "torch", 4, note="not installed"),
        Row("mlp", "mindspore", 4, turns=[[0.5]], first_call=2.0, trains=False),
    ]
    missing, untrained = report.table(measured).splitlines()[-2:]
    assert missing.endswith("not installed")
    assert missing.split()[-10:-2] == ["4"] + ["-"] * 7
    assert "500.0" in untrained
    assert untrained.endswith("NO")


def test_ranks_share_a_batch_and_take_turns():
    """32 samples on 8 ranks are 4 for each: no rank can have 16 micro-batches."""
    others = ["ours", "torch", "mindspore", "boost", "mindcv"]
    measured = controller.groups("mlp", list(WAYS), [1, 16, 64], [2, 8], 32)
    assert [[(setting.way, setting.micro_size, setting.processes) for setting in group] for group in measured] == [
        [("whole", 1, 2), ("whole", 1, 8)]
        + [setting for way in others for setting in [(way, size, 2), (way, min(size, 4), 8)]]
        for size in (1, 16)
    ]
    joint, _ = Setting("mlp", "ours", 1, 32).data(0)
    shares = [Setting("mlp", "ours", 1, 32, processes=8).data(rank)[0] for rank in range(8)]
    np.testing.assert_array_equal(np.concatenate(shares), joint)


# -- networks and ways, run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMPARED)
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


@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if way.packages[0] == "mindspore"])
def test_each_way_of_mindspore_makes_the_whole_batchs_update(way):
    """There are two updates, because the second shows remains in accumulators or counts. MindSpore's own cell never
    trains here."""
    if not controller.is_installed(WAYS[way]):
        pytest.skip(f"not installed: {', '.join(WAYS[way].packages)}")
    trained, whole = two_updates(way, 4), whole_batch()
    np.testing.assert_array_equal(trained.before, whole.before)
    assert trained.weight_bytes == whole.weight_bytes == 4 * (785 * 512 + 513 * 512 + 513 * 10)
    if way == "mindspore":
        np.testing.assert_array_equal(trained.after, whole.before)
        return
    change = np.abs(whole.after - whole.before).max()
    np.testing.assert_allclose(trained.after, whole.after, rtol=0, atol=1e-4 * change)
    np.testing.assert_allclose(trained.losses, whole.losses, rtol=1e-5)


def test_pytorchs_loop_makes_the_whole_batchs_update():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    split, whole = (WAYS["torch"].build(Setting("mlp", "torch", micro_size, 8)) for micro_size in (4, 1))
    change = np.abs(whole.weight()).max()
    losses, expected = ([program.step() for _ in range(2)] for program in (split, whole))
    np.testing.assert_allclose(split.weight(), whole.weight(), rtol=0, atol=1e-5 * change)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_worker_that_fails_or_hangs_becomes_a_note():
    with pytest.raises(WorkerError, match=r"failed: .*no_such_way"):
        Worker(Setting("mlp", "no_such_way", 1, 8), limit=600)
    with pytest.raises(WorkerError, match="> 0 s"):
        Worker(Setting("mlp", "whole", 1, 8), limit=0.01)


@pytest.mark.distributed
def test_the_command_measures_on_two_processes_and_writes_what_it_prints(tmp_path):
    output = tmp_path / "result.txt"
    options = "--networks mlp --batch 8 --micro-sizes 2 --processes 2 --rounds 1 --seconds 0 --turn 0.05"
    command = [sys.executable, "-m", "benchmarks", *options.split(), "--ways", "whole", "ours", "--output", str(output)]
    env = {**os.environ, "TEST_FOLDER": str(tmp_path)}  # tells its processes from those of another benchmark
    finished = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stderr
    text = finished.stdout
    assert output.read_text() == text
    rows = [line[34:].split()[:4] for line in text.splitlines() if line.endswith("yes")]
    assert [row[:2] for row in rows] == [["2", "1"], ["2", "2"]]
    assert all(float(number) > 0 for row in rows for number in row)
    for said in ("not measured  mlp: update at 16", "mindspore 2.", "threads: gaccum_ms.tune_cpu()"):
        assert said in text
    environments = [(process.pid, process.info["environ"] or {}) for process in psutil.process_iter(["environ"])]
    assert not [pid for pid, environment in environments if environment.get("TEST_FOLDER") == str(tmp_path)]


# -- kernels -----------------------------------------------------------------------------------------------------------


_KERNELS = """
import csv, sys
from pathlib import Path
from benchmarks.ways import WAYS, Setting
from mindspore.profiler import ProfilerActivity, profile, tensorboard_trace_handler

program = WAYS[sys.argv[1]].build(Setting("mlp", sys.argv[1], 1, 16))
program.step()
with profile(activities=[ProfilerActivity.CPU], on_trace_ready=tensorboard_trace_handler(sys.argv[1])):
    program.step()
(details,) = Path(sys.argv[1]).glob("**/cpu_op_detail_info_*.csv")
for row in csv.DictReader(details.open()):
    print("kernel", row["op_type"])
"""


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


# -- memory limits -----------------------------------------------------------------------------------------------------


def test_limits_lie_between_what_needs_a_quarter_and_half_of_the_batch():
    assert memory_limit.neighbours(32) == [8, 11, 16, 32]
    assert memory_limit.limit_of({8: 1000, 11: 1500, 16: 1200, 32: 1400}, 32) == 1100
    # If memory does not tell the sizes apart, all of them must fit.
    assert memory_limit.limit_of({8: 1000, 11: 1005, 16: 1010, 32: 1050}, 32) == 1071


# -- micro-batches by length -------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_the_tokens_benchmark_measures_a_split(capsys):
    small = "--batch 24 --longest 32 --even-tokens 128 --max-tokens 128 --widths 2 --layers 1 --rounds 1"
    tokens.main([*small.split(), "--ways", "MaxTokens"])
    title, _, line = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["padding", "tokens/s"]
    name, padding, speed, *_ = line.split()
    assert name == "MaxTokens"
    assert 0 < float(padding.rstrip("%")) < 40  # the even split has 44 %
    assert float(speed) > 0
