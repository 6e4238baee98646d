"""Logits that are never stored: a tile of the head's product is reduced, or turned into its gradient, while it is in registers.

As many programs as multiprocessors take the tiles in turns, those of one stretch of the vocabulary after each other: the head's
weights are read once and the hidden states stay in the L2 cache. The gradient leaves by a descriptor too, from shared memory;
written from registers it would spill them.

Shapes: T tokens, E hidden size, V vocabulary, C stretches of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from trimtab.model.sizes import HEAD_TILE_VOCAB
from trimtab.model.transform import Transform


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def _transformed(z, scale, softcap, temperature, SCALED: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr):
    if SCALED:
        z = z * scale
    if SOFTCAP:
        z = _tanh(z / softcap) * softcap
    if TEMPERED:
        z = z / temperature
    return z


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
    return _transformed(acc, scale, softcap, temperature, SCALED, SOFTCAP, TEMPERED)


@triton.jit
def _exp(z, shift):
    """exp(z - shift) by one multiply-add and one exp2."""
    log2e: tl.constexpr = 1.4426950408889634
    return tl.exp2(z * log2e - (shift * log2e)[:, None])


@triton.jit(do_not_specialize=["tokens", "rows", "stretches"])
def _reduce(
    H, W, BIAS, OUT, tokens, V, rows, stretches, scale, softcap, temperature, E: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """Of each token in a stretch: the largest logit, and the sums of exp(z - largest) and of that times z. OUT is [3, C, T]."""
    stride = (tl.zeros((), tl.int64) + stretches) * tokens
    for i in tl.range(tl.program_id(0), rows * stretches, tl.num_programs(0)):
        first, c = (i % rows) * BM, i // rows
        z = _tile(
            H, W, BIAS, first, c * BN, V, scale, softcap, temperature, E, BM, BN, BK, STAGES, HAS_BIAS, SCALED, SOFTCAP,
            TEMPERED,
        )  # fmt: skip
        # What lies beyond the vocabulary counts for nothing; not -inf, which times 0 is not a number.
        if c * BN + BN > V:
            z = tl.where((c * BN + tl.arange(0, BN) < V)[None, :], z, -1e30)
        peak = tl.max(z, 1)
        p = _exp(z, peak)
        t = first + tl.arange(0, BM)
        out = OUT + (tl.zeros((), tl.int64) + c) * tokens + t
        tl.store(out, peak, mask=t < tokens)
        tl.store(out + stride, tl.sum(p, 1), mask=t < tokens)
        tl.store(out + 2 * stride, tl.sum(p * z, 1), mask=t < tokens)


@triton.jit(do_not_specialize=["tokens", "stretches"])
def _merge(SUMS, LSE, MEAN, tokens, stretches, BC: tl.constexpr, BT: tl.constexpr):
    """From what `_reduce` found in every stretch: log-sum-exp, and the mean logit under the softmax."""
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    stride = (tl.zeros((), tl.int64) + stretches) * tokens
    peak = tl.full([BT], -1e30, tl.float32)
    total, mean = tl.zeros([BT], tl.float32), tl.zeros([BT], tl.float32)
    for first in range(0, stretches, BC):
        c = first + tl.arange(0, BC)
        at = SUMS + c[:, None].to(tl.int64) * tokens + t[None, :]
        here = (c < stretches)[:, None] & (t < tokens)[None, :]
        peaks = tl.load(at, mask=here, other=-1e30)
        top = tl.maximum(peak, tl.max(peaks, 0))
        before, share = tl.exp(peak - top), tl.exp(peaks - top[None, :])
        total = total * before + tl.sum(tl.load(at + stride, mask=here, other=0.0) * share, 0)
        mean = mean * before + tl.sum(tl.load(at + 2 * stride, mask=here, other=0.0) * share, 0)
        peak = top
    total = tl.where(t < tokens, total, 1.0)
    tl.store(LSE + t, peak + tl.log(total), mask=t < tokens)
    tl.store(MEAN + t, mean / total, mask=t < tokens)


@triton.jit
def _chosen(
    H, W, BIAS, TARGETS, OUT, scale, softcap, temperature, E: tl.constexpr, EP: tl.constexpr, HAS_BIAS: tl.constexpr,
    SCALED: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
):  # fmt: skip
    """The logit of one token's target."""
    t, e = tl.program_id(0).to(tl.int64), tl.arange(0, EP)
    target = tl.load(TARGETS + t).to(tl.int64)
    h = tl.load(H + t * E + e, mask=e < E, other=0.0).to(tl.float32)
    w = tl.load(W + target * E + e, mask=e < E, other=0.0).to(tl.float32)
    z = tl.sum(h * w, 0)
    if HAS_BIAS:
        z += tl.load(BIAS + target).to(tl.float32)
    tl.store(OUT + t, _transformed(z, scale, softcap, temperature, SCALED, SOFTCAP, TEMPERED))


