"""No circle of imports; and a plain step can be followed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn

from tests.structure import PACKAGE, imports, longest_chain, of_packages
from tests.support.reference import make_step


def test_no_import_is_circular_and_the_longest_chain_of_packages_is_short():
    imported = imports()
    packages, circles = longest_chain(of_packages(imported))
    assert circles == longest_chain(imported)[1] == []
    assert len(packages) <= 12, packages
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == (["a", "b", "c"], [])
    assert longest_chain({"a": {"b"}, "b": {"a"}})[1] == ["b -> a"]


def test_the_architecture_names_each_package_in_the_order_of_imports():
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE)
    packages = {folder.parent.name for folder in PACKAGE.glob("*/__init__.py")}
    assert packages == set(named) - {"gaccum_ms"}
    contract = (PACKAGE.parent / "pyproject.toml").read_text()
    layers = re.findall(r'"(\w+)"', contract[contract.index("layers = [") :].partition("]")[0])
    assert [layer for layer in reversed(layers) if layer in named] == [name for name in named if name in layers]


def test_a_plain_step_runs_through_the_files_that_the_architecture_names():
    ran = set()
    watched = ("training", "accumulation", "transforms")

    def watch(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in file.parents and file.parent.name in watched:
            ran.add(file.name)

    ms.set_context(mode=ms.PYNATIVE_MODE)  # Python then runs the code that graph mode compiles
    network = nn.Dense(3, 2)
    with_loss = nn.WithLossCell(network, nn.CrossEntropyLoss())
    step = make_step(with_loss, lambda weights: nn.Momentum(weights, 0.1, 0.9), micro_size=2)
    batch = ms.Tensor(np.ones((4, 3), np.float32)), ms.Tensor(np.zeros(4, np.int32))
    step(*batch)
    step.called_by_python = True  # as during a call: else it is within a graph of the user's, and copies its inputs
    sys.setprofile(watch)
    try:
        step.construct(*batch)
    finally:
        sys.setprofile(None)
    text = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    paragraph = text[text.index("To follow a plain step, read") : text.index("`test_structure.py` watches")]
    named = re.findall(r"(\w+\.py)`", paragraph)
    assert len(named) == 6  # the step, and five of accumulation/
    # Nothing on most devices; the copies of a network that draws random numbers, of which there are none here; and the
    # advice, which a compilation may give.
    assert ran - {"saturation.py", "copies.py", "assembly.py", "advice.py"} == set(named)
