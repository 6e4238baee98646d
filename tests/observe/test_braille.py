"""Curves in braille: what is high is high, spikes stay, gaps are gaps."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trimtab.observe.braille import BLANK, braille, stretches


def dots(lines: list[str]) -> np.ndarray:
    """[rows, columns] of dots, from the top."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    return np.array(
        [
            [bool((ord(c) - BLANK) & bits[row][side]) for c in line for side in (0, 1)]
            for line in lines
            for row in range(4)
        ]
    )


def test_a_rising_line_rises() -> None:
    lines = braille(range(8), 4, 2)
    drawn = dots(lines)
    tops = [int(np.argmax(drawn[:, column])) for column in range(8)]
    assert tops == sorted(tops, reverse=True) and tops[0] == 7 and tops[-1] == 0


def test_all_equal_is_a_line_in_the_middle() -> None:
    drawn = dots(braille([2.0] * 50, 10, 3))
    assert drawn.sum() == 20 and drawn[6].all()


@pytest.mark.parametrize("count", [1, 2, 3, 19, 100, 10_000])
def test_it_has_the_size_that_was_asked_for(count: int) -> None:
    lines = braille(np.sin(np.arange(count)), 17, 3)
    assert [len(line) for line in lines] == [17] * 3
    assert dots(lines).any(axis=0).all()


def test_a_spike_of_one_step_in_ten_thousand_stays() -> None:
    values = np.zeros(10_000)
    values[4321] = 1.0
    drawn = dots(braille(values, 30, 4))
    assert drawn[0].sum() == 1 and drawn[:, int(4321 / 10_000 * 60)].all()


def test_missing_values_are_a_gap() -> None:
    values = [1.0, 2.0, math.nan, math.inf, 3.0, 4.0]
    drawn = dots(braille(values, 3, 2))
    assert drawn.any(axis=0).tolist() == [True, True, False, False, True, True]
    assert not dots(braille([math.nan] * 5, 3, 2)).any() and not dots(braille([], 3, 2)).any()


def test_the_axis_may_be_given_and_values_beyond_it_stay_at_its_ends() -> None:
    drawn = dots(braille([0.5, 0.5, 9.0, 9.0], 2, 1, low=0.0, high=1.0))
    assert drawn[0, 2:].all() and not drawn[0, :2].any()


def test_stretches_cover_every_step_once() -> None:
    parts = stretches(np.arange(100, dtype=float), 60)
    assert np.concatenate(parts).tolist() == list(range(100))
