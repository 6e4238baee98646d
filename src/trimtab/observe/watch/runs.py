"""A table of the runs in a folder: what each does, how far it is and what it has reached. What moved last is at the top."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from trimtab.base.errors import DataError
from trimtab.observe.doctor.examine import MIN_STEPS_TO_JUDGE
from trimtab.observe.format import MISSING, duration, gib, number, percent
from trimtab.observe.look import RunLook
from trimtab.observe.visible import visible
from trimtab.observe.watch.fit import Lines, cut
from trimtab.observe.watch.view import MARKS, STATE_LEVEL
from trimtab.record.layout import CHECKPOINTS, CONFIG, METRICS_FILE, NOW_FILE
from trimtab.record.reader import RunReader

MAX_DEPTH = 3
JUDGE_EVERY_S = 10.0
HEAD = ("run", "state", "step", "learns", "held out", "findings", "s a step", "peak", "last sign")
RIGHT = {2, 3, 4, 6, 7, 8}


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs, at most three levels below. A checkpoint holds a config, too, and is none; links are not followed."""
    found: list[Path] = []

    def look(place: Path, depth: int) -> None:
        try:
            inside = sorted(path for path in place.iterdir() if path.is_dir() and not path.is_symlink())
        except OSError:
            return
        for path in inside:
            if (path / CONFIG).is_file():
                found.append(path)
            elif depth < MAX_DEPTH and path.name != CHECKPOINTS and not path.name.startswith("."):
                look(path, depth + 1)

    look(folder, 1)
    return found


class RunsSource:
    """The runs below a folder; each is read once, and then only what was added."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock = folder, clock
        self._looks: dict[Path, RunLook] = {}
        self._heads: dict[Path, dict[str, Any]] = {}
        self._judged: dict[Path, tuple[float, str]] = {}
        """When the rules were last asked, and what they said."""
        self.refresh()

    def refresh(self) -> bool:
        """True where a run is new or has written something."""
        before = dict(self._heads)
        found = find_runs(self.folder)
        self._heads = {path: self._head(path) for path in found}
        return self._heads != before

    @property
    def rows(self) -> list[dict[str, Any]]:
        return sorted(self._heads.values(), key=lambda row: -float(row["sign"]))

    def _head(self, path: Path) -> dict[str, Any]:
        look = self._looks.setdefault(path, RunLook(RunReader(path), self._clock))
        name = visible(str(path.relative_to(self.folder)))
        try:
            changed = look.refresh()
        except DataError:
            return {"name": name, "kind": "unknown", "sign": 0.0}
        sign = max(_mtime(path / METRICS_FILE), _mtime(path / NOW_FILE), _mtime(path / CONFIG))
        known = self._heads.get(path)
        kind = look.state.kind
        if known and "facts" in known and not changed and known["kind"] == kind:
            return known | {"sign": sign}
        return {"name": name, "kind": kind, "sign": sign, "facts": _facts(look) | {"findings": self._judge(look, kind)}}

    def _judge(self, look: RunLook, kind: str) -> str:
        """The rules take up to a second on a long run, so one that is running is judged at most every ten seconds."""
        at, said = self._judged.get(look.folder, (-JUDGE_EVERY_S, ""))
        if kind != "running" or self._clock() - at >= JUDGE_EVERY_S:
            said = _findings(look)
            self._judged[look.folder] = self._clock(), said
        return said


def _facts(look: RunLook) -> dict[str, str]:
    reader, metrics = look.reader, look.reader.metrics
    steps = metrics.steps
    learned = next((name for name in ("reward/mean", "sft/loss", "rm/loss") if name in metrics.names), "")
    score = next(
        (name for name in ("eval/pass@1", "eval/score", "eval/accuracy", "eval/loss") if name in metrics.names), ""
    )
    peaks = [_last(reader, name) for name in metrics.names if name.startswith("memory/") and name.endswith("_peak_gib")]
    _, seconds = metrics.points("time/total")
    share = score in ("eval/pass@1", "eval/accuracy")
    return {
        "step": f"{int(steps[-1]) if len(steps) else 0}/{look.steps or MISSING}",
        "learns": number(_last(reader, learned)),
        "held out": percent(_last(reader, score), 1) if share else number(_last(reader, score)),
        "s a step": duration(float(np.median(seconds[-20:])) if len(seconds) else None),
        "peak": gib(max((peak for peak in peaks if peak is not None), default=None)),
    }


def _findings(look: RunLook) -> str:
    """How many, and how bad the worst is; a dash where too few steps were made for any rule to judge."""
    done = look.done
    if not done.findings:
        return f"{MARKS['ok'][0]} none" if len(look.record.steps) >= MIN_STEPS_TO_JUDGE else MISSING
    worst = "bad" if any(finding.level == "bad" for finding in done.findings) else "warn"
    return f"{MARKS[worst][0]} {len(done.findings)}"


def _last(reader: RunReader, name: str) -> float | None:
    _, values = reader.metrics.points(name)
    return float(values[-1]) if len(values) else None


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def runs_lines(rows: list[dict[str, Any]], now: float, width: int, height: int) -> Lines:
    """The table, cut to the screen: names give way first, then the columns at the right."""
    cells = [[row["name"], *_cells(row, now)] for row in rows]
    widths = [max(len(each[at]) for each in [list(HEAD), *cells]) for at in range(len(HEAD))]
    while len(widths) > 3 and sum(widths[1:]) + 2 * (len(widths) - 1) + 12 > width:
        widths.pop()
    widths[0] = max(4, min(widths[0], width - sum(widths[1:]) - 2 * (len(widths) - 1)))
    lines = [_line(list(HEAD), widths, "bold")]
    for row, each in zip(rows[: max(0, height - 2)], cells):
        lines.append(_line(each, widths, "", MARKS[STATE_LEVEL.get(row["kind"], "unknown")][1]))
    left = len(rows) - (len(lines) - 1)
    if not rows:
        lines.append(Text("no run in this folder yet", style="dim"))
    elif left:
        lines.append(Text(f"and {left} more", style="dim"))
    return [cut(line, width) for line in lines[:height]]


def _cells(row: dict[str, Any], now: float) -> list[str]:
    mark = MARKS[STATE_LEVEL.get(row["kind"], "unknown")][0]
    facts = row.get("facts") or {}
    sign = f"{duration(max(0.0, round(now - row['sign'])))} ago" if row["sign"] else MISSING
    return [f"{mark} {row['kind']}", *(facts.get(name, MISSING) for name in HEAD[2:-1]), sign]


def _line(cells: list[str], widths: list[int], style: str, state_style: str = "") -> Text:
    line = Text(style=style)
    for at, width in enumerate(widths):
        cell = cut(Text(cells[at]), width)
        pad = " " * (width - cell.cell_len)
        if at:
            line.append("  ")
        line.append(
            (pad if at in RIGHT else "") + cell.plain + ("" if at in RIGHT else pad), state_style if at == 1 else ""
        )
    return line
