"""The program of a rank that generates for ranks that train (`run.placement: {actor: N, rollout: M}`): it has the policy and an
engine, and is sent new weights (cluster/transfer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.cluster.serve import Link, serve
from trimtab.cluster.transfer import ChannelSetup, Transferred
from trimtab.record.folder import ENGINE_LOGS
from trimtab.rollout.native.cut import CutEngine
from trimtab.run.build import load_policy, own_modes, use_planned_kernels, with_known_dtype
from trimtab.run.generating_rank import GeneratingRank, GeneratingSetup
from trimtab.run.machine import load_within
from trimtab.run.models import keep_routes


@dataclass(frozen=True, kw_only=True)
class SamplerSetup(GeneratingSetup):
    """What such a rank is made from."""

    checkpoint: Path | None
    folder: Path
    channel: ChannelSetup


class SamplerRank(GeneratingRank):
    """What the driver's orders are carried out on."""

    def __init__(self, setup: SamplerSetup, link: Link) -> None:
        super().__init__(setup, link)
        run, model, learn, device = setup.config.run, setup.config.model, setup.config.learn, self._device
        joint = setup.plan.joint_ranks
        if joint:  # of the device only the slices take memory; their type is the device's
            model, device = with_known_dtype(model, device), torch.device("cpu")
        policy = load_within(run, device, load_policy, model, learn.seed, device, run.kernels, setup.checkpoint)
        keep_routes(policy, setup.config)
        if not joint:
            use_planned_kernels(setup.plan, policy)
        self._open_engine(setup, policy, logs=setup.folder / ENGINE_LOGS / f"sampler-{setup.rank}")
        self._channel = setup.channel.open(1 + setup.rank, self._device)
        self._policy = None if joint else policy
        self._comes = self._engine.let_go() if isinstance(self._engine, CutEngine) else {}

    def receive_weights(self, version: int) -> Transferred:
        """Have the weights of this version from now on."""
        if self._policy is None:
            assert isinstance(self._engine, CutEngine)
            found = self._channel.receive(self._comes, self._engine.take, version)
        else:
            found = self._channel.pass_on(self._policy, version)
        self._engine.publish(version)
        return found


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, SamplerRank)
