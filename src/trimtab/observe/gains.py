"""What single changes of a run's settings would gain, by the planner: its seconds with and without, as this run measures them.

A gain is told only where the planner can compute it, as "about", rounded to 5 %, and only above 5 %.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.observe.look import RunLook
from trimtab.observe.web.server.explorer import Question, Scales, explore, scales_of

MIN_GAIN, ROUND_TO = 0.05, 0.05
OPENED = ("run.token_budget", "run.checkpoint_activations", "run.offload.", "run.rollout.max_sequences", "run.rollout.kv_memory",
          "run.rollout.prefill_tokens", "run.kernels", "run.engine")  # fmt: skip
"""Keys that Trimtab would choose, and that decide how long a step takes."""
MOST_KEYS = 6
MAX_CANDIDATES = 10
"""Single changes that are looked at."""
MAX_SECONDS = 4.0
"""For all single changes together."""


@dataclass(frozen=True)
class Outcome:
    """A step with a change, and without one."""

    text: str
    overrides: tuple[str, ...]
    seconds: float | None
    """Of a step, as this run would take them; None where it does not fit."""
    now: float
    """Of a step as it is."""
    peak_bytes: int | None
    fits: bool

    @property
    def gain(self) -> float:
        """Share of a step's time that it saves; 0 where it saves none."""
        return 0.0 if self.seconds is None or self.now <= 0 else max(0.0, 1 - self.seconds / self.now)

    def as_json(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "overrides": list(self.overrides),
            "seconds": self.seconds,
            "now": self.now,
            "peak_bytes": self.peak_bytes,
            "fits": self.fits,
        }


def gain_words(outcome: Outcome | None) -> str | None:
    """`about 30 % less time a step`; None where it is not worth telling."""
    if outcome is None or outcome.gain <= MIN_GAIN:
        return None
    rounded = max(MIN_GAIN, round(outcome.gain / ROUND_TO) * ROUND_TO)
    return f"about {100 * rounded:.0f} % less time a step"


def outcome_of(look: RunLook, overrides: Sequence[str], text: str = "", scales: Scales | None = None) -> Outcome | None:
    """What the planner says of a change; None where it cannot say anything: no plan, no steps, a model it does not know."""
    now = look.record.now("time/total")
    if now is None or not look.plan or not overrides:
        return None
    try:
        scales = scales or scales_of(look.folder, look.reader)
        found = explore(look.folder, Question(tuple(overrides)), scales)
    except (TrimtabError, OSError, ValueError, TypeError, KeyError, ArithmeticError):
        return None
    scaled = found.get("measured")
    if found["fits"] and scaled is None:
        return None
    phases = found.get("phases") or []
    on_cpu = found.get("device") == "cpu"
    peak = max((phase["host_bytes" if on_cpu else "device_bytes"] for phase in phases), default=None)
    return Outcome(
        text or " ".join(overrides),
        tuple(overrides),
        scaled["total"] if scaled else None,
        now,
        peak,
        bool(found["fits"]),
    )


def best_safe_change(look: RunLook) -> Outcome | None:
    """Of the keys of `run` that the user set, the one whose setting costs the most time: left to Trimtab, a step is shorter. None
    where none gains more than 5 %."""
    said = look.run.get("set")
    keys = [key for key in said if isinstance(key, str) and key.startswith(OPENED)] if isinstance(said, list) else []
    tried = [outcome_of(look, [f"{key}=auto"], f"leave {key} to Trimtab") for key in keys[:MOST_KEYS]]
    found = [outcome for outcome in tried if outcome is not None and outcome.gain > MIN_GAIN]
    return max(found, key=lambda outcome: outcome.gain, default=None)


def single_changes(look: RunLook) -> list[Outcome]:
    """Ten single changes, of what a user may want to know: other sizes, more or less memory saved, other lengths; fewer where
    the planner takes long."""
    if not look.plan or not look.record.steps:
        return []
    found, until = [], time.monotonic() + MAX_SECONDS
    try:
        scales = scales_of(look.folder, look.reader)
    except (TrimtabError, OSError, ValueError, TypeError, KeyError, ArithmeticError):
        return []
    for text, overrides in _candidates(look):
        if time.monotonic() < until and (outcome := outcome_of(look, overrides, text, scales)) is not None:
            found.append(outcome)
    return found


def _candidates(look: RunLook) -> list[tuple[str, tuple[str, ...]]]:
    record = look.record
    budget = int(record.now("run/token_budget") or record.setting("run.token_budget", 0))
    found: list[tuple[str, tuple[str, ...]]] = []
    if budget:
        found.append(("micro-batches of twice the tokens", (f"run.token_budget={2 * budget}",)))
        found.append(("micro-batches of half the tokens", (f"run.token_budget={max(256, budget // 2)}",)))
    if not record.setting("run.checkpoint_activations", False):
        found.append(("activations recomputed", ("run.checkpoint_activations=true",)))
    else:
        found.append(("activations kept", ("run.checkpoint_activations=false",)))
    if record.on_cuda:
        on = record.setting("run.offload.optimizer", False)
        words = "optimizer state on the device" if on else "optimizer state in host memory"
        found.append((words, (f"run.offload.optimizer={str(not on).lower()}",)))
    if look.stage != "rl":
        return found
    slots, tokens = record.setting("run.rollout.max_sequences", 0), record.setting("learn.max_new_tokens", 0)
    prompts, samples = record.setting("learn.prompts_per_step", 0), record.setting("learn.samples_per_prompt", 0)
    if slots:
        found.append(("half as many decode slots", (f"run.rollout.max_sequences={max(1, slots // 2)}",)))
    if tokens:
        found.append(("responses of at most half the tokens", (f"learn.max_new_tokens={max(1, tokens // 2)}",)))
        found.append(("responses of at most twice the tokens", (f"learn.max_new_tokens={2 * tokens}",)))
    if prompts and samples:
        found.append(("twice as many prompts a step", (f"learn.prompts_per_step={2 * prompts}",)))
        found.append(("twice as many samples a prompt", (f"learn.samples_per_prompt={2 * samples}",)))
    found.append(("a KL penalty, with its reference", ("learn.kl.coef=0.001",)))
    return found[:MAX_CANDIDATES]
