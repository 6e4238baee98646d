"""What may be lowered when memory runs out, one rung at a time, cheapest first. All are keys of `run`: the gradient is the same.

For the update: fewer tokens' logits at a time, then smaller micro-batches, down to a quarter of the first that failed. Below that
a device idles more than it would recompute, so activations are recomputed next, in part where layers are fused, then whole. Then
micro-batches shrink to the longest sequence, which is never cut; activations, then the optimizer's state, wait in host memory;
last, the rollout gives up part of its KV cache. Passes without a gradient keep no activations, so they have fewer rungs. The
optimizer step does not depend on micro-batches at all; what it streams from host memory can come in smaller pieces.

A rung that is taken makes the next attempt a different one: budgets are lowered from the micro-batch that there was, not from a
number that no micro-batch reached, and a rung that would change nothing is passed over. So the climb ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.base.units import GIB
from trimtab.config.run import Recompute
from trimtab.model.memory import Shortage, attempt, host_memory
from trimtab.rollout.engine import Engine
from trimtab.update.updater import AnyUpdater

MIN_CHUNK_TOKENS = 128
"""Tokens whose logits make one tile of a product: below, time is lost and hardly any memory won."""
BUDGET_SHRINK_FACTOR = 0.7
"""What is left of a budget that did not fit: halving would often give up more than was missing."""
MIN_PIECE_ELEMENTS = 2**20


@dataclass(frozen=True)
class Tried:
    """The pass that ran out of memory, in tokens."""

    longest: int = 0
    """Tokens of its longest sequence."""
    largest: int = 0
    """Tokens of its largest micro-batch."""


Rung = Callable[[Tried], str | None]
"""Lowers one thing and says what; None where it is as low as it goes."""


class Ladder:
    """Lowers settings of an updater and its engine. `lowered` has the values that are no longer what they were set to."""

    def __init__(self, updater: AnyUpdater, engine: Engine, least_kv_tokens: int) -> None:
        self.updater, self.engine, self._least_kv_tokens = updater, engine, least_kv_tokens
        self.lowered: dict[str, Any] = {}
        self.own_memory = updater.device.type == "cuda"
        """The device has memory of its own, so that what waits in the host's is out of its way."""
        self._first_failed: int | None = None

    @property
    def update(self) -> Sequence[Rung]:
        return (
            self.chunk, self.budget, self.recompute_some, self.recompute_all, self.budget_to_longest, self.offload_activations,
            self.offload_optimizer, self.shrink_kv,
        )  # fmt: skip

    @property
    def score(self) -> Sequence[Rung]:
        return (self.chunk, self.score_budget, self.offload_optimizer, self.shrink_kv)

    @property
    def weights(self) -> Sequence[Rung]:
        """For what handles weights and optimizer state whole: the optimizer step, publishing, checkpoints."""
        return (self.smaller_pieces, self.offload_optimizer, self.shrink_kv)

    def chunk(self, tried: Tried) -> str | None:
        now = min(self.updater.logprob_chunk, tried.largest)
        return self._set("logprob_chunk", max(MIN_CHUNK_TOKENS, now // 4), below=now)

    def budget(self, tried: Tried) -> str | None:
        if self._first_failed is None:
            self._first_failed = tried.largest
        return self._less("token_budget", tried, max(tried.longest, self._first_failed // 4))

    def budget_to_longest(self, tried: Tried) -> str | None:
        return self._less("token_budget", tried, tried.longest)

    def score_budget(self, tried: Tried) -> str | None:
        return self._less("score_token_budget", tried, tried.longest)

    def recompute_some(self, tried: Tried) -> str | None:
        if self.updater.checkpoint_activations is not False or not self.updater.fused:
            return None
        return self._recompute("some")

    def recompute_all(self, tried: Tried) -> str | None:
        return None if self.updater.checkpoint_activations is True else self._recompute(True)

    def offload_activations(self, tried: Tried) -> str | None:
        updater = self.updater
        if updater.activations_offloaded or not self._host_has_room(updater.layer_input_bytes(tried.largest)):
            return None
        updater.offload_activations()
        return self._note("offload_activations", False, True)

    def offload_optimizer(self, tried: Tried) -> str | None:
        updater = self.updater
        if updater.optimizer_offloaded or not self._host_has_room(updater.state_bytes):
            return None
        if isinstance(attempt(updater.offload_optimizer), Shortage):  # what is free cannot always be pinned
            return None
        return self._note("offload_optimizer", False, True)

    def smaller_pieces(self, tried: Tried) -> str | None:
        updater = self.updater
        before = updater.piece
        if not updater.optimizer_offloaded or before <= MIN_PIECE_ELEMENTS:
            return None
        updater.piece = max(MIN_PIECE_ELEMENTS, before // 4)
        return f"optimizer state moved at a time {before:,} -> {updater.piece:,} elements"

    def shrink_kv(self, tried: Tried) -> str | None:
        sizes = self.engine.shrink(self._least_kv_tokens)
        return None if sizes is None else "rollout.kv_memory {:.2f} GiB -> {:.2f} GiB".format(*(s / GIB for s in sizes))

    def restore(self, lowered: dict[str, Any], rollout: dict[str, int]) -> None:
        """Go on where an earlier session of the run had come to. What is lower already stays."""
        self.engine.lower(rollout, self._least_kv_tokens)
        for name in ("logprob_chunk", "token_budget", "score_token_budget"):
            if name in lowered:
                self._set(name, lowered[name], below=getattr(self.updater, name))
        order: list[Recompute] = [False, "some", True]
        wanted = lowered.get("checkpoint_activations", False)
        if order.index(wanted) > order.index(self.updater.checkpoint_activations):
            self._recompute(wanted)
        for name, rung in (
            ("offload_activations", self.offload_activations),
            ("offload_optimizer", self.offload_optimizer),
        ):
            if name in lowered:
                rung(Tried())

    def _less(self, name: str, tried: Tried, least: int) -> str | None:
        now = min(getattr(self.updater, name), tried.largest)
        return self._set(name, max(least, int(now * BUDGET_SHRINK_FACTOR)), below=now)

    def _set(self, name: str, value: int, below: int) -> str | None:
        if value >= below:
            return None
        before = getattr(self.updater, name)
        setattr(self.updater, name, value)
        return self._note(name, before, value)

    def _recompute(self, activations: Recompute) -> str:
        before = self.updater.checkpoint_activations
        self.updater.recompute(activations)
        return self._note("checkpoint_activations", before, activations)

    def _note(self, name: str, before: Any, now: Any) -> str:
        self.lowered[name] = now
        show = (f"{value:,}" if type(value) is int else str(value).lower() for value in (before, now))
        return f"{name.replace('offload_', 'offload.')} {' -> '.join(show)}"

    def _host_has_room(self, size: int) -> bool:
        """True if host memory can hold this many bytes and a tenth as many stay free."""
        return self.own_memory and host_memory()[1] > size * 11 // 10
