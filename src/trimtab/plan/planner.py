"""Fills in every `auto` of `run` so that a step is as fast as the memory allows, and gives a reason for each in a line.

Nothing chosen here changes what is learned. Every combination of what is recomputed and what waits in host memory is tried; for
each, the largest useful sizes that fit are found (sizes.py), and the plan whose predicted step is shortest wins. Keys that are
pinned stay as they are, and have to fit. A plan that does not fit has the least of everything that was left open: no other values
of these keys would fit either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from trimtab.config.known import ResolvedOffload, ResolvedRun
from trimtab.config.run import Recompute, Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import Ledger, build_ledger
from trimtab.plan.placement import Placement, pinned_placement
from trimtab.plan.rules import lends, page_tokens, small_page, useful_budget
from trimtab.plan.sizes import KV_FIFTHS, SHARED, SMALLEST, WHAT_FITS, Case, Limits, Way, grow, smallest, unbounded
from trimtab.plan.times import Times, predict, prefill_tokens_per_step

PROFILES = {"safe": 0.80, "balanced": 0.90, "max": 0.96}
"""Share of a device's memory that a plan may fill."""
HOST_SHARE = 0.9
"""Share of the host's memory that a plan for a GPU may fill."""
ENGINE_OVER_DEVICES = "vllm"
"""The engine for a model that is cut over several devices: the native one runs on a single device."""
MIN_SPEEDUP_OF_OTHER_ENGINE = 1.25
"""How many times faster a step must be with another engine before it is chosen: that engine holds a second copy of the weights,
in processes that can die."""
ASSUMED_STEPS = 1000
"""Steps that a plan assumes if the number of steps is not known."""
MAX_SLOWDOWN_TO_TRY_KV_SHARES = 1.1
"""Plans whose step is at most this many times as long as the shortest are tried with other shares of memory for the KV cache."""
MAX_SLOWDOWN_AT_BEST = 1.03
"""A way is left out if even with the largest sizes its step would take more than so many times as long as one that fits."""
MAX_SLOWDOWN_BY_RECOMPUTING = 1.05
"""Recomputing some activations is accepted if the predicted step is at most this many times as long."""


@dataclass(frozen=True)
class Choice:
    """One key of `run`, the value it got, and the reason."""

    key: str
    value: Any
    why: str
    measured: bool = False
    """`trimtab tune` measured it on this device."""


@dataclass(frozen=True)
class Plan:
    """A known `run`, and what it will take."""

    run: ResolvedRun
    choices: tuple[Choice, ...]
    ledger: Ledger
    times: Times
    place: Placement
    limits: Limits
    job: Job
    machine: Machine

    @property
    def fits(self) -> bool:
        return self.missing_bytes == 0

    @property
    def engine_devices(self) -> int:
        """Devices that each engine spans."""
        return self.run.rollout.tensor_parallel

    @property
    def joint_ranks(self) -> bool:
        """The ranks of an engine generate together: its first one does not own all of it."""
        return self.engine_devices > 1 and not self.run.external

    @property
    def prefill_tokens_per_step(self) -> float:
        return prefill_tokens_per_step(self.job, self.machine, self.run, self.place)

    @property
    def missing_bytes(self) -> int:
        """Bytes that the plan needs beyond the limit, on the device or on its host."""
        return self.limits.missing(self.ledger)


def limits_of(machine: Machine, profile: str) -> Limits:
    share = PROFILES[profile]
    host = int(machine.host_memory * (share if machine.cpu else HOST_SHARE))
    return Limits(int(machine.device.memory * share), host)


def make_plan(run: Run, job: Job, machine: Machine, profile: str = "balanced", place: Placement | None = None) -> Plan:
    """The fastest plan that fits in one placement; where none does, the one that lacks the least. Without a placement: the one
    that the run has pinned, or all devices with everything whole. place.py compares placements."""
    place = place or pinned_placement(run, machine)
    machine = within(machine, run).on(place.devices)
    if run.engine == "auto" and job.generates:
        return _with_engine(run, job, machine, profile, place)
    case = Case(job, machine, limits_of(machine, profile), place)
    plan = _fastest(run, case, fill=profile == "max")
    if not plan.fits and job.checkpoints:  # they are written without a copy, then
        return make_plan(run, replace(job, checkpoints=False), machine, profile, place)
    if run.external and job.generates and run.rollout.processes == "auto":
        plan = _with_fewer_processes(run, plan, case, fill=profile == "max")
    if not plan.fits and job.fused and run.kernels == "auto":
        return _with_own_modules(run, plan, profile)
    return plan


