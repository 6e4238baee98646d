"""Numbers as people read them; what is missing is '-'."""

import math

import pytest

from trimtab.observe.format import count, duration, gib, number, percent, scores, sparkline


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0 s"),
        (0.4242, "0.42 s"),
        (0.996, "1.0 s"),
        (3.14, "3.1 s"),
        (9.96, "10 s"),
        (42, "42 s"),
        (59.6, "1m 00s"),
        (580, "9m 40s"),
        (3599.6, "1h 00m"),
        (7500, "2h 05m"),
        (86399, "1d 00h"),
        (3 * 86400 + 4 * 3600, "3d 04h"),
    ],
)
def test_duration(value, shown):
    assert duration(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (213.4, "213"),
        (999.6, "1.0k"),
        (18_234, "18.2k"),
        (999_960, "1.0M"),
        (4.94e8, "494.0M"),
        (7e9, "7.0G"),
    ],
)
def test_count(value, shown):
    assert count(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.4312, "0.431"), (0, "0.000"), (-0.5, "-0.500"), (12.345, "12.35"), (1234.56, "1234.6"), (0.00002, "2.0e-05")],
)
def test_number(value, shown):
    assert number(value) == shown


def test_share_and_memory_have_units():
    assert (percent(0.614), percent(0.0312, 1), gib(7.3), gib(139.84)) == ("61%", "3.1%", "7.30 GiB", "139.8 GiB")


@pytest.mark.parametrize("show", [number, count, percent, gib, duration])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_whatever_is_missing_is_a_dash(show, value):
    assert show(value) == "-"


def test_scores():
    assert (
        scores({"eval/pass@1": 0.412, "pass@8": None, "eval/length_mean": 213})
        == "pass@1 41.2%, pass@8 -, length_mean 213.0"
    )
    assert scores({"eval/score": -0.2, "eval/stderr": 0.077}) == "score -0.200, stderr 0.077", "in the score's own unit"
    assert scores({"before": {"pass@1": 0.1}, "after": {"pass@1": 0.5}}) == "before: pass@1 10.0%, after: pass@1 50.0%"
    assert scores({}) == "-"


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3, 3, 3], 10) == "▄▄▄"
    assert sparkline([0, math.nan, 7], 3) == "▁ █"
    assert sparkline([None, None], 5) == "  "
    assert sparkline([], 5) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24
