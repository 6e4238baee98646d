"""Logits that are never stored: a tile of the head's product is reduced, or turned into its gradient, while it is in registers.

Tiles of one stretch of the vocabulary run side by side over all tokens, so that the head's weights are read once and the hidden
states stay in the L2 cache.

Shapes: T tokens, E hidden size, V vocabulary, C stretches of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.model.head import Transform


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _tile(
    H, W, BIAS, first, n0, V, scale, softcap, temperature, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr, SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
):  # fmt: skip
    """[BM, BN] logits at the sampling temperature, float32."""
    acc = tl.zeros([BM, BN], tl.float32)
    for k in tl.range(0, E, BK, num_stages=STAGES):
        acc = tl.dot(H.load([first, k]), W.load([n0, k]).T, acc, input_precision="ieee")
    if HAS_BIAS:
        n = n0 + tl.arange(0, BN)
        acc += tl.load(BIAS + n, mask=n < V, other=0.0).to(tl.float32)[None, :]
    if SCALED:
        acc = acc * scale
    if SOFTCAP:
        acc = _tanh(acc / softcap) * softcap
    if TEMPERED:
        acc = acc / temperature
    return acc


@triton.jit
def _reduce(
    H, W, BIAS, TARGETS, PEAK, SUM, MEAN, CHOSEN, tokens, V, stretches, scale, softcap, temperature, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """Of each token in a stretch: the largest logit, the sums of exp(z - largest) and of that times z, and the target's logit."""
    first, c = tl.program_id(0) * BM, tl.program_id(1)
    z = _tile(
        H, W, BIAS, first, c * BN, V, scale, softcap, temperature, E, BM, BN, BK, STAGES, HAS_BIAS, SCALED, SOFTCAP, TEMPERED
    )  # fmt: skip
    t, n = first + tl.arange(0, BM), c * BN + tl.arange(0, BN)
    here = (n < V)[None, :]
    peak = tl.max(tl.where(here, z, -float("inf")), 1)
    p = tl.where(here, tl.exp(z - peak[:, None]), 0.0)
    at = t.to(tl.int64) * stretches + c
    tl.store(PEAK + at, peak, mask=t < tokens)
    tl.store(SUM + at, tl.sum(p, 1), mask=t < tokens)
    tl.store(MEAN + at, tl.sum(p * z, 1), mask=t < tokens)
    hit = tl.load(TARGETS + t, mask=t < tokens, other=-1).to(tl.int32)[:, None] == n[None, :]
    found = tl.max(hit.to(tl.int32), 1) > 0
    tl.store(CHOSEN + t, tl.sum(tl.where(hit, z, 0.0), 1), mask=(t < tokens) & found)


