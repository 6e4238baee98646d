"""Processes of the tests (which run, which are gone) and small runs. Nothing here waits without a deadline."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import psutil

DEADLINE_S = 30.0


def runs(process: psutil.Process) -> bool:
    """A zombie does not."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def left(processes: Iterable[psutil.Process], seconds: float = DEADLINE_S) -> list[psutil.Process]:
    """Those that still run at the deadline."""
    found = list(processes)
    wait_for(lambda: not any(map(runs, found)), seconds)
    return list(filter(runs, found))


def wait_for(happens: Callable[[], object], seconds: float = DEADLINE_S) -> bool:
    deadline = time.monotonic() + seconds
    while not happens():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def guarded(guardian: int) -> psutil.Process:
    """The process below the two guardians of which the trainer knows the first."""
    (second,) = psutil.Process(guardian).children()
    return next(child for child in second.children() if child.cmdline() == second.cmdline())


def letters(completions: list[str], **_: Any) -> list[float]:
    """A reward that every policy can raise. Workers import the file of a reward: here that is a quick one."""
    return [float(sum(character in "abcdefghij" for character in text)) for text in completions]


class Trained(NamedTuple):
    """A run that has ended."""

    folder: Path
    metrics: list[dict[str, Any]]
    summary: dict[str, Any]


def train(
    model: Path | dict[str, Any],
    folder: Path,
    usual: Mapping[str, Any],
    changes: Mapping[str, Any] | None = None,
    stage: str = "train",
) -> Trained:
    """Run a stage of `trimtab` into a folder. `usual`: its arguments, as a file of tests has them; `changes`: those of one test.
    Sections (learn, run, observe) are merged key by key, and whatever else is given takes the place of what is usual."""
    import trimtab
    from trimtab.record.sinks import read_metrics

    given = dict(changes or {})
    sections = {
        name: {**usual.get(name, {}), **given.pop(name, {})}
        for name in ("learn", "run", "observe")
        if name in {*usual, *given}
    }
    sections["observe"] = {"dir": str(folder), "tensorboard": False, **sections.get("observe", {})}
    path = model if isinstance(model, dict) else str(model)
    summary = getattr(trimtab, stage)(**{"model": path, **usual, **given, **sections})
    return Trained(Path(summary["run_dir"]), read_metrics(Path(summary["run_dir"])), summary)
