"""What ranks have in common that have an engine and train nothing: for an evaluation, or for ranks that train."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.serve import Link
from trimtab.config.resolved import ResolvedConfig
from trimtab.model.policy import Policy
from trimtab.plan.planner import Plan
from trimtab.reward.models import Classifier
from trimtab.rollout.seat import EngineMeeting, seat_of
from trimtab.run.engines import open_engine
from trimtab.run.machine import memory_limit
from trimtab.run.rollout_orders import LinkReports, RolloutOrders


@dataclass(frozen=True, kw_only=True)
class GeneratingSetup:
    """What such a rank is made from."""

    rank: int
    ranks: int
    device: str
    config: ResolvedConfig
    tokenizer: Any
    plan: Plan
    devices: tuple[str, ...]
    """Of all ranks that generate."""
    meeting: EngineMeeting
    """Of the ranks of engines that are cut over devices."""


@dataclass(frozen=True)
class EngineFacts:
    """What it says of itself once it is built."""

    engine: str
    lowered: dict[str, int]


class GeneratingRank(RolloutOrders):
    """Takes its device; a subclass loads the policy and then opens the engine."""

    def __init__(self, setup: GeneratingSetup, link: Link) -> None:
        self._link, self._rank, self._ranks = link, setup.rank, setup.ranks
        self._device = torch.device(setup.device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        torch.set_num_threads(setup.plan.run.threads)
        self._limit = memory_limit(setup.config.run, self._device)
        self._limit.__enter__()  # it ends with the process

    def _open_engine(
        self, setup: GeneratingSetup, policy: Policy, classifiers: Sequence[Classifier] = (), logs: Path | None = None
    ) -> None:
        reports: Any = LinkReports(self._link)
        seat = seat_of(setup.rank, setup.devices, setup.plan.engine_devices, setup.meeting)
        _, engine = open_engine(setup.config, setup.plan, policy, setup.tokenizer, reports, logs, seat)
        self._use_engine(engine, classifiers)
        self._link.progress = self._rollout_progress

    def ready(self) -> EngineFacts:
        return EngineFacts(self._engine.description, self._engine.lowered)

    def facts_of_shortage(self) -> None:
        """An engine says itself what it ran out of memory with."""
