"""Trimtab's sampling inside vLLM: the same tokens as the native engine's, and their log-probs at the sampling temperature.

vLLM hands every step's logits to its logits processors before it picks tokens. This one draws a token for each row as
`sampler.sample` does, keyed by the request and the position, and gives that token the largest logit; vLLM, asked to be greedy,
then takes it. On a GPU the native engine's kernels draw. Log-probs are noted by request and position: a step that is computed
again (a chunk of a prompt, a request that was preempted) writes what it had written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from trimtab.config.learn import Sampling
from trimtab.model.transfer import to_device
from trimtab.rollout.sampler import sample


class Drawing(LogitsProcessor):
    """One for each model runner; `current` is the latest, in a process with one engine the only one."""

    current: Drawing

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        rows, longest = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self.sampling = Sampling()
        self.made: dict[int, list[int]] = {}
        """Tokens of the requests that run, by id: lists that vLLM makes longer."""
        self._rows: dict[int, tuple[dict[str, int], list[int]]] = {}
        self._slots: dict[int, int] = {}
        self._free = list(range(rows - 1, -1, -1))
        self._table = _Table(rows, longest, device)
        Drawing.current = self

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Who is in which row. A request that lost its row and comes back has the slot it had."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, made in batch_update.added:
            asked = params.extra_args or {}
            self._rows[row] = (asked, made)
            if "id" in asked:
                self.made[asked["id"]] = made
                if asked["id"] not in self._slots:
                    self._slots[asked["id"]] = self._free.pop() if self._free else self._grow()
        for one, other, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction.name == "SWAP":
                self._rows[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        held = [(row, *self._rows[row]) for row in range(logits.shape[0]) if row in self._rows]
        mine = [(asked["key"], self._slots[asked["id"]], len(made), row) for row, asked, made in held if "id" in asked]
        if not mine:
            return logits  # a rehearsal of vLLM's own
        key_B, slot_B, position_B, row_B = to_device(torch.tensor(mine), logits.device).t().contiguous()
        mine_BV = logits if len(mine) == logits.shape[0] else logits[row_B]
        tokens_B = self._table.draw(mine_BV, self.sampling, key_B, slot_B, position_B)
        logits[row_B, tokens_B] = float("inf")
        return logits

    def take(self, ids: list[int], counts: list[int]) -> list[torch.Tensor]:
        """Log-probs of requests that ended, on the CPU; their slots are free again."""
        slots = torch.tensor([self._slots[id] for id in ids], device=self._table.logprobs.device)
        found = self._table.logprobs[slots, : max(counts)].cpu()
        self.forget(ids)
        return [row[:count] for row, count in zip(found, counts)]

    def forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.made.pop(id, None)
            if id in self._slots:
                self._free.append(self._slots.pop(id))

    def _grow(self) -> int:
        """vLLM preempts requests without telling: more may have a slot than rows."""
        rows = self._table.logprobs.shape[0]
        self._table.grow()
        self._free += range(2 * rows - 1, rows, -1)
        return rows


class _Table:
    """What was drawn, by slot and position."""

    def __init__(self, slots: int, longest: int, device: torch.device) -> None:
        self.logprobs = torch.zeros((slots, longest), dtype=torch.float32, device=device)
        self._draw: Any = None
        self._state: Any = None

    def draw(
        self, logits_BV: torch.Tensor, sampling: Sampling, key_B: torch.Tensor, slot_B: torch.Tensor, position_B: torch.Tensor
    ) -> torch.Tensor:  # fmt: skip
        if not logits_BV.is_cuda:
            scores_BV = logits_BV.float() / (sampling.temperature or 1.0)
            tokens_B, logprobs_B = sample(scores_BV, sampling, key_B, position_B)
            self.logprobs[slot_B, position_B] = logprobs_B
            return tokens_B
        if self._draw is None or self._draw.batch < logits_BV.shape[0]:
            self._prepare(logits_BV)
        state = self._state
        state.keys[slot_B], state.generated[slot_B] = key_B, position_B
        state.done.zero_()
        self._draw(logits_BV, slot_B, state, sampling)
        return cast(torch.Tensor, state.last_tokens[slot_B])

    def grow(self) -> None:
        self.logprobs = torch.cat([self.logprobs, torch.zeros_like(self.logprobs)])
        self._draw = None

    def _prepare(self, logits_BV: torch.Tensor) -> None:
        """The native engine's kernels, on rows without limits or stop tokens: those are vLLM's to see to."""
        from trimtab.rollout.native.kernels.sampling import Draw
        from trimtab.rollout.native.rows import RowState

        (slots, longest), device = self.logprobs.shape, logits_BV.device
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
            logprobs=self.logprobs,
            stop_ids=last[:0],
        )
