"""The samples of a run that a report takes along: as many as fit into its budget, chosen so that none that matters is missed.

First come the first and the last step, and the first, best and last evaluation; then every failure; then steps that lie evenly
between. What is left out is counted. The index is read, not the files: only what is chosen is opened.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.observe.look import RunLook

MOST_ROWS, MOST_BYTES = 2_000, 8_000_000
FAILURE_SHARE = 0.5
"""Share of the budget that failures outside of the steps shown may take."""
SEARCH_S = 2.0
"""Seconds for finding failures in other files."""
SHOWN = ("step", "kind", "rows", "reward_min", "reward_mean", "reward_max", "cut_off", "failed")


@dataclass
class Budget:
    rows: int = MOST_ROWS
    size: int = MOST_BYTES
    """Bytes."""
    taken: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def take(self, key: str, line: bytes) -> bool:
        """Take a line along, if it fits and can be read."""
        if self.rows <= 0 or len(line) > self.size:
            return False
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return True
        if isinstance(row, dict):
            self.rows, self.size = self.rows - 1, self.size - len(line)
            self.taken.setdefault(key, []).append(row)
        return True


def samples(look: RunLook, most_rows: int = MOST_ROWS, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    index = sample_index(look)
    budget = Budget(most_rows, most_bytes)
    first, rest = _ordered(look, index)
    for entry in first:
        _read(look.folder, entry, budget)
    _failures(look.folder, [entry for entry in rest if entry.get("failed")], budget)
    for entry in rest:
        if _size(entry) <= budget.size and (entry.get("rows") or 1) <= budget.rows:
            budget.taken.pop(_key(entry), None)
            _read(look.folder, entry, budget)
    total = sum(int(entry.get("rows") or 0) for entry in index)
    kept = sum(map(len, budget.taken.values()))
    return {
        "index": [{key: entry.get(key) for key in SHOWN} for entry in index],
        "rows": budget.taken,
        "left_out": max(0, total - kept),
        "total": total,
    }


def sample_index(look: RunLook) -> list[dict[str, Any]]:
    """Lines of samples/index.jsonl; of a run that has none, made from the names of its files."""
    found = [entry for entry in look.reader.sample_index() if entry.get("kind") in ("train", "eval")]
    known = {(entry["kind"], entry["step"]) for entry in found}
    for kind, where in (("train", "samples"), ("eval", "eval/samples")):
        for path in look.folder.glob(f"{where}/step-*.jsonl"):
            match = re.fullmatch(r"step-([0-9]{1,15})\.jsonl", path.name)
            if match and (kind, int(match[1])) not in known:
                found.append(_entry(kind, int(match[1]), path))
    found.sort(key=lambda entry: (entry["kind"] != "train", entry["step"]))
    return [entry for entry in found if _path(look.folder, entry).is_file()]


def _entry(kind: str, step: int, path: Path) -> dict[str, Any]:
    """What an index would say of a file, as far as that is cheap to know."""
    try:
        size = path.stat().st_size
        rows = sum(chunk.count(b"\n") for chunk in _chunks(path)) if size < 4 * MOST_BYTES else None
    except OSError:
        size, rows = 0, 0
    unknown = dict.fromkeys(("reward_min", "reward_mean", "reward_max", "cut_off", "failed"))
    return {"step": step, "kind": kind, "rows": rows, "bytes": size} | unknown


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


def _path(folder: Path, entry: Mapping[str, Any]) -> Path:
    """By kind and step, never by a name that a file tells."""
    where = "samples" if entry["kind"] == "train" else "eval/samples"
    return folder / where / f"step-{entry['step']}.jsonl"


def _key(entry: Mapping[str, Any]) -> str:
    return f"{entry['kind']}:{entry['step']}"


def _size(entry: Mapping[str, Any]) -> int:
    size = entry.get("bytes")
    return size if type(size) is int else 0


def _ordered(look: RunLook, index: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What comes first, and the rest: the middle, the quarters, the eighths, and so on, of training and evaluation in turn."""
    train = [entry for entry in index if entry["kind"] == "train"]
    held = [entry for entry in index if entry["kind"] == "eval"]
    scores = dict(look.record.points("eval/pass@1") or look.record.points("eval/score"))
    best = max(held, key=lambda entry: scores.get(entry["step"], float("-inf")), default=None)
    first = [*train[-1:], *train[:1], *([best] if best else []), *held[-1:], *held[:1]]
    chosen = {_key(entry): entry for entry in first}
    spread = [entry for pair in _turns(_evenly(train), _evenly(held)) for entry in pair]
    return list(chosen.values()), [entry for entry in spread if _key(entry) not in chosen]


def _evenly(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All of them in an order in which every beginning lies evenly over the whole."""
    found: dict[int, None] = {}
    parts = 1
    while len(found) < len(entries):
        for part in range(parts + 1):
            found.setdefault(round(part * (len(entries) - 1) / parts))
        parts *= 2
    return [entries[at] for at in found]


def _turns(*lists: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    for at in range(max(map(len, lists), default=0)):
        yield [each[at] for each in lists if at < len(each)]


def _read(folder: Path, entry: Mapping[str, Any], budget: Budget) -> None:
    """Lines of a file from its beginning, as far as they fit."""
    try:
        with _path(folder, entry).open("rb") as file:
            while line := file.readline(budget.size + 2):
                if line.strip() and not budget.take(_key(entry), line):
                    return
    except OSError:
        return


def _failures(folder: Path, entries: list[dict[str, Any]], budget: Budget) -> None:
    """Samples that failed, of other steps."""
    spare = Budget(round(FAILURE_SHARE * budget.rows), round(FAILURE_SHARE * budget.size))
    until = time.monotonic() + SEARCH_S
    for entry in entries:
        if time.monotonic() > until or spare.rows <= 0:
            break
        try:
            with _path(folder, entry).open("rb") as file:
                while line := file.readline(spare.size + 2):
                    if b'"failure": null' not in line and line.strip():
                        spare.take(_key(entry), line)
        except OSError:
            continue
    budget.rows -= round(FAILURE_SHARE * budget.rows) - spare.rows
    budget.size -= round(FAILURE_SHARE * budget.size) - spare.size
    for key, rows in spare.taken.items():
        failed = [row for row in rows if row.get("failure")]
        if failed:
            budget.taken.setdefault(key, []).extend(failed)