@triton.jit(do_not_specialize=["tokens", "rows", "stretches"])
def _slope(
    H, W, BIAS, LSE, ENTROPY, DL, DH, OUT, tokens, V, rows, stretches, scale, softcap, temperature, E: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, HAS_BIAS: tl.constexpr, SCALED: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, BY_ENTROPY: tl.constexpr,
):  # fmt: skip
    """The gradient of the head's product, from those of log-prob and entropy (see head.py), wrong at the targets."""
    factor = scale / temperature
    for i in tl.range(tl.program_id(0), rows * stretches, tl.num_programs(0), flatten=True):
        first, c = (i % rows) * BM, i // rows
        z = _tile(
            H, W, BIAS, first, c * BN, V, scale, softcap, temperature, E, BM, BN, BK, STAGES, HAS_BIAS, SCALED, SOFTCAP,
            TEMPERED,
        )  # fmt: skip
        t = first + tl.arange(0, BM)
        lse = tl.load(LSE + t, mask=t < tokens, other=0.0)
        slope = -factor * tl.load(DL + t, mask=t < tokens, other=0.0)
        dz = _exp(z, lse)
        if BY_ENTROPY:
            dh = factor * tl.load(DH + t, mask=t < tokens, other=0.0)
            entropy = tl.load(ENTROPY + t, mask=t < tokens, other=0.0)
            dz = dz * (slope[:, None] - dh[:, None] * (z - (lse - entropy)[:, None]))
        else:
            dz = dz * slope[:, None]
        if SOFTCAP:
            capped = z * (temperature / softcap)
            dz = dz * (1.0 - capped * capped)
        OUT.store([first, c * BN], dz.to(OUT.dtype))


@dataclass(frozen=True)
class Tiles:
    """Tokens, vocabulary and inner dimension of a tile, warps of a program, tiles in flight."""

    tokens: int
    vocabulary: int
    inner: int
    warps: int
    stages: int

    def grid(self, tokens: int, vocabulary: int, device: torch.device) -> tuple[int, int, int]:
        """Programs, tiles along the tokens, and stretches of the vocabulary."""
        rows, stretches = triton.cdiv(tokens, self.tokens), triton.cdiv(vocabulary, self.vocabulary)
        return min(_processors(device), rows * stretches), rows, stretches


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def tiles_for(itemsize: int) -> Tiles:
    return Tiles(128, HEAD_TILE_VOCAB, 64, 8, 3) if itemsize == 2 else Tiles(64, 64, 32, 4, 2)


@cache
def serves(device: torch.device) -> bool:
    """True where descriptors are hardware and three tiles in flight fit beside one on its way out: Hopper, and Blackwell's
    large chips."""
    shared: int = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]
    return torch.cuda.get_device_capability(device)[0] >= 9 and shared >= 227 * 1024


def reduce_logits(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, targets_T: torch.Tensor, transform: Transform
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-sum-exp of each token's logits, the logit of its target, and the mean of its logits under their own softmax."""
    (tokens, size), vocabulary = hidden_TE.shape, weight_VE.shape[0]
    cut = tiles_for(hidden_TE.element_size())
    programs, rows, stretches = cut.grid(tokens, vocabulary, hidden_TE.device)
    sums = torch.empty((3, stretches, tokens), dtype=torch.float32, device=hidden_TE.device)
    _reduce[(programs,)](
        *_sources(hidden_TE, weight_VE, transform, cut), sums, tokens, vocabulary, rows, stretches, *_numbers(transform),
        **_settings(hidden_TE, transform, cut),
    )  # fmt: skip
    # Rows that begin at multiples of 16 bytes: one compilation serves them all.
    lse, mean, chosen = torch.empty((3, -(-tokens // 4) * 4), dtype=torch.float32, device=hidden_TE.device)[:, :tokens]
    _merge[(triton.cdiv(tokens, 64),)](sums, lse, mean, tokens, stretches, BC=32, BT=64, num_warps=4)
    _chosen[(tokens,)](
        hidden_TE, weight_VE, weight_VE if transform.bias_V is None else transform.bias_V, targets_T, chosen,
        *_numbers(transform), E=size, EP=triton.next_power_of_2(size), **_steps(transform),
    )  # fmt: skip
    return lse, chosen, mean


def logits_grad(
    hidden_TE: torch.Tensor, weight_VE: torch.Tensor, transform: Transform, lse_T: torch.Tensor, entropy_T: torch.Tensor,
    dlogprob_T: torch.Tensor, dentropy_T: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """[T, V], the gradient of the product of hidden states and weights, as if no token were the target."""
    tokens, vocabulary = hidden_TE.shape[0], weight_VE.shape[0]
    cut = tiles_for(hidden_TE.element_size())
    programs, rows, stretches = cut.grid(tokens, vocabulary, hidden_TE.device)
    # A descriptor's rows begin at multiples of 16 bytes.
    out = hidden_TE.new_empty((tokens, triton.cdiv(vocabulary, 8) * 8))[:, :vocabulary]
    _slope[(programs,)](
        *_sources(hidden_TE, weight_VE, transform, cut), lse_T, entropy_T, dlogprob_T,
        dlogprob_T if dentropy_T is None else dentropy_T, TensorDescriptor.from_tensor(out, [cut.tokens, cut.vocabulary]),
        tokens, vocabulary, rows, stretches, *_numbers(transform), **_settings(hidden_TE, transform, cut),
        BY_ENTROPY=dentropy_T is not None,
    )  # fmt: skip
    return out


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
        "num_warps": cut.warps, **_steps(transform),
    }  # fmt: skip


def _steps(transform: Transform) -> dict[str, bool]:
    return {
        "HAS_BIAS": transform.bias_V is not None, "SCALED": transform.scale != 1.0, "SOFTCAP": transform.softcap is not None,
        "TEMPERED": transform.temperature != 1.0,
    }  # fmt: skip
