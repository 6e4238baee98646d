"""The run folder: where it is, who may write to it, what it was started with.

A folder holds one run. A second process cannot write to it (a lock that a kill releases), a new run does not overwrite an old
one, and a run that fails before its first write leaves no folder behind, but for what an engine wrote that did not start.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.files import clear, write_json, write_text
from trimtab.config.load import AnyConfig, resolved, resolved_yaml
from trimtab.record.layout import CONFIG, PLAN
from trimtab.record.layout import FINAL as FINAL

LOCK = ".lock"
ENGINE_LOGS = "engines"
"""What lost processes of an engine wrote."""
SECTIONS_FREE_TO_CHANGE = ("run.", "observe.")
"""Sections that a resumed run may change: they do not change what is learned."""


def find_folder(pattern: str, name: str, resume: bool) -> Path:
    """The folder that `observe.dir` means; with `resume` and {time} in it, the newest run that fits."""
    path = str(Path(pattern.replace("{name}", name)).expanduser().absolute())
    if resume and "{time}" in path:
        # Not every folder that * matches: `a-{time}` must not find a run of `a-b-{time}`.
        stamped = re.compile(re.escape(path).replace(re.escape("{time}"), r"(\d{8}-\d{6})", 1))
        candidates = glob.glob(glob.escape(path).replace("{time}", "*"))
        found = {match[1]: match[0] for match in map(stamped.fullmatch, candidates) if match}
        runs = {stamp: run for stamp, run in found.items() if (Path(run) / CONFIG).exists()}
        if runs:
            return Path(runs[max(runs)])
    return Path(path.replace("{time}", time.strftime("%Y%m%d-%H%M%S")))


def refuse_existing(folder: Path, resume: bool) -> None:
    """A new run goes into a new folder."""
    if (folder / CONFIG).exists() and not resume:
        fix = "Continue it with --resume, or choose another folder."
        raise ConfigError([Problem("observe.dir", f"{folder} already holds a run", fix)])


@contextmanager
def claim(folder: Path, resume: bool) -> Iterator[None]:
    """The folder is made and is this process's own, without what a killed one left half written; if it still holds no run at the
    end, it is as it was before."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("w")
    except OSError as error:
        raise ConfigError([Problem("observe.dir", f"cannot write to {folder}: {error.strerror}")]) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            what, fix = f"another process is running in {folder}", "Stop it or choose another folder."
            raise ConfigError([Problem("observe.dir", what, fix)]) from None
        refuse_existing(folder, resume)
        if (folder / CONFIG).exists():
            clear(folder)
            clear(folder / "checkpoints")
        try:
            yield
        finally:
            if not (folder / CONFIG).exists():
                (folder / LOCK).unlink(missing_ok=True)
                for path in made:
                    with contextlib.suppress(OSError):  # something else has been put there meanwhile
                        path.rmdir()


def begin(folder: Path, config: AnyConfig, plan: dict[str, Any]) -> None:
    """The first write: from here on the folder holds a run."""
    write_json(folder / PLAN, plan)
    write_text(folder / CONFIG, resolved_yaml(config))


def changes(held: AnyConfig, config: AnyConfig) -> list[str]:
    """What `config` would learn otherwise than a run with the config `held`: `learn.lr 0.1 (was 0.2)`. More steps are no change,
    unless the rate is one that falls until the last of them."""
    before, now = _flat(held), _flat(config)
    constant = now["learn.schedule.kind"] == "constant"
    if constant and (before["learn.steps"] or 0) <= (now["learn.steps"] or 0):
        now["learn.steps"] = before["learn.steps"]
    keys = [
        key
        for key in {**before, **now}
        if not key.startswith(SECTIONS_FREE_TO_CHANGE) and before.get(key) != now.get(key)
    ]
    return [f"{key} {now.get(key)} (was {before.get(key)})" for key in keys]


def _flat(config: AnyConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(value: Any, key: str) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                walk(item, f"{key}.{name}" if key else str(name))
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            walk(dict(enumerate(value)), key)
        else:
            flat[key] = value

    walk(resolved(config).model_dump(), "")
    return flat
