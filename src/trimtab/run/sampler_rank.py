"""The program of a rank that generates for ranks that train (`run.placement: split`): it has the policy and an engine, and is
sent new weights (cluster/transfer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.serve import Link, serve
from trimtab.cluster.transfer import ChannelSetup, Transferred
from trimtab.config.resolved import ResolvedConfig
from trimtab.observe.meters import MemoryMeter
from trimtab.plan.planner import Plan
from trimtab.record.folder import ENGINE_LOGS
from trimtab.rollout.seat import seat_of
from trimtab.run.build import load_policy, own_modes, use_planned_kernels
from trimtab.run.engines import open_engine
from trimtab.run.evaluation_rank import EvaluationFacts
from trimtab.run.machine import load_within, memory_limit
from trimtab.run.rollout_orders import LinkReports, RolloutOrders


@dataclass(frozen=True)
class SamplerSetup:
    """What such a rank is made from."""

    rank: int
    ranks: int
    device: str
    config: ResolvedConfig
    tokenizer: Any
    plan: Plan
    checkpoint: Path | None
    folder: Path
    channel: ChannelSetup
    devices: tuple[str, ...]
    """Of all that generate."""


class SamplerRank(RolloutOrders):
    """What the driver's orders are carried out on."""

    def __init__(self, setup: SamplerSetup, link: Link) -> None:
        self._link, self._rank, self._ranks = link, setup.rank, setup.ranks
        config, device = setup.config, torch.device(setup.device)
        self._device = device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        torch.set_num_threads(setup.plan.run.threads)
        self._limit = memory_limit(config.run, device)
        self._limit.__enter__()  # it ends with the process
        model, learn, kernels = config.model, config.learn, config.run.kernels
        policy = load_within(config.run, device, load_policy, model, learn.seed, device, kernels, setup.checkpoint)
        use_planned_kernels(setup.plan, policy)
        self._policy = policy
        logs = setup.folder / ENGINE_LOGS / f"sampler-{setup.rank}"
        reports: Any = LinkReports(link)
        seat = seat_of(setup.rank, setup.devices, setup.plan.engine_devices)
        _, engine = open_engine(config, setup.plan, policy, setup.tokenizer, reports, logs, seat)
        self._use_engine(engine, [])
        self._meter = MemoryMeter(device, outside=lambda: engine.non_torch_bytes)
        self._channel = setup.channel.open(1 + setup.rank, device)
        link.progress = self._rollout_progress

    def ready(self) -> EvaluationFacts:
        return EvaluationFacts(self._engine.description, self._engine.lowered)

    def receive_weights(self, version: int) -> Transferred:
        """Have the weights of this version from now on."""
        found = self._channel.pass_on(self._policy, version)
        self._engine.publish(version)
        return found

    def facts_of_shortage(self) -> None:
        """An engine says itself what it ran out of memory with."""


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, SamplerRank)
