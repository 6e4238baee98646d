"""Sets of ranks that have other models than the policy, as the driver starts and asks them (role_rank.py is their program)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.cluster.ranks import Ranks
from trimtab.cluster.trainer import RoleSet
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.planner import Plan
from trimtab.rollout.no_rollout import NoRollout
from trimtab.run.assemble_ranks import RankPlan, ranked_updaters, start_ranks
from trimtab.run.role_rank import RoleFacts
from trimtab.run.stage import CheckedRun, Stage
from trimtab.update.guard import Guard


def start_role(
    planned: RankPlan,
    roles: tuple[str, ...],
    stage: Stage,
    ready: CheckedRun,
    checkpoint: Path | None,
    logs: Path,
    recoveries: Recoveries,
) -> Ranks:
    """Start a rank for each device of these roles. Their logs are in a folder with the name of the first."""
    return start_ranks(planned, stage, ready, checkpoint, logs / roles[0], recoveries, roles=roles)


def role_set(
    roles: tuple[str, ...],
    ranks: Ranks,
    stage: Stage,
    plan: Plan,
    facts: list[RoleFacts],
    config: Any,
    recoveries: Recoveries,
) -> RoleSet:
    """Their models behind guards of their own, once they are built."""
    shorter, reports = stage.shorter(config), {"critic": recoveries.of_critic}
    guards: dict[Any, Guard] = {
        name: Guard(
            updater, NoRollout(), least_kv_tokens=0, shorter=shorter, report=reports.get(name, recoveries.of_policy)
        )
        for name, updater in ranked_updaters(stage, plan, ranks, facts).items()
    }
    return RoleSet(" + ".join(roles), ranks, guards, "critic" in roles)
