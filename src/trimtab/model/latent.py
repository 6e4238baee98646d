"""Multi-head latent attention (DeepSeek's) over what it stores: one latent and one rotated key for all heads of a token.

Keys and values of all heads are linear in the latent, so they need not be made for attention: the part of a query that meets the
key's latent part is brought through that matrix instead, and what attention gives, a sum of latents, through the values' matrix
(absorption). Then all heads share one key, [latent | rotated], and its first part is the value. A plan that asks for this
(`latents`) sees such keys and values; the result is the same up to rounding. Training expands them, as the model's modules do.

Shapes: T tokens, H heads, N size of the part of a key that is not rotated, R of the one that is, V of a value, L of the latent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

LATENT = "_trimtab_latent"
"""Attribute of an attention module."""


class Latent:
    """How one attention module makes keys and values, put on it so that plans can ask for the latents."""

    def __init__(self, module: Any) -> None:
        self._module, self._expand = module, module.expand_kv
        self._now = False
        module.expand_kv = self._keys_and_values
        module.register_forward_pre_hook(self._see, with_kwargs=True)
        setattr(module, LATENT, self)

    def _see(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self._now = bool(getattr(kwargs.get("attention_plan"), "latents", False))

    def _keys_and_values(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, 1, T, L + R] and [1, 1, T, L], or what the module itself makes of them."""
        if not self._now:
            keys, values = self._expand(latent, rotated)
            return keys, values
        return torch.cat((latent, rotated), -1), latent

    def absorb(self, q_THD: torch.Tensor) -> torch.Tensor:
        """[T, H, L + R]: queries that meet stored keys."""
        plain, rotated = q_THD.split((self._module.qk_nope_head_dim, self._module.qk_rope_head_dim), -1)
        return torch.cat((torch.einsum("thn,hnl->thl", plain, self._matrices()[0]), rotated), -1)

    def unfold(self, out_THL: torch.Tensor) -> torch.Tensor:
        """[T, H, V]: what values of their own would have given."""
        return torch.einsum("thl,hvl->thv", out_THL, self._matrices()[1])

    def _matrices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, N, L] of keys and [H, V, L] of values, with what adapters add."""
        module = self._module
        weight = _effective_weight(module.kv_b_proj).unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim))
        keys, values = weight.split((module.qk_nope_head_dim, module.v_head_dim), 1)
        return keys, values


def _effective_weight(linear: Any) -> torch.Tensor:
    if not hasattr(linear, "base_layer"):
        weight: torch.Tensor = linear.weight
        return weight
    weight = linear.base_layer.weight
    if linear.disable_adapters or linear.merged:
        return weight
    for name in linear.active_adapters:
        if name in linear.lora_A:
            weight = weight + linear.get_delta_weight(name).to(weight.dtype)
    return weight


def let_plans_see_latents(model: nn.Module) -> None:
    """From now on plans may ask this model's attention for latents, where it has some."""
    for module in model.modules():
        if _has_latents(module) and LATENT not in vars(module):
            Latent(module)


def latents_of(model: nn.Module) -> dict[int, Latent]:
    """By layer; none for most models."""
    return {int(m.layer_idx): vars(m)[LATENT] for m in model.modules() if LATENT in vars(m)}  # type: ignore[arg-type]


def _has_latents(module: Any) -> bool:
    named = (
        "expand_kv",
        "kv_b_proj",
        "kv_a_layernorm",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "layer_idx",
    )
    if not all(hasattr(module, name) for name in named) or hasattr(module, "indexer"):
        return False
    linear = getattr(module.kv_b_proj, "base_layer", module.kv_b_proj)
    return type(linear) is nn.Linear and linear.bias is None
