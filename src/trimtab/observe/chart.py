"""What a chart of the catalogue (charts.py) is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Page = Literal["overview", "learning", "speed", "memory"]
Style = Literal["line", "thin", "smooth", "dots", "dashed"]
Kind = Literal["lines", "stack", "heat", "bars"]
RL, SFT, RM = "rl", "sft", "reward_model"
ALL, GIVEN = (RL, SFT, RM), (SFT, RM)
"""Stages."""


@dataclass(frozen=True)
class ChartLine:
    """A metric in a chart; or, with `prefix`, one line for every metric whose name begins with it and has no further slash. A
    star in a prefix stands for one part of a whole name: `reward/*/wait_s`."""

    name: str | None
    label: str = ""
    style: Style = "line"
    prefix: str | None = None
    without: tuple[str, ...] = ()
    """Metrics with the prefix that are something else."""

    def shows(self, metric: str) -> bool:
        if self.prefix is None:
            return metric == self.name
        if "*" in self.prefix:
            wanted, parts = self.prefix.split("/"), metric.split("/")
            return len(wanted) == len(parts) and all(want in ("*", part) for want, part in zip(wanted, parts))
        rest = metric.removeprefix(self.prefix)
        return metric.startswith(self.prefix) and "/" not in rest and metric not in self.without

    def label_of(self, metric: str) -> str:
        """The line's own label, or what is special about the metric among those of the prefix."""
        if self.prefix is None:
            return self.label
        if "*" not in self.prefix:
            return metric.removeprefix(self.prefix).replace("_", " ")
        at = self.prefix.split("/").index("*")
        return " ".join(part for part in metric.split("/")[at:] if part != "mean").replace("_", " ")

    def as_json(self) -> dict[str, Any]:
        named = {"name": self.name} if self.prefix is None else {"prefix": self.prefix, "without": list(self.without)}
        return named | {"label": self.label, "style": self.style}


@dataclass(frozen=True)
class Chart:
    """What is drawn in one frame."""

    id: str
    title: str
    page: Page
    metrics: tuple[ChartLine, ...]
    unit: str
    """Of the vertical axis; `share` is shown in per cent."""
    note: str
    """What it shows and what to read in it, in a sentence."""
    kind: Kind = "lines"
    log: bool = False
    zero: bool = False
    """The axis begins at 0."""
    stages: tuple[str, ...] = ALL
    small: bool = False
    order: int = 0

    def lines_of(self, metrics: Sequence[str]) -> list[tuple[str, ChartLine]]:
        """The metrics of a run that it shows, each with its line."""
        return [(name, line) for line in self.metrics for name in metrics if line.shows(name)]

    def as_json(self, metrics: Sequence[str] | None = None) -> dict[str, Any]:
        """`metrics`: those of the runs that are shown; lines with a prefix are then written out."""
        rest = {key: value for key, value in asdict(self).items() if key not in ("metrics", "stages")}
        lines = [line.as_json() for line in self.metrics if metrics is None or line.prefix is None]
        for name, line in self.lines_of(metrics or ()):
            if line.prefix is not None:
                lines.append({"name": name, "label": line.label_of(name), "style": line.style})
        return rest | {"metrics": lines, "stages": list(self.stages)}


def lines(*names: str, style: Style = "line") -> tuple[ChartLine, ...]:
    """`name=label`, or a name alone."""
    parts = [name.partition("=") for name in names]
    return tuple(ChartLine(name, label or name.split("/", 1)[1].replace("_", " "), style) for name, _, label in parts)


def raw_and_smooth(name: str, label: str) -> tuple[ChartLine, ...]:
    return ChartLine(name, label, "thin"), ChartLine(name, f"{label}, smoothed", "smooth")
