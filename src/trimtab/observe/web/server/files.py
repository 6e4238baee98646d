"""Files of a run that may be read: those that lie in the folder that is served, links followed.

A link may point elsewhere inside the folder. One that leaves it is ignored, as if nothing were there.
"""

from __future__ import annotations

import os
from pathlib import Path

SHOWN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "run.json", "now.json", "events.jsonl", "distributions.jsonl", "trace.json",
    "samples", "eval", "profile",
)  # fmt: skip
"""What a page is made from. Checkpoints and exported weights are not among it, and may lie on another disk."""

SHOWN_FOLDERS = ("eval", "eval/results", "profile")
"""Folders whose files are read for a page. Those of samples are looked at one by one, when they are asked for."""


def inside(path: Path, root: Path) -> bool:
    """Whether what the path leads to lies in the root, which has no links in it. What does not exist lies where it would be."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(root)
    except (OSError, ValueError):
        return False


def leaves(run: Path, root: Path) -> bool:
    """Whether the run, or a file that its page is made from, is a link that leaves the root: no such run is shown."""
    if not inside(run, root):
        return True
    try:
        links = [entry for entry in _links(run) if entry.name in SHOWN_FILES]
        for folder in SHOWN_FOLDERS:
            links += _links(run / folder) if (run / folder).is_dir() and inside(run / folder, root) else []
    except OSError:
        return True
    return any(not inside(link, root) for link in links)


def _links(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_symlink()]


def plain_file(path: Path, root: Path) -> bool:
    """Whether there is a regular file, inside the root, that can be opened without waiting for anybody (no pipe, no device)."""
    return path.is_file() and inside(path, root)
