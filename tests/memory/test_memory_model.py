"""Linear predictions from small micro-batches, compared with hand calculations."""

from __future__ import annotations

import pytest

from gaccum_ms.memory.model import next_probe, predict


def probed(samples: int, per_sample: int) -> list[int]:
    measured: dict[int, int] = {}
    while (size := next_probe(measured, samples)) is not None:
        measured[size] = size * per_sample
    return list(measured)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(1, [1]), (3, [1, 2]), (15, [1, 2, 4]), (999, [1, 2, 4, 16])],
)
def test_probes_are_few_and_never_larger_than_the_batch(samples, expected):
    assert probed(samples, 10_000_000) == expected


@pytest.mark.parametrize(
    ("samples", "per_sample", "expected"),
    [
        (252, 1_000_000, [1, 2, 4, 16]),  # 64 would be more than a quarter
        (256, 1_000_000, [1, 2, 4, 16, 64]),
        (10_000, 1_100_000, [1, 2, 4, 16, 64]),
        (10_000, 1_000_000, [1, 2, 4, 16, 64, 256]),
        (10_000, 0, [1, 2, 4, 16, 64, 256, 1024]),
    ],
)
def test_probes_go_on_while_they_say_little(samples, per_sample, expected):
    assert probed(samples, per_sample) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [(1, 100), (2, 110), (4, 130), (10, 190), (16, 250), (17, 260), (256, 2650)],
)
def test_straight_lines_through_what_was_measured_and_on(size, expected):
    """Each sample adds ten bytes, from 1 to 4 samples and from 4 on."""
    assert predict({1: 100, 4: 130, 16: 250}, size) == expected


def test_what_kernels_choose_for_one_sample_does_not_bend_the_line():
    assert predict({1: 10, 4: 130, 16: 250}, 64) == 250 + 48 * 10
    assert predict({1: 10, 4: 130, 16: 250}, 2) == 50


def test_one_measurement_says_nothing_of_others():
    assert predict({2: 100}, 2) == predict({2: 100}, 7) == 100


def test_what_shrinks_is_not_continued_downwards():
    assert predict({1: 100, 4: 90}, 1000) == 90
