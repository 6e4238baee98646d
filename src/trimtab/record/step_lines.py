"""A file with lines of steps that belongs to metrics.jsonl: after a resume it has no line of a step that is still to come.

Lines that cannot be read are dropped when a run resumes: the run is worth more than they are.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.base.files import write_file
from trimtab.record.jsonl import JsonlTail, append_whole, dump_line


class StepLines:
    """Append only. When `write` returns, the line is out of this process."""

    def __init__(self, path: Path, resume_step: int | None) -> None:
        """`resume_step`: the last step that is kept. None: nothing is."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _, rows = JsonlTail(path).read()
        kept = [row for row in rows if resume_step is not None and _step_of(row) <= resume_step]
        write_file(path, (dump_line(row, compact=True) for row in kept))
        self._file = io.FileIO(path, "a")

    def write(self, row: Mapping[str, Any], compact: bool = False) -> None:
        append_whole(self._file, dump_line(row, compact))

    def close(self) -> None:
        self._file.close()


def _step_of(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int | float) else math.inf
