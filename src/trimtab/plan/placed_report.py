"""A placement as data: roles with their devices and memory, the seconds of a step, and the runners-up."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.plan.arrange import Arranged, Arrangement
from trimtab.plan.ledger import ENGINE, MERGED, MERGING, NOT_METERED, Phase
from trimtab.plan.roles import RoleGroup
from trimtab.plan.states import FROZEN

ROLE_OF_COMPONENT = {
    "critic": "critic", "critic's optimizer": "critic", "reference": "reference",
    "reward models": "reward", "reward models' work": "reward",
    **dict.fromkeys(("KV cache", "rollout weights", "decode step", "prefill", ENGINE, MERGED, MERGING), "rollout"),
}  # fmt: skip
SHARED_COMPONENTS = {*NOT_METERED, "workspaces"} - {ENGINE}
PHASES_OF_ROLE = {
    "actor": ("load", "score", "update", "optimizer", "publish", "checkpoint", "export"),
    "critic": ("load", "score", "update", "optimizer", "checkpoint"),
    "reference": ("load", "score"),
    "reward": ("load", "score", "rollout"),
    "rollout": ("load", "rollout", "publish"),
}


def main_role(roles: tuple[str, ...]) -> str:
    """The role whose model is the first of the group: weights, activations and gradients are its."""
    return next(role for role in ("actor", "critic", "rollout", "reference", "reward") if role in roles)


def role_components(group: RoleGroup, role: str, phase: Phase) -> dict[str, int]:
    """What of a phase's memory is a role's: components that all have in common are nobody's."""
    first = main_role(group.roles)
    scorer = next((one for one in ("reference", "reward") if one in group.roles and one != first), first)
    memory = phase.device or phase.host
    owners = ROLE_OF_COMPONENT | {FROZEN: scorer}
    return {
        name: size for name, size in memory.items() if name not in SHARED_COMPONENTS and owners.get(name, first) == role
    }


def role_bytes(group: RoleGroup, role: str) -> int:
    """The most that a role takes in any phase, on each of its devices."""
    return max(sum(role_components(group, role, phase).values()) for phase in group.plan.ledger.phases)


def roles_as_dicts(arrangement: Arrangement) -> list[dict[str, Any]]:
    """Each role with its devices, counted from 0 over all hosts, and its memory in each of its phases."""
    found, first = [], 0
    for group in arrangement.groups:
        for role in group.roles:
            phases = [
                {
                    "name": phase.name,
                    "bytes": sum((parts := role_components(group, role, phase)).values()),
                    "components": parts,
                    "device_bytes": phase.device_bytes,
                    "host_bytes": phase.host_bytes,
                }
                for phase in group.plan.ledger.phases
                if phase.name in PHASES_OF_ROLE[role]
            ]
            found.append(
                {
                    "role": role,
                    "devices": group.devices,
                    "first_device": first,
                    "shares_with": [other for other in group.roles if other != role],
                    "shard": group.plan.place.shard,
                    "shard_devices": group.plan.place.shard_devices,
                    "tensor": group.plan.place.tensor,
                    "busy_seconds": round(group.busy_s, 6),
                    "phases": phases,
                }
            )
        first += group.devices
    return found


def arrangement_as_dict(arrangement: Arrangement) -> dict[str, Any]:
    """A placement in short, as runners-up are told."""
    return {
        "words": arrangement.words(),
        "kind": arrangement.kind,
        "staleness": arrangement.staleness,
        "groups": [{"roles": list(group.roles), "devices": group.devices} for group in arrangement.groups],
        "fits": arrangement.fits,
        "runs_in_this_version": arrangement.built,
        "step_seconds": arrangement.times.as_dict(),
        "tokens_per_device_second": round(arrangement.tokens_per_device_s, 1),
    }


def arranged_as_dict(arranged: Arranged) -> dict[str, Any]:
    """What JSON says of the placement beside the plan of its trainers."""
    chosen = arranged.chosen
    return {
        "placement": asdict(chosen.trainer.plan.place) | arrangement_as_dict(chosen) | {"why": arranged.why},
        "roles": roles_as_dicts(chosen),
        "runners_up": [arrangement_as_dict(one) for one in arranged.runners_up],
        "tokens_per_device_second": round(chosen.tokens_per_device_s, 1) if chosen.fits else None,
    }


def refuse_split(arrangement: Arrangement) -> ConfigError:
    """What each group of devices lacks that cannot hold its roles."""
    problems = []
    for group in arrangement.groups:
        plan = group.plan
        if not plan.fits:
            phase = plan.ledger.fullest
            what = (
                f"{group.devices} devices do not hold {' and '.join(group.roles)}: {phase.name} needs "
                f"{plan.missing_bytes / GIB:.1f} GiB more on each, most of it for {plan.ledger.binding}"
            )
            problems.append(Problem("run.placement", what, "Give these roles more devices, or write auto."))
    return ConfigError(problems)
