"""Log-probs and entropy straight from hidden states, a chunk of tokens at a time, forward and backward.

Logits of a whole batch never exist: a chunk's logits are made, reduced to two numbers a token, and thrown away; the backward
pass makes them again. Sums run in float32 (or wider, if the model is). On CUDA in half precision kernels do this
(kernels/head.py), and not even a chunk's logits are stored; in the backward pass only a chunk's gradient is.

With z the logits at the sampling temperature, lse = log sum exp z, p = exp(z - lse), y the target:
  log-prob  l = z_y - lse                 dl/dz = 1[y] - p
  entropy   h = lse - sum p z             dh/dz = -p (z - lse + h)
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from trimtab.model.gradients import Gradients, add_product
from trimtab.model.transform import Transform


class TokenStats(NamedTuple):
    """For each target token: its log-prob and the entropy of the distribution it came from, in nats."""

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

    @property
    def words(self) -> int:
        """Of which it gives logits."""
        return self.weight_VE.shape[0]

    @property
    def tiled(self) -> bool:
        """True where kernels compute log-probs without storing logits, for hidden states of the weights' type."""
        weight = self.weight_VE
        return _has_kernels(weight[:1], weight)

    def transform(self, temperature: float) -> Transform:
        return Transform(self.bias_V, self.scale, self.softcap, temperature)

    def token_stats(
        self,
        hidden_TE: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
        chunk: int,
        gradients: Gradients | None = None,
    ) -> TokenStats:
        """Log-prob of each target and the entropy there, differentiable in the hidden states and the head's parameters.

        The gradient of the weights is added to `gradients` where they are among those, and to nothing else then.
        """
        logprobs, entropy = _ChunkedStats.apply(
            hidden_TE, self.weight_VE, self.bias_V, targets_T, self, temperature, chunk, gradients
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
        gradients: Gradients | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if _has_kernels(hidden, weight):
            from trimtab.model.kernels.head import reduce_logits

            lse, chosen, mean = reduce_logits(hidden, weight, targets, head.transform(temperature))
            logprobs, entropy = chosen - lse, lse - mean
        else:
            lse, logprobs, entropy = _reduce_chunks(hidden, targets, head, temperature, chunk)
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropy, logprobs)
        ctx.head, ctx.temperature, ctx.chunk, ctx.gradients = head, temperature, chunk, gradients
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, _, lse, _, _ = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        total = None if ctx.gradients is None or not ctx.needs_input_grad[1] else ctx.gradients.of(ctx.head.weight_VE)
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if ctx.needs_input_grad[1] and total is None else total
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if bias is not None and ctx.needs_input_grad[2] else None
        logits_grad = _tiled_grad if _has_kernels(hidden, weight) else _chunk_grad
        for part in _chunks(hidden.shape[0], ctx.chunk):
            grad_z = logits_grad(ctx, part, *grads)
            grad_hidden[part] = grad_z @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad_z.t(), hidden[part])
            if grad_bias is not None:
                grad_bias += grad_z.sum(0)
            del grad_z  # before the next chunk's
        return (
            grad_hidden,
            None if grad_weight is None or total is not None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _has_kernels(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """True for half precision in rows that begin at multiples of 16 bytes, on a device that the kernels were made for."""
    half = hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and weight.dtype == hidden.dtype
    dense = hidden.is_contiguous() and weight.is_contiguous()
    if not hidden.shape[0]:
        return False  # a rank may have no learned token of a row that ranks share
    if not (half and dense and weight.data_ptr() % 16 == 0 and weight.shape[1] % 8 == 0 and find_spec("triton")):
        return False
    from trimtab.model.kernels.head import serves

    return serves(hidden.device)


def _reduce_chunks(
    hidden: torch.Tensor, targets: torch.Tensor, head: Head, temperature: float, chunk: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exp, log-prob and entropy of each token."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    lse, logprobs, entropy = (torch.empty(hidden.shape[0], dtype=wide, device=hidden.device) for _ in range(3))
    for part in _chunks(hidden.shape[0], chunk):
        z = head.logits(hidden[part], temperature)
        lse[part] = torch.logsumexp(z, -1)
        logprobs[part] = z.gather(1, targets[part, None])[:, 0] - lse[part]
        entropy[part] = lse[part] - (torch.exp(z - lse[part, None]) * z).sum(-1)
    return lse, logprobs, entropy


def _chunk_grad(
    ctx: Any, part: slice, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of a chunk's product of hidden states and weights."""
    hidden, targets, lse, entropy = (ctx.saved_tensors[i][part] for i in (0, 3, 4, 5))
    head, temperature = ctx.head, ctx.temperature
    down = torch.zeros_like(lse) if grad_logprob is None else grad_logprob[part]
    z = head.logits(hidden, temperature)
    slope = -down[:, None]
    if grad_entropy is not None:
        slope = slope - grad_entropy[part, None] * (z - (lse - entropy)[:, None])
    grad_z = torch.exp(z - lse[:, None]).mul_(slope)
    grad_z.scatter_add_(1, targets[:, None], down[:, None])
    grad_z /= temperature
    if head.softcap is not None:
        grad_z *= 1 - (z * temperature / head.softcap) ** 2
    grad_z *= head.scale
    return grad_z.to(hidden.dtype)


def _tiled_grad(
    ctx: Any, part: slice, grad_logprob: torch.Tensor | None, grad_entropy: torch.Tensor | None
) -> torch.Tensor:
    """The same, tile by tile; at the targets it follows from what the forward pass found there."""
    from trimtab.model.kernels.head import logits_grad

    weight, transform = ctx.saved_tensors[1], ctx.head.transform(ctx.temperature)
    hidden, targets, lse, entropy, logprobs = (ctx.saved_tensors[i][part] for i in (0, 3, 4, 5, 6))
    down = torch.zeros_like(lse) if grad_logprob is None else grad_logprob[part].contiguous()
    slope = None if grad_entropy is None else grad_entropy[part].contiguous()
    out = logits_grad(hidden, weight, transform, lse, entropy, down, slope)
    at_target = -down if slope is None else -down - slope * (logprobs + entropy)
    at_target = torch.addcmul(down, at_target, logprobs.exp()) * (transform.scale / transform.temperature)
    if transform.softcap is not None:
        at_target *= 1 - ((logprobs + lse) * (transform.temperature / transform.softcap)) ** 2
    return out.scatter_(1, targets[:, None], at_target[:, None].to(out.dtype))


def _chunks(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
