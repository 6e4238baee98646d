"""Log-probs and entropy straight from hidden states, a chunk of tokens at a time, forward and backward.

Logits of a whole batch never exist: a chunk's logits are made, reduced to two numbers a token, and thrown away; the backward
pass makes them again. Sums run in float32 (or wider, if the model is). There is no other path.

With z the logits at the sampling temperature, lse = log sum exp z, p = exp(z - lse), y the target:
  log-prob  l = z_y - lse                 dl/dz = 1[y] - p
  entropy   h = lse - sum p z             dh/dz = -p (z - lse + h)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


class TokenStats(NamedTuple):
    """Of each target token: its log-prob and the entropy of the distribution it came from, in nats."""

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True)
class Head:
    """The map from hidden states to logits: softcap(scale * (h W^T + b)), for any architecture that ends so."""

    weight_VE: torch.Tensor
    bias_V: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden_TE: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        """Logits over the temperature, in at least float32. For a few rows (decoding), never for a training batch."""
        wide = torch.promote_types(hidden_TE.dtype, torch.float32)
        if hidden_TE.is_cuda and hidden_TE.dtype != wide and not torch.is_grad_enabled():
            z = torch.mm(hidden_TE, self.weight_VE.t(), out_dtype=wide)
        else:
            z = hidden_TE.to(wide) @ self.weight_VE.to(wide).t()
        if self.bias_V is not None:
            z = z + self.bias_V
        if self.scale != 1.0:
            z = z * self.scale
        if self.softcap is not None:
            z = torch.tanh(z / self.softcap) * self.softcap
        return z if temperature == 1.0 else z / temperature

    def token_stats(
        self, hidden_TE: torch.Tensor, targets_T: torch.Tensor, temperature: float, chunk: int
    ) -> TokenStats:
        """Log-prob of each target and the entropy there, differentiable in the hidden states and the head's parameters."""
        logprobs, entropy = _ChunkedStats.apply(
            hidden_TE, self.weight_VE, self.bias_V, targets_T, self, temperature, chunk
        )
        return TokenStats(logprobs, entropy)


class _ChunkedStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        head: Head,
        temperature: float,
        chunk: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        lse = torch.empty(hidden.shape[0], dtype=wide, device=hidden.device)
        logprobs, entropy = torch.empty_like(lse), torch.empty_like(lse)
        for part in _chunks(hidden.shape[0], chunk):
            z = head.logits(hidden[part], temperature)
            lse[part] = torch.logsumexp(z, -1)
            logprobs[part] = z.gather(1, targets[part, None])[:, 0] - lse[part]
            entropy[part] = lse[part] - (torch.exp(z - lse[part, None]) * z).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy)
        ctx.head, ctx.temperature, ctx.chunk = head, temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropy = ctx.saved_tensors
        head, wide = ctx.head, lse.dtype
        grad_logprob, grad_entropy = (torch.zeros_like(lse) if g is None else g for g in grads)
        through_entropy = grads[1] is not None
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        narrow = hidden.dtype
        for part in _chunks(hidden.shape[0], ctx.chunk):
            z = head.logits(hidden[part], ctx.temperature)
            p = torch.exp(z - lse[part, None])
            slope = -grad_logprob[part, None]
            if through_entropy:
                slope = slope - grad_entropy[part, None] * (z - (lse - entropy)[part, None])
            grad_z = p.mul_(slope)
            grad_z.scatter_add_(1, targets[part, None], grad_logprob[part, None])
            grad_z /= ctx.temperature
            if head.softcap is not None:
                grad_z *= 1 - (z * ctx.temperature / head.softcap) ** 2
            grad_z *= head.scale
            grad_z = grad_z.to(narrow)
            grad_hidden[part] = grad_z @ weight
            if grad_weight is not None:
                grad_weight += grad_z.t() @ hidden[part]
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
