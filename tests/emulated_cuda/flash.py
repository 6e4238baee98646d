"""Flash attention over sequences of different lengths, which the CPU has not: computed plainly, as the kernels' documents say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch


def _weights(
    q: torch.Tensor, k: torch.Tensor, scale: float, left: int, right: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[H, T, S] of one sequence, whose keys are aligned with its end, and the log of their sums."""
    scores = torch.einsum("thd,shd->hts", q.float(), k.float()) * scale
    length, seen = q.shape[0], k.shape[0]
    row, column = torch.arange(length)[:, None] + seen - length, torch.arange(seen)[None]
    banned = torch.zeros((length, seen), dtype=torch.bool)
    if right >= 0:
        banned |= column > row + right
    if left >= 0:
        banned |= column < row - left
    scores = scores.masked_fill(banned, float("-inf"))
    return scores.softmax(-1), torch.logsumexp(scores, -1)


def _sequences(starts: torch.Tensor, key_starts: torch.Tensor) -> list[tuple[slice, slice]]:
    first, second = starts.tolist(), key_starts.tolist()
    return [(slice(*a), slice(*b)) for a, b in zip(pairwise(first), pairwise(second))]


def _scale(q: torch.Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: Any, key_starts: Any, most: int, most_keys: int, dropout: float,
    causal: bool, debug: bool, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, **_: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    left = -1 if window_size_left is None else window_size_left
    right = 0 if causal else -1 if window_size_right is None else window_size_right
    _demand(q, k, v, starts, key_starts)
    repeat, outs, sums = q.shape[1] // k.shape[1], [], []
    for own, seen in _sequences(starts, key_starts):
        weights, lse = _weights(q[own], k[seen].repeat_interleave(repeat, 1), _scale(q, scale), left, right)
        values = v[seen].repeat_interleave(repeat, 1)
        outs.append(torch.einsum("hts,shd->thd", weights.to(v.dtype).float(), values.float()))
        sums.append(lse)
    out, lse = torch.cat(outs).to(q.dtype), torch.cat(sums, 1)
    nothing = torch.empty(0, dtype=torch.uint8)
    return out, lse, torch.empty(2, dtype=torch.uint64), nothing, nothing.clone()


def _backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, starts: Any,
    key_starts: Any, most: int, most_keys: int, dropout: float, causal: bool, *_: Any, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, **__: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    left = -1 if window_size_left is None else window_size_left
    right = 0 if causal else -1 if window_size_right is None else window_size_right
    return _gradients(grad, q, k, v, out, lse, starts, key_starts, _scale(q, scale), left, right)


def _gradients(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, starts: Any,
    key_starts: Any, scale: float, left: int, right: int,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    repeat = q.shape[1] // k.shape[1]
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for own, seen in _sequences(starts, key_starts):
        keys, values = (x[seen].float().repeat_interleave(repeat, 1) for x in (k, v))
        weights, sums = _weights(q[own], keys, scale, left, right)
        # The kernels read probabilities from the log that they are given, and what is lost to them from the output.
        weights = weights * (sums - lse[:, own]).exp()[..., None]
        slope, down = grad[own].float(), weights.shape[0] // repeat
        by_weight = torch.einsum("thd,shd->hts", slope, values)
        lost = (slope * out[own].float()).sum(-1).t()[..., None]
        by_score = weights * (by_weight - lost) * scale
        found[0][own] += torch.einsum("hts,shd->thd", by_score, keys)
        by_key = torch.einsum("hts,thd->shd", by_score, q[own].float())
        by_value = torch.einsum("hts,thd->shd", weights, slope)
        found[1][seen] += by_key.unflatten(1, (down, repeat)).sum(2)
        found[2][seen] += by_value.unflatten(1, (down, repeat)).sum(2)
    return tuple(x.to(q.dtype) for x in found)


def _demand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, key_starts: torch.Tensor) -> None:
    """What the kernels refuse."""
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if starts.dtype != torch.int32 or key_starts.dtype != torch.int32:
        raise RuntimeError("cu_seqlens must have dtype int32")
    if q.shape[-1] % 8 or q.shape[-1] > 256 or q.shape[-1] != v.shape[-1] or any(x.stride(-1) != 1 for x in (q, k, v)):
        raise RuntimeError(f"FlashAttention: head size {q.shape[-1]} (values {v.shape[-1]}) is not supported")


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int,
    is_causal: bool = False, scale: float | None = None, window_size: Any = None, *_: Any, **__: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    left, right = window_size or (-1, -1)
    out, lse, state, _, _ = _forward(
        query, key, value, cu_seq_q, cu_seq_k if cu_seq_k is not None else cu_seq_q, max_q, max_k, 0.0, is_causal, False,
        scale=scale, window_size_left=left, window_size_right=0 if is_causal else right,
    )  # fmt: skip
    return out, lse, state


def _varlen_backward(
    grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, is_causal: bool, rng_state: torch.Tensor, scale: float | None = None,
    window_size: Any = None, *_: Any, **__: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    left, right = window_size or (-1, -1)
    return _gradients(
        grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, _scale(query, scale), left, 0 if is_causal else right
    )


REPLACED: dict[str, Callable[..., Any]] = {
    "aten::_flash_attention_forward": _forward,
    "aten::_flash_attention_backward": _backward,
    "torch_attn::_varlen_attn": _varlen,
    "torch_attn::_varlen_attn_backward": _varlen_backward,
}
