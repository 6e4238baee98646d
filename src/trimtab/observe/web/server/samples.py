"""Completions of one step, read when somebody asks for them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trimtab.observe.web.server.files import plain_file
from trimtab.observe.web.server.tail import parse_line
from trimtab.record.layout import eval_samples_file, samples_file

MAX_BYTES = 32 << 20
"""Bytes of a step's file that are sent; what it holds beyond is counted."""
KINDS = ("train", "eval")


def step_file(run: Path, kind: str, step: int) -> Path:
    return eval_samples_file(run, step) if kind == "eval" else samples_file(run, step)


def read_step(run: Path, root: Path, kind: str, step: int) -> dict[str, Any] | None:
    """Rows of a step, how many bytes of the file were left out, and lines that cannot be read; None where there is no file."""
    path = step_file(run, kind, step)
    if not plain_file(path, root):
        return None
    with path.open("rb") as file:
        data = file.read(MAX_BYTES)
        left_out = max(0, path.stat().st_size - len(data))
    if left_out:
        data = data[: data.rfind(b"\n") + 1]
    rows, damaged = [], 0
    for line in data.split(b"\n"):
        row = parse_line(line) if line.strip() else {}
        if row:
            rows.append(row)
        elif row is None:
            damaged += 1
    return {"step": step, "kind": kind, "rows": rows, "left_out_bytes": left_out, "damaged": damaged}


def recorded_steps(run: Path, root: Path, kind: str) -> list[int]:
    """Steps whose completions were kept, newest first."""
    folder = step_file(run, kind, 0).parent
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return []
    found = (re.fullmatch(r"step-([0-9]{1,15})\.jsonl", name) for name in names)
    steps = sorted({int(match[1]) for match in found if match}, reverse=True)
    return [step for step in steps if plain_file(step_file(run, kind, step), root)]
