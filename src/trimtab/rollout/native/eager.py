"""Decoding one token at a time through the model's own modules: for the CPU, and where the kernels cannot serve a model.

Keys and values are gathered from their pages for a dense attention call, or read in place where every sequence has one page.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from trimtab.config.learn import Sampling
from trimtab.model.policy import Policy
from trimtab.model.shapes import LayerShape
from trimtab.rollout.native.cache import Carried, DecodePlan, KVCache, PrefillPlan
from trimtab.rollout.native.kv_codes import Stored
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.rows import Rows
from trimtab.rollout.native.scheduler import Sequence
from trimtab.rollout.sampler import sample


class EagerDecoder:
    """Owns the cache."""

    description = "the model's own modules, step by step"
    most_steps = 1
    rounds_ahead = 0
    replays = 0
    non_torch_bytes = 0

    def __init__(
        self, policy: Policy, shapes: dict[int, LayerShape], pool: PagePool, carried: Carried | None = None,
        stored: Stored = "auto",
    ) -> None:  # fmt: skip
        self.policy, self._stored = policy, stored
        self.pool = pool
        self._shapes, self._carried = shapes, carried
        self.cache = self._make_cache()

    def lend(self) -> None:
        """Nothing here is at a fixed address: the cache is dropped and made again."""
        self.close()

    def reclaim(self) -> None:
        self.cache = self._make_cache()

    def _make_cache(self) -> KVCache:
        def zeros(shape: Seq[int], dtype: torch.dtype) -> torch.Tensor:  # masked scores are computed, so must be finite
            return torch.zeros(tuple(shape), dtype=dtype, device=self.policy.device)

        pool = self.pool
        return KVCache(
            self._shapes, pool.total, pool.page_tokens, self.policy.dtype, zeros, self._carried, self._stored
        )

    def begin(self, rows: Rows, sampling: Sampling, longest: int) -> None:
        self._rows, self._sampling = rows, sampling

    def refresh(self) -> None:
        """Nothing to do: the weights are the trainer's own."""

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        return self.policy.hidden(tokens_T, positions_T, plan)

    def draw(self, index_B: torch.Tensor, hidden_BE: torch.Tensor) -> None:
        logits_BV = self.policy.head.logits(hidden_BE, self._sampling.temperature or 1.0)
        state = self._rows.state
        tokens_B, logprobs_B = sample(logits_BV, self._sampling, state.keys[index_B], state.generated[index_B])
        self._rows.append(index_B, tokens_B, logprobs_B)

    def run(self, live: Seq[Sequence], steps: int) -> None:
        for step in range(steps):
            done = self._rows.state.done.tolist()
            running = [s for s in live if not done[s.row]]
            if running:
                self._step(running, step)

    def _step(self, live: list[Sequence], step: int) -> None:
        """One token for each sequence; `step` tokens of this round are stored already."""
        rows = self._rows
        width = max(len(s.pages) for s in live)
        first_page = self._in_a_row(live, step) if width == 1 else None
        rows.set_pages(live)
        index_B = rows.index(live)
        pages_BP, positions_B = rows.pages[index_B, :width], rows.state.positions[index_B]
        slots_B, longest = self.cache.slots(pages_BP, positions_B), max(s.stored for s in live) + step + 1
        attention = DecodePlan(self.cache, pages_BP, positions_B, slots_B, longest, index_B, first_page)
        with self.policy.routers.during(rows.recorded(index_B)):
            hidden_BE = self.policy.hidden(rows.state.last_tokens[index_B], positions_B, attention)
        self.draw(index_B, hidden_BE)

    def close(self) -> None:
        self.cache.clear()

    def _in_a_row(self, live: list[Sequence], step: int) -> int | None:
        """Put sequences of one page each in page order, and their pages side by side: attention then reads them in place.

        A page moves at most once for each sequence that ended below it. Returns the first page, or None where others lie between.
        """
        live.sort(key=lambda s: s.pages[0])
        for sequence in reversed(live):
            target = self.pool.lower(sequence.pages[0])
            if target is None:
                break
            self.cache.copy_page(sequence.pages[0], target, sequence.stored + step)
            sequence.pages = [target]
            self._rows.forget_pages(sequence)
        live.sort(key=lambda s: s.pages[0])
        first, last = live[0].pages[0], live[-1].pages[0]
        return first if last - first == len(live) - 1 else None
