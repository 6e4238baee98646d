"""What a caller may hand over from Python beside the config: rows, reward functions, an environment, callbacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.observe.observer import Callback
from trimtab.observe.profiling.request import ProfileRequest
from trimtab.run.ray_hosts import RayHosts

GIVEN_ROWS = "object:rows"
"""Stands for rows that were handed over from Python."""


@dataclass
class Inputs:
    """What a caller may hand over as Python objects instead of naming it in the config."""

    train_rows: Sequence[Mapping[str, Any]] | None = None
    eval_rows: Sequence[Mapping[str, Any]] | None = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    environment: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """The class of an environment, or tools, by name."""
    base_dir: Path = field(default_factory=Path.cwd)
    """Reward files are relative to this: the folder of the config file."""
    name: str = "run"
    verbose: bool = False
    """The start card shows every choice."""
    callbacks: Sequence[Callback] = ()
    profile: ProfileRequest | None = None
    """Steps to profile."""
    resume_with: str = "the same call and resume=True"
    """How the user resumes the run, in words or as a command: for messages."""
    rank_restarts: int = 0
    """How often ranks of the run were lost and started again so far."""
    lost: str = ""
    """Why the latest were lost, if nobody has been told."""
    devices_before: int = 0
    """How many devices the run had when it lost them."""
    hosts: RayHosts | None = None
    """Of the Ray cluster that the run is on; None: it is on this machine alone (open_run.py)."""
    restarts_left: int = 0
    """How often they may still be (restarts.py)."""


def given_rows(
    rows: Sequence[Mapping[str, Any]] | None, source: str | None, key: str
) -> Sequence[Mapping[str, Any]] | None:
    """Rows that came from Python, where some did."""
    if rows is None and source == GIVEN_ROWS:
        raise DataError(
            f"{key}: this config was made in Python with rows, which a config cannot hold. Name a file, or pass the rows."
        )
    return rows
