"""Where the time goes: shares of a step, what holds rollout or the update back, and whether the run slows down."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import total
from trimtab.observe.format import count, duration, number, percent

SPEED = "rollout/tokens_per_s"


def _share(phase: str, limit: float, least_s: float = 0.05) -> Callable[[Record], Symptom | None]:
    """A check of a phase's share of all time; phases of a few milliseconds are nobody's trouble."""

    def check(record: Record) -> Symptom | None:
        share, mean_s = record.share_of_time(phase) or 0.0, fmean(record.values(f"time/{phase}"))
        if share <= limit or mean_s < least_s:
            return None
        return Symptom(
            "warn", f"{percent(share)} of all time, {duration(mean_s)} a step over {len(record.steps)} steps"
        )

    return check


def occupancy(record: Record) -> float | None:
    """Share of decode slots in use that could have been: slots beyond a step's samples cannot. None: refills hide it."""
    raw, samples = record.now("rollout/batch_occupancy"), record.now("run/samples")
    slots = record.setting("run.rollout.max_sequences", 0)
    if raw is None or not samples or not slots or total(record, "rollout/refills"):
        return None
    return min(1.0, raw * slots / min(slots, samples))


def rollout_share(record: Record) -> Symptom | None:
    share = record.share_of_time("rollout") or 0.0
    if share <= 0.7:
        return None
    seen = f"{percent(share)} of all time over {len(record.steps)} steps, {count(record.now(SPEED))} tokens/s"
    used, longest = occupancy(record), record.now("response/length_max")
    if used is not None and used < 0.5:
        mean = record.now("response/length_mean")
        seen += f"; slots {percent(used)} full, mean {count(mean)} and longest {count(longest)} tokens"
        if (record.now("environment/turns_mean") or 0) > 1:
            return Symptom(
                "warn", seen, "turns: each round of a conversation waits for the last answer of the one before"
            )
        return Symptom("warn", seen, "a tail: most of the time a few long responses decode alone")
    if total(record, "rollout/parked"):
        return Symptom("warn", seen, "KV memory is short: see the rule kv_short")
    return Symptom("warn", seen)


def kv_short(record: Record) -> Symptom | None:
    parked, samples = total(record, "rollout/parked"), total(record, "run/samples")
    if not samples or parked / samples <= 0.02:
        return None
    use = f", KV cache {percent(record.now('rollout/kv_usage'))} full at its fullest"
    span = record.span("rollout/parked")
    return Symptom("warn", f"{parked:.0f} times for {samples:.0f} samples over {span}{use}")


def decode_graphs(record: Record) -> Symptom | None:
    share = record.now("rollout/graph_share") or 0.0
    if share >= 0.9:
        return None
    return Symptom("warn", f"{percent(share)} of decode steps (median of {record.span('rollout/graph_share')})")


def _on_cpu(record: Record) -> str | None:
    return None if record.on_cuda else "runs on a CPU"


def small_microbatches(record: Record) -> Symptom | None:
    """Room is known only where the device's size is; without it the numbers alone decide."""
    per_update = (record.now("run/microbatches") or 0.0) / record.updates_per_batch
    budget, room = record.now("run/token_budget") or 0.0, _used_memory(record)
    if budget >= 8192 or per_update < 4 or (room is not None and room > 0.8):
        return None
    seen = f"{number(per_update, 1)} micro-batches per update, of at most {budget:.0f} tokens"
    return Symptom(
        "warn", seen if room is None else f"{seen}; {percent(room)} of the device's memory is used at the peak"
    )


def _used_memory(record: Record) -> float | None:
    size, peak = record.now("memory/device_total_gib"), record.now("memory/update_peak_gib")
    return peak / size if size and peak else None


def waits_for_host(record: Record) -> Symptom | None:
    """One micro-batch leaves nothing to launch ahead."""
    behind = record.now("run/device_behind")
    per_update = (record.now("run/microbatches") or 0.0) / record.updates_per_batch
    if behind is None or behind >= 0.1 or per_update < 3:
        return None
    return Symptom(
        "warn",
        f"{number(behind, 2)} micro-batches were left when the last was launched (median of "
        f"{record.span('run/device_behind')}), {number(per_update, 1)} an update",
    )


