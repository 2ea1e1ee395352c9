"""A function becomes a splitter once, with what holds for a function."""

from __future__ import annotations

import dataclasses

import pytest

from gaccum_ms.options.options import Options
from gaccum_ms.splitting.splitter import Splitter, check_split


def in_two(x):
    return [(x[:2],), (x[2:],)]


def test_a_function_is_wrapped_once():
    options = Options(split=in_two)
    assert isinstance(options.split, Splitter)
    assert options.split([1, 2, 3]) == [([1, 2],), ([3],)]
    assert repr(options.split) == repr(in_two), "as errors show it"
    assert dataclasses.replace(options, aux=True).split is options.split


@pytest.mark.parametrize("split", [4, list])
def test_refuses_what_is_no_split(split):
    with pytest.raises(TypeError, match="For 'Owner', the argument 'split' must be an EvenSplit, a function that"):
        check_split("Owner", "split", Options(split=split).split)
