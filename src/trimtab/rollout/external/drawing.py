"""Trimtab's sampling inside another library: the native engine's tokens, and their log-probs at the sampling temperature.

A library hands over the logits of a step and says whose row each is. Tokens are drawn as `sampler.sample` draws them, keyed by
the request and the position; on a GPU the native engine's kernels draw. Log-probs are noted by request and position, each
request in a slot of its own: a step that is computed again (a chunk of a prompt, a request that lost its memory) writes what it
had written.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import torch

from trimtab.config.learn import Sampling
from trimtab.model.transfer import to_device
from trimtab.rollout.sampler import sample


class LogitsRow(NamedTuple):
    """A row of a step's logits that is to be drawn from."""

    at: int
    name: Hashable
    """Name of the request, which is held."""
    key: int
    position: int
    """Tokens that the request has."""


class KeyedSampler:
    """Draws for as many requests as are held, and remembers their log-probs until they are taken."""

    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        self.sampling = Sampling()
        self._slots: dict[Hashable, int] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._logprobs = torch.zeros((slots, longest), dtype=torch.float32, device=device)
        self._draw: Any = None
        self._state: Any = None

    def __contains__(self, name: Hashable) -> bool:
        return name in self._slots

    def hold(self, name: Hashable) -> None:
        """Give a request its slot. One that has one keeps it."""
        if name not in self._slots:
            self._slots[name] = self._free.pop() if self._free else self._grow()

    def draw(self, logits_BV: torch.Tensor, rows: Sequence[LogitsRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """A token for each of these rows, of which there is one at least; the rows, and the tokens, on the logits' device."""
        mine = [(row.key, self._slots[row.name], row.position, row.at) for row in rows]
        key_B, slot_B, position_B, at_B = to_device(torch.tensor(mine), logits_BV.device).t().contiguous()
        everyone = [row.at for row in rows] == list(range(logits_BV.shape[0]))
        mine_BV = logits_BV if everyone else logits_BV[at_B]
        if not logits_BV.is_cuda:
            scores_BV = mine_BV.float() / (self.sampling.temperature or 1.0)
            tokens_B, logprobs_B = sample(scores_BV, self.sampling, key_B, position_B)
            self._logprobs[slot_B, position_B] = logprobs_B
            return at_B, tokens_B
        if self._draw is None or self._draw.batch < mine_BV.shape[0]:
            self._prepare(mine_BV)
        state = self._state
        state.keys[slot_B], state.generated[slot_B] = key_B, position_B
        state.done.zero_()
        self._draw(mine_BV, slot_B, state, self.sampling)
        return at_B, cast(torch.Tensor, state.last_tokens[slot_B])

    def take(self, names: Sequence[Hashable], counts: Sequence[int]) -> list[torch.Tensor]:
        """Log-probs of requests that ended, on the CPU; their slots are free again."""
        slots = torch.tensor([self._slots[name] for name in names], device=self._logprobs.device)
        found = self._logprobs[slots, : max(counts)].cpu()
        self.forget(names)
        return [row[:count] for row, count in zip(found, counts)]

    def forget(self, names: Iterable[Hashable]) -> None:
        for name in names:
            if name in self._slots:
                self._free.append(self._slots.pop(name))

    def _grow(self) -> int:
        """Libraries preempt requests without telling: more may be held than run at a time."""
        slots = self._logprobs.shape[0]
        self._logprobs = torch.cat([self._logprobs, torch.zeros_like(self._logprobs)])
        self._draw = None
        self._free += range(2 * slots - 1, slots, -1)
        return slots

    def _prepare(self, logits_BV: torch.Tensor) -> None:
        """The native engine's kernels, on rows without limits or stop tokens: those are the library's to see to."""
        from trimtab.rollout.native.kernels.sampling import Draw
        from trimtab.rollout.native.rows import RowState

        (slots, longest), device = self._logprobs.shape, logits_BV.device
        last, positions, generated, keys = torch.zeros((4, slots), dtype=torch.int64, device=device)
        self._draw = Draw(max(slots, logits_BV.shape[0]), logits_BV.shape[1], device)
        self._state = RowState(
            last_tokens=last,
            positions=positions,
            generated=generated,
            keys=keys,
            limits=torch.full_like(last, longest + 1),
            done=torch.zeros(slots, dtype=torch.int32, device=device),
            tokens=torch.zeros((slots, longest), dtype=torch.int64, device=device),
            logprobs=self._logprobs,
            stop_ids=last[:0],
        )
