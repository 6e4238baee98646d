"""Chooses between placements: everything on all devices in turn (colocated), or roles on devices of their own (split).

A split step is as long as its parts one after the other, where groups of devices that work at the same time count as the slowest
of them. With `learn.staleness` above 0 rollout runs beside the update, and the longer of the two is the step. Candidates are
ordered by a bound that no plan of theirs can beat, and planned until the bound is worse than the best found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trimtab.config.placement import groups_of_roles
from trimtab.config.row_ranks import of_roles
from trimtab.config.run import Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.place import place_over, plan_on
from trimtab.plan.placement import PLACEMENTS_BUILT, Placement
from trimtab.plan.planner import Plan, limits_of, within
from trimtab.plan.roles import RoleGroup, job_of_roles, layouts, machine_of, publish_s, roles_of
from trimtab.plan.states import least_bytes
from trimtab.plan.times import product_share

MIN_SPEEDUP_OF_SPLIT = 1.05
"""How many times faster a step must be with roles on different devices before that is chosen: colocated is simpler."""
MAX_PLANNED = 5
"""Split placements that are planned in full, for each number of steps that rollout may lie behind."""
MAX_RUNNERS_UP = 4
SHARES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((1, 7), (1, 3), (3, 5), (1, 2), (1, 1), (2, 1), (5, 3), (3, 1), (7, 1)),
    3: ((1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 2, 1), (2, 2, 1), (3, 3, 2), (1, 1, 4), (2, 1, 3), (4, 1, 1), (4, 1, 3)),
    4: ((1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 1, 3), (3, 3, 1, 1)),
}
"""Shares of the devices that are tried for so many groups, in the order of a layout."""
Sizes = tuple[tuple[tuple[str, ...], int], ...]
"""Groups of roles, each with its number of devices."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step's parts, of the slowest group each, and of the whole step."""

    rollout: float
    publish: float
    score: float
    update: float
    total: float

    def as_dict(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in vars(self).items()}


@dataclass(frozen=True)
class Arrangement:
    """Roles on their devices, and what a step takes."""

    kind: Literal["colocated", "split"]
    staleness: int
    groups: tuple[RoleGroup, ...]
    times: StepTimes
    job: Job

    @property
    def fits(self) -> bool:
        return all(group.plan.fits for group in self.groups)

    @property
    def devices(self) -> int:
        return sum(group.devices for group in self.groups)

    @property
    def tokens_per_device_s(self) -> float:
        """Tokens of prompts and completions a second and device."""
        tokens = self.job.sequences * (self.job.typical_prompt + self.job.expected_completion)
        return tokens / self.times.total / self.devices

    @property
    def built(self) -> bool:
        """This version can run it: rollout is alone on its devices, or with the actor."""
        return self.kind == "colocated" or "actor" in self.rollout.roles or self.rollout.roles == ("rollout",)

    @property
    def trainer(self) -> RoleGroup:
        return next(group for group in self.groups if "actor" in group.roles)

    @property
    def rollout(self) -> RoleGroup:
        return next(group for group in self.groups if "rollout" in group.roles)

    def words(self) -> str:
        """`colocated on 8`, or `split: 16 actor + reference, 16 critic, 16 rollout`, and how far behind rollout may be."""
        behind = f", learn.staleness: {self.staleness}" if self.staleness else ""
        if self.kind == "colocated":
            return f"colocated on {self.devices}{behind}"
        groups = ", ".join(f"{group.devices} {' + '.join(group.roles)}" for group in self.groups)
        return f"split: {groups}{behind}"


@dataclass(frozen=True)
class Arranged:
    """The placement that was chosen, why, and others that were planned, the fastest first."""

    chosen: Arrangement
    why: str
    runners_up: tuple[Arrangement, ...] = ()


