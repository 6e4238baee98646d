"""The overview of a run for a width: one column below 120 characters, two from there, three from 160."""

from __future__ import annotations

from functools import partial

from trimtab.observe.watch.fit import Lines, ScreenPart, beside, column, cut, wrap
from trimtab.observe.watch.sections import (
    CURVES,
    curve_lines,
    curve_title,
    engine_lines,
    event_lines,
    finding_lines,
    header,
    memory_lines,
    memory_rows,
    phase_lines,
    progress_lines,
    verdict_lines,
)
from trimtab.observe.watch.view import RunView, mapping

TWO_COLUMNS, THREE_COLUMNS = 120, 160
MAX_VERDICT, MAX_CURVE, MAX_EVENTS = 6, 9, 200
GAP = 2


def overview(view: RunView, width: int, height: int) -> Lines:
    """At most `height` lines of at most `width` characters."""
    top = _top(view, width, min(height, 3 + MAX_VERDICT))
    widths = column_widths(width)
    rest = height - len(top)
    found = [column(parts, each, rest) for parts, each in zip(_columns(view, len(widths)), widths)]
    return [cut(line, width) for line in [*top, *beside(found, widths, GAP)]][:height]


def column_widths(width: int) -> list[int]:
    count = 3 if width >= THREE_COLUMNS else 2 if width >= TWO_COLUMNS else 1
    each, more = divmod(width - GAP * (count - 1), count)
    return [each + (number < more) for number in range(count)]


def _top(view: RunView, width: int, most: int) -> Lines:
    """Name and state, the verdict, and how far it is."""
    room = max(1, most - 3)
    found = mapping(view.run.get("verdict"))
    said = sum(len(wrap(str(mapping(part).get("text") or ""), width - 2, 9)) for part in found.get("parts") or [])
    lines = [header(view, width), *verdict_lines(view, width, max(1, min(room, said + 1)))]
    return [*lines, *progress_lines(view, width, 2)]


def _columns(view: RunView, count: int) -> list[list[ScreenPart]]:
    parts = _parts(view)
    curves = [parts["first"], parts["second"]]
    use = [parts["phases"], parts["memory"], parts["engine"]]
    told = [parts["findings"], parts["events"]]
    if count == 1:
        return [[*curves, parts["phases"], parts["memory"], parts["findings"], parts["engine"], parts["events"]]]
    return [[*curves, parts["events"]], [*use, parts["findings"]]] if count == 2 else [curves, use, told]


def _parts(view: RunView) -> dict[str, ScreenPart]:
    (first, label), (second, other) = CURVES.get(view.stage, CURVES["rl"])
    phases = mapping(view.run.get("phases")).get("rows") or []
    timed = sum(1 for row in phases if mapping(row).get("seconds"))
    planned = len(memory_rows(view))
    events, engine = len(view.rows("events")), any(name in view.last for name in ENGINE_NAMES)
    findings = max(1, len(view.rows("findings")) + len(view.rows("damaged")))

    def curve(metric: str, label: str, rank: int) -> ScreenPart:
        has = bool(len(view.metrics.points(metric)[0]))
        build = partial(curve_lines, view, metric)
        title = curve_title(view, metric, label)
        return ScreenPart(title, build, 3 if has else 1, MAX_CURVE if has else int(rank == 1), rank)

    return {
        "first": curve(first, label, 1),
        "second": curve(second, other, 5),
        "phases": ScreenPart("where a step goes", partial(phase_lines, view), min(timed, 2), timed, 2),
        "memory": ScreenPart("memory", partial(memory_lines, view), min(planned, 2), planned, 4),
        "findings": ScreenPart("findings", partial(finding_lines, view), 1, findings, 3),
        "engine": ScreenPart("engine", partial(engine_lines, view), 1, 3 if engine else 0, 6),
        "events": ScreenPart("events", partial(event_lines, view), min(events, 2), min(events, MAX_EVENTS), 7),
    }


ENGINE_NAMES = ("rollout/tokens_per_s", "run/microbatches")
