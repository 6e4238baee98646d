"""Trimtab's sampling inside vLLM (external/drawing.py).

vLLM hands every step's logits to its logits processors before it picks tokens. This one draws a token for each row and gives it
the largest logit; vLLM, asked to be greedy, then takes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.v1.sample.logits_processor import LogitsProcessor

from trimtab.rollout.external.drawing import KeyedSampler, LogitsRow


class DrawingProcessor(LogitsProcessor):
    """One for each model runner; `current` is the latest, in a process with one engine the only one."""

    current: DrawingProcessor

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        rows, longest = vllm_config.scheduler_config.max_num_seqs, vllm_config.model_config.max_model_len
        self.keyed = KeyedSampler(rows, longest, device)
        self.made: dict[int, list[int]] = {}
        """Tokens of the requests that run, by id: lists that vLLM makes longer."""
        self._rows: dict[int, tuple[dict[str, int], list[int]]] = {}
        DrawingProcessor.current = self

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
                self.keyed.hold(asked["id"])
        for one, other, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(other, None)
            if first is not None:
                self._rows[other] = first
            if second is not None and direction.name == "SWAP":
                self._rows[one] = second

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        held = [(row, *self._rows[row]) for row in range(logits.shape[0]) if row in self._rows]
        mine = [LogitsRow(row, asked["id"], asked["key"], len(made)) for row, asked, made in held if "id" in asked]
        if mine:  # or it is a rehearsal of vLLM's own
            logits[self.keyed.draw(logits, mine)] = float("inf")
        return logits

    def take(self, ids: list[int], counts: list[int]) -> list[torch.Tensor]:
        """Log-probs of requests that ended, on the CPU."""
        found = self.keyed.take(ids, counts)
        self.forget(ids)
        return found

    def forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            self.made.pop(id, None)
            self.keyed.forget([id])