def arrange(run: Run, job: Job, machine: Machine, profile: str = "balanced") -> Arranged:
    """The fastest placement that a run leaves open; of near ones the colocated."""
    asked = run.placement
    if isinstance(asked, dict):
        groups = {tuple(r for r in roles if r in roles_of(job)): n for roles, n in groups_of_roles(asked).items()}
        if len(groups) == 1:
            pinned = run.with_values({"placement": "colocated", "devices": sum(groups.values())})
            return Arranged(_colocated(pinned, job, machine, profile), "one group of devices holds all roles")
        chosen = _Search(run, job, machine, profile).planned(tuple(groups.items()), job.staleness)
        return Arranged(chosen, "run.placement says so")
    devices = machine.devices if run.devices == "auto" else run.devices
    may_split = asked in ("auto", "split") and job.training and job.generates and devices > 1 and not machine.cpu
    if asked == "auto" and machine.here:
        may_split = may_split and "split" in PLACEMENTS_BUILT
    found: list[Arrangement] = []
    if asked != "split" or not may_split:
        found.append(_colocated(run.with_values({"placement": "colocated"}), job, machine, profile))
    if may_split:
        search = _Search(run, job, machine, profile)
        found += search.best(devices, job.staleness)
        found += search.best(devices, 1) if job.staleness == 0 else []
    return _chosen(found, job, asked)


def _chosen(found: list[Arrangement], job: Job, asked: str) -> Arranged:
    open_ = [one for one in found if one.staleness == job.staleness]  # what is learned is not ours to choose
    fitting = sorted((one for one in open_ if one.fits), key=lambda one: one.times.total) or open_
    first, chosen = fitting[0], fitting[0]
    colocated = next((one for one in fitting if one.kind == "colocated"), None)
    if colocated and colocated.times.total <= MIN_SPEEDUP_OF_SPLIT * first.times.total:
        chosen = colocated
    others = [one for one in sorted(found, key=lambda one: one.times.total) if one is not chosen and one.fits]
    return Arranged(chosen, _why(chosen, others, asked), tuple(_distinct(others))[:MAX_RUNNERS_UP])


def _why(chosen: Arrangement, others: list[Arrangement], asked: str) -> str:
    if not chosen.fits:
        return "nothing that was tried fits"
    if asked == "split" and chosen.kind == "split":
        return "the fastest of the split placements that fit"
    rivals = [one for one in others if one.staleness == chosen.staleness and one.kind != chosen.kind]
    if not rivals:
        return "roles take turns on the same devices" if chosen.kind == "colocated" else "colocated does not fit"
    gain = rivals[0].times.total / chosen.times.total
    if chosen.kind == "colocated":
        if gain < 1:
            return f"split would be {1 / gain - 1:.0%} faster, too little to split for".replace("%", " %")
        return f"{gain - 1:.0%} faster than the best split placement".replace("%", " %")
    return f"{gain - 1:.0%} faster than colocated".replace("%", " %")


def _distinct(found: list[Arrangement]) -> Iterator[Arrangement]:
    """The fastest of each kind: which roles are together, and how far behind rollout is."""
    seen: set[object] = set()
    for one in found:
        key = one.kind, one.staleness, tuple(group.roles for group in one.groups)
        if key not in seen:
            seen.add(key)
            yield one


def _colocated(run: Run, job: Job, machine: Machine, profile: str) -> Arrangement:
    """All roles on all devices. Rollout and update take turns, however far behind rollout may be."""
    return colocated_arrangement(place_over(run, job, machine, profile))


def colocated_arrangement(plan: Plan) -> Arrangement:
    group, job, times = RoleGroup(roles_of(plan.job), plan), plan.job, plan.times
    publish = times.publish + times.waits.publish
    step = StepTimes(times.rollout, publish, group.score_s, group.update_s, times.total)
    return Arrangement("colocated", job.staleness, (group,), step, job)


