"""Whose rows the logits of one of SGLang's batches are. Imports nothing of SGLang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trimtab.rollout.external.drawing import KeyedSampler, LogitsRow


def draw_batch(
    keyed: KeyedSampler, logits_BV: torch.Tensor, requests: Sequence[Any], keys: Mapping[str, int]
) -> torch.Tensor:  # fmt: skip
    """A token for each row. Rows that nobody reads get token 0: a prompt that is not at its end, a request that was aborted and
    is still in the batch."""
    assert len(requests) == logits_BV.shape[0], f"{logits_BV.shape[0]} rows of {len(requests)} requests"
    mine = [
        LogitsRow(at, request.rid, keys[request.rid], len(request.output_ids))
        for at, request in enumerate(requests)
        if request.rid in keyed and request.inflight_middle_chunks <= 0
    ]
    tokens_B = torch.zeros(len(requests), dtype=torch.int64, device=logits_BV.device)
    if mine:
        at_B, drawn_B = keyed.draw(logits_BV, mine)
        tokens_B[at_B] = drawn_B
    return tokens_B
