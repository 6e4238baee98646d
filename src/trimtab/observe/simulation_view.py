"""A simulated run as a timeline: in text, and as one HTML page with a picture that needs nothing else."""

from __future__ import annotations

from html import escape
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.plan.scenario import mean_length
from trimtab.plan.simulate import Scenario, Simulated, SimulatedSpan

COLUMNS = 50
MAX_TRACKS = 12
"""Engines that are drawn; the others are told as a number."""
LETTERS = {"rollout": "r", "publish": "p", "update": "U", "reward": "$"}
COLORS = {"rollout": ("#4c78a8", "#9ecae9"), "publish": ("#b279a2", "#b279a2"), "update": ("#54a24b", "#88d27a"),
          "reward": ("#f58518", "#ffbf79")}  # fmt: skip
STYLES = {"rollout": ("blue", "bright_blue"), "publish": ("magenta", "magenta"), "update": ("green", "bright_green"),
          "reward": ("yellow", "yellow")}  # fmt: skip


def drawn_tracks(result: Simulated) -> list[str]:
    """The first engines, and all tracks that are not engines."""
    engines = [name for name in result.tracks if name.startswith("engine")]
    return [*engines[:MAX_TRACKS], *(name for name in result.tracks if name not in engines)]


def simulation_view(scenario: Scenario, result: Simulated) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for track in drawn_tracks(result):
        table.add_row(Text(track), _line(track, result), Text(f"{result.busy(track):4.0%} busy".replace("%", " %")))
    left = len(scenario.engines) - MAX_TRACKS
    parts: list[RenderableType] = [table]
    parts += [Text(f"and {left} more engines", style="dim")] if left > 0 else []
    parts += [
        Text("r rollout  p publish  $ rewards  U score and update; steps take turns in shade", style="dim"),
        Text(),
    ]
    parts.append(Text(summary(scenario, result)))
    return Panel(
        Group(*parts), title="Simulation", title_align="left", box=box.ROUNDED, border_style="cyan", expand=False
    )


def summary(scenario: Scenario, result: Simulated) -> str:
    tokens = result.tokens / len(result.steps)
    return (
        f"{len(result.steps)} steps in {result.total:.4g} s; a step takes {result.step_s:.4g} s once under way. "
        f"{len(scenario.engines)} engines of {scenario.engines[0].rows} rows, {mean_length(scenario):.0f} new tokens a sequence: "
        f"{tokens / result.step_s:,.0f} new tokens/s"
    )


def _line(track: str, result: Simulated) -> Text:
    """A cell for each stretch of time: what the track does for the most of it."""
    mine = [span for span in result.spans if span.track == track]
    cell, line = result.total / COLUMNS, Text()
    for column in range(COLUMNS):
        begin, end = column * cell, (column + 1) * cell
        shares = [(min(span.end, end) - max(span.begin, begin), span) for span in mine]
        most, span = max(shares, key=lambda share: share[0], default=(0.0, None))
        if span is None or most <= 0 or 2 * sum(max(0.0, share) for share, _ in shares) < cell:
            line.append("·", style="dim")
        else:
            line.append(LETTERS[span.name], style=STYLES[span.name][span.step % 2])
    return line


def simulation_dict(scenario: Scenario, result: Simulated) -> dict[str, Any]:
    """The result as JSON has it."""
    return {
        "seconds": round(result.total, 6),
        "step_seconds": round(result.step_s, 6),
        "engines": len(scenario.engines),
        "rows": scenario.engines[0].rows,
        "staleness": scenario.staleness,
        "tokens": result.tokens,
        "sequences": list(result.sequences),
        "stolen": result.stolen,
        "busy": {track: round(result.busy(track), 4) for track in result.tracks},
        "steps": [{name: round(value, 6) for name, value in vars(step).items()} for step in result.steps],
        "spans": [
            {
                "track": span.track,
                "name": span.name,
                "step": span.step,
                "begin": round(span.begin, 6),
                "end": round(span.end, 6),
            }
            for span in result.spans
        ],
    }


def simulation_html(title: str, scenario: Scenario, result: Simulated) -> str:
    """One page with no script and nothing loaded from elsewhere; names and times stand in the tooltips of spans."""
    tracks, height, left, width = drawn_tracks(result), 22, 90, 1100
    scale = (width - left - 10) / result.total
    drawn = []
    for row, track in enumerate(tracks):
        y = 10 + row * height
        drawn.append(f'<text x="0" y="{y + 14}">{escape(track)}</text>')
        drawn += [_rect(span, left + span.begin * scale, y, span.seconds * scale, height - 4)
                  for span in result.spans if span.track == track]  # fmt: skip
    bottom = 10 + len(tracks) * height
    for mark in range(11):
        x, seconds = left + mark / 10 * result.total * scale, mark / 10 * result.total
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="8" y2="{bottom}" stroke="#8884"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{seconds:.3g} s</text>')
    keys = " ".join(
        f'<span style="background:{colors[0]}">&nbsp;&nbsp;</span> {name}' for name, colors in COLORS.items()
    )
    more = len(scenario.engines) - MAX_TRACKS
    rest = f"<p>and {more} more engines</p>" if more > 0 else ""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        "<style>body{font:14px system-ui,sans-serif;margin:2em;max-width:1150px}svg text{font:12px system-ui,sans-serif}</style>"
        f"<h1>{escape(title)}</h1><p>{escape(summary(scenario, result))}</p><p>{keys}</p>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 24}" role="img" '
        f'aria-label="timeline">{"".join(drawn)}</svg>{rest}</html>\n'
    )


def _rect(span: SimulatedSpan, x: float, y: float, width: float, height: float) -> str:
    told = f"{span.name} of step {span.step}: {span.begin:.4g} to {span.end:.4g} s"
    color = COLORS[span.name][span.step % 2]
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(0.5, width):.2f}" height="{height}" fill="{color}">'
        f"<title>{escape(told)}</title></rect>"
    )
