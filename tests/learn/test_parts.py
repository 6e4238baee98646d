"""Several parts, one reward: sums and z-scores by hand, and what no unit, spread or missing value may change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from trimtab.learn.parts import Part, combine, z_score

NAN = float("nan")
# Two interleaved groups: samples 0, 2, 4 and samples 1, 3.
GROUPS = torch.tensor([0, 1, 0, 1, 0])
VALUES = torch.tensor([[1.0, 10.0], [0.0, 10.0], [2.0, 30.0], [4.0, 10.0], [6.0, 20.0]], dtype=torch.float64)


def close(actual: torch.Tensor, expected: list[float]) -> None:
    assert_close(actual, torch.tensor(expected, dtype=torch.float64))


def test_without_normalisation_it_is_the_weighted_sum() -> None:
    close(combine(VALUES, GROUPS, [Part("a"), Part("b", -0.1)]), [0.0, -1.0, -1.0, 3.0, 4.0])


def test_z_scores_within_groups_by_hand() -> None:
    # {1, 2, 6}: mean 3, (4 + 1 + 9) / 2 = 7.   {0, 4}: mean 2, (4 + 4) / 1 = 8.
    s, t = math.sqrt(7), math.sqrt(8)
    first = [-2 / s, -2 / t, -1 / s, 2 / t, 3 / s]
    close(z_score(VALUES[:, 0], GROUPS), first)
    # {10, 30, 20}: mean 20, (100 + 100 + 0) / 2 = 100.   {10, 10} has no spread.
    second = [-1.0, 0.0, 1.0, 0.0, 0.0]
    parts = [Part("a", 2.0, "group"), Part("b", 0.5, "group")]
    close(combine(VALUES, GROUPS, parts), [2 * x + 0.5 * y for x, y in zip(first, second)])


def test_z_scores_over_the_step_by_hand() -> None:
    # Mean 2.6 and (2.56 + 6.76 + 0.36 + 1.96 + 11.56) / 4 = 5.8.
    s = math.sqrt(5.8)
    close(combine(VALUES[:, :1], GROUPS, [Part("a", 1.0, "step")]), [x / s for x in (-1.6, -2.6, -0.6, 1.4, 3.4)])


def test_normalised_and_plain_parts_go_together() -> None:
    # {10, 30, 20} and {10, 10} as above, beside the plain first part.
    close(combine(VALUES, GROUPS, [Part("a"), Part("b", 1.0, "group")]), [0.0, 0.0, 3.0, 4.0, 6.0])


def test_a_part_that_does_not_apply_adds_nothing_and_is_left_out_of_the_mean() -> None:
    values = torch.tensor([[1.0], [NAN], [3.0], [NAN], [NAN]], dtype=torch.float64)
    # Group 0 compares 1 and 3 (mean 2, std sqrt 2); group 1 has nothing to compare.
    half = 1 / math.sqrt(2)
    for way in ("group", "step"):
        close(combine(values, GROUPS, [Part("a", 1.0, way)]), [-half, 0.0, half, 0.0, 0.0])


def test_a_part_that_applies_nowhere_adds_nothing() -> None:
    values = torch.full((5, 1), NAN, dtype=torch.float64)
    for way in ("none", "group", "step"):
        close(combine(values, GROUPS, [Part("a", 1.0, way)]), [0.0] * 5)


def test_rounding_is_not_taken_for_a_spread() -> None:
    values = torch.tensor([0.1 + 0.2, 0.3, 0.3], dtype=torch.float64)
    assert values[0] != values[1]
    close(z_score(values, torch.zeros(3, dtype=torch.int64)), [0.0, 0.0, 0.0])


WAYS = pytest.mark.parametrize("way", ["group", "step"])
numbers = st.floats(-100, 100).map(lambda x: round(x, 3))


@st.composite
def scored(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    size = draw(st.integers(1, 20))
    maybe = st.one_of(numbers, st.just(NAN))
    values = draw(st.lists(st.tuples(maybe, maybe), min_size=size, max_size=size))
    groups = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    return torch.tensor(values, dtype=torch.float64), torch.tensor(groups)


@WAYS
@settings(deadline=None)
@given(given_=scored())
def test_it_is_finite_whatever_the_groups(way: str, given_: tuple[torch.Tensor, torch.Tensor]) -> None:
    values, groups = given_
    found = combine(values, groups, [Part("a", 3.0, way), Part("b", -1.0, way)])
    assert found.isfinite().all()
    assert found.abs().max() <= 4 * math.sqrt(len(values))  # no z-score exceeds (n - 1) / sqrt(n)


@WAYS
@settings(deadline=None)
@given(given_=scored(), constant=numbers)
def test_a_constant_part_contributes_nothing(
    way: str, given_: tuple[torch.Tensor, torch.Tensor], constant: float
) -> None:
    values, groups = given_
    with_constant = torch.stack((values[:, 0], torch.full_like(values[:, 0], constant)), dim=1)
    parts = [Part("a", 1.0, way), Part("b", 5.0, way)]
    assert_close(combine(with_constant, groups, parts), combine(values[:, :1], groups, parts[:1]), rtol=0, atol=0)


@WAYS
@settings(deadline=None)
@given(given_=scored(), scale=st.floats(0.01, 100), shift=st.floats(-50, 50))
def test_units_of_one_part_change_nothing(
    way: str, given_: tuple[torch.Tensor, torch.Tensor], scale: float, shift: float
) -> None:
    values, groups = given_
    parts = [Part("a", 1.0, way), Part("b", 0.7, way)]
    changed = values.clone()
    changed[:, 0] = scale * changed[:, 0] + shift
    before, after = combine(values, groups, parts), combine(changed, groups, parts)
    assert_close(after, before, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(given_=scored())
def test_the_order_of_samples_does_not_matter(given_: tuple[torch.Tensor, torch.Tensor]) -> None:
    values, groups = given_
    parts = [Part("a", 1.0, "group"), Part("b", 1.0, "step")]
    back = torch.arange(len(groups)).flip(0)
    assert_close(combine(values[back], groups[back], parts), combine(values, groups, parts)[back])
