"""The learning rate of each optimizer step."""

from __future__ import annotations

import math

from trimtab.config.learn import Learn
from trimtab.update.optimizer import AnyLearn


def learning_rate(learn: AnyLearn, step: int, update: int = 0, peak: float | None = None) -> float:
    """Rate of optimizer step `update` of step `step`, both from 0; `peak` None: learn.lr.

    Hugging Face's schedules: s / W while s < W, then down from 1 at s = W to `final` at s = N, with s, W and N in the schedule's
    unit. The last step is s = N - 1, so that something is learned from it with `final` 0 too.
    """
    schedule, peak = learn.schedule, learn.lr if peak is None else peak
    assert learn.steps is not None, "known once the data is counted"
    total, position = learn.steps, step
    if schedule.unit == "update" and isinstance(learn, Learn):  # elsewhere a step is one update
        total, position = total * learn.updates_per_batch, step * learn.updates_per_batch + update
    if position < schedule.warmup_steps:
        return peak * position / schedule.warmup_steps
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (position - schedule.warmup_steps) / max(1, total - schedule.warmup_steps))
    shape = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final + (1.0 - schedule.final) * shape)
