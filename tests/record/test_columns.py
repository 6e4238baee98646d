"""Metrics as columns are those of a plain dictionary of rows, whatever lines a run has left."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.record.columns import MetricTable


def reference(lines: list[dict[str, Any]]) -> dict[int, dict[str, float | None]]:
    """One row a step, written for reading and not for speed."""
    rows: dict[int, dict[str, float | None]] = {}
    for line in lines:
        step = line.get("step")
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < 2**53:
            continue
        again = "time/total" in line and "time/total" in rows.get(step, {})
        if again or any(other > step for other in rows):
            rows = {other: row for other, row in rows.items() if other < step}
        rows.setdefault(step, {})
        for name, value in line.items():
            if name != "step":
                rows[step][name] = number(value)
    return rows


def number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def as_rows(table: MetricTable) -> dict[int, dict[str, float | None]]:
    rows: dict[int, dict[str, float | None]] = {step: {} for step in table.steps.tolist()}
    for name in table.names:
        for step, value, written in zip(rows, table.column(name).tolist(), table.written(name).tolist(), strict=True):
            if written:
                rows[step][name] = None if math.isnan(value) else value
            else:
                assert math.isnan(value)
    return rows


NAMES = ("time/total", "reward/mean", "eval/pass@1")
VALUES = st.one_of(st.floats(), st.integers(), st.just(10**400), st.none(), st.booleans(), st.text(max_size=2))
STEPS = st.one_of(
    st.integers(0, 6), st.sampled_from([None, True, -1, 2**53, 2**53 - 1, 10**400, 3.0, "4", [5], math.nan])
)
LINES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"step": STEPS}, optional=dict.fromkeys(NAMES, VALUES)),
        st.dictionaries(st.sampled_from(NAMES), VALUES),
    ),
    max_size=20,
)


@given(LINES)
def test_columns_are_those_of_the_plain_reading(lines: list[dict[str, Any]]) -> None:
    table = MetricTable(lines)
    expected = reference(lines)
    assert as_rows(table) == expected
    assert len(table) == len(expected)
    assert set(table.names) == {name for row in expected.values() for name in row}
    for name in NAMES:
        steps, values = table.points(name)
        found = {step: row[name] for step, row in expected.items() if row.get(name) is not None}
        assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == found


@given(LINES, st.integers(0, 20))
def test_what_is_said_to_be_unchanged_is_unchanged(lines: list[dict[str, Any]], cut: int) -> None:
    table = MetricTable(lines[:cut])
    before = list(as_rows(table).items())
    unchanged = table.extend(lines[cut:])
    after = list(as_rows(table).items())
    assert before[:unchanged] == after[:unchanged]
    assert unchanged == len(before) or unchanged < len(after)
    assert after == list(reference(lines).items())


def test_a_resume_makes_void_what_lay_after_it() -> None:
    lines = [{"step": n, "time/total": 1.0, "x": 1.0} for n in (1, 2, 3, 4)]
    table = MetricTable([*lines, {"step": 3, "time/total": 1.0, "x": 2.0}])
    assert (table.steps.tolist(), table.column("x").tolist()) == ([1, 2, 3], [1.0, 1.0, 2.0])


def test_lines_of_one_step_are_one_row_and_a_repeated_step_is_a_new_one() -> None:
    split = MetricTable([{"step": 1, "time/total": 1.0, "a": 1.0}, {"step": 1, "eval/pass@1": 0.5}])
    assert as_rows(split) == {1: {"time/total": 1.0, "a": 1.0, "eval/pass@1": 0.5}}
    repeated = MetricTable([{"step": 1, "time/total": 1.0, "a": 1.0}, {"step": 1, "time/total": 2.0}])
    assert as_rows(repeated) == {1: {"time/total": 2.0}}
    assert repeated.names == ["time/total"]


def test_arrays_are_float64_and_keep_their_values_when_rows_are_added() -> None:
    table = MetricTable([{"step": 1, "a": 1}, {"step": 2}])
    column, steps = table.column("a"), table.steps
    assert column.dtype == np.float64 and steps.dtype == np.int64
    table.extend([{"step": 1, "time/total": 1.0, "a": 5}, {"step": 4}])
    assert column.tolist() == pytest.approx([1.0, math.nan], nan_ok=True) and steps.tolist() == [1, 2]
    assert table.column("unknown").shape == (2,)


def test_rows_until_a_step_are_a_table_of_their_own() -> None:
    lines = [{"step": step, "a": float(step), **({"b": 1.0} if step > 2 else {})} for step in range(1, 5)]
    whole = MetricTable(lines)
    early = whole.until(2)
    assert early.steps.tolist() == [1, 2] and early.column("a").tolist() == [1.0, 2.0]
    assert early.names == ["a"] and np.isnan(early.column("b")).all()
    early.extend([{"step": 3, "a": 9.0}])
    assert whole.column("a").tolist() == [1.0, 2.0, 3.0, 4.0] and early.column("a").tolist() == [1.0, 2.0, 9.0]
    assert len(whole.until(0)) == 0 and len(whole.until(99)) == 4
