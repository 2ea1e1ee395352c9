"""The benchmark of semi-auto parallel mode: its numbers, its verdicts on made-up ones, and the real command."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter

import pytest
from compile_worker import SAMPLES
from finished_graph import COLLECTIVES

from benchmarks import semi_auto

pytestmark = pytest.mark.xdist_group("parallel")
WEIGHTS = 4 * (12 * 32 + 32 + 32)  # bytes
INPUTS = 4 * SAMPLES * (12 + 1)  # of one device
WHOLE = {("AllReduce", "gradients"): (3, WEIGHTS), ("AllReduce", "losses"): (1, 4)}
BACKWARD = {("AllReduce", "others"): (1, 4)}  # of the loss, if the compiler does not fold it away


def numbers(row):
    return {what: (row.collectives[what], row.bytes[what]) for what in row.collectives}


@pytest.mark.core(name=["plain", "ours, 4"])
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "k", "expected"),
    [
        ("plain", 1, WHOLE),
        ("ours, 1", 1, WHOLE),
        *(
            (f"{way}, {k}", k, {**WHOLE, ("AllReduce", "losses"): (k, 4 * k), **BACKWARD, **more})
            for way, k, more in (
                ("ours", 4, {}),
                ("ours", 16, {}),
                ("framework", 4, {("AllGather", "inputs gathered"): (2, INPUTS)}),
            )
        ),
        *((f"per sample, {k}", k, WHOLE) for k in (1, 4)),
        # A lazy network has its loss's backward in each call.
        ("lazy, 4", 4, {**WHOLE, ("AllReduce", "losses"): (4, 16), ("AllReduce", "others"): (4, 16)}),
    ],
)
def test_collectives_are_told_apart_and_counted(cases, name, k, expected):
    row = semi_auto.measure(cases(name), name, "lazy" in name, k)
    assert numbers(row) == expected
    text = (cases(name).folder / "finished.ir").read_text()
    assert row.nodes == len(re.findall(r"^ +%\d+\([^=]*\) = ", text, re.MULTILINE))
    if "lazy" not in name:  # each node of the file is executed once
        assert row.collectives.total() == len(re.findall(rf"\) = (?:PrimFunc_)?(?:{'|'.join(COLLECTIVES)})\(", text))


@pytest.mark.distributed
def test_weights_that_are_gathered_are_no_inputs(cases):
    row = semi_auto.measure(cases("optimizer parallel, 4"), "optimizer parallel", False, 4)
    assert any(kind == "AllGather" for kind, _ in row.collectives)
    assert row.of("inputs gathered") == (0, 0)


def made_up(title, micro_size, **counts):
    number = {("AllReduce", purpose.replace("_", " ")): n for purpose, n in counts.items()}
    collectives = Counter({("AllReduce", "gradients"): 3, **number})
    sizes = Counter({what: 4 * n for what, n in collectives.items()})
    return semi_auto.Row(title, False, micro_size, collectives, sizes, 10, 1.0)


PER_SAMPLE = "gaccum_ms, PerSampleLoss"
GOOD = [
    made_up(semi_auto.WHOLE_TITLE, 1, losses=1),
    made_up("gaccum_ms", 4, losses=4),
    made_up(PER_SAMPLE, 4, losses=1),
]


@pytest.mark.parametrize(
    ("bad", "failed"),
    [
        (made_up("gaccum_ms", 4, gradients=12), 0),
        (made_up("gaccum_ms", 4)._replace(bytes=Counter({("AllReduce", "gradients"): 48})), 0),
        (made_up("gaccum_ms", 4, inputs_gathered=2), 1),
        (made_up(PER_SAMPLE, 4, losses=4), 2),
    ],
    ids=["a collective for each micro-batch", "bytes", "inputs", "a loss for each micro-batch"],
)
def test_each_bad_number_fails_its_own_promise(bad, failed):
    assert [line.split()[0] for line in semi_auto.targets(GOOD)] == ["PASS"] * 3
    verdicts = [line.split()[0] for line in semi_auto.targets([*GOOD, bad])]
    assert verdicts == ["FAIL" if index == failed else "PASS" for index in range(3)]


def test_what_did_not_compile_passes_nothing():
    bad = GOOD[1]._replace(note="it did not")
    assert [line.split()[0] for line in semi_auto.targets([*GOOD, bad])] == ["FAIL"] * 3
    assert semi_auto.collectives_table([*GOOD, bad]).endswith("not compiled: it did not")


@pytest.mark.thorough
@pytest.mark.distributed
def test_the_command_prints_what_it_counted(cases, tmp_path, monkeypatch, capsys):
    """On the ranks that compile for the other tests."""
    output = tmp_path / "result.txt"
    monkeypatch.setattr(semi_auto, "Compiler", lambda _: contextlib.nullcontext(cases))
    monkeypatch.setattr(sys, "argv", ["semi_auto", "--micro-sizes", "4", "--output", str(output)])
    semi_auto.main()
    printed = capsys.readouterr().out
    assert output.read_text() == printed
    purposes, kinds, _, *lines = printed.split("\n\n")[2].splitlines()
    assert purposes.split() == ["gradients", "inputs", "gathered", "losses", "others"]
    assert kinds.split()[-5:] == ["AllReduce", "AllGather", "AllReduce", "AllReduce", "all"]
    shown = {line[:46].strip(): [int(one) for one in line[46:].split()] for line in lines}
    theirs, once = [4, 3, WEIGHTS, 2, INPUTS, 4, 16, 1, 4, 10], [4, 3, WEIGHTS, 0, 0, 1, 4, 0, 0, 4]
    assert shown["nn.TrainOneStepCell, whole batch"] == [1, *once[1:]]
    assert shown["MindSpore's GradAccumulationCell"] == theirs
    assert shown["gaccum_ms"] == [4, 3, WEIGHTS, 0, 0, 4, 16, 1, 4, 8]
    assert shown["gaccum_ms, PerSampleLoss"] == once
    assert len(shown) == 7
    assert printed.count("PASS") == 3
    assert "not a run on hardware" in printed
    assert "mindspore 2." in printed
