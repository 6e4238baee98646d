"""A trace reduced to two tables: which kernels (on a CPU: operators) took the time, and where the device had nothing to do.

Seconds of an operator are its own, without those of the operators that it calls, so that they add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_KERNELS, MAX_GAPS = 200, 50
MIN_GAP_S = 20e-6
"""Shorter gaps are the launch of the next kernel."""
BETWEEN = "between phases"
NS = 1e-9


@dataclass(frozen=True)
class KernelSpan:
    """Something that ran, and where: a thread of the host, or a device."""

    name: str
    start_ns: int
    duration_ns: int
    track: int = 0

    @property
    def end_ns(self) -> int:
        return self.start_ns + self.duration_ns


@dataclass
class _Sum:
    ns: int = 0
    calls: int = 0


def reduce_kernels(spans: Sequence[KernelSpan], phases: Sequence[KernelSpan]) -> dict[str, Any]:
    """`kernels` and `gaps` of RUN/profile/kernels.json. `phases`: those of the step, one after the other."""
    phases = sorted(phases, key=lambda span: span.start_ns)
    sums: dict[tuple[str, str], _Sum] = {}
    for span, own_ns in own_times(spans):
        found = sums.setdefault((span.name, phase_at(span.start_ns, phases)), _Sum())
        found.ns += own_ns
        found.calls += 1
    total = sum(each.ns for each in sums.values()) or 1
    ordered = sorted(sums.items(), key=lambda item: -item[1].ns)
    kernels = [
        {"name": name, "seconds": each.ns * NS, "calls": each.calls, "share": each.ns / total, "phase": phase}
        for (name, phase), each in ordered[:MAX_KERNELS]
    ]
    return {"kernels": kernels, "kernels_left_out": max(0, len(ordered) - MAX_KERNELS), "gaps": _gaps(spans, phases)}


def own_times(spans: Iterable[KernelSpan]) -> Iterable[tuple[KernelSpan, int]]:
    """Every span with the nanoseconds that none of the spans inside it took, track by track."""
    tracks: dict[int, list[KernelSpan]] = {}
    for span in spans:
        tracks.setdefault(span.track, []).append(span)
    for found in tracks.values():
        found.sort(key=lambda span: (span.start_ns, -span.duration_ns))
        open_spans: list[_Open] = []
        for span in found:
            while open_spans and open_spans[-1].span.end_ns <= span.start_ns:
                done = open_spans.pop()
                yield done.span, done.own_ns
            if open_spans:
                open_spans[-1].own_ns -= min(span.end_ns, open_spans[-1].span.end_ns) - span.start_ns
            open_spans.append(_Open(span))
        yield from ((done.span, done.own_ns) for done in open_spans)


@dataclass
class _Open:
    span: KernelSpan
    own_ns: int = field(init=False)

    def __post_init__(self) -> None:
        self.own_ns = self.span.duration_ns


def phase_at(at_ns: int, phases: Sequence[KernelSpan]) -> str:
    """The phase in which something began. `phases` are in order."""
    low, high = 0, len(phases)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if phases[middle].start_ns <= at_ns else (low, middle)
    return phases[low - 1].name if low and at_ns < phases[low - 1].end_ns else BETWEEN


def _gaps(spans: Sequence[KernelSpan], phases: Sequence[KernelSpan]) -> list[dict[str, Any]]:
    """The longest times in which nothing ran: after what, since when (seconds from the first span), and in which phase."""
    found = []
    first: int | None = None
    latest: KernelSpan | None = None
    for span in sorted(spans, key=lambda span: span.start_ns):
        first = span.start_ns if first is None else first
        if latest is not None and (span.start_ns - latest.end_ns) * NS > MIN_GAP_S:
            seconds = (span.start_ns - latest.end_ns) * NS
            at, phase = (latest.end_ns - first) * NS, phase_at(latest.end_ns, phases)
            found.append({"after": latest.name, "seconds": seconds, "at": at, "phase": phase, "before": span.name})
        if latest is None or span.end_ns > latest.end_ns:
            latest = span
    return sorted(found, key=lambda gap: -float(gap["seconds"]))[:MAX_GAPS]  # type: ignore[arg-type]