@triton.jit
def _slope(
    H, W, BIAS, TARGETS, LSE, ENTROPY, DL, DH, OUT, tokens, V, scale, softcap, temperature, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, BY_ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient of the head's product, from those of log-prob and entropy (see head.py)."""
    first, c = tl.program_id(0) * BM, tl.program_id(1)
    z = _tile(
        H, W, BIAS, first, c * BN, V, scale, softcap, temperature, E, BM, BN, BK, STAGES, HAS_BIAS, SCALED, SOFTCAP, TEMPERED
    )  # fmt: skip
    t, n = first + tl.arange(0, BM), c * BN + tl.arange(0, BN)
    lse = tl.load(LSE + t, mask=t < tokens, other=0.0)[:, None]
    dl = tl.load(DL + t, mask=t < tokens, other=0.0)[:, None]
    slope = -dl
    if BY_ENTROPY:
        dh = tl.load(DH + t, mask=t < tokens, other=0.0)[:, None]
        entropy = tl.load(ENTROPY + t, mask=t < tokens, other=0.0)[:, None]
        slope = slope - dh * (z - lse + entropy)
    hit = tl.load(TARGETS + t, mask=t < tokens, other=-1).to(tl.int32)[:, None] == n[None, :]
    dz = tl.exp(z - lse) * slope + tl.where(hit, dl, 0.0)
    if SOFTCAP:
        capped = z * temperature / softcap
        dz = dz * (1.0 - capped * capped)
    dz = dz * (scale / temperature)
    out = OUT + t.to(tl.int64)[:, None] * V + n[None, :]
    tl.store(out, dz.to(OUT.dtype.element_ty), mask=(t < tokens)[:, None] & (n < V)[None, :])


@dataclass(frozen=True)
class Tiles:
    """Tokens, vocabulary and inner dimension of a tile, warps of a program, tiles in flight."""

    tokens: int
    vocabulary: int
    inner: int
    warps: int
    stages: int


def tiles_for(itemsize: int) -> Tiles:
    return Tiles(128, 256, 64, 8, 3) if itemsize == 2 else Tiles(64, 64, 32, 4, 2)


def reduce_logits(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, targets_T: torch.Tensor, transform: Transform
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exp of each token's logits, the logit of its target, and the mean of its logits under their own softmax."""
    tokens, vocabulary = hidden_TE.shape[0], weight_VE.shape[0]
    cut = tiles_for(hidden_TE.element_size())
    stretches = triton.cdiv(vocabulary, cut.vocabulary)
    peak, total, mean = torch.empty((3, tokens, stretches), dtype=torch.float32, device=hidden_TE.device)
    chosen = torch.empty(tokens, dtype=torch.float32, device=hidden_TE.device)
    _reduce[(triton.cdiv(tokens, cut.tokens), stretches)](
        *_sources(hidden_TE, weight_VE, transform, cut), targets_T, peak, total, mean, chosen, tokens, vocabulary, stretches,
        *_numbers(transform), **_settings(hidden_TE, transform, cut),
    )  # fmt: skip
    top = peak.amax(1, keepdim=True)
    share = torch.exp(peak - top)
    mass = (total * share).sum(1)
    return top[:, 0] + torch.log(mass), chosen, (mean * share).sum(1) / mass


def logits_grad(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, targets_T: torch.Tensor, transform: Transform, lse_T: torch.Tensor,
    entropy_T: torch.Tensor, dlogprob_T: torch.Tensor, dentropy_T: torch.Tensor | None, out_TV: torch.Tensor,
) -> None:  # fmt: skip
    """Fills `out` with the gradient of the product of hidden states and weights."""
    tokens, vocabulary = hidden_TE.shape[0], weight_VE.shape[0]
    cut = tiles_for(hidden_TE.element_size())
    _slope[(triton.cdiv(tokens, cut.tokens), triton.cdiv(vocabulary, cut.vocabulary))](
        *_sources(hidden_TE, weight_VE, transform, cut), targets_T, lse_T, entropy_T, dlogprob_T,
        dlogprob_T if dentropy_T is None else dentropy_T, out_TV, tokens, vocabulary, *_numbers(transform),
        **_settings(hidden_TE, transform, cut), BY_ENTROPY=dentropy_T is not None,
    )  # fmt: skip


def _sources(hidden: torch.Tensor, weight: torch.Tensor, transform: Transform, cut: Tiles) -> tuple[object, ...]:
    return (
        TensorDescriptor.from_tensor(hidden, [cut.tokens, cut.inner]),
        TensorDescriptor.from_tensor(weight, [cut.vocabulary, cut.inner]),
        weight if transform.bias_V is None else transform.bias_V,
    )


def _numbers(transform: Transform) -> tuple[float, float, float]:
    return transform.scale, transform.softcap or 1.0, transform.temperature


def _settings(hidden: torch.Tensor, transform: Transform, cut: Tiles) -> dict[str, int]:
    return {
        "E": hidden.shape[1], "BM": cut.tokens, "BN": cut.vocabulary, "BK": cut.inner, "STAGES": cut.stages,
        "HAS_BIAS": transform.bias_V is not None, "SCALED": transform.scale != 1.0, "SOFTCAP": transform.softcap is not None,
        "TEMPERED": transform.temperature != 1.0, "num_warps": cut.warps,
    }  # fmt: skip
