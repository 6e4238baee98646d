"""The learning curve of a run as one picture: reward and evaluation, response length, and where each step's time went.

Reads metrics.jsonl only, so it can be drawn while the run goes on. No global matplotlib state is touched.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.errors import ConfigError, DataError
from trimtab.observe.format import percent
from trimtab.observe.history import SHOWN_PHASES
from trimtab.observe.sinks import read_metrics

Series = tuple[np.ndarray, np.ndarray]
"""(steps, values), finite only, in step order."""

INK, REWARD, EVAL, LENGTH = "#333333", "#0072b2", "#d55e00", "#009e73"
PHASE_COLORS = {
    "rollout": "#0072b2",
    "reward": "#e69f00",
    "score": "#56b4e9",
    "update": "#009e73",
    "publish": "#cc79a7",
    "checkpoint": "#8c6bb1",
    "eval": "#d55e00",
    "idle": "#d0d0d0",
}
MAX_BINS = 120


def plot_curve(run_dir: Path, out: Path) -> None:
    """Draw RUN's learning curve into `out` (PNG)."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise ConfigError(
            "drawing a learning curve needs matplotlib. Install it with: pip install 'trimtab[plot]'"
        ) from error
    rows = read_metrics(run_dir)
    if not rows:
        raise DataError(f"{Path(run_dir) / 'metrics.jsonl'} has no metrics yet: there is nothing to draw")
    figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    reward_axis, length_axis, time_axis = figure.subplots(3, 1, sharex=True, height_ratios=[3, 1.3, 2])
    _draw_reward(reward_axis, series(rows, "reward/mean"), series(rows, "eval/pass@1"))
    _draw_length(length_axis, series(rows, "response/length_mean"))
    _draw_time(time_axis, rows)
    for axis in (reward_axis, length_axis, time_axis):
        _style(axis)
    time_axis.set_xlabel("step", color=INK)
    time_axis.xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    time_axis.margins(x=0.02)
    figure.align_ylabels()
    reward_axis.set_title(title(Path(run_dir).resolve().name, rows), loc="left", fontsize=12, color=INK, pad=12)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def series(rows: list[dict[str, Any]], name: str) -> Series:
    """One metric over the steps that have it."""
    points = sorted((row["step"], row[name]) for row in rows if row.get(name) is not None)
    return np.array([p[0] for p in points], dtype=float), np.array([p[1] for p in points], dtype=float)


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a tenth of the run; windows shrink at the ends, so nothing is extrapolated."""
    half = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(0, index - half), np.minimum(len(values), index + half + 1)
    return (sums[end] - sums[start]) / (end - start)


def title(name: str, rows: list[dict[str, Any]]) -> str:
    """The run's name and what it achieved."""
    parts = []
    _, rewards = series(rows, "reward/mean")
    if len(rewards):
        level = smooth(rewards)
        parts.append("reward " + _change([f"{value:.3g}" for value in level]))
    _, accuracy = series(rows, "eval/pass@1")
    if len(accuracy):
        parts.append("eval pass@1 " + _change([percent(value, 1) for value in accuracy]))
    return f"{name}: {', '.join(parts)}" if parts else name


def _change(shown: list[str]) -> str:
    return shown[0] if len(shown) == 1 else f"{shown[0]} → {shown[-1]}"


def binned(edges: np.ndarray, points: Series) -> np.ndarray:
    """Mean of the values in each bin; 0 where a bin has none."""
    total, _ = np.histogram(points[0], edges, weights=points[1])
    number, _ = np.histogram(points[0], edges)
    return total / np.maximum(1, number)


def _draw_reward(axis: Any, reward: Series, accuracy: Series) -> None:
    steps, values = reward
    handles = []
    if len(steps):
        axis.plot(steps, values, color=REWARD, alpha=0.3, linewidth=1, marker="." if len(steps) < 3 else "")
        handles += axis.plot(steps, smooth(values), color=REWARD, linewidth=2.2, label="training reward (smoothed)")
    if len(accuracy[0]):
        comparable = not len(values) or (values.min() >= -0.25 and values.max() <= 1.25)
        target = axis if comparable else axis.twinx()
        handles += target.plot(*accuracy, color=EVAL, linewidth=1, linestyle=":", marker="o", label="eval pass@1")
        if target is not axis:
            target.set_ylabel("eval pass@1", color=EVAL)
            target.spines[:].set_visible(False)
            target.tick_params(colors=EVAL, length=0)
    axis.set_ylabel("mean reward")
    _legend(axis, handles)


def _draw_length(axis: Any, length: Series) -> None:
    steps, values = length
    if len(steps):
        axis.plot(steps, values, color=LENGTH, alpha=0.3, linewidth=1, marker="." if len(steps) < 3 else "")
        axis.plot(steps, smooth(values), color=LENGTH, linewidth=2)
        axis.set_ylim(0, values.max() * 1.15 or 1)
    axis.set_ylabel("response length\n(tokens)")


def _draw_time(axis: Any, rows: list[dict[str, Any]]) -> None:
    """Stacked mean seconds a step, in bins wide enough to be seen."""
    timed = {name: series(rows, f"time/{name}") for name in SHOWN_PHASES}
    steps = np.concatenate([points[0] for points in timed.values()])
    if len(steps):
        first, last = steps.min(), steps.max()
        width = math.ceil((last - first + 1) / MAX_BINS)  # whole steps, so that every bin averages as many
        edges = np.arange(first - 0.5, last + 0.5 + width, width)
        base = np.zeros(len(edges) - 1)
        handles = []
        for name, points in timed.items():
            if not points[1].any():
                continue
            top = base + binned(edges, points)
            handles.append(
                axis.stairs(top, edges, baseline=base, fill=True, color=PHASE_COLORS[name], linewidth=0, label=name)
            )
            base = top
        _legend(axis, handles, columns=len(handles))
        axis.set_ylim(0, base.max() * 1.25 or 1)
    axis.set_ylabel("time (s a step)")


def _legend(axis: Any, handles: list[Any], columns: int = 1) -> None:
    place = "best" if columns == 1 else "upper left"
    spacing = {"columnspacing": 1.2, "handlelength": 1.4, "handletextpad": 0.5}
    if handles:
        axis.legend(handles=handles, loc=place, ncols=columns, frameon=False, fontsize=9, labelcolor=INK, **spacing)


def _style(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color("#999999")
    axis.tick_params(colors=INK, length=3)
    axis.yaxis.label.set_color(INK)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
