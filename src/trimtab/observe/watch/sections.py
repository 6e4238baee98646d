"""The parts of the overview: each takes a view of the run and gives lines of text no wider than it is told.

Names and texts from outside go through `visible`; whatever is missing is left out or shown as '-'.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.text import Text

from trimtab.observe.braille import braille, span_of
from trimtab.observe.format import count, duration, get, gib, number, percent
from trimtab.observe.visible import visible
from trimtab.observe.watch.fit import Lines, wrap
from trimtab.observe.watch.view import MARKS, STATE_LEVEL, RunView, mapping

GIB = 2**30
LABEL_WIDTH = 7
NAME_WIDTH = 11
MIN_BAR, MAX_BAR = 6, 40
CURVES = {
    "rl": (("reward/mean", "reward"), ("response/length_mean", "response length")),
    "sft": (("sft/loss", "loss"), ("throughput/tokens_per_s", "tokens a second")),
    "reward_model": (("rm/loss", "loss"), ("rm/accuracy", "right")),
}
"""What is learned, and what it depends on, by stage."""
SCORES = ("eval/pass@1", "eval/score", "eval/accuracy", "eval/loss")


def header(view: RunView, width: int) -> Text:
    """`demo ✓ running · task:arithmetic · 135M · grpo · cpu`"""
    facts = view.facts
    kind = str(view.state.get("kind") or "unknown")
    mark, style = MARKS[STATE_LEVEL.get(kind, "unknown")]
    size = count(get(facts, "parameters")).replace("G", "B") if get(facts, "parameters") else None
    shown = [facts.get("task"), size, facts.get("algorithm"), facts.get("batch"), facts.get("device")]
    rest = " · ".join(visible(str(value)) for value in shown if value)
    return Text.assemble((view.name, "bold"), "  ", (f"{mark} {kind}", style), (f"  {rest}" if rest else "", "dim"))


def verdict_lines(view: RunView, width: int, height: int) -> Lines:
    """The verdict in a sentence, and what to do next."""
    found = mapping(view.run.get("verdict"))
    mark, style = MARKS.get(str(found.get("level")), MARKS["unknown"])
    parts = {
        str(part.get("id")): visible(str(part.get("text") or "")) for part in map(mapping, found.get("parts") or [])
    }
    said = " ".join(text for name, text in parts.items() if name != "next" and text)
    advice = parts.get("next", "")
    wanted = min(2, len(wrap(f"next: {advice}", width - 2, 2))) if advice else 0
    lines = wrap(said or "Nothing can be said of this run yet.", width - 2, max(1, height - wanted))
    lines = [Text.assemble((f"{mark} " if not at else "  ", style), line) for at, line in enumerate(lines)]
    if advice:
        told = wrap(f"next: {advice}", width - 2, max(1, height - len(lines)), "cyan")
        lines += [Text.assemble("  ", line) for line in told]
    return lines


def progress_lines(view: RunView, width: int, height: int) -> Lines:
    """How far the run is, and what it does at this moment."""
    facts, state = view.facts, view.state
    step, steps = get(facts, "step") or 0, get(facts, "steps") or 0
    share = min(1.0, step / steps) if steps else 0.0
    left = get(state, "left_s")
    tail = f" {percent(share)}  {duration(get(facts, 'seconds'))}" + (
        f", {duration(left)} left" if left is not None else ""
    )
    head = f"step {step:,.0f}/{steps:,.0f} "
    room = max(MIN_BAR, width - len(head) - len(tail))
    done = round(room * share)
    line = Text.assemble(head, ("━" * done, "cyan"), ("─" * (room - done), "dim"), (tail, "bold"))
    return [line, Text.assemble(("now: ", "dim"), visible(doing(view)))][:height]


def doing(view: RunView) -> str:
    state = view.state
    words = str(state.get("text") or "")
    if view.has_ended or not state.get("phase"):
        return words or "-"
    since, done, total = get(state, "since"), get(state, "done"), get(state, "total")
    spent = f" {duration(max(0.0, view.now - since))}" if since is not None else ""
    counted = f", {done:,.0f} of {total:,.0f} {state.get('unit') or ''}".rstrip() if done is not None and total else ""
    return f"{state['phase']}{spent}{counted}" + (f" · {words}" if state.get("kind") == "quiet" and words else "")


def curve_lines(view: RunView, metric: str, width: int, height: int) -> Lines:
    """A curve with the ends of its axis beside it."""
    steps, values = view.metrics.points(metric)
    found = span_of(values)
    if found is None:
        return [Text("no value yet", style="dim")]
    known = _by_step(steps, values)
    labels = ["".rjust(LABEL_WIDTH)] * height
    labels[-1] = value_text(metric, found[0]).rjust(LABEL_WIDTH)
    labels[0] = value_text(metric, found[1]).rjust(LABEL_WIDTH)
    drawn = braille(known, max(1, width - LABEL_WIDTH - 1), height)
    return [Text.assemble((f"{label} ", "dim"), (line, "cyan")) for label, line in zip(labels, drawn)]


def curve_title(view: RunView, metric: str, label: str) -> str:
    """`reward 0.12 → 0.83, held out 31.0% → 74.0%`"""
    _, values = view.metrics.points(metric)
    title = f"{label} {_change(metric, values)}" if len(values) else label
    if metric == CURVES.get(view.stage, CURVES["rl"])[0][0]:
        for score in SCORES:
            _, scores = view.metrics.points(score)
            if len(scores):
                return f"{title}, held out {_change(score, scores)}"
    return title


def _by_step(steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """With a gap for every step that has no value, unless values are rare."""
    last, first = int(steps[-1]), int(steps[0])
    if last - first + 1 > 4 * len(steps):
        return values
    found = np.full(last - first + 1, np.nan)
    found[(steps - first).astype(int)] = values
    return found


def _change(metric: str, values: np.ndarray) -> str:
    first, last = value_text(metric, float(values[0])), value_text(metric, float(values[-1]))
    return last if len(values) == 1 else f"{first} → {last}"


def value_text(metric: str, value: float) -> str:
    if metric in ("eval/pass@1", "rm/accuracy", "eval/accuracy"):
        return percent(value, 1)
    return count(value) if metric in ("response/length_mean", "throughput/tokens_per_s") else number(value)


def bar(share: float, width: int, style: str = "cyan", mark: float | None = None) -> Text:
    """A share of a width, with a mark where something else would be."""
    cells = [("█", style)] * min(width, round(width * max(0.0, share))) if share > 0 else []
    cells += [("░", "dim")] * (width - len(cells))
    if mark is not None and width:
        cells[min(width - 1, max(0, round(width * mark) - 1))] = ("┃", "bold magenta")
    return Text.assemble(*cells)


def phase_lines(view: RunView, width: int, height: int) -> Lines:
    """Where a step goes, the longest phase first, and what was planned."""
    rows = [row for row in map(mapping, mapping(view.run.get("phases")).get("rows") or []) if get(row, "seconds")]
    rows = sorted(rows, key=lambda row: -(get(row, "seconds") or 0.0))
    lines = []
    for row in rows[:height]:
        planned = get(row, "planned")
        beside = f", plan {duration(planned)}" if planned else ""
        text = f"{duration(get(row, 'seconds')).rjust(7)} {percent(get(row, 'share')).rjust(4)}"
        room = bar_width(width, len(text) + 15)
        name = visible(str(row.get("name") or ""))[:NAME_WIDTH].ljust(NAME_WIDTH)
        lines.append(Text.assemble(name, bar(get(row, "share") or 0.0, room), f" {text}", (beside, "dim")))
    return lines


def memory_lines(view: RunView, width: int, height: int) -> Lines:
    """The peak of each phase, of the limit; ┃ is where the plan has it. The fullest first."""
    memory = mapping(view.run.get("memory"))
    rows = memory_rows(view)
    rows.sort(key=lambda row: -max(get(row, "measured") or 0.0, get(row, "predicted") or 0.0))
    tops = [get(row, key) or 0.0 for row in rows for key in ("measured", "predicted")]
    limit = get(memory, "limit") or get(memory, "device") or max(tops, default=0.0)
    lines = []
    for row in rows[:height]:
        measured, planned = get(row, "measured"), get(row, "predicted")
        text = gib(None if measured is None else measured / GIB).rjust(8)
        beside = f", plan {gib(planned / GIB)}" if planned else ""
        room = bar_width(width, len(text) + 17)
        mark = planned / limit if planned and limit else None
        share = (measured or 0.0) / limit if limit else 0.0
        style = "red" if share > 1 else "cyan"
        name = visible(str(row.get("name") or ""))[:NAME_WIDTH].ljust(NAME_WIDTH)
        lines.append(Text.assemble(name, bar(share, room, style, mark), f" {text}", (beside, "dim")))
    return lines


def memory_rows(view: RunView) -> list[Mapping[str, Any]]:
    """Phases whose peak was measured; where none was, as planned."""
    rows = [mapping(row) for row in mapping(view.run.get("memory")).get("phases") or []]
    return [row for row in rows if get(row, "measured")] or [row for row in rows if get(row, "predicted")]


def bar_width(width: int, text: int) -> int:
    return max(MIN_BAR, min(MAX_BAR, width - NAME_WIDTH - text))


ENGINE_FACTS: tuple[tuple[str, str, Any], ...] = (
    ("rollout/tokens_per_s", "tokens/s", count),
    ("rollout/batch_occupancy", "slots used", percent),
    ("rollout/kv_usage", "KV pages used", percent),
    ("rollout/parked", "preempted", count),
    ("rollout/graph_share", "from graphs", percent),
    ("rollout/tail_s", "tail", duration),
    ("throughput/update_mfu", "update MFU", percent),
    ("run/microbatches", "micro-batches", count),
    ("run/packing_fill", "packing", percent),
)


def engine_lines(view: RunView, width: int, height: int) -> Lines:
    """Numbers of the last step, as many as fit."""
    shown = [f"{label} {form(view.last[name])}" for name, label, form in ENGINE_FACTS if name in view.last]
    return wrap(" · ".join(text.replace(" ", "\u00a0") for text in shown), width, height)


def finding_lines(view: RunView, width: int, height: int) -> Lines:
    """The worst first: what, and what was seen. Before them, files that cannot be read."""
    lines = [_damaged(row) for row in view.rows("damaged")]
    for row in view.rows("findings"):
        mark, style = MARKS.get(str(row.get("level")), MARKS["unknown"])
        seen = visible(str(row.get("evidence") or ""))
        title = visible(str(row.get("title") or row.get("rule") or ""))
        lines.append(Text.assemble((f"{mark} ", style), title, (f": {seen}" if seen else "", "dim")))
    if len(lines) > height:
        lines = [*lines[: height - 1], Text(f"and {len(lines) - height + 1} more: trimtab doctor", style="dim")]
    return lines or [Text("nothing found", style="dim")]


def _damaged(row: Mapping[str, Any]) -> Text:
    place = f", line {row['line']}" if row.get("line") else ""
    words = visible(f"{row.get('file')}{place}: {row.get('text')}")
    return Text.assemble((f"{MARKS['warn'][0]} ", MARKS["warn"][1]), words)


def event_line(row: Mapping[str, Any]) -> Text:
    """`12:01:33 step 41 ▲ text`"""
    at, step = get(row, "at"), get(row, "step")
    clock = time.strftime("%H:%M:%S", time.localtime(at)) if at is not None and 0 <= at < 2**33 else "--:--:--"
    mark, style = {"warn": MARKS["warn"], "error": MARKS["bad"]}.get(str(row.get("level")), ("·", "dim"))
    place = f"step {step:.0f} " if step is not None else ""
    return Text.assemble((f"{clock} {place}", "dim"), (f"{mark} ", style), visible(str(row.get("text") or "")))


def event_lines(view: RunView, width: int, height: int) -> Lines:
    """The last ones, the newest at the bottom."""
    return [event_line(row) for row in view.rows("events")[-height:]]
