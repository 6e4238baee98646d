"""What a run has measured, for the simulator: decode steps by their batch, passes over prompts, and the other phases."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.plan.scenario import MeasuredTimes
from trimtab.record.layout import TRACE_FILE
from trimtab.record.reader import read_trace

TRAINING = ("score", "update")
PHASES_TRACK = 1


def measured_times(folder: Path) -> MeasuredTimes:
    """The times in trace.json of a run folder: of all steps but the first, which warms up, where there are more."""
    path = folder / TRACE_FILE
    if not path.is_file():
        raise ConfigError([Problem("--times", f"{folder} has no {TRACE_FILE}", "Give the folder of a run.")])
    events = [event for event in read_trace(path) if event.get("ph") == "X"]
    steps = sorted({_step(event) for event in events if event["name"] in TRAINING and _step(event) >= 1})
    kept = set(steps[1:] or steps)
    phases = defaultdict[str, dict[int, float]](lambda: defaultdict(float))
    for event in events:
        if event["tid"] == PHASES_TRACK and _step(event) in kept:
            phases[event["name"]][_step(event)] += event["dur"] / 1e6
    decodes, prefills, longer = _engine_spans(events, kept, phases["rollout"])
    if not decodes or not phases["update"]:
        what = f"{path} has no decode steps and updates of the native engine"
        raise ConfigError(
            [Problem("--times", what, "Give a run with run.engine: native that has trained a step or more.")]
        )
    return MeasuredTimes(
        step_s=tuple((rows, longer * seconds) for rows, seconds in _by_batch(decodes)),
        prefill_token_s=longer * sum(s for _, s in prefills) / max(1, sum(tokens for tokens, _ in prefills)),
        reward_s=_mean(phases["reward"], kept),
        train_s=sum(_mean(phases[name], kept) for name in TRAINING),
        publish_s=_mean(phases["publish"], kept),
    )


def _engine_spans(
    events: list[dict[str, Any]], kept: set[int], rollout: dict[int, float]
) -> tuple[list[tuple[int, int, float]], list[tuple[int, float]], float]:
    """Decode steps (sequences, steps, seconds) and passes over prompts (tokens, seconds) of rollouts, not of evaluations; and how
    many times longer a rollout is than these, over all steps: only some steps have them, more of the slow ones, and a rollout has
    moments between them."""
    decodes, prefills, spanned = [], [], defaultdict[int, float](float)
    begun = {
        _step(e): (e["ts"], e["ts"] + e["dur"]) for e in events if e["tid"] == PHASES_TRACK and e["name"] == "rollout"
    }
    for event in events:
        first, last = begun.get(_step(event), (0, 0))
        if _step(event) not in kept or event["name"] not in ("decode", "prefill") or not first <= event["ts"] < last:
            continue
        seconds = event["dur"] / 1e6
        spanned[_step(event)] += seconds
        if event["name"] == "decode":
            decodes.append((event["args"]["sequences"], event["args"]["steps"], seconds))
        else:
            prefills.append((event["args"]["tokens"], seconds))
    longer = _mean(rollout, kept) / fmean(spanned.values()) if spanned else 1.0
    return decodes, prefills, longer


def step_seconds(folder: Path) -> list[float]:
    """Seconds of every step but the first, as trace.json has them: its phases, without evaluation and checkpoints."""
    found = defaultdict[int, float](float)
    for event in read_trace(folder / TRACE_FILE):
        timed = event.get("ph") == "X" and event["tid"] == PHASES_TRACK and _step(event) >= 1
        if timed and event["name"] in ("rollout", "reward", "publish", *TRAINING):
            found[_step(event)] += event["dur"] / 1e6
    return [found[step] for step in sorted(found)[1:]]


def _step(event: dict[str, Any]) -> int:
    return int((event.get("args") or {}).get("step", -1))


def _mean(by_step: dict[int, float], steps: set[int]) -> float:
    return fmean(by_step.get(step, 0.0) for step in steps)


def _by_batch(decodes: list[tuple[int, int, float]]) -> tuple[tuple[float, float], ...]:
    """Seconds of a step by sequences in it: means over batches within a quarter of each other, rising."""
    bins = defaultdict[int, list[tuple[int, int, float]]](list)
    for one in decodes:
        bins[(4 * one[0]).bit_length() * 4 + (one[0] * 4 >> max(0, one[0].bit_length() - 1)) % 4].append(one)
    found = []
    for held in bins.values():
        steps = sum(count for _, count, _ in held)
        found.append((fmean(rows for rows, _, _ in held), sum(s for _, _, s in held) / steps))
    return tuple(sorted(found))
