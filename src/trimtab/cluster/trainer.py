"""The Trainer of several devices: every rank has the models, and this is what the loop talks to (run/roles.py).

A checkpoint is written by all ranks at once, each its part, behind the training. The driver puts the parts together when all are
on disk: before that, the checkpoint before it is the newest. Export is written by the first rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.base.spans import Taken, log
from trimtab.cluster.ranks import Ranks
from trimtab.plan.governor import Governor
from trimtab.record.part import PartWritten
from trimtab.record.run_state import RunState
from trimtab.record.saving import PendingCheckpoint
from trimtab.update.guard import Guard
from trimtab.update.stats import Applied, Scored, Trained
from trimtab.update.trainer import GuardedTrainer

SCORERS: dict[Scored, Any] = {"policy": "policy", "reference": "reference", "critic": "critic"}
"""A rank is told the model's name."""


class WriteFailed(TrimtabError):
    """A rank could not write its part of a checkpoint."""

    def __init__(self, why: str, number: int | None) -> None:
        super().__init__(why, number)
        self.why, self.number = why, number


@dataclass(frozen=True)
class RoleSet:
    """Ranks that have other models than the policy."""

    name: str
    """Its roles, for people."""
    ranks: Ranks
    guards: Mapping[Scored, Guard]
    """Of the models that say something of samples."""
    saves: bool
    """They have a part of a checkpoint."""


class RankedTrainer(GuardedTrainer):
    """See run/roles.py."""

    def __init__(
        self, ranks: Ranks, guard: Guard, governor: Governor, critic: Guard | None, beside: Sequence[RoleSet] = ()
    ) -> None:
        """`ranks`: those that train the policy. `beside`: others, each with models that are nowhere else."""
        super().__init__(guard, governor, SCORERS, critic)
        self.ranks, self._beside = ranks, beside
        for role in beside:
            self._guards |= {str(model): own for model, own in role.guards.items()}
        self._places = {model: place for place, each in enumerate(beside, 1) for model in each.guards}
        self._saving = [ranks, *(each.ranks for each in beside if each.saves)]
        self._pending: PendingCheckpoint | None = None
        """What is being written."""
        self._reads_live_tensors = False
        self._settling = threading.RLock()
        """The update of the policy and that of a critic apart run side by side, and each waits for what is being saved."""
        self._began = self._waited_s = self._written_s = 0.0
        self._on_written: Callable[[float, float], None] = lambda begin, end: None
        for each in self._guards.values():
            each.before_recovery = self._before_change

    @property
    def lost(self) -> bool:
        return self.ranks.closed or any(each.ranks.closed for each in self._beside)

    def place_of(self, model: Scored) -> int:
        return self._places.get(model, 0)

    def tell_written(self, on_written: Callable[[float, float], None]) -> None:
        self._on_written = on_written

    def prepare_to_save(self) -> None:
        self._ask_saving("reserve_copy")

    def apply(self, lr: float, model: Trained = "policy") -> Applied:
        self._before_change()
        return super().apply(lr, model)

    def save(self, folder: Path, state: RunState, keep: int, files: Mapping[str, bytes]) -> None:
        started = time.perf_counter()
        self.settle_saves()
        pending = PendingCheckpoint(folder, state, keep, files)

        def capture() -> list[bool]:
            found: list[bool] = self._ask_saving("capture", folder, state.step)
            return found

        copies = self.guard.run("checkpoint", capture)
        self._reads_live_tensors = not all(copies)
        with pending.explaining():
            aside = pending.open()
            self._ask_saving("begin_write", aside)
        self._pending, self._began = pending, started
        self._waited_s += time.perf_counter() - started

    def settle_saves(self, wait: bool = True) -> None:
        with self._settling:
            self._settle_saves(wait)

    def _settle_saves(self, wait: bool) -> None:
        pending = self._pending
        if pending is None or (not wait and not all(self._ask_saving("is_written"))):
            return
        started, self._pending, self._reads_live_tensors = time.perf_counter(), None, False
        with pending.explaining():
            try:
                parts: list[PartWritten] = self._ask_saving("end_write")
            except WriteFailed as failed:
                raise OSError(failed.number, failed.why) from failed
            pending.finish(parts)
        ended = time.perf_counter()
        self._waited_s += ended - started
        self._written_s += ended - self._began
        self._on_written(self._began, ended)

    def end_step(self) -> dict[str, float]:
        found = {"checkpoint/wait_s": self._waited_s, "checkpoint/write_s": self._written_s}
        self._waited_s = self._written_s = 0.0
        found = {name: seconds for name, seconds in found.items() if seconds}
        return super().end_step() | found | self._take_observed()

    def _take_observed(self) -> dict[str, float]:
        """What ranks have logged goes to the log of this process, each rank on its own track; of seconds, the slowest rank's."""
        found: dict[str, float] = {}
        for of, ranks in (("", self.ranks), *((f"{each.name} ", each.ranks) for each in self._beside)):
            observed: list[tuple[dict[str, float], Taken]] = ranks.ask("observed")
            for rank, (parts, taken) in enumerate(observed):
                for name, seconds in parts.items():
                    found[name] = max(seconds, found.get(name, 0.0))
                for span in taken.spans:
                    log.add(f"{of}rank {rank}", span.name, span.begin, span.end, **span.args)
                for value in taken.counters:
                    log.count(f"{value.name}, {of}rank {rank}", value.at, value.value)
        return found

    def _ask_saving(self, method: str, *args: Any) -> list[Any]:
        """Everyone who has a part of a checkpoint; those that train the policy first."""
        return [found for ranks in self._saving for found in ranks.ask(method, *args)]

    def close(self) -> None:
        """What is being saved is on disk, unless the ranks are gone."""
        if not self.lost:
            self.settle_saves()

    def export(self, folder: Path, scores: Mapping[str, Any] | None = None) -> None:
        self.ranks.ask("export", folder, scores)

    def _before_change(self) -> None:
        """Tensors that are being saved, and not as a copy, may change from here on."""
        with self._settling:
            if self._reads_live_tensors:
                self.settle_saves()
