"""A function becomes a splitter once, with what holds for a function."""

from __future__ import annotations

import dataclasses

import pytest

from gaccum_ms import EvenSplit, MaxTokens
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


def test_nothing_is_known_of_a_function():
    """A name that the function has by chance says nothing."""
    in_two.needs_count = True
    split = Options(split=in_two).split
    assert not (split.needs_count or split.keeps_inputs or split.auto or split.plan)
    assert split.joins
    assert split.two_sizes([1]) is None


@pytest.mark.parametrize("split", [None, EvenSplit(), MaxTokens(8, 0)])
def test_everything_else_stays_as_it_is(split):
    assert Options(split=split).split is split
    check_split("Owner", "split", split)


@pytest.mark.parametrize("split", [4, list])
def test_refuses_what_is_no_split(split):
    with pytest.raises(TypeError, match="For 'Owner', the argument 'split' must be an EvenSplit, a function that"):
        check_split("Owner", "split", Options(split=split).split)
