"""A run without signal says so: in each step's line, after a few steps, and not again and again."""

from __future__ import annotations

import io

import pytest

from trimtab.observe.console import Console
from trimtab.observe.panel import panel_facts
from trimtab.observe.signal import SignalWatch

NONE, SOME = {"reward/zero_std_groups": 1.0, "reward/mean": 0.25}, {"reward/zero_std_groups": 0.75}


def test_the_share_of_groups_with_signal_is_on_every_line() -> None:
    out = io.StringIO()
    console = Console(10, file=out)
    console.step(1, SOME)
    console.step(2, {"reward/mean": 0.5})
    with_signal, not_compared = out.getvalue().splitlines()
    assert "| signal 25% | len" in with_signal
    assert "signal" not in not_compared, "there are no groups to compare"
    console.step(3, SOME)
    assert ("signal", "25% of groups") in panel_facts(console.history)


@pytest.mark.parametrize("live", [False, True])
def test_three_steps_without_signal_are_told_once(live: bool) -> None:
    out = io.StringIO()
    with Console(100, live=live, file=out) as console:
        for step in range(1, 29):
            console.step(step, NONE)
    text = " ".join(out.getvalue().split())
    assert text.count("warning: no group had signal in the last 3 steps") == 1
    assert "the same reward (mean 0.250)" in text and "learn.samples_per_prompt" in text


def test_steps_are_counted_in_a_row() -> None:
    watch = SignalWatch()
    assert [watch.saw(metrics) for metrics in (NONE, NONE, SOME, NONE, NONE, {})] == [None] * 6
    assert "3 steps" in (watch.saw(NONE) or ""), "a step that says nothing of it changes nothing"
    assert [bool(watch.saw(NONE)) for _ in range(4, 31)] == [False] * 26 + [True], "and again at thirty"
