"""The record of torch's CUDA allocator, reduced to what a page can show: bytes over time by component, and the largest blocks.

A component is the part of Trimtab whose code asked for the block. Blocks that were there before the record began are
`before profiling`; those without a Python frame were asked for by the backward pass, which runs outside Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEFORE, NO_FRAME, OTHER = "before profiling", "backward pass", "other"
COMPONENTS = (
    ("trimtab/rollout/", "engine"),
    ("trimtab/update/optimizer", "optimizer"),
    ("trimtab/update/", "update"),
    ("trimtab/reward/", "reward models"),
    ("trimtab/model/", "model"),
)
MAX_POINTS, MAX_BLOCKS = 400, 50


@dataclass(frozen=True)
class HeldBlock:
    bytes: int
    where: str
    component: str


def reduce_memory(entries: Sequence[Mapping[str, Any]], allocated_at_end: int) -> dict[str, Any]:
    """RUN/profile/memory.json from the entries of one device, oldest first. The record may have lost its beginning: what was held
    then follows from what is held at the end."""
    changes = [entry for entry in entries if entry.get("action") in ("alloc", "free_completed")]
    base = allocated_at_end - sum(_change(entry) for entry in changes)
    held = base
    peak, peak_at = base, -1
    for index, entry in enumerate(changes):
        held += _change(entry)
        if held > peak:
            peak, peak_at = held, index
    places = _places(len(changes), peak_at)
    times: list[float] = []
    points: list[dict[str, int]] = []
    blocks: list[HeldBlock] = []
    start = int(changes[0].get("time_us", 0)) if changes else 0
    for index, (live, sums) in enumerate(_replay(changes, base)):
        if index in places:
            times.append((int(changes[index].get("time_us", start)) - start) / 1e6)
            points.append(dict(sums))
        if index == peak_at:
            blocks = sorted(live.values(), key=lambda block: -block.bytes)[:MAX_BLOCKS]
    names = sorted({name for point in points for name in point}, key=lambda name: -max(p.get(name, 0) for p in points))
    return {
        "timeline": {"at": times, "components": {name: [point.get(name, 0) for point in points] for name in names}},
        "largest": [{"bytes": each.bytes, "where": each.where, "component": each.component} for each in blocks],
        "peak_bytes": peak,
    }


def _replay(changes: Sequence[Mapping[str, Any]], base: int) -> Iterator[tuple[dict[int, HeldBlock], dict[str, int]]]:
    """The blocks that are held after each change, by address, and the bytes of each component."""
    live: dict[int, HeldBlock] = {}
    sums = {BEFORE: base}
    for entry in changes:
        address, size = int(entry.get("addr", 0)), int(entry.get("size", 0))
        if entry["action"] == "alloc":
            where, component = origin(entry.get("frames") or ())
            live[address] = HeldBlock(size, where, component)
            sums[component] = sums.get(component, 0) + size
        else:
            block = live.pop(address, None)
            component = BEFORE if block is None else block.component
            sums[component] = sums.get(component, 0) - size
        yield live, sums


def origin(frames: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Who asked for a block: file, line and function, and the component. Frames are innermost first."""
    named = [frame for frame in frames if str(frame.get("filename", "")).endswith(".py")]
    if not named:
        return "outside Python", NO_FRAME
    own = next((frame for frame in named if "trimtab/" in _path(frame)), named[0])
    path = _path(own)
    component = next((name for part, name in COMPONENTS if part in path), OTHER)
    return f"{_short(path)}:{own.get('line', 0)} {own.get('name', '')}".rstrip(), component


def _path(frame: Mapping[str, Any]) -> str:
    return str(frame["filename"]).replace("\\", "/")


def _short(path: str) -> str:
    """Below the packages, or the last parts: whose machine it was is nobody's business."""
    for part in ("site-packages/", "src/trimtab/"):
        if part in path:
            return path.rpartition(part)[2] if part == "site-packages/" else f"trimtab/{path.rpartition(part)[2]}"
    return "/".join(path.split("/")[-2:])


def _change(entry: Mapping[str, Any]) -> int:
    return int(entry.get("size", 0)) * (1 if entry["action"] == "alloc" else -1)


def _places(count: int, peak_at: int) -> set[int]:
    """Which changes are drawn: evenly spaced ones, the last, and the peak."""
    stride = max(1, -(-count // MAX_POINTS))
    return {*range(0, count, stride), count - 1, peak_at} - {-1}
