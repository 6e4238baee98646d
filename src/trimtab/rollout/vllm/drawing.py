"""Trimtab's sampling inside vLLM: the same tokens as the native engine's, and their log-probs at the sampling temperature.

vLLM hands every step's logits to its logits processors before it picks tokens. This one draws a token for each row by
`sampler.sample`, keyed by the request and the position, and leaves that token alone finite; vLLM, asked to be greedy, then takes
it. Log-probs are noted by request and position: a step that is computed again (a chunk of a prompt, a request that was preempted)
writes what it had written.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from trimtab.config.learn import Sampling
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
        self._logprobs = torch.zeros((rows, longest), dtype=torch.float32, device=device)
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
        key_B, slot_B, position_B, row_B = torch.tensor(mine).t().to(logits.device, non_blocking=True)
        scores_BV = logits[row_B].float() / (self.sampling.temperature or 1.0)
        tokens_B, logprobs_B = sample(scores_BV, self.sampling, key_B, position_B)
        self._logprobs[slot_B, position_B] = logprobs_B
        logits[row_B] = float("-inf")
        logits[row_B, tokens_B] = 0.0
        return logits

    def take(self, ids: list[int], counts: list[int]) -> list[torch.Tensor]:
        """Log-probs of requests that ended, on the CPU; their slots are free again."""
        slots = torch.tensor([self._slots[id] for id in ids], device=self._logprobs.device)
        found = self._logprobs[slots, : max(counts)].cpu()
        self.forget(ids)
        return [row[:count] for row, count in zip(found, counts)]

    def forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.made.pop(id, None)
            if id in self._slots:
                self._free.append(self._slots.pop(id))

    def _grow(self) -> int:
        """vLLM preempts requests without telling: more may have a slot than rows."""
        rows = self._logprobs.shape[0]
        self._logprobs = torch.cat([self._logprobs, torch.zeros_like(self._logprobs)])
        self._free += range(2 * rows - 1, rows, -1)
        return rows
