"""Fills in every `auto` of `run` so that a step is as fast as the memory allows, and gives a reason for each in a line.

Nothing chosen here changes what is learned. Every combination of what is recomputed and what waits in host memory is tried; for
each, the largest useful budgets that fit are found, and the plan whose predicted step is shortest wins. Keys that are pinned stay
as they are, and have to fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import Any

from trimtab.config.run import Offload, Recompute, Rollout, Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import ALONE, MIB, Ledger, Placement, draw_up, kv_bytes, least_kv_bytes
from trimtab.plan.times import Times, launch_s, outside_step, predict, product_share

PROFILES = {"safe": 0.80, "balanced": 0.90, "max": 0.96}
"""Share of a device's memory that a plan may fill."""
HOST_SHARE = 0.9
"""Share of the host's memory that a plan for a GPU may fill."""
GRAIN = 128
"""Budgets are multiples of this many tokens."""
CUT_OVER = "vllm"
"""The engine for a model that is cut over several devices: the native one runs on a single device."""
CLEARLY = 1.25
"""How many times faster a step must be with another engine before it is chosen: that engine holds a second copy of the weights,
in processes that can die."""
LONG_RUN = 1000
"""Steps that a run is taken to have where nobody says how many."""
MOST_PROCESSES = 6
"""Most processes of an outside engine: each takes its turn on the device, and has its own kernels and graphs there."""
NEAR = 1.1
"""The fewest processes are chosen whose predicted decode step is at most this many times as long as the shortest."""
WIDEST = 65536
"""Tokens of the largest micro-batch that is of use."""
LITTLE = 1.05
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
class Limits:
    """Bytes that a plan may fill, of a device and of its host."""

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
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that the plan needs beyond the limit, on the device or on its host."""
        device = self.ledger.fullest.device_bytes - self.limits.device
        host = self.ledger.fullest_host.host_bytes - self.limits.host
        return max(0, device, host)


@dataclass(frozen=True)
class _Case:
    """What a plan is made for."""

    job: Job
    machine: Machine
    limits: Limits
    place: Placement

    def ledger(self, run: Run) -> Ledger:
        return draw_up(self.job, self.machine, run, self.place)


def limits_of(machine: Machine, profile: str) -> Limits:
    share = PROFILES[profile]
    host = int(machine.host_memory * (share if machine.cpu else HOST_SHARE))
    return Limits(int(machine.device.memory * share), host)


def make_plan(run: Run, job: Job, machine: Machine, profile: str = "balanced", place: Placement = ALONE) -> Plan:
    """The fastest plan that fits; where none does, the one that lacks the least."""
    if run.engine == "auto" and job.generates:
        return _with_engine(run, job, machine, profile, place)
    case = _Case(job, machine, limits_of(machine, profile), place)
    plans = [
        _with_budgets(run, case, recompute, offload, fill=profile == "max")
        for recompute, offload in _ways(run, job, machine)
    ]
    fitting = [plan for plan in plans if plan.fits]
    if not fitting and run.outside and run.rollout.processes == "auto" and plans[0].run.rollout.processes != 1:
        return _with_fewer_processes(run, plans[0], profile)
    if not fitting:
        return min(plans, key=lambda plan: plan.missing_bytes)
    fastest = min(plan.times.total for plan in fitting)
    # The first within a hundredth of the fastest: plans that recompute and offload least come first.
    return next(plan for plan in fitting if plan.times.total <= 1.01 * fastest)


def _with_engine(run: Run, job: Job, machine: Machine, profile: str, place: Placement) -> Plan:
    """The native engine, unless the model is cut over several devices, or another engine that is installed makes the run clearly
    faster, start-up included."""
    others = () if machine.cpu else machine.engines
    names = ("native", *others) if place.tensor == 1 else (CUT_OVER,)
    plans = {name: make_plan(run.model_copy(update={"engine": name}), job, machine, profile, place) for name in names}
    fitting = [name for name in names if plans[name].fits] or list(names)

    def seconds(name: str) -> float:
        """What a step takes, times CLEARLY with an engine other than the native one, and its share of the start-up."""
        times = plans[name].times
        return (1.0 if name == "native" else CLEARLY) * times.total + times.start / (job.steps or LONG_RUN)

    name = min(fitting, key=lambda name: (plans[name].missing_bytes, seconds(name)))
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


def _with_fewer_processes(run: Run, too_large: Plan, profile: str) -> Plan:
    """The plan with the most engine processes that fits, fewer than the given plan has; with one process where none fits."""
    assert too_large.run.rollout.processes != "auto"
    for count in range(too_large.run.rollout.processes - 1, 0, -1):
        pinned = run.model_copy(update={"rollout": run.rollout.model_copy(update={"processes": count})})
        plan = make_plan(pinned, too_large.job, too_large.machine, profile, too_large.place)
        if plan.fits or count == 1:
            break
    return replace(plan, choices=(Choice("run.rollout.processes", count, "more would not fit"), *plan.choices))


def _ways(run: Run, job: Job, machine: Machine) -> Iterator[tuple[Recompute, Offload]]:
    """Every combination of what is recomputed and what waits on the host, the least first."""
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
            continue  # of activations only the layers' inputs wait on the host
        yield recompute, Offload(optimizer=optimizer, reference=reference, activations=activations)


def _with_budgets(run: Run, case: _Case, recompute: Recompute, offload: Offload, fill: bool) -> Plan:
    """The plan with these ways of saving memory and the largest useful budgets that fit. `fill`: larger ones are useful too."""
    job, machine = case.job, case.machine
    choices: list[Choice] = []

    def fill_in(key: str, value: Any, why: str) -> Any:
        """A key's value: as the user pinned it, or else `value`, which is noted as a choice."""
        pinned = attrgetter(key.removeprefix("run."))(run)
        if pinned != "auto":
            return pinned
        choices.append(Choice(key, value, why))
        return value

    draft = _draft(run, case, recompute, offload)
    chunk, why_chunk = _chunk(job, machine, _room(draft, case))
    draft = draft.model_copy(update={"logprob_chunk": _pinned_or(run, "logprob_chunk", chunk)})
    draft = draft.model_copy(update={"rollout": _rollout(run, draft, case, fill_in)})
    useful, why_useful = _useful(job, machine, fill)
    budget, why_budget = _largest(draft, case, "update", "token_budget", useful, why_useful)
    draft = draft.model_copy(update={"token_budget": _pinned_or(run, "token_budget", budget)})
    score_useful = 2 * max(budget, useful)
    score, why_score = _largest(draft, case, "score", "score_token_budget", score_useful, "no activations are kept")
    draft = draft.model_copy(update={"score_token_budget": _pinned_or(run, "score_token_budget", score)})
    fill_in("run.kernels", draft.kernels, _why_kernels(job, machine))
    fill_in("run.threads", draft.threads, "one a physical core")
    if job.generates:
        fill_in("run.reward_workers", draft.reward_workers, "one a core, at most eight")
    fill_in("run.token_budget", budget, why_budget)
    fill_in("run.score_token_budget", score, why_score)
    fill_in("run.logprob_chunk", chunk, why_chunk)
    why_recompute = {False: "all activations fit", "some": "these fit", True: "a layer's input is all that fits"}
    fill_in("run.checkpoint_activations", recompute, why_recompute[recompute])
    for key in ("optimizer", "reference", "activations"):
        away = getattr(offload, key)
        fill_in(f"run.offload.{key}", away, _why_away(key, away, job, machine))
    times = predict(job, machine, draft, case.place)
    return Plan(draft, tuple(choices), case.ledger(draft), times, case.place, case.limits, job, machine)