def _fastest(run: Run, case: Case, fill: bool) -> Plan:
    plans: list[Plan] = []
    for ways in _ways(run, case):
        first = _plan(run, case, ways[0], fill)
        if first.fits and gave_up_nothing(first):
            return first  # no other way could be faster: it only saves memory
        tried = _promising(run, case, ways, first, fill)
        plans += [*tried.values(), *_with_other_shares(run, case, list(tried), list(tried.values()), fill)]
        if fitting := [plan for plan in plans if plan.fits]:
            fastest = min(plan.times.total for plan in fitting)
            # The first within a hundredth of the fastest: plans that recompute and offload least come first.
            return next(plan for plan in fitting if plan.times.total <= 1.01 * fastest)
    return min(plans, key=lack)


def _promising(run: Run, case: Case, ways: list[Way], first: Plan, fill: bool) -> dict[Way, Plan]:
    """The plans of all ways, in their order, but for those that would be slower even if memory were no matter."""
    found = {ways[0]: first}
    if case.machine.cpu:
        return found | {way: _plan(run, case, way, fill) for way in ways[1:]}
    fitting = {way: sizes for way in ways[1:] if case.fits((sizes := smallest(run, case, way)).run)}
    if not fitting:
        return found | {way: _plan(run, case, way, fill) for way in ways[1:]}
    best = {
        way: predict(case.job, case.machine, unbounded(sizes, case, fill), case.place).total
        for way, sizes in fitting.items()
    }
    for way in sorted(best, key=lambda way: best[way]):
        fastest = min((plan.times.total for plan in found.values() if plan.fits), default=None)
        if fastest is None or best[way] <= MAX_SLOWDOWN_AT_BEST * fastest:
            found[way] = _plan(run, case, way, fill)
    return {way: found[way] for way in ways if way in found}


def _with_other_shares(run: Run, case: Case, ways: list[Way], plans: list[Plan], fill: bool) -> list[Plan]:
    """The same with more or less of the memory for the KV cache, where it shares that with micro-batches: first all of it, then
    what lies between for those that come close to the fastest."""
    sharing = [(way, [plan]) for way, plan in zip(ways, plans) if plan.fits and SHARED in _whys(plan)]
    for number, fifths in enumerate(KV_FIFTHS[1:]):
        if number == 1:
            fastest = min((plan.times.total for plan in plans if plan.fits), default=0.0)
            fastest = min([fastest, *(plan.times.total for _, found in sharing for plan in found)])
            sharing = [
                (way, found)
                for way, found in sharing
                if min(p.times.total for p in found) <= MAX_SLOWDOWN_TO_TRY_KV_SHARES * fastest
            ]
        for way, found in sharing:
            found.append(_plan(run, case, replace(way, kv_fifths=fifths), fill))
    return [plan for _, found in sharing for plan in found[1:]]


def _whys(plan: Plan) -> set[str]:
    return {choice.why for choice in plan.choices}


def gave_up_nothing(plan: Plan) -> bool:
    """No size was cut for want of memory, nothing is recomputed and nothing waits in host memory."""
    run = plan.run
    saved = run.checkpoint_activations or run.offload.optimizer or run.offload.reference or run.offload.activations
    return not saved and not _whys(plan) & {WHAT_FITS, SHARED, SMALLEST}


def lack(plan: Plan) -> tuple[int, int, int]:
    """What a plan lacks, and then what it takes: of those that do not fit, the one with the least is told."""
    phases = plan.ledger.phases
    return plan.missing_bytes, sum(p.required_bytes for p in phases), sum(p.host_bytes for p in phases)


def within(machine: Machine, run: Run) -> Machine:
    """The machine with no more memory than `run.memory`: of each device, or of the host where there is none."""
    if run.memory is None:
        return machine
    if machine.cpu:
        return replace(machine, host_memory=min(machine.host_memory, run.memory))
    return replace(machine, device=replace(machine.device, memory=min(machine.device.memory, run.memory)))


