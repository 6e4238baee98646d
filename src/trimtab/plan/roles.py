"""The roles of a run, and the work of devices that hold only some of them.

A role is what devices do: train the policy (actor) or the critic, score by the reference policy or by reward models, generate
(rollout). Devices that hold the same roles are planned as a run of their own: with the part of the step's work that is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.plan.job import Job, Machine
from trimtab.plan.links import NETWORK_BYTES_PER_S, NETWORK_CALL_S, NETWORK_SHARE, link_of
from trimtab.plan.planner import Plan
from trimtab.plan.shape import ModelShape


@dataclass(frozen=True)
class RoleGroup:
    """Devices that hold the same roles, and the plan of their share of a step."""

    roles: tuple[str, ...]
    plan: Plan

    @property
    def devices(self) -> int:
        return self.plan.place.devices

    @property
    def score_s(self) -> float:
        """Seconds of passes without gradients."""
        return self.plan.times.score + self.plan.times.waits.score

    @property
    def update_s(self) -> float:
        """Seconds of forward and backward passes and of the optimizer step."""
        times = self.plan.times
        return times.update + times.waits.update + times.waits.optimizer

    @property
    def busy_s(self) -> float:
        """Seconds of a step in which these devices work."""
        rollout = self.plan.times.rollout if "rollout" in self.roles else 0.0
        return rollout + self.score_s + self.update_s


def roles_of(job: Job) -> tuple[str, ...]:
    """The roles that a run has."""
    found = ["actor"] if job.training else []
    found += ["critic"] if job.critic is not None else []
    found += ["reference"] if job.reference else []
    found += ["reward"] if job.reward_models else []
    return (*found, *(["rollout"] if job.generates else []))


def job_of_roles(job: Job, roles: tuple[str, ...]) -> Job:
    """The part of a job that devices with these roles do."""
    generates = "rollout" in roles
    mine = replace(job, generates=generates, reward_models=(), frozen=())
    if not generates:
        mine = replace(mine, eval_sequences=0, eval_completion=0)
    if "actor" in roles:
        frozen = () if generates else _frozen(job, roles, without=("reference",))
        return replace(
            mine,
            critic=job.critic if "critic" in roles else None,
            reference="reference" in roles,
            compared=job.compared and ("reference" in roles or not job.reference),
            reward_models=job.reward_models if generates and "reward" in roles else (),
            frozen=frozen,
        )
    mine = replace(mine, critic=None, reference=False, compared=False, old_logprobs=False)
    if "critic" in roles:
        assert job.critic is not None
        return replace(mine, shape=job.critic, old_logprobs=True, frozen=_frozen(job, roles))
    mine = replace(mine, training=False, checkpoints=False)
    if generates:
        return replace(mine, frozen=_frozen(job, roles))
    first, *others = _frozen(job, roles)
    return replace(mine, shape=first, old_logprobs=True, frozen=tuple(others), rank=0, adapters=0)


def _frozen(job: Job, roles: tuple[str, ...], without: tuple[str, ...] = ()) -> tuple[ModelShape, ...]:
    """Models of these roles that only score."""
    found: tuple[ModelShape, ...] = (job.shape,) if "reference" in roles and "reference" not in without else ()
    return found + (job.reward_models if "reward" in roles else ())


def layouts(roles: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Ways to put the roles of a run on different devices, rollout last where it has its own."""
    training = tuple(role for role in roles if role != "rollout")
    yield training, ("rollout",)
    others = tuple(role for role in training if role != "actor")
    if "critic" in roles:
        beside = tuple(role for role in others if role != "reference")
        mine = tuple(role for role in training if role not in beside)
        yield mine, beside, ("rollout",)
        yield (*mine, "rollout"), beside
    if "reference" in roles or "reward" in roles:
        scoring = tuple(role for role in others if role != "critic")
        mine = tuple(role for role in training if role not in scoring)
        yield mine, scoring, ("rollout",)
        if "critic" in roles:
            yield ("actor",), ("critic",), scoring, ("rollout",)


def machine_of(machine: Machine, devices: int) -> Machine:
    """So many devices of a machine, with their share of a host's memory and cores."""
    part = replace(machine.on(devices), engines=machine.engines)
    if devices >= machine.per_host or machine.cpu:
        return part
    share = devices / machine.per_host
    return replace(part, host_memory=int(machine.host_memory * share), cores=max(1, int(machine.cores * share)))


def publish_s(job: Job, machine: Machine, devices: int, tensor: int) -> float:
    """Seconds to give the weights of trainers to engines on other devices: every host of engines receives each byte once, over
    the network cards of its devices, and these hand it to each other. On one host all is NVLink or PCIe."""
    nbytes = job.adapters * 4 if job.rank else job.shape.parameters * job.itemsize
    calls = 1 if job.rank else job.shape.layers + (1 if job.shape.tied else 2)
    rate, call = link_of(machine)
    if machine.hosts <= 1:
        return nbytes / tensor / rate + calls * call
    inside = min(devices, machine.per_host)
    crossing = nbytes / inside / (NETWORK_BYTES_PER_S * NETWORK_SHARE)
    handing = max(0.0, nbytes / tensor - nbytes / inside) / rate
    return crossing + handing + calls * (call + NETWORK_CALL_S)
