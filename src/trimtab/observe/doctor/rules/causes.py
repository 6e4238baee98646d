"""Why rollout or the update takes as long as it does: causes of what bounds a run's speed (observe/verdict.py).

Each counts only where its phase takes a fifth of the time or more: a slow part of something short is nobody's concern.
"""

from __future__ import annotations

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom
from trimtab.observe.doctor.rules.common import on_cpu, total, update_memory_share
from trimtab.observe.doctor.rules.speed import occupancy
from trimtab.observe.format import count, duration, percent

MIN_SHARE_OF_TIME = 0.2
TAIL, DECODE, PREFILL, WAIT = "rollout/tail_s", "rollout/decode_s", "rollout/prefill_s", "update/offload_wait_s"
OFFLOADS = ("optimizer", "reference", "activations")


def _matters(record: Record, phase: str) -> bool:
    return (record.share_of_time(phase) or 0.0) >= MIN_SHARE_OF_TIME


def rollout_tail(record: Record) -> Symptom | None:
    """Told by its seconds where these are known; else by empty slots and a longest response that is far from the mean."""
    if not _matters(record, "rollout"):
        return None
    tail, decode = total(record, TAIL), total(record, DECODE)
    mean, longest = record.now("response/length_mean"), record.now("response/length_max")
    lengths = f"responses of {count(mean)} tokens on average, the longest of a step {count(longest)}"
    if record.values(TAIL):
        if not decode or tail <= 0.3 * decode:
            return None
        return Symptom("warn", f"{percent(tail / decode)} of decoding, {duration(record.mean(TAIL))} a step; {lengths}")
    used = occupancy(record)
    if used is None or used >= 0.5 or not mean or not longest or longest <= 3 * mean:
        return None
    return Symptom("warn", f"slots {percent(used)} full; {lengths}")


def rollout_batch(record: Record) -> Symptom | None:
    """Slots are full all the time and fewer than the samples of a step, while the KV cache has room: a decode step then takes
    what reading the weights takes, however few sequences share it."""
    slots, samples = record.now("rollout/slots"), record.now("run/samples")
    full, kv = record.now("rollout/batch_occupancy") or 0.0, record.now("rollout/kv_usage")
    if not slots or not samples or kv is None or not _matters(record, "rollout"):
        return None
    if slots > 0.5 * samples or full < 0.8 or kv > 0.7 or slots > 256:
        return None
    return Symptom(
        "warn",
        f"{slots:.0f} slots for {samples:.0f} samples, {percent(full)} full; the KV cache is {percent(kv)} full at its peak",
    )


def rollout_prefill(record: Record) -> Symptom | None:
    prefill, phase = total(record, PREFILL), total(record, "time/rollout")
    if not phase or prefill <= 0.4 * phase or not _matters(record, "rollout"):
        return None
    seen = f"{percent(prefill / phase)} of rollout, {duration(record.mean(PREFILL))} a step"
    computed, cached = total(record, "rollout/prefill_tokens"), total(record, "rollout/cached_prefix_tokens")
    if computed:
        if cached > computed:
            return None
        seen += f"; {percent(cached / (computed + cached))} of prompt tokens come from the cache"
    if not record.setting("run.rollout.prefix_cache", True):
        return Symptom("warn", seen, "run.rollout.prefix_cache is off: every sample computes its prompt again")
    return Symptom("warn", seen)


def update_offload(record: Record) -> Symptom | None:
    waited, phase = total(record, WAIT), total(record, "time/update")
    if not phase or waited <= 0.2 * phase or not _matters(record, "update"):
        return None
    which = [f"run.offload.{what}" for what in OFFLOADS if record.setting(f"run.offload.{what}", False)]
    seen = f"{percent(waited / phase)} of the update, {duration(record.mean(WAIT))} a step"
    return Symptom("warn", seen + (f"; on: {', '.join(which)}" if which else ""))


def update_recompute(record: Record) -> Symptom | None:
    used = update_memory_share(record)
    if used is None or used >= 0.6 or not _matters(record, "update"):
        return None
    return Symptom("warn", f"the update's peak is {percent(used)} of the device's memory")


def _recomputes(record: Record) -> bool:
    key = "run.checkpoint_activations"
    return record.setting(key, False) or record.setting(key, "") == "some"


def _nothing_recomputed(record: Record) -> str | None:
    return on_cpu(record) or (None if _recomputes(record) else "nothing is recomputed")


RULES = (
    DoctorRule(
        "rollout_tail",
        "rollout waits for its longest responses",
        unit="share of decoding with less than a quarter of the slots that could be used",
        healthy="below 30 %",
        found_when="above that over the last 20 steps; without that metric, slots less than half full while the longest response "
        "is over three times the mean",
        cause="most of the time only a few long responses are still decoding",
        remedy="set learn.overlong, a soft penalty for long responses, or lower learn.max_new_tokens",
        kind="advice",
        check=rollout_tail,
        needs=("time/rollout", "response/length_max"),
    ),
    DoctorRule(
        "rollout_batch",
        "too few sequences decode together",
        unit="decode slots",
        healthy="as many as a step has samples, or the KV cache is full",
        found_when="at most half as many slots as samples and at most 256, 80 % full or more, while the KV cache is at most 70 % "
        "full",
        cause="run.rollout.max_sequences is too small: a decode step takes what reading the weights takes, however few share it",
        remedy="raise run.rollout.max_sequences, or leave it on auto",
        kind="safe",
        check=rollout_batch,
        needs=("rollout/slots", "rollout/batch_occupancy", "rollout/kv_usage"),
        unless=on_cpu,
    ),
    DoctorRule(
        "rollout_prefill",
        "rollout spends its time on prompts",
        unit="share of rollout",
        healthy="below 40 %",
        found_when="above that over the last 20 steps, while less than half of the prompt tokens come from the cache",
        cause="prompts are long compared with responses, and each is computed again for every sample",
        remedy="set run.rollout.prefix_cache: true; leave run.rollout.prefill_tokens on auto, or raise it",
        kind="safe",
        check=rollout_prefill,
        needs=("rollout/prefill_s", "time/rollout"),
        unless=on_cpu,
    ),
    DoctorRule(
        "update_offload",
        "the update waits for offloaded states",
        unit="share of the update",
        healthy="below 20 %",
        found_when="above that over the last 20 steps",
        cause="states come from host memory over a link that is slower than the update",
        remedy="set run.offload.optimizer, run.offload.reference and run.offload.activations to auto or false",
        kind="safe",
        check=update_offload,
        needs=("update/offload_wait_s", "time/update"),
        unless=on_cpu,
    ),
    DoctorRule(
        "update_recompute",
        "activations are recomputed while memory is free",
        unit="peak of the update divided by the device's memory",
        healthy="above 60 %, or nothing is recomputed",
        found_when="below 60 % while run.checkpoint_activations is on",
        cause="run.checkpoint_activations is set, or was planned while another process used the device",
        remedy="set run.checkpoint_activations: auto or false",
        kind="safe",
        check=update_recompute,
        needs=("memory/device_total_gib", "memory/update_peak_gib"),
        unless=_nothing_recomputed,
    ),
)
