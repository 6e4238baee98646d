"""The main chart as an SVG drawn in Python: for mail previews and readers without scripts. No style attributes, no addresses."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.observe.curve import smooth
from trimtab.observe.learned import show
from trimtab.observe.look import RunLook

WIDTH, HEIGHT = 720, 280
LEFT, RIGHT, TOP, BOTTOM = 52, 130, 14, 30
INK, FAINT, GRID, HELD = "#2f3a55", "#c3c9d4", "#e6e9ee", "#c2570c"
OBJECTIVES = (
    ("reward/mean", "reward", ""),
    ("rm/accuracy", "accuracy", "share"),
    ("sft/loss", "loss", ""),
    ("rm/loss", "loss", ""),
)
SCORES = (
    ("eval/pass@1", "pass@1", "share"),
    ("eval/score", "score", ""),
    ("eval/accuracy", "held out", "share"),
    ("eval/loss", "held out", ""),
)
MOST_POINTS = 600

Points = tuple[NDArray[np.float64], NDArray[np.float64]]


def main_chart(look: RunLook) -> str:
    """An SVG, or nothing where there is no point to draw."""
    table = look.reader.metrics
    objective = next((entry for entry in OBJECTIVES if len(table.points(entry[0])[0])), None)
    score = next((entry for entry in SCORES if len(table.points(entry[0])[0])), None)
    if objective is not None and score is not None and score[0] == "eval/loss" and objective[0] == "rm/accuracy":
        score = None
    drawn = [table.points(entry[0]) for entry in (objective, score) if entry is not None]
    if not drawn:
        return ""
    low, high = _range([points[1] for points in drawn])
    first, last = min(float(points[0].min()) for points in drawn), max(float(points[0].max()) for points in drawn)
    frame = _Frame(first, last if last > first else first + 1, low, high)
    parts = [frame.axes()]
    if objective is not None:
        steps, values = table.points(objective[0])
        parts.append(frame.line(_thin((steps, values)), FAINT, 1))
        parts.append(frame.line(_thin((steps, smooth(values) if len(values) > 4 else values)), INK, 2.5))
        parts.append(
            frame.label(
                f"{objective[1]} {show(float(smooth(values)[-1]), objective[2])}", float(smooth(values)[-1]), INK
            )
        )
    if score is not None:
        steps, values = _thin(table.points(score[0]))
        parts.append(frame.line((steps, values), HELD, 1.2, "3 3"))
        parts += [
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.5" fill="{HELD}"/>'
            for x, y in zip(steps, values)
        ]
        parts.append(frame.label(f"{score[1]} {show(float(values[-1]), score[2])}", float(values[-1]), HELD))
    words = escape(" and ".join(entry[0] for entry in (objective, score) if entry is not None))
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{words} over steps" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _range(series: list[NDArray[np.float64]]) -> tuple[float, float]:
    values = np.concatenate(series)
    low, high = float(values.min()), float(values.max())
    if low == high:
        low, high = low - 0.5, high + 0.5
    return low - 0.05 * (high - low), high + 0.08 * (high - low)


def _thin(points: Points) -> Points:
    """The least and the greatest value of every stretch, in order, where there are more points than can be seen."""
    steps, values = points
    if len(values) <= MOST_POINTS:
        return points
    edges = np.linspace(0, len(values), MOST_POINTS // 2 + 1).astype(int)
    kept: list[int] = []
    for start, end in pairwise(edges.tolist()):
        part = values[start:end]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return steps[kept], values[kept]


class _Frame:
    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self.first, self.last, self.low, self.high = first, last, low, high
        self._labels: list[float] = []

    def x(self, step: float) -> float:
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def axes(self) -> str:
        parts = []
        for value in _ticks(self.low, self.high, 5):
            at = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="{GRID}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end" fill="#5b6472">{value:g}</text>')
        for step in _ticks(self.first, self.last, 7):
            if step == int(step):
                at = self.x(step)
                parts.append(
                    f'<text x="{at:.1f}" y="{HEIGHT - 10}" text-anchor="middle" fill="#5b6472">{int(step)}</text>'
                )
        return "".join(parts)

    def line(self, points: Points, colour: str, width: float, dashes: str = "") -> str:
        shown = " ".join(f"{self.x(step):.1f},{self.y(value):.1f}" for step, value in zip(*points))
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        return f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="{width}"{dashed}/>'

    def label(self, text: str, value: float, colour: str) -> str:
        at = self.y(value)
        while any(abs(at - other) < 15 for other in self._labels):
            at += 15
        self._labels.append(at)
        return (
            f'<text x="{WIDTH - RIGHT + 10}" y="{at + 4:.1f}" fill="{colour}" font-weight="600">{escape(text)}</text>'
        )


def _ticks(low: float, high: float, about: int) -> list[float]:
    rough = (high - low) / about
    scale = 10 ** math.floor(math.log10(rough))
    step = next(factor * scale for factor in (1, 2, 5, 10) if factor * scale >= rough)
    first = math.ceil(low / step)
    return [round(number * step, 10) for number in range(first, math.floor(high / step) + 1)]
