"""The run folder: where it is, who may write to it, what is in it.

A folder holds one run. A second process cannot write to it (a lock that a kill releases), and a new run does not overwrite an old
one.
"""

from __future__ import annotations

import fcntl
import glob
import time
from pathlib import Path
from typing import IO

from trimtab.checkpoint import clear, newest_checkpoint
from trimtab.config.load import resolved_yaml
from trimtab.config.schema import Config
from trimtab.errors import ConfigError, Problem

CONFIG, METRICS, FINAL = "config.yaml", "metrics.jsonl", "final"


def find_folder(pattern: str, name: str, resume: bool) -> Path:
    """The folder that `observe.dir` means; with `resume` and {time} in it, the newest that fits."""
    pattern = pattern.replace("{name}", name)
    if resume and "{time}" in pattern:
        existing = glob.glob(glob.escape(pattern).replace(glob.escape("{time}"), "*"))
        if existing:
            return Path(max(existing)).expanduser().absolute()
    return Path(pattern.replace("{time}", time.strftime("%Y%m%d-%H%M%S"))).expanduser().absolute()


def open_folder(folder: Path, config: Config, resume: bool) -> IO[str]:
    """Create and lock the folder; returns the lock, which lives as long as the run."""
    if (folder / CONFIG).exists() and not resume:
        raise ConfigError(
            [
                Problem(
                    "observe.dir", f"{folder} already holds a run", "Go on with it (--resume) or choose another folder."
                )
            ]
        )
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            [Problem("observe.dir", f"another process is running in {folder}", "Stop it or choose another folder.")]
        ) from None
    clear(folder / "checkpoints")
    write_whole(folder / CONFIG, resolved_yaml(config))
    return lock


def resume_point(folder: Path) -> Path | None:
    """The checkpoint to go on from, or None to start from the beginning."""
    return newest_checkpoint(folder)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a kill leaves the old one or the new one, never half of one."""
    aside = path.with_name(f".{path.name}.writing")
    aside.write_text(text)
    aside.rename(path)
