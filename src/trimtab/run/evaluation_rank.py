"""The program of a rank that only generates: one device's share of an evaluation. It needs no other rank."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.cluster.serve import Link, serve
from trimtab.model.load import load_model
from trimtab.model.policy import Policy
from trimtab.run.build import own_modes
from trimtab.run.generating_rank import GeneratingRank, GeneratingSetup
from trimtab.run.machine import load_within
from trimtab.run.rollout_orders import load_classifiers


@dataclass(frozen=True, kw_only=True)
class EvaluationSetup(GeneratingSetup):
    """What such a rank is made from."""

    reward_models: tuple[str, ...]


class EvaluationRank(GeneratingRank):
    """What the driver's orders are carried out on."""

    def __init__(self, setup: EvaluationSetup, link: Link) -> None:
        super().__init__(setup, link)
        policy = Policy(load_within(setup.config.run, self._device, load_model, setup.config.model, self._device))
        classifiers = load_classifiers(setup.reward_models, policy.device, policy.dtype)
        self._open_engine(setup, policy, classifiers)


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, EvaluationRank)
