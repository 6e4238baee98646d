"""Memory: too little left, too much left, leaks, and predictions that were wrong. GiB are 2^30 bytes."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.observe.doctor.record import RECENT_STEPS, Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom, steady_band
from trimtab.observe.doctor.rules.common import total
from trimtab.observe.format import gib, number, percent

RESTARTS = "rollout/restarts"
TOTAL, HOST, RETRIES, OOMS = "memory/device_total_gib", "memory/host_gib", "run/alloc_retries", "run/oom_recoveries"
PREDICTION = "memory/predicted_over_measured"
PEAKS = tuple(f"memory/{phase}_peak_gib" for phase in ("rollout", "score", "update", "optimizer"))


def peak(record: Record) -> tuple[float, str] | None:
    """The highest peak of recent steps, and the phase it was in."""
    peaks = [(max(record.recent(name)), name.split("/")[1].split("_")[0]) for name in PEAKS if record.values(name)]
    return max(peaks) if peaks else None


def memory_tight(record: Record) -> Symptom | None:
    size, highest = record.now(TOTAL), peak(record)
    if not size or highest is None or highest[0] / size <= 0.95:
        return None
    return Symptom("warn", f"{gib(highest[0])} of {gib(size)} ({percent(highest[0] / size)}) in {highest[1]}")


def memory_unused(record: Record) -> Symptom | None:
    """Free memory is a finding only if the run does something more slowly to save memory."""
    size, highest = record.now(TOTAL), peak(record)
    if not size or highest is None or highest[0] / size >= 0.6:
        return None
    spent = list(_savings(record))
    if not spent:
        return None
    seen = f"{gib(highest[0])} of {gib(size)} ({percent(highest[0] / size)}) at the peak, in {highest[1]}; yet "
    return Symptom("warn", seen + ", ".join(spent))


def _savings(record: Record) -> Iterable[str]:
    """What the run does to save memory, and could do without."""
    per_update = (record.now("run/microbatches") or 0.0) / record.updates_per_batch
    if per_update >= 4 and (record.now("run/token_budget") or 0.0) < 16384:
        yield f"{number(per_update, 1)} micro-batches per update"
    if (
        record.setting("run.checkpoint_activations", False)
        or record.setting("run.checkpoint_activations", "") == "some"
    ):
        yield "activations are recomputed"
    for what in ("optimizer", "reference", "activations"):
        if record.setting(f"run.offload.{what}", False):
            yield f"run.offload.{what} is on"
    if total(record, "rollout/parked"):
        yield "sequences are preempted because KV memory is short"


def oom_recoveries(record: Record) -> Symptom | None:
    """A count over the whole run: a step had some where it rises."""
    points = record.points(OOMS)
    before = [0.0, *(value for _, value in points)]
    hit = [step for (step, value), last in zip(points, before) if value > last]
    if not hit:
        return None
    seen = f"{points[-1][1]:.0f} in {len(hit)} of {len(points)} steps, the last in step {hit[-1]}"
    return Symptom("bad" if len(hit) > 0.05 * len(points) and len(hit) > 2 else "warn", seen)


def engine_restarts(record: Record) -> Symptom | None:
    points = record.points(RESTARTS)
    hit = [(step, value) for step, value in points if value > 0]
    if not hit:
        return None
    seen = f"{sum(value for _, value in hit):.0f} in {len(hit)} of {len(points)} steps, the last in step {hit[-1][0]}"
    return Symptom("bad" if len(hit) > 0.05 * len(points) and len(hit) > 2 else "warn", seen)


def alloc_retries(record: Record) -> Symptom | None:
    points = record.points(RETRIES)[-RECENT_STEPS:]
    hit = [value for _, value in points if value > 0]
    if len(hit) < 2:
        return None
    return Symptom("warn", f"{sum(hit):.0f} in {len(hit)} of the last {len(points)} steps")


def prediction(record: Record) -> Symptom | None:
    now = record.now(PREDICTION) or 1.0
    if 0.98 <= now <= 1.5:
        return None
    seen = f"{number(now, 2)} (median of {record.span(PREDICTION)})"
    if now > 1:
        return Symptom("warn", seen, "the plan reserves memory that the run does not use")
    return Symptom("warn", seen, "the run uses more memory than planned: a longer batch may not fit")


def host_leak(record: Record) -> Symptom | None:
    """A third of the run is left out at the beginning: caches fill. What remains must still rise at its end."""
    values = record.values(HOST)
    line, half = record.trend(HOST, skip=len(values) // 3), record.trend(HOST, skip=len(values) * 2 // 3)
    if not line.rises(max(0.25, 0.1 * line.start)) or half.change < line.change / 3:
        return None
    steps = len(values) - len(values) // 3
    a_thousand = f"{gib(1000 * line.change / steps)} a thousand steps"
    seen = f"{gib(line.start)} to {gib(line.end)} (fitted) over the last {steps} steps: {a_thousand}"
    return Symptom("bad" if line.end > 2 * line.start else "warn", seen)


RULES = (
    DoctorRule(
        "oom_recoveries",
        "ran out of device memory and recovered",
        unit="recoveries",
        healthy="0",
        found_when="one or more; bad in more than 5 % of steps",
        cause="micro-batches larger than the memory that is left; each recovery repeats work",
        remedy="lower run.token_budget, or leave it on auto",
        kind="safe",
        check=oom_recoveries,
        needs=(OOMS,),
        steps=1,
    ),
    DoctorRule(
        "engine_restarts",
        "the engine's process was lost and started again",
        unit="restarts",
        healthy="0",
        found_when="one or more; bad in more than 5 % of steps",
        cause="it ran out of host or device memory, hung, or was killed; its work is repeated",
        remedy="read the console's warnings for the reason; add host memory, lower run.rollout.max_sequences, or set "
        "run.engine: native",
        kind="safe",
        check=engine_restarts,
        needs=(RESTARTS,),
        steps=1,
    ),
    DoctorRule(
        "memory_tight",
        "device memory nearly full",
        unit="highest peak divided by the device's memory",
        healthy="below 95 %",
        found_when="above that in a phase of the last 20 steps",
        cause="memory budgets are at the limit: a longer batch will not fit",
        remedy="lower run.token_budget or run.rollout.kv_memory by a tenth, or leave them on auto",
        kind="safe",
        check=memory_tight,
        needs=(TOTAL,),
    ),
    DoctorRule(
        "memory_unused",
        "device memory unused",
        unit="highest peak divided by the device's memory",
        healthy="above 60 %, or more memory would make nothing faster",
        found_when="below 60 % while small micro-batches, recomputation, offloading or preemption save memory",
        cause="memory budgets are set too small, or were planned while another process used the device",
        remedy="leave run.token_budget, run.checkpoint_activations, run.offload and run.rollout.kv_memory on auto, or raise them",
        kind="safe",
        check=memory_unused,
        needs=(TOTAL,),
    ),
    DoctorRule(
        "alloc_retries",
        "the allocator runs out of memory and retries",
        unit="allocations that were repeated after freeing the cache",
        healthy="0",
        found_when="in two or more of the last 20 steps",
        cause="memory is nearly full or fragmented; each retry waits for the device",
        remedy="lower run.token_budget by 10 to 25 %, or set PYTORCH_ALLOC_CONF=expandable_segments:True",
        kind="safe",
        check=alloc_retries,
        needs=(RETRIES,),
    ),
    DoctorRule(
        "prediction",
        "memory was predicted wrongly",
        unit="predicted peak divided by measured peak",
        healthy="0.98 to 1.5",
        found_when="the median of the last 20 steps is outside that",
        cause="the plan's formulas do not fit this model or device",
        remedy="set run.token_budget yourself for now, and report the model, the device and this number",
        kind="safe",
        check=prediction,
        band=steady_band(PREDICTION, "0.98 to 1.5", low=0.98, high=1.5),
        needs=(PREDICTION,),
    ),
    DoctorRule(
        "host_leak",
        "host memory keeps growing",
        unit="GiB of the process tree",
        healthy="steady after the first third of the run",
        found_when="rises by a tenth and by 0.25 GiB over the last two thirds of the run, and still rises at the end; bad if "
        "it doubled",
        cause="a leak, most often in a reward function that keeps what it has seen (a cache, a client, a log)",
        remedy="watch the reward workers' memory (ps) and limit their caches; stopping and resuming the run frees the memory",
        kind="safe",
        check=host_leak,
        needs=(HOST,),
        steps=60,
    ),
)
