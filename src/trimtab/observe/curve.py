"""The learning curve of a run as one picture: reward or loss with its evaluation, what it depends on, and where the time went.

Reads the run's metrics only, so it can be drawn while the run goes on. No global matplotlib state is touched. What a run has no
metric for has no panel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.base.errors import ConfigError, DataError
from trimtab.observe.format import percent
from trimtab.observe.history import SHOWN_PHASES
from trimtab.record.columns import MetricTable, Points
from trimtab.record.layout import METRICS_FILE
from trimtab.record.reader import RunReader

Lines = Mapping[str, Points]
"""What a panel shows, by its name in the legend."""

CURVE_FILE = "curve.png"
INK, REWARD, EVAL, LENGTH = "#333333", "#0072b2", "#d55e00", "#009e73"
LINE_COLORS = (LENGTH, "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f")
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
MAX_PARTS = len(LINE_COLORS)
NOT_PARTS = ("mean", "std", "zero_std_groups", "failed", "latency_max_s", "repeated")
"""`reward/NAME` that is no part of the reward."""
OBJECTIVES = (
    ("reward/mean", "mean reward", "training reward"),
    ("sft/loss", "loss (nats a token)", "training loss"),
    ("rm/loss", "loss (nats a pair)", "training loss"),
)
"""What is learned: its metric, the axis, and its name in the legend."""
EVALUATIONS = (("eval/pass@1", "eval pass@1"), ("eval/score", "eval score"), ("eval/loss", "eval loss"))


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
    reader = RunReader(run_dir)
    reader.update()
    reader.refuse_damaged()
    metrics = reader.metrics
    if not len(metrics):
        raise DataError(f"{reader.folder / METRICS_FILE} has no metrics yet: there is nothing to draw")
    small = small_panels(metrics)
    lines = math.ceil(len(small) / 2)
    inches = 5.4 + 1.8 * lines
    figure = Figure(figsize=(10, inches), dpi=120)
    FigureCanvasAgg(figure)
    edges = {
        "left": 0.09,
        "right": 0.94,
        "top": 1 - 0.45 / inches,
        "bottom": 0.5 / inches,
    }  # no layout engine: seconds less
    grid = figure.add_gridspec(
        lines + 2, 2, height_ratios=[2.4, *[1.3] * lines, 1.7], hspace=0.35, wspace=0.25, **edges
    )
    top = figure.add_subplot(grid[0, :])
    _draw_objective(top, metrics)
    axes = [top]
    for index, (label, shown) in enumerate(small.items()):
        axes.append(figure.add_subplot(grid[1 + index // 2, index % 2], sharex=top))
        _draw_lines(axes[-1], label, shown)
    axes.append(figure.add_subplot(grid[-1, :], sharex=top))
    _draw_time(axes[-1], metrics)
    for axis in axes:
        _style(axis)
    axes[-1].set_xlabel("step", color=INK)
    axes[-1].xaxis.set_major_locator(MaxNLocator(nbins=10, steps=[1, 2, 5, 10], integer=True))
    axes[-1].margins(x=0.02)
    figure.align_ylabels()
    top.set_title(title(Path(run_dir).resolve().name, metrics), loc="left", fontsize=12, color=INK, pad=12)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, format="png")


def small_panels(metrics: MetricTable) -> dict[str, dict[str, Points]]:
    """What the objective depends on, by the label of its axis; panels and lines without a value are left out."""
    steps, without = metrics.points("reward/zero_std_groups")
    found: dict[str, dict[str, Points]] = {
        "response length\n(tokens)": {"": metrics.points("response/length_mean")},
        "share": {
            "responses cut off": metrics.points("response/truncated"),
            "groups with signal": (steps, 1.0 - without),
        },
        "entropy\n(nats a token)": {"": metrics.points("policy/entropy")},
        "KL (nats a token)": {
            "to the reference": metrics.points("policy/kl_ref"),
            "within a step": _unless_nothing(metrics.points("policy/kl_old")),
        },
        "reward parts": {name: metrics.points(f"reward/{name}") for name in reward_parts(metrics)},
        "right (share)": {"training": metrics.points("rm/accuracy"), "held out": metrics.points("eval/accuracy")},
        "gradient norm": {"": metrics.points("policy/grad_norm")},
    }
    kept = {label: {name: points for name, points in lines.items() if len(points[0])} for label, lines in found.items()}
    return {label: lines for label, lines in kept.items() if lines}


def _unless_nothing(points: Points) -> Points:
    """None of it where all of it is 0, as the KL of a step with one update is."""
    return points if points[1].any() else (points[0][:0], points[1][:0])


def reward_parts(metrics: MetricTable) -> list[str]:
    """Names of the reward's parts, where it has several: one alone is the reward."""
    names = (name.removeprefix("reward/") for name in metrics.names if name.startswith("reward/"))
    parts = [name for name in names if name not in NOT_PARTS and "/" not in name]
    return parts[:MAX_PARTS] if len(parts) > 1 else []


