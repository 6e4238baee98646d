"""The program of a rank that generates for ranks that train (`run.placement: {actor: N, rollout: M}`): it has the policy and an
engine, and is sent new weights (cluster/transfer.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.cluster.serve import Link, serve
from trimtab.cluster.transfer import ChannelSetup, Transferred
from trimtab.record.folder import ENGINE_LOGS
from trimtab.run.build import load_policy, own_modes, use_planned_kernels
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
        self._policy = load_within(run, device, load_policy, model, learn.seed, device, run.kernels, setup.checkpoint)
        keep_routes(self._policy, setup.config)
        use_planned_kernels(setup.plan, self._policy)
        self._open_engine(setup, self._policy, logs=setup.folder / ENGINE_LOGS / f"sampler-{setup.rank}")
        self._channel = setup.channel.open(1 + setup.rank, device)

    def receive_weights(self, version: int) -> Transferred:
        """Have the weights of this version from now on."""
        found = self._channel.pass_on(self._policy, version)
        self._engine.publish(version)
        return found


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, SamplerRank)