def _with_own_modules(run: Run, too_large: Plan, profile: str) -> Plan:
    """The plan with the model's own modules, whose layers keep half as much of their inputs as fused ones, if it fits."""
    job = replace(too_large.job, fused=False)
    plan = make_plan(run, job, too_large.machine, profile, too_large.place)
    if not plan.fits:
        return too_large
    why = "fused layers do not fit"
    choices = (replace(choice, why=why) if choice.key == "run.kernels" else choice for choice in plan.choices)
    return replace(plan, choices=tuple(choices))


def _with_engine(run: Run, job: Job, machine: Machine, profile: str, place: Placement) -> Plan:
    """The native engine, unless the model is cut over several devices, or another engine that is installed makes the run clearly
    faster, start-up included."""
    others = () if machine.cpu or job.quantised or job.kv_stored != "auto" else machine.engines
    over_devices = ENGINE_OVER_DEVICES if vllm_cuts(machine) else "native"
    names = ("native", *others) if place.tensor == 1 else (over_devices,)
    cut = {} if place.tensor == 1 else {"rollout.tensor_parallel": place.tensor}
    plans = {name: make_plan(run.with_values({"engine": name} | cut), job, machine, profile, place) for name in names}
    fitting = [name for name in names if plans[name].fits] or list(names)

    def seconds(name: str) -> float:
        """What a step takes, made longer for engines other than the native one, and its share of the start-up."""
        times = plans[name].times
        return (1.0 if name == "native" else MIN_SPEEDUP_OF_OTHER_ENGINE) * times.total + times.start / (
            job.steps or ASSUMED_STEPS
        )

    name = min(fitting, key=lambda name: (plans[name].missing_bytes, seconds(name)))
    if place.tensor > 1:
        why = f"the model is split over {place.tensor} devices"
    elif len(names) == 1:
        why = "shares the trainer's weights" if place.shares_weights else "has a copy of the weights of its own"
    else:
        why = "predicted rollout of a step: " + ", ".join(
            f"{other} {plans[other].times.rollout:.2g} s" for other in names
        )
        why += "".join(f"; {other} takes {plans[other].times.start:.0f} s to start" for other in names[1:])
    chosen = plans[name]
    why = why if chosen.fits else SMALLEST
    after = 1 + max((i for i, choice in enumerate(chosen.choices) if choice.key.startswith("run.rollout.")), default=-1)
    choices = (*chosen.choices[:after], Choice("run.engine", name, why), *chosen.choices[after:])
    return replace(chosen, choices=choices)


def vllm_cuts(machine: Machine) -> bool:
    """vLLM can cut its copy over devices: on this machine it has to be there."""
    return not machine.here or ENGINE_OVER_DEVICES in machine.engines


def _with_fewer_processes(run: Run, plan: Plan, case: Case, fill: bool) -> Plan:
    """The plan, or a faster one with fewer engine processes where memory has cut down what so many can run at once."""
    most = plan.run.rollout.processes
    cut = {choice.why for choice in plan.choices if choice.key.startswith("run.rollout.")} & {
        WHAT_FITS,
        SMALLEST,
        SHARED,
    }
    best = plan
    for count in range(most - 1, 0, -1) if cut or not plan.fits else ():
        pinned = run.with_values({"rollout.processes": count})
        fewer = _fastest(pinned, case, fill)
        if (fewer.missing_bytes, fewer.times.total) < (best.missing_bytes, 0.99 * best.times.total):
            best = fewer
    if best is plan:
        return plan
    fewer_of = Choice("run.rollout.processes", best.run.rollout.processes, "more processes do not fit")
    return replace(best, choices=(fewer_of, *best.choices))


def _ways(run: Run, case: Case) -> Iterator[list[Way]]:
    """Every combination of what is recomputed and what waits on the host, the least first, and where that is not the rule, the
    same with a KV cache that is given up after each rollout; then all that with smaller pages, for want of memory alone."""
    job, machine = case.job, case.machine
    usual, lend = page_tokens(run, job, machine), lends(run, machine)
    pages, lent = [usual], [lend]
    small = small_page(run, machine)
    if job.generates and run.rollout.page_tokens == "auto" and small < usual[0]:
        pages.append((small, "small pages waste less at the end of a sequence"))
    if job.generates and run.rollout.lend_memory == "auto" and machine.cpu:
        lent.append((True, "rollout and update take turns with the same memory"))
    copies = bool(job.rank and job.generates and not (machine.cpu or lend[0]))
    savings = list(_savings(run, job, machine))
    for page in pages:
        yield [
            Way(recompute, offload, page, lending, crowd_out=crowd_out)
            for lending, crowd_out, (recompute, offload) in product(lent, (False, True)[: 1 + copies], savings)
        ]


