"""Profiling the steps that a user asked for, in this process or on ranks (observe/profiling)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.ranks import Ranks
from trimtab.observe.profiling.profiler import ProcessProfiler, Profiled, ProfileWindow
from trimtab.observe.profiling.request import ProfileRequest


def check_profile(
    asked: ProfileRequest | None, done: int, steps: int, ranks: int, warn: Callable[[str], None]
) -> ProfileRequest | None:
    """What is to be profiled of a run that has made `done` steps. Steps and ranks that it does not have are refused."""
    if asked is None:
        return None
    asked.check_steps(steps)
    asked.check_ranks(ranks)
    left = asked.after(done)
    if left is None:
        warn(f"{asked.spelling.steps}: step {asked.last} and those before it are done already, so nothing is profiled")
    return left


def open_profile(
    asked: ProfileRequest | None,
    ranks: Ranks | None,
    folder: Path,
    device: torch.device,
    done: int,
    tell: Callable[[str], None],
) -> ProfileWindow | None:
    """Profiles the steps that were asked for, from the first of them on."""
    if asked is None:
        return None
    target: Profiled = ProcessProfiler(folder, device, asked) if ranks is None else RankedProfiler(ranks, folder, asked)
    return ProfileWindow(asked, target, done, tell)


@dataclass(frozen=True)
class RankedProfiler:
    """The named ranks profile themselves; the first of them writes the tables that a page reads."""

    ranks: Ranks
    folder: Path
    asked: ProfileRequest

    def start(self) -> None:
        self.ranks.ask("start_profile", self.folder, self.asked)

    def begin_phase(self, name: str) -> None:
        self.ranks.ask("begin_profiled", name)

    def end_phase(self) -> None:
        if not self.ranks.closed:
            self.ranks.ask("end_profiled")

    def stop(self) -> None:
        if not self.ranks.closed:
            self.ranks.ask("stop_profile")


class ProfileOrders:
    """A rank's part of it: each public method is an order of the driver. Ranks that were not named do nothing."""

    _rank: int
    _policy: Any
    _profiler: ProcessProfiler | None = None

    def start_profile(self, folder: Path, asked: ProfileRequest) -> None:
        if self._rank in asked.ranks:
            main = self._rank == asked.ranks[0]
            self._profiler = ProcessProfiler(folder, self._policy.device, asked, self._rank, main)
            self._profiler.start()

    def begin_profiled(self, name: str) -> None:
        if self._profiler is not None:
            self._profiler.begin_phase(name)

    def end_profiled(self) -> None:
        if self._profiler is not None:
            self._profiler.end_phase()

    def stop_profile(self) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None
