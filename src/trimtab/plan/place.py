"""Chooses devices and what each of them holds: every placement that a run leaves open is planned, and the fastest that fits wins.

Of placements within a hundredth of the fastest the simplest wins: everything whole, then optimizer state in parts, then
gradients, then weights. Of numbers of devices within three hundredths, the smallest. Nothing of it changes what is learned.
`trimtab plan` and `trimtab train` both come through here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trimtab.config.run import Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.placement import TENSOR_CUTS, Placement, device_counts, may_share_rows, placements, row_cuts
from trimtab.plan.planner import (
    MIN_SPEEDUP_OF_OTHER_ENGINE,
    Plan,
    gave_up_nothing,
    lack,
    limits_of,
    make_plan,
    vllm_cuts,
    within,
)
from trimtab.plan.rows import RowRanks
from trimtab.plan.rules import why_placed
from trimtab.plan.sizes import SMALLEST
from trimtab.plan.states import least_bytes

MAX_SLOWDOWN_OF_SIMPLER_SHARD = 1.01
"""A simpler way to hold states is chosen if its step takes at most so many times as long as the fastest."""
MIN_SPEEDUP_OF_SHARED_ROWS = 1.03
"""How many times faster a step must be with more devices to each micro-batch before these are chosen."""
ENOUGH_SHARING_RANKS = 8
"""More devices to each micro-batch are tried only while that makes steps faster, or nothing fits."""
MAX_SLOWDOWN_OF_FEWER_DEVICES = 1.03
"""Fewer devices are chosen if a step takes at most so many times as long as on more."""


def place_over(run: Run, job: Job, machine: Machine, profile: str = "balanced") -> Plan:
    """The fastest plan on the devices there are; where none fits, the one that lacks the least."""
    found: list[Plan] = []
    for count in device_counts(run, machine):
        plan = plan_on(count, run, job, machine, profile)
        if found and not plan.fits:
            break
        found.append(plan)
        # Each has more to do with fewer: once that is slower, or does not fit, still fewer are too.
        if not plan.fits or plan.times.total > MAX_SLOWDOWN_OF_FEWER_DEVICES * _shortest(found):
            break
    near = [plan for plan in found if plan.times.total <= MAX_SLOWDOWN_OF_FEWER_DEVICES * _shortest(found)]
    chosen = near[-1] if found[0].fits else found[0]
    return _explained(chosen, {"run.devices": _why_devices(chosen, found, machine)})


def _shortest(plans: list[Plan]) -> float:
    return min(plan.times.total for plan in plans)


def plan_on(devices: int, run: Run, job: Job, machine: Machine, profile: str) -> Plan:
    """The best plan on so many devices. A rollout copy is cut over several only where nothing else fits, or the native engine is
    slow, as it is with experts."""
    plan = _with_shared_rows(run, job, machine, profile, devices)
    enough = plan.fits and not job.shape.has_experts
    if enough or devices == 1 or not _may_cut(run, job, machine):
        return plan
    heads = min(block.kv_heads for block in job.shape.kinds if block.kv_heads)
    tried = [plan]
    for cut in TENSOR_CUTS:
        if cut <= min(devices, machine.per_host) and heads % cut == 0 and devices % cut == 0:
            tried.append(_simplest_fast(run, job, machine, profile, placements(run, job, machine, devices, tensor=cut)))
    fitting = [plan for plan in tried if plan.fits]
    if not fitting:
        return min(tried, key=lack)
    slower = {True: 1.0, False: MIN_SPEEDUP_OF_OTHER_ENGINE}  # as in choosing an engine on one device
    return min(fitting, key=lambda one: slower[one is plan or not plan.fits] * one.times.total)


def _with_shared_rows(run: Run, job: Job, machine: Machine, profile: str, devices: int) -> Plan:
    """The best plan on so many devices with whole rollout copies. That several share each micro-batch is tried where a sequence
    does not fit otherwise, or fills a micro-batch alone; it is chosen where nothing else fits, or a step is clearly faster."""

    def sharing(ranks: int) -> Plan:
        rows = RowRanks(ranks, ranks, ranks)
        return _simplest_fast(run, job, machine, profile, placements(run, job, machine, devices, rows=rows))

    best = sharing(1)
    open_ = run.sequence_parallel == "auto" and (job.training or job.compared) and may_share_rows(job)
    if not open_ or machine.cpu or (best.fits and best.run.token_budget >= 2 * job.longest_trained):
        return best
    for ranks in row_cuts(devices):
        shared = sharing(ranks)
        faster = shared.fits and MIN_SPEEDUP_OF_SHARED_ROWS * shared.times.total < best.times.total
        if faster or (shared.fits and not best.fits):
            best = shared
        elif best.fits and ranks >= ENOUGH_SHARING_RANKS:
            break  # more of them have still more to exchange
    return best


def _may_cut(run: Run, job: Job, machine: Machine) -> bool:
    """An engine could cut its copy over devices: the native one, which cuts no experts, or another where there is one."""
    if (
        not job.generates
        or machine.cpu
        or job.quantised
        or job.kv_stored != "auto"
        or run.rollout.tensor_parallel != "auto"
    ):
        return False
    native = not job.shape.has_experts
    return (run.engine == "native" and native) or (run.engine == "auto" and (native or vllm_cuts(machine)))


def _simplest_fast(run: Run, job: Job, machine: Machine, profile: str, places: Iterable[Placement]) -> Plan:
    """The simplest of the placements that come near the fastest that fits."""
    tried: list[Plan] = []
    limit = limits_of(within(machine, run), profile).device
    possible = list(places)
    for place in [place for place in possible if machine.cpu or least_bytes(job, place) <= limit] or possible[-1:]:
        last = tried[-1] if tried else None
        if last and last.fits and last.place.shard == place.shard and _waits_little(last):
            continue  # fewer in a set have less to gather, which is nothing to gain here
        plan = make_plan(run, job, machine, profile, place)
        tried.append(plan)
        if plan.fits and gave_up_nothing(plan) and (_waits_little(plan) or place.shard != "none"):
            break  # `optimizer` exchanges the least, and each mode after it more
    fitting = [plan for plan in tried if plan.fits]
    if not fitting:
        return _explained(min(tried, key=lack), {"run.shard": SMALLEST, "run.shard_devices": SMALLEST})
    fastest = min(plan.times.total for plan in fitting)
    chosen = next(plan for plan in fitting if plan.times.total <= MAX_SLOWDOWN_OF_SIMPLER_SHARD * fastest)
    return _explained(chosen, {"run.shard": _why_shard(chosen, tried)})


def _waits_little(plan: Plan) -> bool:
    """No other way to exchange things could make a step clearly faster."""
    return plan.times.communication <= (MAX_SLOWDOWN_OF_SIMPLER_SHARD - 1) * plan.times.total


def _why_shard(chosen: Plan, tried: list[Plan]) -> str:
    job, place = chosen.job, chosen.place
    if place.devices == 1:
        return why_placed(place, chosen.machine)["shard"]
    if place.shard == "none":
        return "adapters are small: each rank holds them whole" if job.rank else "it fits whole: no gather needed"
    simpler = [plan for plan in tried[: tried.index(chosen)] if plan.place.shard != place.shard]
    what = {"optimizer": "optimizer state", "gradients": "optimizer state and gradients", "full": "weights"}[
        place.shard
    ]
    if any(plan.fits for plan in simpler):
        fastest = min(plan.times.total for plan in simpler if plan.fits)
        return f"{fastest / chosen.times.total - 1:.0%} faster than with more on each rank".replace("%", " %")
    verb = "fit" if place.shard != "optimizer" else "fits"
    return f"{what} of {_billions(job.shape.parameters)} parameters {verb} only in parts"


def _why_devices(chosen: Plan, found: list[Plan], machine: Machine) -> str:
    used = chosen.place.devices
    if len(found) == 1 and used == 1:
        return why_placed(chosen.place, machine)["devices"]
    if not chosen.fits:
        return "all that there are"
    if used < found[0].place.devices:
        gain = chosen.times.total / found[0].times.total - 1
        more = found[0].place.devices
        return (
            f"{more} would be {gain:.0%} faster".replace("%", " %") if gain > 0.005 else f"{more} would not be faster"
        )
    fewer = [plan for plan in found if plan.place.devices < used]
    if not fewer:
        return "fewer do not hold it" if used > 1 and machine.devices == used else "all that there are"
    return f"a step takes {chosen.times.total:.3g} s; with {fewer[0].place.devices} it would take {fewer[0].times.total:.3g} s"


def _explained(plan: Plan, why: dict[str, str]) -> Plan:
    """The plan with these reasons for keys that it chose."""
    choices = (replace(choice, why=why[choice.key]) if choice.key in why else choice for choice in plan.choices)
    return replace(plan, choices=tuple(choices))


def _billions(number: int) -> str:
    return f"{number / 1e9:.1f}B" if number >= 1e8 else f"{number / 1e6:.0f}M"
