"""What bounds a run's speed: the longest phase, and the first cause that the doctor's rules find for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.record import Record
from trimtab.observe.format import number

PHASES = ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle")
IN_WORDS = {
    "rollout": "rollout",
    "reward": "the reward",
    "score": "scoring",
    "update": "the update",
    "publish": "publishing weights",
    "checkpoint": "checkpoints",
    "eval": "evaluation",
    "idle": "waiting",
}
WINDOW = 20
"""Steps that count as now."""


@dataclass(frozen=True)
class Cause:
    """A rule that explains why a phase is long."""

    rule: str
    words: str
    """After "bounds the speed": why."""
    metrics: tuple[str, ...]
    """Evidence; the first leads to its chart."""
    key: Callable[[Record], str | None] = lambda record: None
    """The line of config that changes it."""
    safe: bool = True


def _offload(record: Record) -> str | None:
    on = [what for what in ("optimizer", "activations", "reference") if record.setting(f"run.offload.{what}", False)]
    return f"run.offload.{on[0]}: auto" if on else None


def _workers(record: Record) -> str | None:
    workers = record.setting("run.reward_workers", 0)
    return f"run.reward_workers: {2 * workers}" if workers else "run.reward_workers: auto"


def _prefill(record: Record) -> str | None:
    off = not record.setting("run.rollout.prefix_cache", True)
    return "run.rollout.prefix_cache: true" if off else "run.rollout.prefill_tokens: auto"


def _wider(record: Record) -> str | None:
    budget = int(record.now("run/token_budget") or 0)
    return f"run.token_budget: {2 * budget}" if budget else None


def _shorter(record: Record) -> str | None:
    most = record.setting("learn.max_new_tokens", 0)
    return f"learn.overlong.buffer: {max(1, most // 4)}" if most else None


CAUSES: Mapping[str, tuple[Cause, ...]] = {
    "rollout": (
        Cause("rollout_tail", "it waits for its longest responses", ("rollout/tail_s", "rollout/decode_s"), _shorter, False),
        Cause("rollout_batch", "too few sequences decode together", ("rollout/slots", "rollout/kv_usage"),
              lambda record: "run.rollout.max_sequences: auto"),
        Cause("kv_short", "the KV cache is too small, so sequences are preempted", ("rollout/parked", "rollout/kv_usage"),
              lambda record: "run.rollout.kv_memory: auto"),
        Cause("decode_graphs", "the engine launches its kernels one by one, without CUDA graphs", ("rollout/graph_share",),
              safe=False),
        Cause("environment_wait", "it waits for environments", ("environment/wait_s",), _workers),
        Cause("rollout_prefill", "it computes prompts (prefill) rather than responses",
              ("rollout/prefill_s", "rollout/cached_prefix_tokens"), _prefill),
    ),
    "reward": (Cause("reward_share", "the run waits for rewards", ("time/reward", "reward/latency_max_s"), _workers),),
    "update": (
        Cause("small_microbatches", "its micro-batches are too small for the device", ("run/token_budget", "run/microbatches"),
              lambda record: "run.token_budget: auto"),
        Cause("waits_for_host", "the device waits for the host to launch its work", ("run/device_behind",), _wider),
        Cause("update_offload", "it waits for offloaded states", ("update/offload_wait_s",), _offload),
        Cause("update_recompute", "activations are recomputed while memory is free", ("memory/update_peak_gib",),
              lambda record: "run.checkpoint_activations: auto"),
    ),
    "checkpoint": (Cause("checkpoint_share", "checkpoints are frequent, or the disk is slow", ("time/checkpoint",)),),
    "eval": (Cause("eval_share", "evaluations are large, or frequent", ("time/eval",)),),
    "idle": (Cause("idle", "much time belongs to no phase", ("time/idle",)),),
}  # fmt: skip
"""By phase, in the order in which they are tried."""


@dataclass(frozen=True)
class Bound:
    phase: str
    share: float
    """Of a step's time."""
    seconds: float
    """A step."""
    total: float
    """Seconds of a whole step."""
    cause: Cause | None
    finding: Finding | None
    shares: Mapping[str, float]

    @property
    def words(self) -> str:
        text = f"{IN_WORDS[self.phase]} bounds the speed, with {100 * self.share:.0f} % of the time"
        text = text[0].upper() + text[1:]
        return f"{text}: {self.cause.words}." if self.cause else f"{text}."

    @property
    def detail(self) -> str:
        others = sorted((name for name in self.shares if name != self.phase), key=lambda name: -self.shares[name])
        own = f"{number(self.seconds, 2)} of {number(self.total, 2)} s a step"
        if not others or self.shares[others[0]] < 0.05:
            return own
        return f"{own}; {IN_WORDS[others[0]]} takes {number(self.shares[others[0]] * self.total, 2)}"


def bound_of(record: Record, findings: Mapping[str, Finding]) -> Bound | None:
    """By the means of the recent steps, the first step left out where there are others; None before the first step."""
    columns = {phase: record.values(f"time/{phase}") for phase in PHASES}
    totals = record.values("time/total")
    count = len(totals)
    if not count:
        return None
    skip = 1 if count > 1 else 0
    longest_cycle = max(WINDOW, 50) if count > 60 else WINDOW  # so that evaluations and checkpoints have their share
    means = {phase: _mean(values[skip:][-longest_cycle:]) for phase, values in columns.items() if values}
    total = _mean(totals[skip:][-longest_cycle:])
    if total <= 0 or not means:
        return None
    shares = {phase: seconds / total for phase, seconds in means.items() if seconds > 0}
    longest = max(shares, key=lambda phase: shares[phase])
    for phase in (longest, *sorted(shares, key=lambda phase: -shares[phase])):
        if phase != longest and phase in ("rollout", "update", "score"):
            continue  # of the others only what is out of proportion is told
        for cause in CAUSES.get(phase, ()):
            if cause.rule in findings:
                return Bound(phase, shares[phase], means[phase], total, cause, findings[cause.rule], shares)
    return Bound(longest, shares[longest], means[longest], total, None, None, shares)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
