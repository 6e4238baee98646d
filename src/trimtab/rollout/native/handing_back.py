"""What a scheduler has not started, counted and handed back for another engine to draw.

Samples are taken from the end: those of the group that came last, and of a group its last ones. So what is left of a group is its
first samples, and what has been forked stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.rollout.feed import CutRequest, Load
from trimtab.rollout.native.scheduler import PromptGroup, Scheduler


def load_of(work: Scheduler, pending: bool = False) -> Load:
    """What the engine has to do, and how much it could begin now: rows that are free, as far as there are pages. `pending`:
    something else is unfinished."""
    unstarted = sum(group.samples - group.forked for group in _waiting(work))
    coming_back = sum(not isinstance(filling.owner, PromptGroup) for filling in work.filling)
    running = len(work.running) + len(work.preempted) + coming_back + pending
    free = 0 if work.preempted else max(0, min(len(work.free_rows), work.spare_pages))
    return Load(unstarted, running, free)


def hand_back(work: Scheduler, samples: int) -> list[CutRequest]:
    """Forget up to this many samples that have not been started."""
    cuts = []
    for group in list(_waiting(work)):
        taken = min(samples, group.samples - group.forked)
        if taken:
            del group.limits[group.samples - taken :]
            samples -= taken
            cuts.append(CutRequest(group.index, taken))
            if group.forked == group.samples:
                _forget(work, group)
    return cuts


def _waiting(work: Scheduler) -> Iterator[PromptGroup]:
    """Groups with samples that have not been started, the last first."""
    yield from reversed(work.waiting)
    for filling in reversed(work.filling):
        if isinstance(filling.owner, PromptGroup):
            yield filling.owner
    yield from reversed(work.ready)


def _forget(work: Scheduler, group: PromptGroup) -> None:
    """Nothing of a group is left to start."""
    if group in work.waiting:
        work.waiting.remove(group)
    elif group in work.ready:
        work.ready.remove(group)
        work.pool.release(group.pages)
        group.pages = []
        work.free_slot(group)
    else:
        filling = next(filling for filling in work.filling if filling.owner is group)
        work.filling.remove(filling)
        work.pool.release(filling.pages)
        work.free_slot(group)
