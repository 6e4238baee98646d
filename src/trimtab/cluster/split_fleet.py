"""Engines on ranks of their own: they have weights of their own, which the ranks that train send them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab.cluster.fleet import Fleet
from trimtab.cluster.ranks import RankLost, Ranks
from trimtab.cluster.transfer import Transferred
from trimtab.rollout.engine import Sampler
from trimtab.rollout.generator import LocalGenerator, Repeat


class SplitFleet(Fleet):
    """See rollout/engine.py. What it generates with does not change while the trainers learn, until `publish`."""

    def __init__(
        self,
        samplers: Ranks,
        trainers: Ranks,
        description: str,
        rows: int,
        lowered: Sequence[Mapping[str, int]],
        parts: int = 1,
        tokens_per_step: float = 0.0,
        joint: bool = False,
    ) -> None:
        super().__init__(samplers, description, rows, lowered, parts, tokens_per_step, joint)
        self._trainers = trainers
        self.published = Transferred(0.0, 0)
        """What the latest `publish` came to."""

    def lend(self) -> None:
        """The update has devices of its own."""

    def publish(self, version: int) -> None:
        everyone = range(len(self._ranks))
        self._ranks.begin("receive_weights", dict.fromkeys(everyone, (version,)))
        try:
            sent: list[Transferred] = self._trainers.ask("send_weights", version)
        except MemoryError as short:  # the others wait for weights that do not come
            self._ranks.kill()
            raise RankLost(f"the weights of version {version} could not be sent: {short}") from short
        self._ranks.end(everyone)
        self.published = sent[0]

    def interrupt(self) -> None:
        """A `generate` in another thread fails."""
        self._ranks.kill()


class SplitGenerator(LocalGenerator):
    """See run/roles.py."""

    apart = True

    def __init__(self, fleet: SplitFleet, sampler: Sampler, repeat: Repeat) -> None:
        super().__init__(fleet, sampler, repeat)
        self._fleet = fleet

    def publish(self, version: int) -> Mapping[str, float]:
        super().publish(version)
        found = self._fleet.published
        return {"publish/seconds": found.seconds, "publish/bytes": float(found.bytes)}
