"""trace.json as a page draws it: spans by track, counters, and how many spans were left out to stay small.

Where there are too many, whole steps are kept: the first twenty, the slowest, the last twenty, and others evenly between.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from trimtab.record.jsonl import finite
from trimtab.record.layout import TRACE_FILE
from trimtab.record.reader import read_trace

MOST_SPANS, MOST_EVENTS = 20_000, 600_000
"""Spans of a page, and events that are read for them."""
MOST_COUNTS = 5_000
"""Points of a counter."""

Span = list[Any]


def trace(
    folder: Path, first: float | None = None, last: float | None = None, most: int = MOST_SPANS
) -> dict[str, Any] | None:
    """`first`, `last`: seconds (Unix) between which spans are wanted. None where there is no trace."""
    names: dict[Any, str] = {}
    spans: list[Span] = []
    counters: dict[str, list[list[float]]] = defaultdict(list)
    left_out = 0
    for number, event in enumerate(read_trace(folder / TRACE_FILE)):
        if number >= MOST_EVENTS:
            left_out += 1
            continue
        kind, args = event.get("ph"), event.get("args")
        args = args if isinstance(args, dict) else {}
        at = finite(event.get("ts"))
        if kind == "M" and event.get("name") == "thread_name":
            names[event.get("tid")] = str(args.get("name"))
        elif at is None or not _within(at, finite(event.get("dur")) or 0.0, first, last):
            continue
        elif kind == "X":
            step = args.get("step")
            more = {key: value for key, value in args.items() if key != "step"}
            length = finite(event.get("dur")) or 0.0
            track = event.get("tid")
            spans.append([track, str(event.get("name")), at, length, step if type(step) is int else None, more or None])
        elif kind == "C":
            for name, value in args.items():
                known = finite(value)
                label = str(event.get("name")) if name == "value" else f"{event.get('name')} {name}"
                if known is not None:
                    counters[label].append([at, known])
    if not spans and not counters:
        return None
    return _shown(names, spans, counters, left_out, most)


def _within(at: float, length: float, first: float | None, last: float | None) -> bool:
    """Whether a span, in microseconds, touches the seconds that are asked for."""
    return (first is None or at + length >= first * 1e6) and (last is None or at <= last * 1e6)


def _shown(
    names: dict[Any, str], spans: list[Span], counters: dict[str, list[list[float]]], left_out: int, most: int
) -> dict[str, Any]:
    kept = spans if len(spans) <= most else _some_steps(spans, names, most)
    tids = sorted({span[0] for span in kept}, key=lambda tid: (tid not in names, str(tid).zfill(9)))
    places = {tid: place for place, tid in enumerate(tids)}
    for span in kept:
        span[0] = places[span[0]]
    thin = {name: points[:: max(1, -(-len(points) // MOST_COUNTS))] for name, points in counters.items()}
    tracks = [names.get(tid, f"track {tid}") for tid in tids]
    return {
        "spans": kept,
        "tracks": tracks,
        "counters": thin,
        "left_out": left_out + len(spans) - len(kept),
        "file": TRACE_FILE,
    }


def _some_steps(spans: list[Span], names: dict[Any, str], most: int) -> list[Span]:
    by_step: dict[int | None, list[Span]] = defaultdict(list)
    for span in spans:
        by_step[span[4]].append(span)
    steps = sorted(step for step in by_step if step is not None)
    slowest = sorted(steps, key=lambda step: -max(span[3] for span in by_step[step]))[:20]
    even = [steps[at] for at in _spread(len(steps))]
    kept: list[Span] = []
    seen: set[int | None] = set()
    for step in (*steps[:20], *slowest, *steps[-20:], None, *even):
        if step in seen or len(kept) + len(by_step[step]) > most:
            continue
        seen.add(step)
        kept += by_step[step]
    return sorted(kept, key=lambda span: (span[2], -span[3]))


def _spread(count: int) -> list[int]:
    """0 to count - 1 in an order in which every beginning lies evenly over the whole."""
    found: dict[int, None] = {}
    parts = 1
    while len(found) < count:
        for part in range(parts + 1):
            found.setdefault(round(part * (count - 1) / parts))
        parts *= 2
    return list(found)
