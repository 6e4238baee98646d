"""Fills in every `auto` of `run` so that a step takes the least time that fits the memory there is, and says why, a line each.

Nothing chosen here changes what is learned. What is recomputed and what waits in host memory is tried in every combination; for
each the largest useful budgets that fit are found, and the plan whose predicted step is shortest wins. Keys that are pinned stay
as they are, and have to fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from trimtab.config.run import Offload, Recompute, Rollout, Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import ALONE, MIB, Ledger, Placement, draw_up, kv_bytes, least_kv_bytes
from trimtab.plan.times import FITTED, Rates, Times, launch_s, outside_step, predict

PROFILES = {"safe": 0.80, "balanced": 0.90, "max": 0.96}
"""Share of a device's memory that a plan may fill."""
HOST_SHARE = 0.9
GRAIN = 128
"""Budgets are multiples of this many tokens."""
CUT_OVER = "vllm"
"""What runs a copy of a model on several devices: the native engine's is on one."""
CLEARLY = 1.25
"""Another engine than the native has a copy of the weights, and processes that may be lost: what it must gain a step."""
LONG_RUN = 1000
"""Steps, where nobody says how many."""
MOST_PROCESSES = 6
"""Of an engine outside: each takes its turn on the device, and has its own kernels and graphs there."""
NEAR = 1.1
WIDEST = 65536
"""Tokens of the largest micro-batch that is of use."""
LITTLE = 1.05
"""A step with some activations made again over one without, as predicted."""