def low_use(record: Record) -> Symptom | None:
    """Where it is known why, another rule says so; this one is for what remains."""
    use = record.now("throughput/update_mfu")
    share = record.share_of_time("update") or 0.0
    if use is None or use >= 0.1 or share < 0.2 or waits_for_host(record) or small_microbatches(record):
        return None
    seen = f"{percent(use)} of the device's matrix rate (median of {record.span('throughput/update_mfu')})"
    return Symptom("warn", f"{seen}; updates take {percent(share)} of all time")


def packing(record: Record) -> Symptom | None:
    """With few micro-batches an even split is what leaves room; with many it is sequences that do not fit side by side."""
    fill, per_update = (
        record.now("run/packing_fill") or 1.0,
        (record.now("run/microbatches") or 0) / record.updates_per_batch,
    )
    if fill >= 0.7 or per_update < 4:
        return None
    return Symptom(
        "warn", f"{percent(fill)} full (median of {record.span('run/packing_fill')}), {per_update:.0f} an update"
    )


def slows_down(record: Record) -> Symptom | None:
    line, length = record.trend(SPEED), record.trend("response/length_mean")
    if not line.falls(0.35 * line.start):
        return None
    seen = f"{count(line.start)} to {count(line.end)} tokens/s (fitted) over {len(record.values(SPEED))} steps"
    if length.rises(0.3 * length.start):
        longer = f"{seen}; responses grew from {number(length.start, 1)} to {number(length.end, 1)} tokens"
        return Symptom("warn", longer, "longer responses: more KV to read a token, and a longer tail")
    if length.falls(0.3 * length.start):
        shorter = f"{seen}; responses shrank from {number(length.start, 1)} to {number(length.end, 1)} tokens"
        return Symptom("warn", shorter, "shorter responses: prompts and the start of a call weigh more")
    return Symptom("warn", seen)


