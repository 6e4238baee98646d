"""The program of a rank that only generates: one device's share of an evaluation. It needs no other rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from trimtab.cluster.serve import Link, serve
from trimtab.config.resolved import ResolvedConfig
from trimtab.model.load import load_model
from trimtab.model.policy import Policy
from trimtab.plan.planner import Plan
from trimtab.rollout.seat import seat_of
from trimtab.run.build import own_modes
from trimtab.run.engines import open_engine
from trimtab.run.machine import load_within, memory_limit
from trimtab.run.rollout_orders import LinkReports, RolloutOrders, load_classifiers


@dataclass(frozen=True)
class EvaluationSetup:
    """What such a rank is made from."""

    rank: int
    ranks: int
    device: str
    config: ResolvedConfig
    tokenizer: Any
    plan: Plan
    reward_models: tuple[str, ...]
    devices: tuple[str, ...]
    """Of all ranks."""


@dataclass(frozen=True)
class EvaluationFacts:
    """What it says of itself once it is built."""

    engine: str
    lowered: dict[str, int]


class EvaluationRank(RolloutOrders):
    """What the driver's orders are carried out on."""

    def __init__(self, setup: EvaluationSetup, link: Link) -> None:
        self._link, self._rank, self._ranks = link, setup.rank, setup.ranks
        config, device = setup.config, torch.device(setup.device)
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(setup.plan.run.threads)
        self._limit = memory_limit(config.run, device)
        self._limit.__enter__()  # it ends with the process
        policy = Policy(load_within(config.run, device, load_model, config.model, device))
        classifiers = load_classifiers(setup.reward_models, policy)
        seat = seat_of(setup.rank, setup.devices, setup.plan.engine_devices)
        reports: Any = LinkReports(link)
        _, engine = open_engine(config, setup.plan, policy, setup.tokenizer, reports, seat=seat)
        self._use_engine(engine, classifiers)
        link.progress = self._rollout_progress

    def ready(self) -> EvaluationFacts:
        return EvaluationFacts(self._engine.description, self._engine.lowered)

    def facts_of_shortage(self) -> None:
        """An engine says itself what it ran out of memory with."""


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, EvaluationRank)
