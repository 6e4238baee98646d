"""Work of a healthy run that teaches nothing or keeps nothing busy: what a hint may be about."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rules.common import learned
from trimtab.observe.doctor.rules.speed import occupancy

MIN_SILENT_GROUPS, MAX_OCCUPANCY, MAX_PACKING = 0.4, 0.5, 0.8


@dataclass(frozen=True)
class Waste:
    text: str
    metric: str
    share: float
    key: str | None = None


def waste_of(record: Record) -> Waste | None:
    """The largest; None where little is wasted."""
    found = [waste for waste in (_groups(record), _slots(record), _packing(record)) if waste is not None]
    return max(found, key=lambda waste: waste.share, default=None)


def _groups(record: Record) -> Waste | None:
    metric = "reward/zero_std_groups"
    share = record.mean(metric) or 0.0
    if share < MIN_SILENT_GROUPS or record.setting("learn.dynamic_sampling.enabled", False):
        return None
    solved = "any more, so most of a step goes into prompts it already solves" if learned(record) else ""
    text = f"{100 * share:.0f} % of groups teach nothing {solved}".rstrip()
    key = "learn.dynamic_sampling.enabled: true"
    harder = "Take harder prompts" if learned(record) else "Take prompts that it solves sometimes"
    return Waste(f"{text}. {harder}, or turn dynamic sampling on.", metric, share, key)


def _slots(record: Record) -> Waste | None:
    used = occupancy(record)
    if used is None or used >= MAX_OCCUPANCY or (record.share_of_time("rollout") or 0.0) < 0.3:
        return None
    text = f"{100 * (1 - used):.0f} % of decode slots are empty on average: a step's last responses decode with few others."
    return Waste(f"{text} More prompts a step would share that time.", "rollout/batch_occupancy", 1 - used)


def _packing(record: Record) -> Waste | None:
    fill, batches = record.now("run/packing_fill"), record.now("run/microbatches") or 0.0
    if fill is None or fill >= MAX_PACKING or batches < 4 * record.updates_per_batch:
        return None
    text = f"Micro-batches are {100 * fill:.0f} % full on average; a larger run.token_budget would fill them better."
    return Waste(text, "run/packing_fill", 1 - fill, "run.token_budget: auto")
