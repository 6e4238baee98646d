"""Where the time goes: shares of a step, what holds rollout or the update back, and whether the run slows down."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rule import DoctorRule, Symptom, steady_band
from trimtab.observe.doctor.rules.common import microbatches_per_update, on_cpu, total, update_memory_share
from trimtab.observe.format import count, duration, number, percent

SPEED = "rollout/tokens_per_s"


def _share(phase: str, limit: float, least_s: float = 0.05) -> Callable[[Record], Symptom | None]:
    """A check of a phase's share of all time. Phases of a few milliseconds are ignored."""

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
            return Symptom("warn", seen, "each round of conversations waits for the last answer of the round before")
        return Symptom("warn", seen, "most of the time only a few long responses are still decoding")
    if total(record, "rollout/parked"):
        return Symptom("warn", seen, "KV memory is short: see the rule kv_short")
    return Symptom("warn", seen)


def kv_short(record: Record) -> Symptom | None:
    parked, samples = total(record, "rollout/parked"), total(record, "run/samples")
    if not samples or parked / samples <= 0.02:
        return None
    use = f", KV cache {percent(record.now('rollout/kv_usage'))} full at its peak"
    span = record.span("rollout/parked")
    return Symptom("warn", f"{parked:.0f} times for {samples:.0f} samples over {span}{use}")


def decode_graphs(record: Record) -> Symptom | None:
    share = record.now("rollout/graph_share") or 0.0
    if share >= 0.9:
        return None
    return Symptom("warn", f"{percent(share)} of decode steps (median of {record.span('rollout/graph_share')})")


def small_microbatches(record: Record) -> Symptom | None:
    """Room is known only where the device's size is; without it the numbers alone decide."""
    per_update = microbatches_per_update(record)
    budget, room = record.now("run/token_budget") or 0.0, update_memory_share(record)
    if budget >= 8192 or per_update < 4 or (room is not None and room > 0.8):
        return None
    seen = f"{number(per_update, 1)} micro-batches per update, of at most {budget:.0f} tokens"
    return Symptom(
        "warn", seen if room is None else f"{seen}; {percent(room)} of the device's memory is used at the peak"
    )


def waits_for_host(record: Record) -> Symptom | None:
    """One micro-batch leaves nothing to launch ahead."""
    behind = record.now("run/device_behind")
    per_update = microbatches_per_update(record)
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
    fill, per_update = record.now("run/packing_fill") or 1.0, microbatches_per_update(record)
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
        return Symptom(
            "warn",
            longer,
            "responses are longer: every token reads more KV cache, and the last ones decode alone for longer",
        )
    if length.falls(0.3 * length.start):
        shorter = f"{seen}; responses shrank from {number(length.start, 1)} to {number(length.end, 1)} tokens"
        return Symptom(
            "warn", shorter, "responses are shorter: prefill and the start of each rollout take a larger share"
        )
    return Symptom("warn", seen)


