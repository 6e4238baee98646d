"""The sizes of a plan: each begins at the least that can work and is raised as far as it helps, while every phase still fits.

What a phase takes grows with every size. So if the least sizes do not fit, none do, and a refusal means that no choice of sizes
would have helped; and if they fit, whatever is raised from there fits too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from trimtab.config.known import ResolvedOffload, ResolvedRollout, ResolvedRun
from trimtab.config.row_ranks import written
from trimtab.config.run import Recompute, Rollout, RowRole, Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import least_kv_bytes, shared_kv_bytes, step_kv_bytes
from trimtab.plan.ledger import GIB, MERGED, MIB, Ledger, build_ledger, processes_of
from trimtab.plan.placement import Placement
from trimtab.plan.rows import least_budget, least_score_budget
from trimtab.plan.rules import (
    GRAIN_TOKENS,
    best_chunk,
    best_processes,
    most_at_once,
    most_prefilled,
    overlaps,
    useful_budget,
    why_away,
    why_cut,
    why_kernels,
    why_overlap,
    why_placed,
    workers_for,
)  # fmt: skip

KV_HEADROOM = 1.05
"""Factor by which the KV cache of a whole step exceeds what its sequences need: later prompts may be longer than those seen."""
KV_FIFTHS = (2, 5, 4, 3, 1)
"""Fifths of the free memory that are tried for a KV cache that is not lent; micro-batches grow into the rest."""
MIN_GAIN_BY_SMALLER_PREFILL = 1.1
"""How many times as many sequences must run at once before a smaller prefill is taken for them."""
MIN_USEFUL_PREFILL_TOKENS = 1024
"""Tokens of the smallest prefill that is taken for more sequences at once: with less, weights are read too often. Even less is
taken only where nothing else fits."""
SMALLEST, WHAT_FITS = "takes the least memory", "the largest that fits"
COLOCATED = "rollout and update take turns on the same devices"
SHARED = "its share of free memory; micro-batches use the rest"


@dataclass(frozen=True)
class Limits:
    """Bytes that a plan may fill, of a device and of its host."""

    device: int
    host: int

    def missing(self, ledger: Ledger) -> int:
        """Bytes that the fullest phase needs beyond them, on the device or on its host."""
        device = ledger.fullest.required_bytes - self.device
        return max(0, device, ledger.fullest_host.host_bytes - self.host)


@dataclass(frozen=True)
class Case:
    """What a plan is made for."""

    job: Job
    machine: Machine
    limits: Limits
    place: Placement

    def ledger(self, run: ResolvedRun) -> Ledger:
        return build_ledger(self.job, self.machine, run, self.place)

    def fits(self, run: ResolvedRun) -> bool:
        return self.limits.missing(self.ledger(run)) == 0


@dataclass(frozen=True)
class Way:
    """One way to save memory: what has no size. Each with the reason for it."""

    recompute: Recompute
    offload: ResolvedOffload
    page_tokens: tuple[int, str]
    lend_memory: tuple[bool, str]
    kv_fifths: int = KV_FIFTHS[0]
    """Fifths of the free memory that the KV cache may take where it is not lent."""
    crowd_out: bool = False
    """The KV cache leaves no room for a copy of the weights with adapters merged in, which would stay beside the update."""


@dataclass
class Sizes:
    """A known `run`, and the reasons for what was chosen, by key."""

    asked: Run
    run: ResolvedRun
    why: dict[str, str]
    kv_fifths: int

    def free(self, key: str) -> bool:
        return bool(attrgetter(key)(self.asked) == "auto")

    def set(self, values: dict[str, Any]) -> None:
        self.run = self.run.with_values(values)


def smallest(run: Run, case: Case, way: Way) -> Sizes:
    """`run` with the least of everything that it leaves open."""
    job, machine = case.job, case.machine
    processes, why_processes = best_processes(run, job, machine)
    rollout = {
        "page_tokens": way.page_tokens[0],
        "lend_memory": way.lend_memory[0],
        "max_sequences": 1,
        "prefill_tokens": 1,
        "processes": processes,
        "kv_memory": 1,  # until the rest is known
    }
    values = {
        "engine": "native",
        "devices": case.place.devices,
        "cluster": "local",
        "shard": case.place.shard,
        "shard_devices": case.place.shard_devices,
        "prefetch": 1,
        "overlap": overlaps(case.place, job),
        "placement": "colocated",
        "kernels": "native" if job.fused else "plain",
        "threads": machine.cores_per_rank,
        "reward_workers": workers_for(machine.cores),
        "sequence_parallel": written(place_rows(case.place)),
        "tensor_parallel": 1,
        "token_budget": least_budget(job, case.place.rows),
        "score_token_budget": least_score_budget(job, case.place.rows),
        "logprob_chunk": 1,
    }
    cut = {"tensor_parallel": case.place.tensor}
    filled = ResolvedRun.model_validate(
        dict(run)
        | _open(run, values)
        | {
            "device": "cpu" if machine.cpu else "cuda",
            "checkpoint_activations": way.recompute,
            "offload": way.offload,
            "rollout": ResolvedRollout.model_validate(dict(run.rollout) | _open(run.rollout, rollout) | cut),
        }
    )
    if job.generates and run.rollout.kv_memory == "auto":
        filled = filled.with_values({"rollout.kv_memory": _least_kv(filled, case, way.crowd_out)})
    why = {
        "rollout.page_tokens": way.page_tokens[1],
        "rollout.lend_memory": "nothing else needs it here" if case.place.generates_only else way.lend_memory[1],
        "rollout.processes": why_processes,
        "rollout.tensor_parallel": why_cut(case.place),
        "kernels": why_kernels(job, machine),
        "threads": "one per physical core" if machine.devices == 1 else "the cores, divided among ranks",
        **why_placed(case.place, machine),
        "prefetch": "one layer is gathered while another runs"
        if case.place.shard == "full"
        else "no layer is gathered",
        "sequence_parallel": "each device holds whole sequences"
        if case.place.rows.most == 1
        else "long sequences fit only in parts, or are faster so",
        "tensor_parallel": "layers are not cut where they are trained",
        "overlap": why_overlap(case.place, job),
        "placement": "there is one device" if case.place.devices == 1 else COLOCATED,
        "reward_workers": "one per core, at most 8",
    }
    return Sizes(run, filled, why, way.kv_fifths)


def place_rows(place: Placement) -> dict[RowRole, int]:
    rows = place.rows
    return {"policy": rows.policy, "reference": rows.reference, "critic": rows.critic}


def _open(section: Run | Rollout, values: dict[str, Any]) -> dict[str, Any]:
    """Those of `values` that the user left to us."""
    return {key: value for key, value in values.items() if getattr(section, key) == "auto"}


def _least_kv(draft: ResolvedRun, case: Case, crowd_out: bool) -> int:
    """Bytes of the smallest KV cache: one of the longest sequences in each process. Where memory is not lent and adapters would
    be merged into a copy of the weights that stays, as much more as leaves no room for that copy: where it is not wanted, or
    would not fit and takes more."""
    rollout = draft.rollout
    least = least_kv_bytes(case.job, draft, processes_of(draft), rollout.page_tokens)
    if not case.job.rank or rollout.lend_memory:
        return least
    filled = draft.with_values({"rollout.kv_memory": least})
    phase = case.ledger(filled)["rollout"]
    size = phase.device.get(MERGED, 0)
    more = case.machine.device.memory - phase.required_bytes - 2 * size + MIB
    return least + more if size and (crowd_out or (more < size and not case.fits(filled))) else least


def unbounded(sizes: Sizes, case: Case, fill: bool) -> ResolvedRun:
    """The run with the largest useful size of all that is open, as if memory were no matter: no plan of this way is faster."""
    job, machine = case.job, case.machine
    budget = (
        useful_budget(job, machine, fill, case.place.rows)[0] if sizes.free("token_budget") else sizes.run.token_budget
    )
    values: dict[str, Any] = {
        "token_budget": max(budget, least_budget(job, case.place.rows)),
        "score_token_budget": max(2 * budget, least_score_budget(job, case.place.rows)),
        "rollout.prefill_tokens": most_prefilled(machine),
        "rollout.max_sequences": most_at_once(job, machine, case.place.engines),
        "rollout.kv_memory": 1 << 50,
    }
    return sizes.run.with_values({key: value for key, value in values.items() if sizes.free(key)})


def grow(sizes: Sizes, case: Case, fill: bool) -> None:
    """Raise what is open from the least, which fits, to the largest that is useful and fits. `fill`: larger micro-batches are
    useful too."""
    job, machine = case.job, case.machine
    busiest = case.ledger(sizes.run)["update" if job.training else "rollout" if job.generates else "score"]
    limit, used = (
        (case.limits.host, busiest.host_bytes) if machine.cpu else (case.limits.device, busiest.required_bytes)
    )
    chunk, why_chunk = best_chunk(job, machine, max(0, limit - used))
    _raise(sizes, case, "logprob_chunk", _parts(chunk, 2), why_chunk)
    if job.generates:
        _grow_rollout(sizes, case)
    useful, why_useful = useful_budget(job, machine, fill, case.place.rows)
    _widen(sizes, case, "token_budget", useful, why_useful)
    budget = sizes.run.token_budget
    most = 2 * max(useful, budget if sizes.free("token_budget") else 0)
    _widen(sizes, case, "score_token_budget", most, "scoring keeps no activations")
    recompute, offload = sizes.run.checkpoint_activations, sizes.run.offload
    sizes.why["checkpoint_activations"] = {
        False: "all activations fit", "some": "only some activations fit", True: "only the input of each layer fits",
    }[recompute]  # fmt: skip
    for key in ("optimizer", "reference", "activations"):
        sizes.why[f"offload.{key}"] = why_away(key, getattr(offload, key), job, machine)


def _parts(most: int, divisor: int) -> Iterator[int]:
    """`most`, and one `divisor`-th of it at a time, down to 1."""
    while most > 1:
        yield most
        most //= divisor
    yield 1


def _raise(sizes: Sizes, case: Case, key: str, tries: Iterator[int], why: str) -> None:
    """Set a key to the first of these that fits; the last is what it has."""
    if not sizes.free(key):
        return
    sizes.why[key] = why
    for value in tries:
        if case.fits(sizes.run.with_values({key: value})):
            sizes.set({key: value})
            return
        sizes.why[key] = WHAT_FITS


def _widen(sizes: Sizes, case: Case, key: str, most: int, why: str) -> None:
    """Raise a budget to the largest up to `most` that fits; it never is less than the longest sequence."""
    if not sizes.free(key):
        return
    least = (least_budget if key == "token_budget" else least_score_budget)(case.job, case.place.rows)

    def fits(budget: int) -> bool:
        return case.fits(sizes.run.with_values({key: budget}))

    found, reason = _widest(fits, least, most, why)
    sizes.set({key: found})
    sizes.why[key] = reason


def _widest(fits: Callable[[int], bool], least: int, most: int, why: str) -> tuple[int, str]:
    if most <= least:
        return least, "just holds the longest sequence"
    if fits(most):
        return most, why
    low, high = least // GRAIN_TOKENS, most // GRAIN_TOKENS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * GRAIN_TOKENS) else (low, middle)
    return max(least, low * GRAIN_TOKENS), WHAT_FITS


def _grow_rollout(sizes: Sizes, case: Case) -> None:
    """As large a prefill, as many sequences at once, and with them as large a KV cache, as the rest leaves room for. A smaller
    prefill is taken where clearly more sequences then run at once."""
    most, least, found = most_prefilled(case.machine), sizes.run.rollout.prefill_tokens, _Batch(0, {}, "")
    for prefill in _parts(most, 4) if sizes.free("rollout.prefill_tokens") else (least,):
        run = sizes.run.with_values({"rollout.prefill_tokens": prefill})
        if not case.fits(run):
            continue
        tried = _largest_batch(run, sizes, case)
        if not found.at_once or (
            prefill >= MIN_USEFUL_PREFILL_TOKENS and tried.at_once >= MIN_GAIN_BY_SMALLER_PREFILL * found.at_once
        ):
            found = replace(tried, values=tried.values | {"rollout.prefill_tokens": prefill})
        if tried.whole or prefill <= MIN_USEFUL_PREFILL_TOKENS:
            break
    assert found.values
    sizes.set(found.values)
    whole = found.values["rollout.prefill_tokens"] == most
    sizes.why["rollout.prefill_tokens"] = "keeps the device busy" if whole else WHAT_FITS
    sizes.why["rollout.max_sequences"] = "decoding gains nothing from more" if found.whole else WHAT_FITS
    sizes.why["rollout.kv_memory"] = found.why_kv


@dataclass(frozen=True)
class _Batch:
    """Sequences that run at once on one device, and the values with which they do."""

    at_once: int
    values: dict[str, Any]
    why_kv: str
    whole: bool = False
    """max_sequences is as large as is of use."""


def _largest_batch(run: ResolvedRun, sizes: Sizes, case: Case) -> _Batch:
    least = run.rollout.max_sequences
    free, best = sizes.free("rollout.max_sequences"), _Batch(0, {}, "")
    most = most_at_once(case.job, case.machine, case.place.engines) if free else least
    for batch in _parts(most, 2) if free else (most,):
        tried = run.with_values({"rollout.max_sequences": batch})
        if batch > least and not case.fits(tried):
            continue
        kv, why = (
            _kv_memory(tried, case, sizes.kv_fifths)
            if sizes.free("rollout.kv_memory")
            else (tried.rollout.kv_memory, "")
        )
        at_once = min(batch, _sequences_in(kv, tried, case))
        if at_once > best.at_once:
            values = {"rollout.max_sequences": batch, "rollout.kv_memory": kv}
            best = _Batch(at_once, values, why, whole=batch == most)
        if at_once == batch:
            break  # fewer would run at once with fewer
    return best


def _sequences_in(kv: int, run: ResolvedRun, case: Case) -> int:
    """Sequences of a step that run at once in a KV cache of so many bytes, in one engine; at least one."""
    job, page = case.job, run.rollout.page_tokens
    one = shared_kv_bytes(job, run, job.sequences, job.samples, job.completion, page) / job.sequences
    return max(1, int(kv / one))


def _kv_memory(run: ResolvedRun, case: Case, fifths: int) -> tuple[int, str]:
    """Bytes for the KV cache: what the sequences need that may run at once, where that fits. Where memory is lent, all that the
    rest leaves; where it is not, so many fifths of that: micro-batches grow into the remainder."""
    job, rollout = case.job, run.rollout
    least, mine = rollout.kv_memory, job.of_one_engine(case.place.engines)
    at_once = min(mine, rollout.max_sequences)
    wanted = max(least, int(step_kv_bytes(job, run, at_once, rollout.page_tokens) * KV_HEADROOM) + MIB)
    whole, lent = _kv_room(run, case), rollout.lend_memory
    room = whole
    if not lent:
        two = least_kv_bytes(job, run, max(2, processes_of(run)), rollout.page_tokens)
        room = max(least, whole * fifths // 5, min(whole, two))
    if wanted <= room:
        share = " that this engine has" if case.place.engines > 1 else ""
        return (
            wanted,
            f"holds all sequences of a step{share}" if at_once == mine else "holds all sequences that run at once",
        )
    if whole <= least:
        return least, WHAT_FITS
    if not lent:
        return room, SHARED
    return room, "all memory that is left" + ("; lent to the update between rollouts" if job.training else "")


def _kv_room(run: ResolvedRun, case: Case) -> int:
    """Bytes of the largest KV cache with which every phase fits: each phase grows with it along a line."""
    least, limits = run.rollout.kv_memory, case.limits
    larger = run.with_values({"rollout.kv_memory": least + GIB})
    phases = zip(case.ledger(run).phases, case.ledger(larger).phases, strict=True)
    room = max(limits.host, limits.device)
    for now, more in phases:
        for before, after, limit in (
            (now.required_bytes, more.required_bytes, limits.device),
            (now.host_bytes, more.host_bytes, limits.host),
        ):
            if after > before:
                room = min(room, least + (limit - before) * GIB // (after - before))
    room = max(least, room - MIB)
    return room if case.fits(run.with_values({"rollout.kv_memory": room})) else least
