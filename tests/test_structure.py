"""The package stays one that a reader can follow: bounds on what structure.py counts."""

from __future__ import annotations

import pytest

pytest.importorskip("grimp", reason="grimp comes with import-linter, in the extra 'dev': pip install '.[dev]'")

from structure import longest_chain, structure


def test_the_package_can_be_followed():
    found = structure()
    assert len(found.chain) <= 9, found.chain
    assert found.fan_out[0] <= 12, found.fan_out
    assert found.circles == []
    assert found.long_files == {}


def test_chains_and_circles_of_a_small_package():
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == (["a", "b", "c"], [])
    assert longest_chain({"a": {"b"}, "b": {"a"}})[1] == ["b -> a"]