def _pinned_or(section: Run | Rollout, key: str, value: Any) -> Any:
    pinned = getattr(section, key)
    return value if pinned == "auto" else pinned


def _draft(run: Run, case: _Case, recompute: Recompute, offload: Offload) -> Run:
    """`run` without `auto`, with the least budgets that can work."""
    job, machine = case.job, case.machine
    page = page_tokens(run, job, machine)[0]
    rollout = {
        "kv_memory": kv_bytes(job, 1, job.longest_sequence, page),
        "page_tokens": page,
        "lend_memory": _lend(run, machine)[0],
        "max_sequences": 1,
        "prefill_tokens": 1,
        "processes": _processes(run, job, machine)[0],
    }
    values = {
        "engine": "native",
        "kernels": "native" if job.fused else "plain",
        "threads": machine.cores,
        "reward_workers": workers_for(machine.cores) if job.generates else "auto",
        "token_budget": job.longest_trained,
        "score_token_budget": job.longest_trained,
        "logprob_chunk": GRAIN,
    }
    return run.model_copy(
        update={key: _pinned_or(run, key, value) for key, value in values.items()}
        | {
            "device": "cpu" if machine.cpu else "cuda",
            "checkpoint_activations": recompute,
            "offload": offload,
            "rollout": run.rollout.model_copy(
                update={key: _pinned_or(run.rollout, key, value) for key, value in rollout.items()}
            ),
        }
    )