def smooth(values: np.ndarray) -> np.ndarray:
    """Centred mean over about a tenth of the run; windows shrink at the ends, so nothing is extrapolated."""
    half = max(1, len(values) // 20)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    start, end = np.maximum(0, index - half), np.minimum(len(values), index + half + 1)
    return (sums[end] - sums[start]) / (end - start)


def title(name: str, metrics: MetricTable) -> str:
    """The run's name and what it achieved: the first and the last values, as the summary and the doctor have them."""
    parts = []
    for metric, label in (("reward/mean", "reward"), ("sft/loss", "loss"), ("rm/loss", "loss"), *EVALUATIONS):
        _, values = metrics.points(metric)
        if len(values):
            share = metric == "eval/pass@1"
            parts.append(f"{label} {_change([percent(v, 1) if share else f'{v:.3f}' for v in values])}")
    return f"{name}: {', '.join(parts)}" if parts else name


def _change(shown: list[str]) -> str:
    return shown[0] if len(shown) == 1 else f"{shown[0]} → {shown[-1]}"


def binned(edges: np.ndarray, points: Points) -> np.ndarray:
    """Mean of the values in each bin; 0 where a bin has none."""
    total, _ = np.histogram(points[0], edges, weights=points[1])
    number, _ = np.histogram(points[0], edges)
    return total / np.maximum(1, number)


def _draw_objective(axis: Any, metrics: MetricTable) -> None:
    handles: list[Any] = []
    values = np.array([])
    for metric, label, name in OBJECTIVES:
        found = metrics.points(metric)
        if len(found[0]):
            axis.set_ylabel(label)
            handles.append(_draw_line(axis, found, REWARD, f"{name} (smoothed)"))
            values = found[1]
    for metric, name in EVALUATIONS:
        found = metrics.points(metric)
        if not len(found[0]):
            continue
        comparable = metric != "eval/pass@1" or not len(values) or (values.min() >= -0.25 and values.max() <= 1.25)
        target = axis if comparable else axis.twinx()
        handles += target.plot(*found, color=EVAL, linewidth=1, linestyle=":", marker="o", label=name)
        if target is not axis:
            target.set_ylabel(name, color=EVAL)
            target.spines[:].set_visible(False)
            target.tick_params(colors=EVAL, length=0)
    _legend(axis, handles)


def _draw_line(axis: Any, points: Points, color: str, label: str) -> Any:
    """Every step, faint, and the smoothed line over it, which is returned."""
    steps, values = points
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=1, marker="." if len(steps) < 3 else "")
    return axis.plot(steps, smooth(values), color=color, linewidth=2, label=label)[0]


def _draw_lines(axis: Any, label: str, lines: Lines) -> None:
    handles = [_draw_line(axis, points, color, name) for (name, points), color in zip(lines.items(), LINE_COLORS)]
    if min(points[1].min() for points in lines.values()) >= 0:
        axis.set_ylim(0, max(points[1].max() for points in lines.values()) * 1.15 or 1)
    axis.set_ylabel(label)
    _legend(axis, handles if "" not in lines else [])


def _draw_time(axis: Any, metrics: MetricTable) -> None:
    """Stacked mean seconds a step, in bins wide enough to be seen."""
    timed = {name: metrics.points(f"time/{name}") for name in SHOWN_PHASES}
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
