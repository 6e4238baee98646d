"""The one attention function of Trimtab, registered with transformers; packed training, prefill and decode all go through it.

A forward pass carries an `AttentionPlan` as a keyword argument, which transformers hands unchanged to every layer. The plan
knows which token may see which; the function here only reshapes. A plan travels with the call (not in a global) so that
activation checkpointing replays a layer in the backward pass under the plan it was first run with.

Shapes: T tokens of a packed row, H query heads, K key/value heads, D head size, N segments, L segment length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from trimtab.model.latent import LATENT
from trimtab.model.recurrent import Mixer
from trimtab.model.sinks import flash_serves, rows_with_sinks

ATTENTION_NAME = "trimtab"


@dataclass(frozen=True)
class Rules:
    """What an architecture asks of its attention besides causality."""

    scale: float
    window: int | None = None
    """A token sees itself and window - 1 tokens before it."""
    softcap: float | None = None
    """Scores s become softcap * tanh(s / softcap)."""
    sinks_H: torch.Tensor | None = None
    """One extra score a head that takes probability and gives nothing."""

    @property
    def plain(self) -> bool:
        """True where a fused kernel can do it: scaled dot product with at most a window."""
        return self.softcap is None and self.sinks_H is None

    @property
    def flash(self) -> bool:
        """True where a flash kernel can do it, with sinks taken in afterwards (sinks.py)."""
        return self.softcap is None


class AttentionPlan(Protocol):
    """Decides who sees whom in one forward pass. One whose `latents` is true sees the latents of layers that have some."""

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor: ...

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        """What a layer that carries a state makes of the tokens, each sequence by itself."""
        ...


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    attention_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: [1, H, T, D] in, [1, T, H, D] out."""
    assert attention_plan is not None, "the attention plan did not reach the attention layer"
    assert attention_mask is None, "its layers make masks of their own"
    assert query.shape[0] == 1
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    # squeeze, not [0]: the backward pass of an index fills a tensor with zeros first.
    q_THD, k_TKD, v_TKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    latent = vars(module).get(LATENT) if getattr(attention_plan, "latents", False) else None
    if latent is not None:
        q_THD = latent.absorb(q_THD)
    out_THD = attention_plan.attend(layer, q_THD, k_TKD, v_TKD, Rules(scale, sliding_window, softcap, s_aux))
    return (out_THD if latent is None else latent.unfold(out_THD))[None], None


AttentionInterface.register(ATTENTION_NAME, attention)


def dense_attention(
    q_NHLD: torch.Tensor,
    k_NKSD: torch.Tensor,
    v_NKSD: torch.Tensor,
    rules: Rules,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of N independent rows. `allowed` is a bool mask that broadcasts to [N, 1, L, S]; None is causal with L = S."""
    if allowed is None and rules.window is not None and rules.window < q_NHLD.shape[2]:
        position = torch.arange(q_NHLD.shape[2], device=q_NHLD.device)
        allowed = causal_window(position, position, rules.window)
    if rules.plain:
        return F.scaled_dot_product_attention(
            q_NHLD,
            k_NKSD,
            v_NKSD,
            attn_mask=allowed,
            is_causal=allowed is None,
            scale=rules.scale,
            enable_gqa=q_NHLD.shape[1] != k_NKSD.shape[1],
        )
    if rules.softcap is None and rules.sinks_H is not None and flash_serves(q_NHLD, k_NKSD, v_NKSD):
        return rows_with_sinks(q_NHLD, k_NKSD, v_NKSD, rules.sinks_H, rules.scale, allowed)
    if allowed is None:
        position = torch.arange(q_NHLD.shape[2], device=q_NHLD.device)
        allowed = causal_window(position, position, None)
    return _explicit_attention(q_NHLD, k_NKSD, v_NKSD, rules, allowed)


def causal_window(q_position: torch.Tensor, k_position: torch.Tensor, window: int | None) -> torch.Tensor:
    """[..., L, S] mask: a key is seen from its own position on, for `window` positions."""
    distance = q_position[..., :, None] - k_position[..., None, :]
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


def _explicit_attention(
    q_NHLD: torch.Tensor, k_NKSD: torch.Tensor, v_NKSD: torch.Tensor, rules: Rules, allowed: torch.Tensor
) -> torch.Tensor:
    """Scores in memory, for what fused kernels lack: soft-capped scores; and sinks, on a GPU in full precision. Softmax in at
    least float32."""
    n, heads, length, size = q_NHLD.shape
    kv_heads = k_NKSD.shape[1]
    q = q_NHLD.reshape(n, kv_heads, heads // kv_heads, length, size)
    scores = torch.einsum("nkgld,nksd->nkgls", q, k_NKSD) * rules.scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if rules.softcap is not None:
        scores = torch.tanh(scores / rules.softcap) * rules.softcap
    scores = scores.masked_fill(~allowed[..., None, :, :] if allowed.ndim > 2 else ~allowed, float("-inf"))
    if rules.sinks_H is not None:
        sinks = rules.sinks_H.to(scores.dtype).reshape(1, kv_heads, -1, 1, 1).expand(n, -1, -1, length, 1)
        weights = torch.softmax(torch.cat((scores, sinks), -1), -1)[..., :-1]
    else:
        weights = torch.softmax(scores, -1)
    return torch.einsum("nkgls,nksd->nkgld", weights.to(v_NKSD.dtype), v_NKSD).reshape(n, heads, length, -1)
