"""What a rank does in a rollout: it generates with an engine of its own, and scores with reward models. Each public method is an
order of the driver's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from trimtab.cluster.feed import DriverFeed
from trimtab.cluster.serve import Link, Orders
from trimtab.model.memory import free
from trimtab.reward.models import Classifier
from trimtab.rollout.engine import Engine, Request, RolloutStats
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.feed import Bounds, FedEngine
from trimtab.rollout.native.cut import CutEngine
from trimtab.rollout.trajectory import Group
from trimtab.workers.messages import Cell


class LinkReports:
    """What an engine survives is the driver's to tell."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def of_engine(self, line: str) -> None:
        self._link.tell("engine", line)

    def restarted(self, line: str) -> None:
        self._link.tell("restarted", line)


def load_classifiers(paths: Sequence[str], device: torch.device, dtype: torch.dtype) -> list[Classifier]:
    """The reward models of a run. `dtype`: the policy's."""
    return [Classifier(path, device, dtype) for path in paths]


class RolloutOrders(Orders):
    """See above. `_link`, `_rank`, `_ranks` and `_device` are its subclass's."""

    _device: torch.device
    _link: Link
    _rank: int
    _ranks: int

    def _use_engine(self, engine: Engine, classifiers: Sequence[Classifier]) -> None:
        self._engine, self._classifiers = engine, classifiers
        self._feed: DriverFeed | None = None

    def generate(self, requests: Sequence[Request], bounds: Bounds) -> Iterator[Group | RolloutStats | dict[str, int]]:
        """What it is given, and what comes from the driver's queue (cluster/feed.py); then what that took, and what is lower."""
        engine = cast(FedEngine, self._engine)
        self._feed = DriverFeed(self._link, bounds, sum(request.samples for request in requests))
        with self._feed as feed:
            yield from engine.generate(requests, feed)
        yield engine.stats
        yield engine.lowered

    def follow(self, requests: Sequence[Request], bounds: Bounds) -> None:
        """Generate what the first rank of this one's engine does, which says what came of it."""
        assert isinstance(self._engine, CutEngine)
        self._engine.follow(requests, bounds)

    def lend(self) -> None:
        self._engine.lend()

    def make_room(self) -> None:
        """Give up what torch has cached: another rank's engine needs it."""
        free(self._device)

    def publish(self, version: int) -> None:
        self._engine.publish(version)

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        return self._engine.shrink(least_tokens)

    def lowered(self) -> dict[str, int]:
        return self._engine.lowered

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        self._engine.lower(limits, least_tokens)

    def score_rewards(self, number: int, prompts: Sequence[Any], completions: Sequence[Any]) -> list[Cell]:
        """This rank's share of what a reward model has to score."""
        return self._classifiers[number].score(prompts, completions, self._rank, self._ranks)

    def _rollout_progress(self) -> tuple[int, ...]:
        """Changes as long as the engine works, or waits for work, and as reward models score."""
        stats, waits = self._engine.stats, 0 if self._feed is None else self._feed.waits
        waits += self._engine.waits if isinstance(self._engine, ExternalEngine | CutEngine) else 0
        scored = sum(each.passes for each in self._classifiers)
        return stats.decode_steps, stats.prefill_tokens, waits, scored
