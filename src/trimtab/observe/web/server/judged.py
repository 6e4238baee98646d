"""The page data of a run, from helper modules that judge it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def head(folder: Path) -> dict[str, Any]:
    return {"name": folder.name, "state": {"kind": "running"}}


def run(folder: Path) -> dict[str, Any]:
    return head(folder)


def trace(folder: Path, first: float | None, last: float | None) -> dict[str, Any]:
    return {}


def compare(folders: Mapping[str, Path]) -> dict[str, Any]:
    return {}
