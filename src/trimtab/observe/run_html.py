"""A run as one block of HTML, for a notebook: the verdict, four numbers, two curves and where a step goes.

No script, no style sheet, nothing loaded: what stands here is text that is escaped and pictures that are part of it. The block
has its own background, so it reads the same in light and dark notebooks.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from trimtab.observe.format import MISSING, duration, get, gib, number, percent
from trimtab.observe.svg import as_image, curve_svg, phases_svg
from trimtab.observe.visible import visible
from trimtab.observe.watch.sections import CURVES, SCORES, curve_title, doing, value_text
from trimtab.observe.watch.view import MARKS, RunView, mapping

WIDTH, CURVE_HEIGHT, BAR_HEIGHT = 720, 130, 22
LIVE_HEIGHT = 330
"""Of the block that is replaced while a run trains: what is below it does not jump."""
EDGE = {"ok": "#1a7f37", "warn": "#9a6700", "bad": "#cf222e", "unknown": "#767676"}
QUESTIONS = (
    ("learning", "Is it learning?"), ("bound", "What bounds it?"), ("wrong", "Is anything wrong?"), ("fits", "Does it fit?"),
)  # fmt: skip
SMALL = "color:#5f5f5f;font-size:12px"


def run_html(view: RunView) -> str:
    """All of it, of a run that has ended or goes on."""
    found = mapping(view.run.get("verdict"))
    level = str(found.get("level") or "unknown")
    parts = {str(part.get("id")): str(part.get("text") or "") for part in map(mapping, found.get("parts") or [])}
    said = " ".join(text for name, text in parts.items() if name != "next" and text)
    mark = MARKS.get(level, MARKS["unknown"])[0]
    body = _div(f"{_text(mark)} {_text(said or 'Nothing can be said of this run yet.')}", "font-weight:600")
    if parts.get("next"):
        body += _div(f"Next: {_text(parts['next'])}", "margin-top:2px")
    return _block(view, body, _numbers(view), EDGE.get(level, EDGE["unknown"]))


def live_html(view: RunView) -> str:
    """The same while a run trains: how far it is instead of a verdict, in a block whose height stays."""
    step, steps = get(view.facts, "step") or 0, get(view.facts, "steps") or 0
    left = get(view.state, "left_s")
    more = f", {duration(left)} left" if left is not None else ""
    share = min(100.0, 100 * step / steps) if steps else 0.0
    head = f"step {step:.0f}/{steps:.0f}, {duration(get(view.facts, 'seconds'))}{more}"
    bar = _div(
        _div("&nbsp;", f"width:{share:.1f}%;background-color:#0072b2;height:6px;line-height:6px"),
        "background-color:#e4e4e4",
    )
    body = _div(_text(head), "font-weight:600") + bar + _div(f"now: {_text(doing(view))}", SMALL)
    return _block(view, body, _plain_numbers(view), EDGE["unknown"], f"height:{LIVE_HEIGHT}px;overflow:hidden;")


def _block(view: RunView, body: str, numbers: str, edge: str, more: str = "") -> str:
    title = _div(f"Trimtab · {_text(view.name)}", SMALL)
    style = (
        f"{more}border-left:4px solid {edge};padding:8px 12px;background-color:#ffffff;color:#222222;"
        f"max-width:{WIDTH + 20}px;font-family:sans-serif;font-size:14px"
    )
    return _div(title + body + numbers + _curves(view) + _phases(view), style)


def _numbers(view: RunView) -> str:
    """The four questions, or plain numbers where nothing answers them."""
    asked = mapping(view.run.get("questions"))
    cells = []
    for name, question in QUESTIONS:
        answer = mapping(asked.get(name))
        if not answer:
            return _plain_numbers(view)
        unit = str(answer.get("unit") or "")
        value = answer.get("value")
        measured = isinstance(value, float)
        shown = MISSING if value is None else f"{number(value, 2)} {unit}" if measured else str(value)
        cells.append((question, shown, str(answer.get("note") or "").rstrip(":")))
    return _cells(cells)


def _plain_numbers(view: RunView) -> str:
    metric, label = CURVES.get(view.stage, CURVES["rl"])[0]
    score = next((name for name in SCORES if name in view.last), "")
    peaks = [value for name, value in view.last.items() if name.startswith("memory/") and name.endswith("_peak_gib")]
    peak = max(peaks, default=view.last.get("memory/host_gib"))
    return _cells(
        [
            (label, value_text(metric, view.last[metric]) if metric in view.last else MISSING, ""),
            ("held out", value_text(score, view.last[score]) if score else MISSING, score.removeprefix("eval/")),
            ("a step", duration(view.last.get("time/total")), ""),
            ("peak memory", gib(peak), ""),
        ]
    )


def _cells(cells: list[tuple[str, str, str]]) -> str:
    shown = "".join(
        f'<td style="padding:6px 18px 6px 0;text-align:left;vertical-align:top;background-color:#ffffff;color:#222222">'
        f"{_div(_text(label), SMALL)}{_div(_text(value), 'font-size:18px;font-weight:600')}{_div(_text(note), SMALL)}</td>"
        for label, value, note in cells
    )
    return f'<table style="margin:4px 0;border:none;background-color:#ffffff"><tr>{shown}</tr></table>'


def _curves(view: RunView) -> str:
    cells = ""
    for index, (metric, label) in enumerate(CURVES.get(view.stage, CURVES["rl"])):
        points = view.metrics.points(metric)
        empty = view.metrics.points("")
        score = next((name for name in SCORES if len(view.metrics.points(name)[0])), "") if not index else ""
        scores = view.metrics.points(score) if score and _comparable(metric, points, score) else empty
        ends = [*points[1], *scores[1]]
        shown = (value_text(metric, min(ends)), value_text(metric, max(ends))) if ends else ("", "")
        title = curve_title(view, metric, label)
        width = WIDTH // 2 - 6
        picture = as_image(curve_svg(points, scores, width, CURVE_HEIGHT, shown), width, CURVE_HEIGHT, title)
        style = "padding:0 6px 0 0;background-color:#ffffff;text-align:left"
        cells += f'<td style="{style}">{_div(_text(title), SMALL)}{picture}</td>'
    return f'<table style="margin:0;border:none;background-color:#ffffff"><tr>{cells}</tr></table>'


def _comparable(metric: str, points: Any, score: str) -> bool:
    """Whether a score has the unit of the curve: losses have, and shares beside a reward between 0 and 1."""
    if metric in ("sft/loss", "rm/loss"):
        return score == "eval/loss"
    return bool(len(points[1])) and points[1].min() >= -0.25 and points[1].max() <= 1.25


def _phases(view: RunView) -> str:
    rows: list[Mapping[str, Any]] = [mapping(row) for row in mapping(view.run.get("phases")).get("rows") or []]
    seconds = {str(row.get("name")): get(row, "seconds") or 0.0 for row in rows}
    if not any(seconds.values()):
        return ""
    shown = ", ".join(f"{name} {duration(spent)}" for name, spent in seconds.items() if spent)
    total = sum(seconds.values())
    picture = as_image(
        phases_svg(seconds, WIDTH, BAR_HEIGHT), WIDTH, BAR_HEIGHT, f"where a step goes: {visible(shown)}"
    )
    longest = max(seconds, key=lambda name: seconds[name])
    words = f"where a step goes: {duration(total)}, {percent(seconds[longest] / total)} of it {visible(longest)}"
    return _div(_text(words), SMALL) + picture


def _div(inside: str, style: str) -> str:
    return f'<div style="{style}">{inside}</div>'


def _text(text: str) -> str:
    return escape(visible(text))