@dataclass
class _Search:
    """Split placements of one run; the plan of a group is made once."""

    run: Run
    job: Job
    machine: Machine
    profile: str
    plans: dict[tuple[tuple[str, ...], int], RoleGroup] = field(default_factory=dict)

    def best(self, devices: int, staleness: int) -> list[Arrangement]:
        """The fastest that fit on so many devices, and the best that does not where none does."""
        bounds = {sizes: self._bound(sizes, staleness) for sizes in self._candidates(devices, staleness)}
        found: list[Arrangement] = []
        for sizes in sorted(
            (sizes for sizes in bounds if bounds[sizes] is not None), key=lambda one: bounds[one] or 0.0
        ):
            fitting = [one.times.total for one in found if one.fits]
            bound = bounds[sizes] or 0.0
            if len(found) >= MAX_PLANNED or (fitting and bound > min(fitting)):
                break
            found.append(self.planned(sizes, staleness))
        fitting_ones = [one for one in found if one.fits]
        return fitting_ones or found[:1]

    def planned(self, sizes: Sizes, staleness: int) -> Arrangement:
        groups = tuple(self._group(roles, devices) for roles, devices in sizes)
        return Arrangement("split", staleness, groups, self._times(groups, staleness), self.job)

    def _times(self, groups: tuple[RoleGroup, ...], staleness: int) -> StepTimes:
        rollout = next(group for group in groups if "rollout" in group.roles)
        score, update = max(group.score_s for group in groups), max(group.update_s for group in groups)
        generating = rollout.plan.times.rollout
        if "actor" in rollout.roles:
            times = rollout.plan.times
            publish = times.publish + times.waits.publish
            return StepTimes(generating, publish, score, update, generating + publish + score + update)
        publish = publish_s(self.job, self.machine, rollout.devices, rollout.plan.place.tensor)
        if staleness == 0:
            return StepTimes(generating, publish, score, update, generating + publish + score + update)
        others = max(group.score_s for group in groups if group is not rollout)
        total = max(generating + publish + rollout.score_s, others + update)
        return StepTimes(generating, publish, score, update, total)

    def _group(self, roles: tuple[str, ...], devices: int) -> RoleGroup:
        key = roles, devices
        if key not in self.plans:
            job, machine = job_of_roles(self.job, roles), machine_of(self.machine, devices)
            values: dict[str, object] = {"devices": devices, "placement": "split"}
            if "actor" not in roles or devices == 1:
                values |= {"shard": "auto", "shard_devices": "auto"}
            if "actor" not in roles:
                values |= {"sequence_parallel": of_roles(self.run, roles)}
            if "rollout" not in roles:
                values |= {"engine": "native", "rollout.tensor_parallel": 1}
            self.plans[key] = RoleGroup(
                roles, plan_on(devices, self.run.with_values(values), job, machine, self.profile)
            )
        return self.plans[key]

    def _candidates(self, devices: int, staleness: int) -> Iterator[Sizes]:
        host = self.machine.per_host
        unit = host if devices % host == 0 and devices >= 3 * host else max(1, host // 2) if devices >= 2 * host else 1
        unit = unit if devices % unit == 0 else 1
        seen: set[Sizes] = set()
        for layout in layouts(roles_of(self.job)):
            if staleness and any({"actor", "rollout"} <= set(roles) for roles in layout):
                continue  # they take turns on the same devices: nothing runs beside anything
            for shares in SHARES[len(layout)]:
                counts = _parts(devices // unit, shares)
                sizes = tuple((roles, unit * count) for roles, count in zip(layout, counts or ()))
                if counts and sizes not in seen:
                    seen.add(sizes)
                    yield sizes

    def _bound(self, sizes: Sizes, staleness: int) -> float | None:
        """Seconds that no plan of these groups can beat; None where a group cannot hold its models."""
        work = []
        for roles, devices in sizes:
            job = job_of_roles(self.job, roles)
            if job.generates and not job.training:
                group = self._group(roles, devices)
                if not group.plan.fits:
                    return None
                work.append((group.plan.times.rollout, 0.0))
                continue
            mode: Literal["none", "full"] = "full" if devices > 1 and not job.rank else "none"
            cut = min(8, self.machine.per_host, devices)
            place = Placement(devices, 1, mode, devices if mode == "full" else 1, cut)
            limits = limits_of(within(self.machine, self.run), self.profile)
            if least_bytes(job, place) > limits.device:
                return None
            work.append((0.0, self._least_seconds(job, devices)))
        rollout, training = max(one[0] for one in work), max(one[1] for one in work)
        return max(rollout, training) if staleness else rollout + training

    def _least_seconds(self, job: Job, devices: int) -> float:
        """Products alone, at the rate that they reach, dealt evenly."""
        scorings = int(job.compared) + int(job.old_logprobs) + int(job.critic is not None)
        each = (4 if job.rank else 6) * job.epochs if job.training else 0
        products = (each + 2 * scorings) * job.shape.active_parameters
        products += (each * job.critic.active_parameters) if job.critic is not None else 0
        products += 2 * sum(shape.active_parameters for shape in job.frozen)
        rate = self.machine.device.flops * product_share(job.shape.hidden)
        return products * job.expected_row.tokens / devices / rate


def _parts(whole: int, shares: tuple[int, ...]) -> list[int] | None:
    """`whole` in parts as near these shares as whole numbers come; None where a part would be empty."""
    total = sum(shares)
    parts = [max(1, round(whole * share / total)) for share in shares]
    parts[parts.index(max(parts))] += whole - sum(parts)
    return parts if min(parts) >= 1 else None
