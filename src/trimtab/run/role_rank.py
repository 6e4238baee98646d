"""The program of a rank that has the critic, the reference policy or reward models, and neither the policy nor an engine
(`run.placement: {actor: 2, critic: 1, reference: critic}`).

It carries out the orders that any rank does for these models (rank.py), with others of its own set; the ranks that train the
policy take no part. Of a checkpoint it writes what is the critic's.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.base.spans import Taken, log
from trimtab.cluster.mesh import Mesh
from trimtab.cluster.serve import serve
from trimtab.cluster.updater import UpdaterFacts
from trimtab.config.resolved import ResolvedConfig, with_plan
from trimtab.model.load import resolve_dtype
from trimtab.model.policy import AnyPolicy
from trimtab.model.sharded import ShardedPolicy
from trimtab.observe.meters import MemoryMeter
from trimtab.plan.ledger import CHECKPOINT_COPY
from trimtab.record.behind import WriteBehind
from trimtab.record.checkpoint import load_part
from trimtab.record.host_copy import HostCopy
from trimtab.record.part import CheckpointPart, PartWritten, collect_files
from trimtab.rollout.no_rollout import NoRollout
from trimtab.run.build import own_modes, update_settings, use_planned_kernels
from trimtab.run.machine import load_within
from trimtab.run.models import load_reference, load_sharded_reference, put_reference_away
from trimtab.run.rank import Rank, RankSetup, facts_of
from trimtab.run.rollout_orders import load_classifiers
from trimtab.run.same_ranks import software_here
from trimtab.update.critic import critic_files, restore_critic
from trimtab.update.frozen import FrozenScorer
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.pass_clock import update_parts
from trimtab.update.updater import Updater


@dataclass(frozen=True, kw_only=True)
class RoleSetup(RankSetup):
    """What such a rank is made from."""

    roles: tuple[str, ...]


@dataclass(frozen=True)
class RoleFacts:
    """What it says of itself once it is built."""

    updaters: dict[str, UpdaterFacts]
    software: dict[str, str]


class RoleRank(Rank):
    """What the driver's orders are carried out on."""

    def _build(self, setup: RankSetup, device: torch.device) -> None:
        assert isinstance(setup, RoleSetup)
        self.roles = setup.roles
        ready, plan, mesh = setup.ready, setup.plan, self._mesh
        self._ready, self._rank, self._ranks, self._device = ready, setup.rank, setup.ranks, device
        saves = "critic" in setup.roles
        self._copy = HostCopy(device) if saves and CHECKPOINT_COPY in plan.ledger["checkpoint"].host else None
        self._behind = WriteBehind()
        self._captured: CheckpointPart | None = None
        self._is_copy = False
        self._written: PartWritten | None = None
        self._channel = None
        self._meter = MemoryMeter(device)
        assert isinstance(ready.config, ResolvedConfig)
        config = with_plan(ready.config, plan.run)
        self._models: dict[str, Any] = {}
        self._critic: Updater | None = None
        if "critic" in setup.roles:
            cut = mesh.device_mesh if plan.run.shard == "full" else None
            self._critic = load_within(ready.config.run, device, setup.stage.open_critic, config, device, cut, mesh)
            assert self._critic is not None
            self._models["critic"] = self._critic
            if setup.checkpoint is not None:
                restore_critic(setup.checkpoint, self._critic, load_part)
        self._reference = self._open_reference(setup, device, mesh) if "reference" in setup.roles else None
        if self._reference is not None:
            sizes = update_settings(plan.run)
            self._models["reference"] = FrozenScorer(
                self._reference,
                PolicyGradient(ready.config.learn),
                device,
                ranks=setup.ranks,
                score_token_budget=sizes["score_token_budget"],
                logprob_chunk=sizes["logprob_chunk"],
            )
        own = None if self._critic is None else self._critic.policy
        self._share_rows(setup, {"reference": self._reference, "critic": own})
        self._updaters = self._models
        dtype = resolve_dtype(ready.config.model, device)
        self._use_engine(NoRollout(), load_classifiers(setup.reward_models, device, dtype))
        self._active: Any = next(iter(self._models.values()), None)
        self._link.progress = self._progress

    def _folder_of(self, setup: RankSetup) -> Path:
        assert isinstance(setup, RoleSetup)
        return super()._folder_of(setup) / setup.roles[0]

    def _open_reference(self, setup: RoleSetup, device: torch.device, mesh: Mesh) -> AnyPolicy:
        config, run = setup.ready.config, setup.plan.run
        if run.shard == "full":
            return load_within(config.run, device, load_sharded_reference, config, run, device, mesh.device_mesh, mesh)
        reference = load_within(config.run, device, load_reference, config, device, mesh)
        use_planned_kernels(setup.plan, reference)
        away = put_reference_away(reference, run)
        assert away is not None
        return away

    def ready(self) -> RoleFacts:  # type: ignore[override]
        return RoleFacts({name: facts_of(model) for name, model in self._models.items()}, software_here())

    def observed(self) -> tuple[dict[str, float], Taken]:
        clocks = [clock for model in self._models.values() for clock in model.take_clocks()]
        return update_parts(clocks), log.take()

    def _sharded_models(self) -> list[ShardedPolicy]:
        return [model.policy for model in self._models.values() if isinstance(model.policy, ShardedPolicy)]

    def _part(self) -> CheckpointPart:
        files = {} if self._critic is None else critic_files(self._critic)
        return collect_files(files, self._rank, self._ranks)

    def facts_of_shortage(self) -> Any:
        return None if self._active is None else super().facts_of_shortage()

    def _progress(self) -> Any:
        if self._active is not None:
            return super()._progress()
        self._look_at_store()
        return self._rollout_progress()


def main(descriptor: str) -> None:
    with own_modes():
        serve(descriptor, RoleRank)
