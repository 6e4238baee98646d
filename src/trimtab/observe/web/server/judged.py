"""The page data of a run (observe/web/data.py), in the parts that the server hands out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.observe.look import RunLook, look_at
from trimtab.observe.web.compare import compare
from trimtab.observe.web.data import run_data
from trimtab.observe.web.encode import clean
from trimtab.observe.web.facts import head
from trimtab.observe.web.samples import SHOWN, sample_index
from trimtab.observe.web.traces import trace

COMMAND = "trimtab serve"


def head_of(folder: Path, id: str) -> dict[str, Any]:
    """What a list shows of a run."""
    found: dict[str, Any] = clean(head(look_at(folder, COMMAND), id))
    return found


def page_of(look: RunLook, id: str) -> dict[str, Any]:
    """A run without columns and samples, which are asked for by themselves."""
    return run_data(look, id, whole=False) | {"samples": _index(look), "trace": trace_of(look.folder, None, None)}


def trace_of(folder: Path, first: float | None, last: float | None) -> dict[str, Any] | None:
    """Spans between two Unix times, or a selection of all."""
    found: dict[str, Any] | None = clean(trace(folder, first, last))
    return found


def compared(folders: Mapping[str, Path]) -> dict[str, Any]:
    found: dict[str, Any] = clean(compare([(id, look_at(folder, COMMAND)) for id, folder in folders.items()]))
    return found


def _index(look: RunLook) -> dict[str, Any]:
    try:
        index = sample_index(look)
    except (TrimtabError, OSError):
        index = []
    total = sum(int(entry.get("rows") or 0) for entry in index)
    shown = [{key: entry.get(key) for key in SHOWN} for entry in index]
    found: dict[str, Any] = clean({"index": shown, "rows": {}, "left_out": 0, "total": total})
    return found