@dataclass(frozen=True)
class Choice:
    """One key of `run`, the value it got, and the reason."""

    key: str
    value: Any
    why: str
    measured: bool = False
    """By `trimtab tune`, on this device."""


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may fill."""

    device: int
    host: int


@dataclass(frozen=True)
class Plan:
    """A `run` without `auto`, and what it will take."""

    run: Run
    choices: tuple[Choice, ...]
    ledger: Ledger
    times: Times
    place: Placement
    limits: Limits
    job: Job
    machine: Machine

    @property
    def fits(self) -> bool:
        return self.short == 0

    @property
    def short(self) -> int:
        """Bytes that are missing, on the device or on its host."""
        device = self.ledger.fullest.device_bytes - self.limits.device
        host = self.ledger.fullest_host.host_bytes - self.limits.host
        return max(0, device, host)


def limits_of(machine: Machine, profile: str) -> Limits:
    share = PROFILES[profile]
    host = int(machine.host_memory * (share if machine.cpu else HOST_SHARE))
    return Limits(int(machine.device.memory * share), host)


def make_plan(
    run: Run,
    job: Job,
    machine: Machine,
    profile: str = "balanced",
    place: Placement = ALONE,
    rates: Rates = FITTED,
) -> Plan:
    """The fastest plan that fits; where none does, the one that lacks the least."""
    if run.engine == "auto" and job.generates:
        return _with_engine(run, job, machine, profile, place, rates)
    limits = limits_of(machine, profile)
    plans = [
        _with_budgets(run, job, machine, limits, place, rates, recompute, offload, fill=profile == "max")
        for recompute, offload in _ways(run, job, machine)
    ]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting and run.outside and run.rollout.processes == "auto" and plans[0].run.rollout.processes != 1:
        return _with_fewer_processes(run, plans[0], profile, rates)
    if not fitting:
        return min(plans, key=lambda plan: plan.short)
    fastest = min(plan.times.total for plan in fitting)
    # The first within a hundredth: they come in the order of what is left alone.
    return next(plan for plan in fitting if plan.times.total <= 1.01 * fastest)


def _with_engine(run: Run, job: Job, machine: Machine, profile: str, place: Placement, rates: Rates) -> Plan:
    """The native engine, but where a copy of the model is on several devices, or a run is clearly faster with another that is
    here, its start counted."""
    others = () if machine.cpu else machine.engines
    names = ("native", *others) if place.tensor == 1 else (CUT_OVER,)
    plans = {
        name: make_plan(run.model_copy(update={"engine": name}), job, machine, profile, place, rates) for name in names
    }
    fitting = [name for name in names if plans[name].fits] or list(names)

    def seconds(name: str) -> float:
        """Of a step, with its share of the start; of another than the native one as it would have to be."""
        times = plans[name].times
        return (1.0 if name == "native" else CLEARLY) * times.total + times.start / (job.steps or LONG_RUN)

    name = min(fitting, key=lambda name: (plans[name].short, seconds(name)))
    if place.tensor > 1:
        why = f"a copy of the model is cut over {place.tensor} devices"
    elif len(names) == 1:
        why = "shares the trainer's weights" if place.shares_weights else "a copy of the model fits on a device"
    else:
        why = "rollout of a step: " + ", ".join(f"{other} {plans[other].times.rollout:.2g} s" for other in names)
        why += "".join(f"; {other} takes {plans[other].times.start:.0f} s to start" for other in names[1:])
    chosen = plans[name]
    after = 1 + max((i for i, choice in enumerate(chosen.choices) if choice.key.startswith("run.rollout.")), default=-1)
    choices = (*chosen.choices[:after], Choice("run.engine", name, why), *chosen.choices[after:])
    return replace(chosen, choices=choices)


def _with_fewer_processes(run: Run, short: Plan, profile: str, rates: Rates) -> Plan:
    """Than a plan that does not fit has: as many of an engine as fit, or one."""
    assert short.run.rollout.processes != "auto"
    for count in range(short.run.rollout.processes - 1, 0, -1):
        pinned = run.model_copy(update={"rollout": run.rollout.model_copy(update={"processes": count})})
        plan = make_plan(pinned, short.job, short.machine, profile, short.place, rates)
        if plan.fits or count == 1:
            break
    return replace(plan, choices=(Choice("run.rollout.processes", count, "more would not fit"), *plan.choices))


def _ways(run: Run, job: Job, machine: Machine) -> Iterator[tuple[Recompute, Offload]]:
    """What may be recomputed and what may wait on the host, least first."""
    levels: list[Recompute] = [False, "some", True] if job.fused else [False, True]
    if run.checkpoint_activations != "auto":
        levels = [run.checkpoint_activations]

    def tries(pinned: bool | str, useful: bool) -> list[bool]:
        return [bool(pinned)] if pinned != "auto" else [False, True] if useful and not machine.cpu else [False]

    for optimizer, reference, activations, recompute in product(
        tries(run.offload.optimizer, True),
        tries(run.offload.reference, job.reference),
        tries(run.offload.activations, True),
        levels,
    ):
        if activations and recompute is not True and True in levels:
            continue  # only layers' inputs wait on the host
        yield recompute, Offload(optimizer=optimizer, reference=reference, activations=activations)


def _with_budgets(
    run: Run, job: Job, machine: Machine, limits: Limits, place: Placement, rates: Rates, recompute: Recompute, offload: Offload,
    fill: bool,
) -> Plan:  # fmt: skip
    """The largest useful budgets that fit with these ways of saving memory."""
    choices: list[Choice] = []

    def fill_in(section: Run | Rollout | Offload, prefix: str, key: str, value: Any, why: str) -> Any:
        if getattr(section, key) != "auto":
            return getattr(section, key)
        choices.append(Choice(f"{prefix}.{key}", value, why))
        return value

    draft = _draft(run, job, machine, recompute, offload)
    room = _room(draft, job, machine, limits, place)
    chunk, why_chunk = _chunk(job, machine, room)
    draft = draft.model_copy(update={"logprob_chunk": run.logprob_chunk if run.logprob_chunk != "auto" else chunk})
    rollout = _rollout(run, draft, job, machine, limits, place, fill_in)
    draft = draft.model_copy(update={"rollout": rollout})
    useful, why_useful = _useful(job, machine, rates, fill)
    budget, why = _largest(draft, job, machine, limits, place, "update", "token_budget", useful, why_useful)
    draft = draft.model_copy(update={"token_budget": run.token_budget if run.token_budget != "auto" else budget})
    score, why_score = _largest(
        draft,
        job,
        machine,
        limits,
        place,
        "score",
        "score_token_budget",
        2 * max(budget, useful),
        "no activations are kept",
    )
    why_recompute = {False: "all activations fit", "some": "these fit", True: "a layer's input is all that fits"}[
        recompute
    ]
    filled = draft.model_copy(
        update={
            "kernels": fill_in(run, "run", "kernels", "native" if job.fused else "plain", _why_kernels(job, machine)),
            "threads": fill_in(run, "run", "threads", machine.cores, "one a physical core"),
            "reward_workers": fill_in(
                run, "run", "reward_workers", workers_for(machine.cores), "one a core, at most eight"
            )
            if job.generates
            else run.reward_workers,
            "token_budget": fill_in(run, "run", "token_budget", budget, why),
            "score_token_budget": fill_in(run, "run", "score_token_budget", score, why_score),
            "logprob_chunk": fill_in(run, "run", "logprob_chunk", chunk, why_chunk),
            "checkpoint_activations": fill_in(run, "run", "checkpoint_activations", recompute, why_recompute),
        }
    )
    for key in ("optimizer", "reference", "activations"):
        away = getattr(offload, key)
        fill_in(run.offload, "run.offload", key, away, _why_away(key, away, job, machine))
    ledger = draw_up(job, machine, filled, place)
    return Plan(
        filled, tuple(choices), ledger, predict(job, machine, filled, place, rates), place, limits, job, machine
    )


def _draft(run: Run, job: Job, machine: Machine, recompute: Recompute, offload: Offload) -> Run:
    """Every key filled in, budgets with the least that can work."""
    longest = job.longest_sequence
    rollout = run.rollout.model_copy(
        update={
            "kv_memory": kv_bytes(job, 1, longest, page_tokens(run, job, machine)[0]),
            "page_tokens": page_tokens(run, job, machine)[0],
            "lend_memory": _lend(run, machine)[0],
            "max_sequences": 1,
            "prefill_tokens": 1,
            "processes": _processes(run, job, machine)[0],
        }
    )
    pinned = {
        key: getattr(run.rollout, key) for key in type(run.rollout).model_fields if getattr(run.rollout, key) != "auto"
    }
    return run.model_copy(
        update={
            "device": "cpu" if machine.cpu else "cuda",
            "engine": "native" if run.engine == "auto" else run.engine,
            "kernels": run.kernels if run.kernels != "auto" else "native" if job.fused else "plain",
            "threads": machine.cores if run.threads == "auto" else run.threads,
            "reward_workers": workers_for(machine.cores) if run.reward_workers == "auto" else run.reward_workers,
            "token_budget": job.longest_trained if run.token_budget == "auto" else run.token_budget,
            "score_token_budget": job.longest_trained if run.score_token_budget == "auto" else run.score_token_budget,
            "logprob_chunk": GRAIN if run.logprob_chunk == "auto" else run.logprob_chunk,
            "checkpoint_activations": recompute,
            "offload": offload,
            "rollout": rollout.model_copy(update=pinned),
        }
    )


def _why_kernels(job: Job, machine: Machine) -> str:
    if job.fused:
        return "fused layers serve this model"
    return "a CPU runs the model's own modules" if machine.cpu else "fused layers do not serve this model or its type"


def workers_for(cores: int) -> int:
    """Processes that run reward functions."""
    return max(1, min(8, cores))


def _room(draft: Run, job: Job, machine: Machine, limits: Limits, place: Placement) -> int:
    """Bytes that are left when the least that can work is in place."""
    ledger = draw_up(job, machine, draft, place)
    busiest = ledger["update" if job.training else "rollout"]
    return max(0, limits.host - busiest.host_bytes if machine.cpu else limits.device - busiest.device_bytes)


def _chunk(job: Job, machine: Machine, room: int) -> tuple[int, str]:
    """Tokens whose logits, or their gradient, exist at a time: on a GPU whole tiles, enough for a product at full speed."""
    if machine.cpu:
        return max(64, min(4096, 64 * MIB // (12 * job.shape.vocabulary))), "logits of a chunk stay small"
    most, logit = min(1024 * MIB, room // 32), 4 if job.tiled_head else 14
    return max(128, min(8192, most // (logit * job.shape.vocabulary) // 128 * 128)), "logits of a chunk stay small"


def page_tokens(run: Run, job: Job, machine: Machine) -> tuple[int, str]:
    """On a CPU, where attention has no paged kernel, a page that holds a whole sequence spares a copy of the cache a step."""
    if run.rollout.page_tokens != "auto":
        return run.rollout.page_tokens, ""
    if run.outside:
        return (128 if machine.cpu else 16), "what such engines use"
    if not machine.cpu:
        return 64, "one tile of the decode kernel"
    whole = job.in_flight * job.typical_sequence * job.shape.kv_elements * job.itemsize
    roomy = run.rollout.kv_memory == "auto" and job.longest_sequence == job.typical_sequence
    if roomy and 2 * whole <= machine.host_memory // 2:
        return job.typical_sequence, "one page a sequence: decoding reads it in place"
    return 16, "little waste at the end of a sequence"


def _processes(run: Run, job: Job, machine: Machine) -> tuple[int, str]:
    """Of an engine outside: while one is busy on its host another has the device. The fewest that come near the fastest; each
    has a copy of the weights, all together a quarter of the device at most."""
    if run.rollout.processes != "auto":
        return run.rollout.processes, ""
    if not run.outside or machine.cpu:
        return 1, "all cores work for it" if run.outside else "the trainer's own"
    if run.rollout.tensor_parallel > 1:
        return 1, f"it has {run.rollout.tensor_parallel} devices"
    room = machine.device.memory // 4 // (job.shape.parameters * job.itemsize)
    most = max(1, min(MOST_PROCESSES, machine.cores // 3, room))
    if run.rollout.kv_memory != "auto":  # each has to hold the longest sequence
        page = page_tokens(run, job, machine)[0]
        most = max(1, min(most, run.rollout.kv_memory // least_kv_bytes(job, run, 1, page)))
    context = job.typical_prompt + job.expected_completion / 2
    seconds = {n: outside_step(job, machine, run, n, job.in_flight, context) for n in range(1, most + 1)}
    count = min(n for n in seconds if seconds[n] <= NEAR * min(seconds.values()))
    return count, "one would wait for its host" if count > 1 else "more would gain nothing"


def _lend(run: Run, machine: Machine) -> tuple[bool, str]:
    """Rollout and update need their memory in turn, and handing it over takes milliseconds."""
    if run.rollout.lend_memory != "auto":
        return run.rollout.lend_memory, ""
    if machine.cpu:
        return False, "one memory for all"
    if not machine.device.lends:
        return False, "this device's memory cannot be lent"
    return True, "rollout and update use the same memory in turn"


def _rollout(
    run: Run, draft: Run, job: Job, machine: Machine, limits: Limits, place: Placement, fill_in: Any
) -> Rollout:  # fmt: skip
    if not job.generates:
        return run.rollout
    page, why_page = page_tokens(run, job, machine)
    lend, why_lend = _lend(run, machine)
    in_flight = min(-(-job.in_flight * place.tensor // machine.devices), 256 if machine.cpu else 1024)
    settings = {
        "page_tokens": fill_in(run.rollout, "run.rollout", "page_tokens", page, why_page),
        "lend_memory": fill_in(run.rollout, "run.rollout", "lend_memory", lend, why_lend),
        "max_sequences": fill_in(
            run.rollout, "run.rollout", "max_sequences", in_flight, "as many as decode gains from"
        ),
        "prefill_tokens": fill_in(
            run.rollout, "run.rollout", "prefill_tokens", 4096 if machine.cpu else 16384, "keeps the device busy"
        ),
    }
    settings["processes"] = fill_in(run.rollout, "run.rollout", "processes", *_processes(run, job, machine))
    without = draft.model_copy(update={"rollout": draft.rollout.model_copy(update=settings | {"kv_memory": 1})})
    kv, why = _kv_memory(without, job, machine, limits, place)
    settings["kv_memory"] = fill_in(run.rollout, "run.rollout", "kv_memory", kv, why)
    return draft.rollout.model_copy(update=settings)


def _kv_memory(without: Run, job: Job, machine: Machine, limits: Limits, place: Placement) -> tuple[int, str]:
    """The whole step where it fits beside the rest of rollout; where memory is not lent, beside an update of the longest
    sequence as well, and in two fifths of what that leaves."""
    rollout = without.rollout
    assert rollout.page_tokens != "auto"
    ledger = draw_up(job, machine, without, place)
    assert rollout.processes != "auto"
    least = least_kv_bytes(job, without, max(2, rollout.processes), rollout.page_tokens)
    assert rollout.max_sequences != "auto"
    at_once = min(job.in_flight, rollout.max_sequences * machine.devices)
    wanted = int(kv_bytes(job, at_once, job.typical_sequence, rollout.page_tokens) * 1.05) + MIB
    wanted = max(least, wanted // max(1, machine.devices))
    if machine.cpu:
        room, words = (limits.host - ledger["rollout"].host_bytes) * 2 // 5, "two fifths of the free memory"
    elif rollout.lend_memory:
        room, words = limits.device - ledger["rollout"].device_bytes, "what rollout leaves, lent to the update"
    else:
        left = limits.device - ledger.fullest.device_bytes
        room, words = left * 2 // 5, "two fifths of the free memory"
    if wanted > room:
        # Adapters are merged into a copy where room is left for one: sequences come first.
        more = min(wanted, room + ledger["rollout"].device.get("merged copy", 0))
        filled = without.model_copy(update={"rollout": rollout.model_copy(update={"kv_memory": more})})
        if draw_up(job, machine, filled, place)["rollout"].device_bytes <= limits.device:
            room = more
    if wanted <= room:
        return wanted, "the whole step at once" if at_once == job.in_flight else "as many sequences as run at once"
    return (room, words) if room >= least else (least, "two of the longest sequences")


def _useful(job: Job, machine: Machine, rates: Rates, fill: bool) -> tuple[int, str]:
    """Tokens of a micro-batch beyond which the update gets no faster: on a GPU it has to outlast the launching of its kernels,
    and gradients are added up once a micro-batch, by their bytes 1.5 % of its time at 16k tokens."""
    whole = max(job.longest_trained, -(-job.step_row.tokens // machine.devices // GRAIN) * GRAIN)
    if machine.cpu:
        return 4096, "larger micro-batches gain nothing"
    if fill:
        return whole, "the whole step at once"
    flops = machine.device.flops * rates.products(job.shape.hidden)
    launched = launch_s(job) * job.shape.layers * flops / (6 * job.shape.active_parameters)
    return min(WIDEST, max(16384, 1 << round(launched).bit_length())), "larger micro-batches gain nothing"


def useful_tokens(plan: Plan) -> int:
    return _useful(plan.job, plan.machine, FITTED, fill=False)[0]


def recompute_when_wider(plan: Plan, now: int, budget: int) -> Recompute:
    """Of the activations of a micro-batch that is made larger than it is now because the device waits for its host: some are made
    again where a step takes little longer so and the larger one then fits where this one does. Otherwise all are kept."""
    if not plan.job.fused:
        return False

    def run(budget: int, recompute: Recompute) -> Run:
        return plan.run.model_copy(update={"token_budget": budget, "checkpoint_activations": recompute})

    def bytes_(run: Run) -> int:
        return draw_up(plan.job, plan.machine, run, plan.place)["update"].device_bytes

    def seconds(run: Run) -> float:
        return predict(plan.job, plan.machine, run, plan.place).total

    whole, some = run(budget, False), run(budget, "some")
    planned = max(bytes_(run(now, False)), plan.ledger.fullest.device_bytes)
    room = min(plan.limits.device, int(1.1 * planned))
    return "some" if seconds(some) <= LITTLE * seconds(whole) and bytes_(some) <= room else False


def _largest(
    draft: Run, job: Job, machine: Machine, limits: Limits, place: Placement, phase: str, key: str, most: int, why: str
) -> tuple[int, str]:
    """The largest budget up to `most` with which a phase fits; never less than the longest sequence."""

    def fits(budget: int) -> bool:
        ledger = draw_up(job, machine, draft.model_copy(update={key: budget}), place)
        if phase not in ledger:
            return True
        if machine.cpu:
            return ledger[phase].host_bytes <= limits.host
        return ledger[phase].device_bytes <= limits.device and ledger[phase].host_bytes <= limits.host

    least = job.longest_trained
    if most <= least or not fits(least):
        return least, "the longest sequence has to fit"
    if fits(most):
        return most, why
    low, high = least // GRAIN, most // GRAIN
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRAIN) else (low, middle)
    return max(least, low * GRAIN), "what fits"


def _why_away(key: str, away: bool, job: Job, machine: Machine) -> str:
    if machine.cpu:
        return "one memory for all"
    if key == "reference" and not job.reference:
        return "there is none"
    if key == "activations" and not away:
        return "they fit on the device"
    return "a step is faster with the room it leaves" if away else "it fits on the device"


def place_over(run: Run, job: Job, machine: Machine, profile: str = "balanced", rates: Rates = FITTED) -> Plan:
    """The fastest placement on the devices there are: states sharded over all of them, rollout copies cut over as few as hold
    one."""
    if machine.devices == 1:
        return make_plan(run, job, machine, profile, rates=rates)
    heads = min(block.kv_heads for block in job.shape.kinds)
    cuts = [
        n
        for n in (1, 2, 4, 8)
        if n <= min(machine.devices, machine.per_host) and heads % n == 0 and machine.devices % n == 0
    ]
    plans = [make_plan(run, job, machine, profile, Placement(machine.devices, cut), rates) for cut in cuts]
    fitting = [plan for plan in plans if plan.fits]
    return min(fitting, key=lambda plan: plan.times.total) if fitting else min(plans, key=lambda plan: plan.short)