RULES = (
    DoctorRule(
        "rollout_share",
        "most of the time goes into rollout",
        unit="share of all time",
        healthy="40 to 70 %",
        found_when="above 70 %",
        cause="decoding itself: little else is done with so many tokens per step",
        remedy="a smaller learn.max_new_tokens or learn.overlong against the tail; more prompts per step fill the slots",
        kind="advice",
        check=rollout_share,
        needs=("time/rollout", "time/total"),
    ),
    DoctorRule(
        "kv_short",
        "sequences are preempted: KV memory is short",
        unit="preemptions per sample",
        healthy="0",
        found_when="more than 2 % of samples over the last 20 steps",
        cause="the KV cache does not hold what decodes at a time, so prompts and responses are prefilled again",
        remedy="raise run.rollout.kv_memory, or leave it and run.rollout.lend_memory on auto; "
        "or lower run.rollout.max_sequences",
        kind="safe",
        check=kv_short,
        needs=("rollout/parked", "run/samples"),
    ),
    DoctorRule(
        "decode_graphs",
        "decodes without CUDA graphs",
        unit="share of decode steps that replay a graph",
        healthy="above 90 % on a GPU",
        found_when="below that, median of the last 20 steps",
        cause="the model has layers that wait for the host; the start card says which",
        remedy="an architecture whose layers are known is faster; nothing to set",
        kind="advice",
        check=decode_graphs,
        needs=("rollout/graph_share",),
        unless=_on_cpu,
    ),
    DoctorRule(
        "reward_share",
        "waits for rewards",
        unit="share of all time",
        healthy="below 15 %",
        found_when="above that",
        cause="slow reward calls that outlast the decoding they overlap with",
        remedy="raise run.reward_workers; make the slowest call faster (reward/latency_max_s)",
        kind="safe",
        check=_share("reward", 0.15),
        needs=("time/reward", "time/total"),
    ),
    DoctorRule(
        "small_microbatches",
        "micro-batches too small for the device",
        unit="tokens of a micro-batch",
        healthy="8,192 and more on a GPU, or one micro-batch per update",
        found_when="run.token_budget below 8,192, 4 or more micro-batches per update, and memory not nearly full",
        cause="a token budget that was pinned low, or planned when memory was taken by something else",
        remedy="raise run.token_budget, or leave it on auto",
        kind="safe",
        check=small_microbatches,
        needs=("run/microbatches", "run/token_budget"),
        unless=_on_cpu,
    ),
    DoctorRule(
        "waits_for_host",
        "the device waits for the host to launch its work",
        unit="micro-batches that the device has left to do when the last is launched",
        healthy="half a micro-batch and more",
        found_when="less than a tenth, with 3 or more micro-batches per update",
        cause="micro-batches too small for a device as fast as this on a host as slow as this, or a host that is busy elsewhere",
        remedy="double run.token_budget, with run.checkpoint_activations at some where memory is short, or leave both on auto",
        kind="safe",
        check=waits_for_host,
        needs=("run/device_behind", "run/microbatches"),
        unless=_on_cpu,
    ),
    DoctorRule(
        "low_use",
        "the update leaves the device unused",
        unit="share of the device's matrix rate",
        healthy="30 % and more; small models 20 %",
        found_when="below 10 %, in updates that take a fifth of the time, where neither micro-batches nor the host explain it",
        cause="the model's own modules instead of fused layers, another process on the device, or states that are offloaded",
        remedy="see the start-up card for run.kernels, run.offload.optimizer and run.offload.activations; nvidia-smi for others",
        kind="safe",
        check=low_use,
        needs=("throughput/update_mfu", "time/update"),
        unless=_on_cpu,
    ),
    DoctorRule(
        "packing",
        "micro-batches are not full",
        unit="tokens of a micro-batch over run.token_budget",
        healthy="above 90 %; above 70 % at the least",
        found_when="below 70 % with 4 or more micro-batches per update",
        cause="sequences of more than half the budget: no two of them fit into one micro-batch",
        remedy="raise run.token_budget to a few of the longest sequences",
        kind="safe",
        check=packing,
        needs=("run/packing_fill", "run/microbatches"),
    ),
    DoctorRule(
        "idle",
        "time that belongs to no phase",
        unit="share of all time",
        healthy="below 5 %",
        found_when="above that, and more than 50 ms per step",
        cause="the host is busy elsewhere: writing samples to a slow disk, other processes, a debugger",
        remedy="look at RUN/trace.json; a local disk for observe.dir; a larger observe.samples_every",
        kind="safe",
        check=_share("idle", 0.05),
        needs=("time/idle", "time/total"),
    ),
    DoctorRule(
        "checkpoint_share",
        "checkpoints take long",
        unit="share of all time",
        healthy="below 10 %",
        found_when="above that",
        cause="a slow disk, or checkpoints too often (each new best by evaluation is one, too)",
        remedy="a larger observe.checkpoint_every; a local disk for observe.dir",
        kind="safe",
        check=_share("checkpoint", 0.10),
        needs=("time/checkpoint", "time/total"),
        steps=10,
    ),
    DoctorRule(
        "eval_share",
        "evaluation takes long",
        unit="share of all time",
        healthy="below 20 %",
        found_when="above that",
        cause="many evaluation prompts or samples for so short a run",
        remedy="a larger observe.eval_every; a smaller eval.limit",
        kind="safe",
        check=_share("eval", 0.20),
        needs=("time/eval", "time/total"),
        steps=20,
    ),
    DoctorRule(
        "slows_down",
        "rollout slows down",
        unit="tokens per second of rollout",
        healthy="steady, for responses of the same length",
        found_when="the fitted speed fell by more than 35 % over the run, which has at least 40 steps",
        cause="something else uses the machine, a GPU that throttles, or memory that fills up",
        remedy="look at the machine with trimtab doctor; end what else runs on it; check temperature and power limit",
        kind="safe",
        check=slows_down,
        needs=(SPEED,),
        steps=40,
    ),
)