RULES = (
    DoctorRule(
        "rollout_share",
        "most of the time goes into rollout",
        unit="share of all time",
        healthy="40 to 70 %",
        found_when="above 70 %",
        cause="a step decodes many tokens and does little else",
        remedy="lower learn.max_new_tokens or set learn.overlong to shorten the longest responses; raise "
        "learn.prompts_per_step to fill the batch",
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
        cause="the KV cache cannot hold all running sequences, so the engine preempts some and prefills them again",
        remedy="raise run.rollout.kv_memory, or leave it and run.rollout.lend_memory on auto; "
        "or lower run.rollout.max_sequences",
        kind="safe",
        check=kv_short,
        needs=("rollout/parked", "run/samples"),
    ),
    DoctorRule(
        "decode_graphs",
        "the engine decodes without CUDA graphs",
        unit="share of decode steps that replay a graph",
        healthy="above 90 % on a GPU",
        found_when="the median of the last 20 steps is below that",
        cause="the model has layers that wait for the host; the start card says which",
        remedy="no setting changes it; a model with fused layers is faster",
        kind="advice",
        check=decode_graphs,
        band=steady_band("rollout/graph_share", "above 90 %", low=0.9),
        needs=("rollout/graph_share",),
        unless=on_cpu,
    ),
    DoctorRule(
        "reward_share",
        "the run waits for rewards",
        unit="share of all time",
        healthy="below 15 %",
        found_when="above that",
        cause="reward calls still run when all decoding is done",
        remedy="raise run.reward_workers; make the slowest call faster (reward/latency_max_s)",
        kind="safe",
        check=_share("reward", 0.15),
        needs=("time/reward", "time/total"),
    ),
    DoctorRule(
        "small_microbatches",
        "micro-batches too small for the device",
        unit="tokens of a micro-batch",
        healthy="8,192 or more on a GPU, or one micro-batch per update",
        found_when="run.token_budget below 8,192, 4 or more micro-batches per update, and memory not nearly full",
        cause="run.token_budget is set too low, or was planned while another process used the memory",
        remedy="raise run.token_budget, or leave it on auto",
        kind="safe",
        check=small_microbatches,
        needs=("run/microbatches", "run/token_budget"),
        unless=on_cpu,
    ),
    DoctorRule(
        "waits_for_host",
        "the device waits for the host to launch its work",
        unit="micro-batches that the device still has to do when the host has launched the last one",
        healthy="half a micro-batch or more",
        found_when="less than a tenth, with 3 or more micro-batches per update",
        cause="micro-batches are too small for this fast device and slow host, or the host is busy with other work",
        remedy="double run.token_budget (with run.checkpoint_activations: some if memory is short), or leave both on auto",
        kind="safe",
        check=waits_for_host,
        band=steady_band("run/device_behind", "above 0.1", low=0.1),
        needs=("run/device_behind", "run/microbatches"),
        unless=on_cpu,
    ),
    DoctorRule(
        "low_use",
        "the update uses little of the device's speed",
        unit="share of the device's peak matrix speed (MFU)",
        healthy="30 % or more; small models 20 %",
        found_when="below 10 % while updates take a fifth of the time, and neither small micro-batches nor the host is the "
        "reason",
        cause="the update uses the model's own modules instead of fused layers, another process uses the device, or states "
        "are offloaded",
        remedy="see the start card for run.kernels, run.offload.optimizer and run.offload.activations; run nvidia-smi to see "
        "other processes",
        kind="safe",
        check=low_use,
        needs=("throughput/update_mfu", "time/update"),
        unless=on_cpu,
    ),
    DoctorRule(
        "packing",
        "micro-batches are not full",
        unit="tokens of a micro-batch divided by run.token_budget",
        healthy="above 90 %; at least 70 %",
        found_when="below 70 % with 4 or more micro-batches per update",
        cause="sequences are longer than half the budget, so no two of them fit into one micro-batch",
        remedy="raise run.token_budget to several times the longest sequence",
        kind="safe",
        check=packing,
        band=steady_band("run/packing_fill", "at least 70 %", low=0.7),
        needs=("run/packing_fill", "run/microbatches"),
    ),
    DoctorRule(
        "idle",
        "much time belongs to no phase",
        unit="share of all time",
        healthy="below 5 %",
        found_when="above that, and more than 50 ms per step",
        cause="the host is busy: it writes samples to a slow disk, or runs other processes or a debugger",
        remedy="look at RUN/trace.json; set observe.dir to a local disk; raise observe.samples_every",
        kind="safe",
        check=_share("idle", 0.05),
        needs=("time/idle", "time/total"),
    ),
    DoctorRule(
        "checkpoint_share",
        "checkpoints take much time",
        unit="share of all time",
        healthy="below 10 %",
        found_when="above that",
        cause="the disk is slow, or checkpoints are frequent (each new best evaluation writes one, too)",
        remedy="raise observe.checkpoint_every; set observe.dir to a local disk",
        kind="safe",
        check=_share("checkpoint", 0.10),
        needs=("time/checkpoint", "time/total"),
        steps=10,
    ),
    DoctorRule(
        "eval_share",
        "evaluation takes much time",
        unit="share of all time",
        healthy="below 20 %",
        found_when="above that",
        cause="evaluation has many prompts or samples compared with the training steps",
        remedy="raise observe.eval_every; lower eval.limit",
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
        cause="another process uses the machine, the GPU throttles, or memory fills up",
        remedy="check the machine with trimtab doctor; end other processes; check the GPU's temperature and power limit",
        kind="safe",
        check=slows_down,
        needs=(SPEED,),
        steps=40,
    ),
)
