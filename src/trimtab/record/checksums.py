"""What the files of a folder were when it was written: sizes and sha256, and what has happened to those that are not that now."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

READERS = 4
"""Files that are read at a time: one core hashes more slowly than a disk reads."""


class Sum(TypedDict):
    bytes: int
    sha256: str


def sums_of(folder: Path, names: list[str] | None = None) -> dict[str, Sum]:
    """Size and sha256 of a folder's files, by their path in it; of those `names` that are there, or of all."""
    if names is None:
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    names = sorted(name for name in names if (folder / name).is_file())
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _sum(folder / name), names)
        return dict(zip(names, found, strict=True))


def sum_of_bytes(data: bytes) -> Sum:
    return {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _sum(file: Path) -> Sum:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": opened.tell(), "sha256": digest}


def refuse_other_files(folder: Path, written: Mapping[str, Sum], elsewhere: Mapping[str, Mapping[str, Sum]]) -> None:
    """Raise a ValueError that names the files which are not as they were `written`, and says what became of each. `elsewhere`:
    the same of other folders, by name, from which a file may have come."""
    now = sums_of(folder, list(written))
    changed = [name for name in written if now.get(name) != written[name]]
    if changed:
        raise ValueError("; ".join(_what_happened(name, now.get(name), written, elsewhere) for name in changed))


def _what_happened(
    name: str, now: Sum | None, written: Mapping[str, Sum], elsewhere: Mapping[str, Mapping[str, Sum]]
) -> str:
    if now is None:
        return f"{name} is missing"
    for other, known in written.items():
        if known["sha256"] == now["sha256"]:
            return f"{name} has the contents of {other}"
    for other_folder, files in elsewhere.items():
        for other, known in files.items():
            if known["sha256"] == now["sha256"]:
                return f"{name} has the contents of {other_folder}/{other}"
    before = written[name]["bytes"]
    if now["bytes"] != before:
        return f"{name} has {now['bytes']:,} bytes, but was written with {before:,}"
    return f"{name} was changed or damaged after it was written: its sha256 differs"
