"""Which runs a folder holds: a table from id to folder, made by looking three levels deep.

Guarantees: an id has only letters, digits, dots, dashes, underscores and tildes, whatever the folders are called; it stays the
same for as long as the folder does; and every folder in the table lies in the folder that was scanned, links followed. A run
is not looked into, so that its checkpoints, which hold a config too, are no runs."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from trimtab.base.errors import DataError
from trimtab.observe.web.server.files import inside, leaves
from trimtab.record.layout import CHECKPOINTS, CONFIG
from trimtab.record.reader import run_of_checkpoint

LEVELS = 3
"""Folders below the one that is scanned in which runs are found: RUNS/project/day/run."""
MAX_ENTRIES = 20_000
"""Folders that a scan looks at; the rest of a tree with more is left out."""
RESCAN_S = 1.0
"""A table younger than this is used again."""


class RunTable:
    """Runs by id. Scans again when it is asked and the last scan is a second old."""

    def __init__(self, root: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = checked_root(root)
        self._clock, self._at = clock, -RESCAN_S
        self._runs: dict[str, Path] = {}

    def runs(self) -> dict[str, Path]:
        """Folders by id, newest config first."""
        if self._clock() - self._at >= RESCAN_S:
            self._runs = scan(self.root)
            self._at = self._clock()
        return self._runs

    def find(self, id: str) -> Path | None:
        """The folder of a run; None where no run has this id, or where its folder has gone."""
        folder = self._runs.get(id) or self.runs().get(id)
        return folder if folder is not None and (folder / CONFIG).is_file() and not leaves(folder, self.root) else None


def checked_root(folder: Path) -> Path:
    """The folder with its links followed; a DataError that says what is wrong where it cannot hold runs."""
    if not folder.exists():
        raise DataError(f"RUNS_DIR: {folder} does not exist. Give the folder that holds run folders, such as runs")
    if not folder.is_dir():
        raise DataError(
            f"RUNS_DIR: {folder} is a file, not a folder. Give the folder that holds run folders, such as runs"
        )
    if holder := run_of_checkpoint(folder):
        raise DataError(f"RUNS_DIR: {folder} is a checkpoint, not a run. Give the run's folder: trimtab serve {holder}")
    try:
        os.listdir(folder)
    except OSError as error:
        raise DataError(f"RUNS_DIR: {folder} cannot be read: {error.strerror}") from error
    return folder.resolve()


def scan(root: Path) -> dict[str, Path]:
    """Runs by id; newest first. The folder itself may be one."""
    found: list[tuple[float, Path]] = []
    seen: set[tuple[int, int]] = set()
    waiting, looked_at = [(root, 0)], 0
    while waiting and looked_at < MAX_ENTRIES:
        folder, level = waiting.pop(0)
        looked_at += 1
        try:
            state = folder.stat()
            if (state.st_dev, state.st_ino) in seen:  # a link to a folder that was looked at, or to one above it
                continue
            seen.add((state.st_dev, state.st_ino))
            config = folder / CONFIG
            if config.is_file():
                if not leaves(folder, root):
                    found.append((config.stat().st_mtime, folder))
            elif level < LEVELS:
                waiting += [(below, level + 1) for below in _folders(folder, root)]
        except OSError:  # somebody removes it at this moment, or it may not be read
            continue
    found.sort(key=lambda item: (-item[0], str(item[1])))
    return _with_ids(root, [folder for _, folder in found])


def _folders(folder: Path, root: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != CHECKPOINTS
        )
    return [folder / name for name in names if inside(folder / name, root)]


def _with_ids(root: Path, folders: list[Path]) -> dict[str, Path]:
    table: dict[str, Path] = {}
    for folder in folders:
        table.setdefault(run_id(folder, root), folder)
    return table


def run_id(folder: Path, root: Path) -> str:
    """The path below the root with ~ for slashes; where that has other characters, or is long, the readable part and a digest."""
    path = str(folder.relative_to(root)) if folder != root else root.name or "run"
    plain = path.replace("/", "~")
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._~-]{0,119}", plain) and "~" not in path:
        return plain
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:8]
    readable = re.sub(r"[^A-Za-z0-9_-]+", "_", path.rsplit("/", 1)[-1]).strip("_")[:60]
    return f"{readable or 'run'}~~{digest}"
