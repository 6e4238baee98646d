"""Attention with sinks by flash kernels, which know none: no matrix of scores is in memory.

A sink is one more score in a head's softmax, whose value is zero. So what a head gives is what it gives without, times the share
of its probability that real keys have; that follows from the log of their sum, which flash kernels give beside their output.
Their backward pass reads the probabilities from that log, and one number a query from output and gradient: with the sink in both
it is the gradient of the whole, exactly. The sink's own is minus its probability times that number.

Shapes: N rows, T tokens of a packed row, H query heads, K key/value heads, L queries, S keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch


def flash_serves(q_NHLD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor) -> bool:
    """There is a kernel for rows on this device, of these sizes."""
    return q_NHLD.device.type == "cpu" and k_NKSD.shape[-1] == v_NKSD.shape[-1] and q_NHLD.dtype != torch.float16


def rows_with_sinks(
    q_NHLD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor, sinks_H: torch.Tensor, scale: float,
    allowed: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention of N independent rows; `allowed` as for `dense_attention`."""
    groups = q_NHLD.shape[1] // k_NKSD.shape[1]
    k_NHSD, v_NHSD = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (k_NKSD, v_NKSD))
    mask = None
    if allowed is not None:
        mask = torch.zeros(allowed.shape, dtype=q_NHLD.dtype).masked_fill_(~allowed, float("-inf"))
        mask = mask[(None,) * (4 - mask.ndim)]
    found: torch.Tensor = _Rows.apply(q_NHLD, k_NHSD, v_NHSD, sinks_H, scale, mask)
    return found


def varlen_with_sinks(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, sinks_H: torch.Tensor, offsets: torch.Tensor,
    key_offsets: torch.Tensor, longest: int, longest_key: int, scale: float, left: int,
) -> torch.Tensor:  # fmt: skip
    """Attention of sequences end to end, on a GPU in half precision. `left` is the window less one; -1: none."""
    found: torch.Tensor = _Sequences.apply(
        q_THD, k_TKD, v_TKD, sinks_H, offsets, key_offsets, longest, longest_key, scale, left
    )
    return found


def _taken_in(
    out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [..., D] and log of the sum [...] with the sinks among the scores."""
    whole = torch.logaddexp(sums, sinks.to(sums.dtype).expand_as(sums))
    share = (sums - whole).exp()
    return (out * share[..., None]).to(out.dtype), whole


def _sink_gradient(grad: torch.Tensor, out: torch.Tensor, sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """[...], to be summed over queries."""
    wide = torch.promote_types(out.dtype, torch.float32)
    taken = (sinks.to(sums.dtype).expand_as(sums) - sums).exp()
    return -taken * (grad.to(wide) * out.to(wide)).sum(-1)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, scale: float, mask: torch.Tensor | None
    ) -> torch.Tensor:  # fmt: skip
        own, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
        )
        out, whole = _taken_in(own, sums, sinks[:, None])
        ctx.save_for_backward(q, k, v, out, whole, sinks, mask)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, whole, sinks, mask = ctx.saved_tensors
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grads[0].contiguous(), q, k, v, out, whole, 0.0, mask is None, attn_mask=mask, scale=ctx.scale
        )
        return *found, _sink_gradient(grads[0], out, whole, sinks[:, None]).sum((0, 2)).to(sinks.dtype), None, None


class _Sequences(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor, offsets: torch.Tensor,
        key_offsets: torch.Tensor, longest: int, longest_key: int, scale: float, left: int,
    ) -> torch.Tensor:  # fmt: skip
        own, sums_HT, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, key_offsets, longest, longest_key, 0.0, left < 0, False, scale=scale, window_size_left=left,
            window_size_right=0,
        )  # fmt: skip
        out, whole_TH = _taken_in(own, sums_HT.t(), sinks)
        ctx.save_for_backward(q, k, v, out, whole_TH, sinks, offsets, key_offsets, state, unused)
        ctx.settings = (longest, longest_key, scale, left)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, whole_TH, sinks, offsets, key_offsets, state, unused = ctx.saved_tensors
        longest, longest_key, scale, left = ctx.settings
        grad = grads[0].contiguous()
        found = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, whole_TH.t().contiguous(), offsets, key_offsets, longest, longest_key, 0.0, left < 0, state,
            unused, scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return *found, _sink_gradient(grad, out, whole_TH, sinks).sum(0).to(sinks.dtype), *[None] * 6