def _savings(run: Run, job: Job, machine: Machine) -> Iterator[tuple[Recompute, ResolvedOffload]]:
    levels: list[Recompute] = [False] if not job.training else [False, "some", True] if job.fused else [False, True]
    if run.checkpoint_activations != "auto":
        levels = [run.checkpoint_activations]

    def tries(pinned: bool | str, useful: bool) -> list[bool]:
        return [bool(pinned)] if pinned != "auto" else [False, True] if useful and not machine.cpu else [False]

    for optimizer, reference, activations, recompute in product(
        tries(run.offload.optimizer, job.training),
        tries(run.offload.reference, job.reference),
        tries(run.offload.activations, job.training),
        levels,
    ):
        if activations and recompute is not True and (True in levels or run.offload.activations == "auto"):
            continue  # of activations only the layers' inputs wait on the host
        yield recompute, ResolvedOffload(optimizer=optimizer, reference=reference, activations=activations)


CHOICE_ORDER = (
    "devices", "shard", "shard_devices", "sequence_parallel", "tensor_parallel", "prefetch", "overlap", "placement",
    "rollout.tensor_parallel",
    *(f"rollout.{key}" for key in ("page_tokens", "lend_memory", "max_sequences", "prefill_tokens", "processes", "kv_memory")),
    "kernels", "threads", "reward_workers", "token_budget", "score_token_budget", "logprob_chunk", "checkpoint_activations",
    *(f"offload.{key}" for key in ("optimizer", "reference", "activations")),
)  # fmt: skip
"""Keys in the order in which choices are shown."""


def _plan(run: Run, case: Case, way: Way, fill: bool) -> Plan:
    """The plan that saves memory in this way, with the largest useful sizes that fit; with the least where these do not fit.
    `fill`: larger micro-batches are useful too."""
    sizes = smallest(run, case, way)
    if case.fits(sizes.run):
        grow(sizes, case, fill)
    told = [key for key in CHOICE_ORDER if sizes.free(key) and (case.job.generates or not _of_rollout(key))]
    choices = (Choice(f"run.{key}", attrgetter(key)(sizes.run), sizes.why.get(key, SMALLEST)) for key in told)
    times = predict(case.job, case.machine, sizes.run, case.place)
    return Plan(
        sizes.run, tuple(choices), case.ledger(sizes.run), times, case.place, case.limits, case.job, case.machine
    )


def _of_rollout(key: str) -> bool:
    return key.startswith("rollout.") or key == "reward_workers"


def useful_tokens(plan: Plan) -> int:
    return useful_budget(plan.job, plan.machine, False, plan.place.rows)[0]


def recompute_when_wider(plan: Plan, now: int, budget: int) -> Recompute:
    """What to recompute when micro-batches grow from `now` to `budget` tokens because the device waits for its host: some, if a
    step then takes little longer and at most a tenth more memory than planned. Otherwise nothing."""
    if not plan.job.fused:
        return False

    def run(budget: int, recompute: Recompute) -> ResolvedRun:
        return plan.run.with_values({"token_budget": budget, "checkpoint_activations": recompute})

    def bytes_(run: ResolvedRun) -> int:
        return build_ledger(plan.job, plan.machine, run, plan.place)["update"].device_bytes

    def seconds(run: ResolvedRun) -> float:
        return predict(plan.job, plan.machine, run, plan.place).total

    whole, some = run(budget, False), run(budget, "some")
    planned = max(bytes_(run(now, False)), plan.ledger.fullest.device_bytes)
    room = min(plan.limits.device, int(1.1 * planned))
    return "some" if seconds(some) <= MAX_SLOWDOWN_BY_RECOMPUTING * seconds(whole) and bytes_(some) <= room else False
