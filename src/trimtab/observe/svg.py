"""Small pictures as SVG, drawn in Python: a curve, and a bar of phases.

They go into HTML as images (`data:` addresses): notebooks that are not trusted, and sites that show notebooks, drop SVG that
stands in the page, and show images. An image runs no script and loads nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.observe.curve import EVAL, INK, PHASE_COLORS, smooth
from trimtab.record.columns import Points

MAX_POINTS = 240
"""Stretches that a curve is drawn in; each from its lowest to its highest value."""
FONT = "font-family='system-ui,sans-serif' font-size='11'"
GREY = "#767676"
COLORS = {**PHASE_COLORS, "update": "#007a5a"}
MIN_STEPS_TO_SMOOTH = 5


def as_image(svg: str, width: int, height: int, label: str) -> str:
    """An `<img>` that holds the picture."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" width="{width}" height="{height}" alt="{escape(label)}">'


def curve_svg(points: Points, scores: Points, width: int, height: int, show: Sequence[str] = ("", "")) -> str:
    """A curve: every step thin, smoothed thick; scores on the same axis as dots. `show`: lowest and highest value, in words."""
    left, right, top, bottom = 8, 8, 8, 18
    steps, values = points
    drawn: list[str] = []
    if len(steps):
        every = np.concatenate([steps, scores[0]])
        low, high = _axis(values, scores[1])
        across = _Scale(float(every.min()), float(every.max()), left, width - right)
        down = _Scale(low, high, height - bottom, top)
        low_at, high_at = float(down(np.array([low]))[0]), float(down(np.array([high]))[0])
        for at in (low_at, high_at):
            drawn.append(f"<line x1='{left}' x2='{width - right}' y1='{at:.1f}' y2='{at:.1f}' stroke='#e4e4e4'/>")
        drawn.append(_line(across(steps), down(values), "#9a9a9a", 0.8))
        if len(steps) >= MIN_STEPS_TO_SMOOTH:
            drawn.append(_line(across(steps), down(smooth(values)), INK, 1.8))
        for x, y in zip(across(scores[0]), down(scores[1])):
            drawn.append(f"<circle cx='{x:.1f}' cy='{y:.1f}' r='2.5' fill='{EVAL}'/>")
        drawn.append(f"<text x='{left}' y='{high_at + 11:.1f}' {FONT} fill='{GREY}'>{escape(show[1])}</text>")
        drawn.append(f"<text x='{left}' y='{low_at - 3:.1f}' {FONT} fill='{GREY}'>{escape(show[0])}</text>")
        first, last = int(every.min()), int(every.max())
        drawn.append(f"<text x='{left}' y='{height - 4}' {FONT} fill='{GREY}'>step {first}</text>")
        drawn.append(f"<text x='{width - right}' y='{height - 4}' {FONT} fill='{GREY}' text-anchor='end'>{last}</text>")
    return _picture(drawn, width, height)


def phases_svg(shares: Mapping[str, float], width: int, height: int) -> str:
    """Shares of a step side by side, each with its name where there is room."""
    total = sum(share for share in shares.values() if share > 0)
    drawn, at = [], 0.0
    for name, share in shares.items():
        if share <= 0 or not total:
            continue
        wide = width * share / total
        color = COLORS.get(name, GREY)
        drawn.append(f"<rect x='{at:.1f}' y='0' width='{max(0.5, wide):.1f}' height='{height}' fill='{color}'/>")
        if wide > 7.5 * len(name) + 30:
            ink = INK if name in ("idle", "score", "reward") else "#ffffff"
            words = escape(f"{name} {100 * share / total:.0f}%")
            drawn.append(f"<text x='{at + 6:.1f}' y='{height / 2 + 4:.1f}' {FONT} fill='{ink}'>{words}</text>")
        at += wide
    return _picture(drawn, width, height)


def _axis(values: NDArray[np.float64], scores: NDArray[np.float64]) -> tuple[float, float]:
    both = np.concatenate([values, scores])
    return float(both.min()), float(both.max())


class _Scale:
    """From values to places."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span, self._start, self._way = low, high - low, start, end - start

    def __call__(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        share = (values - self._low) / self._span if self._span > 0 else np.full(len(values), 0.5)
        return self._start + self._way * share


def _line(xs: NDArray[np.float64], ys: NDArray[np.float64], color: str, width: float) -> str:
    xs, ys = thinned(xs, ys)
    if len(xs) == 1:
        return f"<circle cx='{xs[0]:.1f}' cy='{ys[0]:.1f}' r='2' fill='{color}'/>"
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys))
    return f"<polyline points='{path}' fill='none' stroke='{color}' stroke-width='{width}'/>"


def thinned(xs: NDArray[np.float64], ys: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """At most two points a stretch, its lowest and its highest, in their order."""
    if len(xs) <= 2 * MAX_POINTS:
        return xs, ys
    kept: list[int] = []
    edges = np.linspace(0, len(xs), MAX_POINTS + 1).astype(int)
    for start, end in pairwise(edges):
        part = ys[start:end]
        kept += sorted({start + int(part.argmin()), start + int(part.argmax())})
    return xs[kept], ys[kept]


def _picture(drawn: Sequence[str], width: int, height: int) -> str:
    body = "".join(drawn)
    head = f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>"
    return f"{head}{body}</svg>"