def _why_kernels(job: Job, machine: Machine) -> str:
    if job.fused:
        return "fused layers serve this model"
    return "a CPU runs the model's own modules" if machine.cpu else "fused layers do not serve this model or its type"


def workers_for(cores: int) -> int:
    """Processes that run reward functions."""
    return max(1, min(8, cores))


def _room(draft: Run, case: _Case) -> int:
    """Bytes that are left on the device, or on the host of a machine without one, beside the least that can work."""
    busiest = case.ledger(draft)["update" if case.job.training else "rollout"]
    if case.machine.cpu:
        return max(0, case.limits.host - busiest.host_bytes)
    return max(0, case.limits.device - busiest.device_bytes)


def _chunk(job: Job, machine: Machine, room: int) -> tuple[int, str]:
    """How many tokens' logits, or their gradients, exist at a time: on a GPU whole tiles, enough for a product at full speed."""
    if machine.cpu:
        return max(64, min(4096, 64 * MIB // (12 * job.shape.vocabulary))), "logits of a chunk stay small"
    most, logit = min(1024 * MIB, room // 32), 4 if job.tiled_head else 14
    return max(128, min(8192, most // (logit * job.shape.vocabulary) // 128 * 128)), "logits of a chunk stay small"


def page_tokens(run: Run, job: Job, machine: Machine) -> tuple[int, str]:
    """Tokens of a KV page. On a CPU, where attention has no paged kernel, a page that holds a whole sequence saves copying the
    cache in every step."""
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
    """How many processes an outside engine has: while one is busy on its host, another has the device. The fewest that come near
    the fastest (`NEAR`). Each has a copy of the weights; all copies together take at most a quarter of the device."""
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
    """Whether rollout lends its memory to the update: they need it in turn, and handing it over takes milliseconds."""
    if run.rollout.lend_memory != "auto":
        return run.rollout.lend_memory, ""
    if machine.cpu:
        return False, "one memory for all"
    if not machine.device.lends:
        return False, "this device's memory cannot be lent"
    return True, "rollout and update use the same memory in turn"


def _rollout(run: Run, draft: Run, case: _Case, fill_in: Callable[[str, Any, str], Any]) -> Rollout:
    job, machine = case.job, case.machine
    if not job.generates:
        return run.rollout
    in_flight = min(-(-job.in_flight * case.place.tensor // machine.devices), 256 if machine.cpu else 1024)
    prefill = 4096 if machine.cpu else 16384
    settings = {
        "page_tokens": fill_in("run.rollout.page_tokens", *page_tokens(run, job, machine)),
        "lend_memory": fill_in("run.rollout.lend_memory", *_lend(run, machine)),
        "max_sequences": fill_in("run.rollout.max_sequences", in_flight, "as many as decode gains from"),
        "prefill_tokens": fill_in("run.rollout.prefill_tokens", prefill, "keeps the device busy"),
        "processes": fill_in("run.rollout.processes", *_processes(run, job, machine)),
    }
    without = draft.model_copy(update={"rollout": draft.rollout.model_copy(update=settings | {"kv_memory": 1})})
    settings["kv_memory"] = fill_in("run.rollout.kv_memory", *_kv_memory(without, case))
    return draft.rollout.model_copy(update=settings)


def _kv_memory(without: Run, case: _Case) -> tuple[int, str]:
    """Bytes for the KV cache: the whole step's, where that fits beside the rest of rollout. Where memory is not lent, it has to
    fit beside an update of the longest sequence as well, and gets two fifths of what is left then: micro-batches grow into the
    rest."""
    job, machine, limits, rollout = case.job, case.machine, case.limits, without.rollout
    assert rollout.page_tokens != "auto" and rollout.processes != "auto" and rollout.max_sequences != "auto"
    ledger = case.ledger(without)
    least = least_kv_bytes(job, without, max(2, rollout.processes), rollout.page_tokens)
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
        # Adapters are merged into a copy of the weights only where room is left for one: sequences come first.
        more = min(wanted, room + ledger["rollout"].device.get("merged copy", 0))
        filled = without.model_copy(update={"rollout": rollout.model_copy(update={"kv_memory": more})})
        if case.ledger(filled)["rollout"].device_bytes <= limits.device:
            room = more
    if wanted <= room:
        return wanted, "the whole step at once" if at_once == job.in_flight else "as many sequences as run at once"
    return (room, words) if room >= least else (least, "two of the longest sequences")


def _useful(job: Job, machine: Machine, fill: bool) -> tuple[int, str]:
    """Tokens of a micro-batch beyond which the update gets no faster. On a GPU a micro-batch has to take longer than its kernels
    take to launch; and gradients are added up once a micro-batch, which by their bytes takes 1.5 % of its time at 16k tokens."""
    whole = max(job.longest_trained, -(-job.step_row.tokens // machine.devices // GRAIN) * GRAIN)
    if machine.cpu:
        return 4096, "larger micro-batches gain nothing"
    if fill:
        return whole, "the whole step at once"
    flops = machine.device.flops * product_share(job.shape.hidden)
    launched = launch_s(job) * job.shape.layers * flops / (6 * job.shape.active_parameters)
    return min(WIDEST, max(16384, 1 << round(launched).bit_length())), "larger micro-batches gain nothing"


def useful_tokens(plan: Plan) -> int:
    return _useful(plan.job, plan.machine, fill=False)[0]


def recompute_when_wider(plan: Plan, now: int, budget: int) -> Recompute:
    """What to recompute when micro-batches grow from `now` to `budget` tokens because the device waits for its host: some, if a
    step then takes little longer (`LITTLE`) and at most a tenth more memory than planned. Otherwise nothing."""
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


def _largest(draft: Run, case: _Case, phase: str, key: str, most: int, why: str) -> tuple[int, str]:
    """The largest budget up to `most` with which a phase fits; never less than the longest sequence."""
    machine, limits = case.machine, case.limits

    def fits(budget: int) -> bool:
        ledger = case.ledger(draft.model_copy(update={key: budget}))
        if phase not in ledger:
            return True
        if machine.cpu:
            return ledger[phase].host_bytes <= limits.host
        return ledger[phase].device_bytes <= limits.device and ledger[phase].host_bytes <= limits.host

    least = case.job.longest_trained
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


def place_over(run: Run, job: Job, machine: Machine, profile: str = "balanced") -> Plan:
    """The fastest placement on the devices there are: the trainer's states are sharded over all of them, and each rollout copy is
    cut over as few as hold it."""
    if machine.devices == 1:
        return make_plan(run, job, machine, profile)
    heads = min(block.kv_heads for block in job.shape.kinds)
    cuts = [
        n
        for n in (1, 2, 4, 8)
        if n <= min(machine.devices, machine.per_host) and heads % n == 0 and machine.devices % n == 0
    ]
    plans = [make_plan(run, job, machine, profile, Placement(machine.devices, cut)) for cut in cuts]
    fitting = [plan for plan in plans if plan.fits]
    return (
        min(fitting, key=lambda plan: plan.times.total) if fitting else min(plans, key=lambda plan: plan.missing_bytes)
    )
