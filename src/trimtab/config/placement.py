"""`run.placement` as roles and numbers of devices, and what contradicts it.

A mapping gives each role a number of devices of its own, or the name of a role to share devices with. A role that it does not
name is on the actor's devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trimtab.base.suggestions import nearest
from trimtab.config.contradiction import REWARD_MODEL, Contradiction, clash
from trimtab.config.learn import Learn
from trimtab.config.ranks import nearest_divisor
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import RowRole, Run
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

ROLES = ("actor", "critic", "reference", "reward", "rollout")
"""What devices do: train the policy, train the critic, score by the reference policy, score by reward models, generate."""
RoleMap = Mapping[str, int | str]
EXAMPLE = "{actor: 4, rollout: 4}"
MAX_DEVICES = 1024


def groups_of_roles(placement: RoleMap) -> dict[tuple[str, ...], int]:
    """Roles that are on the same devices, and how many devices these are; in the order of `ROLES`."""
    owners: dict[str, str] = {}
    for role in ROLES:
        value = placement.get(role, "actor")
        owners[role] = role if isinstance(value, int) else value
    counts = {owner: count for owner in ROLES if isinstance(count := placement.get(owner), int)}
    return {tuple(role for role in ROLES if owners[role] == owner): count for owner, count in counts.items()}


def absent_roles(config: Config, learn: Learn) -> dict[str, str]:
    """Roles that a run has not, each with the reason."""
    found = {}
    if learn.advantage != "gae":
        found["critic"] = f"{learn.algorithm} has no critic"
    if learn.kl.coef == 0:
        found["reference"] = "learn.kl.coef is 0, so there is no reference policy"
    elif config.model.lora is not None:
        found["reference"] = "with LoRA the reference policy is the actor without its adapters"
    if not any(part.fn.startswith(REWARD_MODEL) for part in config.reward):
        found["reward"] = "no reward is a reward model"
    return found


def placement(config: Config | SftConfig | RewardModelConfig, learn: Learn | None) -> Iterator[Contradiction]:
    """A placement that names what there is not, or whose numbers do not add up."""
    asked, devices = config.run.placement, config.run.devices
    if asked in ("auto", "colocated"):
        return
    if not isinstance(config, Config) or learn is None:
        yield clash("run.placement", "has no effect: this stage only trains, so there is one role", "Leave it out")
    elif isinstance(asked, str):
        if devices == 1:
            what = "is split, but run.devices is 1: roles cannot be on different devices"
            yield clash("run.placement run.devices", what, "Write run.placement: colocated, or more devices")
    else:
        wrong = list(_wrong_roles(asked))
        yield from wrong or (*_absent(asked, absent_roles(config, learn)), *_sizes(config, asked))


def _wrong_roles(asked: RoleMap) -> Iterator[Contradiction]:
    """Names and values that mean nothing."""
    for name, value in asked.items():
        if name not in ROLES:
            near = nearest(name, ROLES, 0.6)
            fix = f"Did you mean {near}?" if near else f"Write {', '.join(ROLES)}"
            yield clash("run.placement", f"{name!r} is not a role", fix)
        elif isinstance(value, int):
            if not 1 <= value <= MAX_DEVICES:
                what = f"gives {name} {value} devices"
                yield clash("run.placement", what, f"Write a number from 1 to {MAX_DEVICES:,}, or a role")
        elif value not in ROLES:
            fix = f"Write a number of devices, or one of {', '.join(ROLES)}"
            yield clash("run.placement", f"{name}: {value!r} is neither a number of devices nor a role", fix)
        elif not isinstance(asked.get(value), int):
            what = f"{name} shares the devices of {value}, which has no number of devices of its own"
            yield clash("run.placement", what, f"Write a number for {value}, or share with a role that has one")
    if not isinstance(asked.get("actor"), int):
        yield clash("run.placement", "gives the actor no devices", f"Write a number for it, such as {EXAMPLE}")


def _absent(asked: RoleMap, absent: Mapping[str, str]) -> Iterator[Contradiction]:
    for role in asked:
        if role in absent:
            keys = "run.placement learn.algorithm learn.kl.coef model.lora reward"
            yield clash(keys, f"names the role {role}, but {absent[role]}", f"Leave {role} out")


def _sizes(config: Config, asked: RoleMap) -> Iterator[Contradiction]:
    run, groups = config.run, groups_of_roles(asked)
    total, actor = sum(groups.values()), int(asked["actor"])
    if total > MAX_DEVICES:
        yield clash(
            "run.placement", f"needs {total:,} devices", f"Write numbers that add up to {MAX_DEVICES:,} at most"
        )
    if run.devices != "auto" and run.devices != total:
        what = f"needs {total} devices, but run.devices is {run.devices}"
        yield clash(
            "run.placement run.devices", what, f"Leave run.devices out, or write numbers that add up to {run.devices}"
        )
    if run.shard_devices != "auto" and actor % run.shard_devices:
        what = f"is {run.shard_devices}, which does not divide the actor's {actor} devices into equal sets"
        yield clash("run.shard_devices run.placement", what, "Write a divisor of the actor's devices, or leave it out")
    yield from _shared_rows(run, groups)
    cut = run.cut
    mine = next(count for roles, count in groups.items() if "rollout" in roles)
    if mine % cut:
        what = f"gives rollout {mine} devices, which engines over {cut} devices each (run.rollout.tensor_parallel) cannot share"
        yield clash("run.placement run.rollout.tensor_parallel", what, f"Write a multiple of {cut} for rollout")


def _shared_rows(run: Run, groups: Mapping[tuple[str, ...], int]) -> Iterator[Contradiction]:
    """Numbers of devices to a micro-batch that do not divide the devices of a role."""
    shared, told = row_ranks(run), set[tuple[int, int]]()
    models: dict[str, RowRole] = {"actor": "policy", "reference": "reference", "critic": "critic"}
    for roles, count in groups.items():
        for role in (role for role in models if role in roles):
            ranks = shared[models[role]]
            if count % ranks and (ranks, count) not in told:
                told.add((ranks, count))
                what = f"is {ranks} for the {models[role]}, which does not divide the {count} devices of {role} into equal sets"
                fix = f"Write {{{models[role]}: {nearest_divisor(ranks, count)}}}, or leave it out"
                yield clash("run.sequence_parallel run.placement", what, fix)
