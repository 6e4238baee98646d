"""Counter-based sampling: every random number is a pure function of (seed, step, prompt, sample, position).

So the same request gives the same tokens in any batch, any order, after a restart or a replay. One uniform number a token is
drawn by hashing and inverted through the cumulative distribution, summed in float64 so that rounding does not favour any token.
"""

from __future__ import annotations

import torch

from trimtab.config.learn import Sampling

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def stream_key(seed: int, step: int, prompt: int, sample: int, first_position: int = 0) -> int:
    """The key of one completion's random numbers, as a signed 64-bit integer. With it position 0 is `first_position`: `uniforms`
    adds a constant a position to the key, so a stream that begins later is the same stream with another key."""
    state = 0
    for part in (seed, step, prompt, sample):
        state = _mix_int((state + (part & _MASK) * _GOLDEN + _GOLDEN) & _MASK)
    return _signed((state + first_position * _GOLDEN) & _MASK)


def uniforms(keys_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """One float64 in [0, 1) for each (key, position), the same on every device."""
    x = keys_B + (positions_B.to(torch.int64) + 1) * _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift_right(x, 31)
    return _shift_right(x, 11).to(torch.float64) * 2.0**-53


def sample(
    logits_BV: torch.Tensor, sampling: Sampling, keys_B: torch.Tensor, positions_B: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn, and their log-probs under the whole distribution at the sampling temperature.

    `logits_BV` are float32, already over the temperature (temperature 0 takes them plain, and takes the largest).
    """
    lse_B = torch.logsumexp(logits_BV, -1)
    if sampling.temperature == 0:
        tokens_B = logits_BV.argmax(-1)
    else:
        kept_BV = keep(logits_BV, sampling)
        cumulative_BV = torch.exp(kept_BV - lse_B[:, None]).cumsum(-1, dtype=torch.float64)
        drawn_B1 = uniforms(keys_B, positions_B)[:, None] * cumulative_BV[:, -1:]
        tokens_B = torch.searchsorted(cumulative_BV, drawn_B1, right=True)[:, 0]
        # u rounds up to the total mass at most once in 2^53 draws; the last token that has mass is the right answer then.
        last_B = torch.searchsorted(cumulative_BV, cumulative_BV[:, -1:].contiguous())[:, 0]
        tokens_B = torch.minimum(tokens_B, last_B).clamp(max=logits_BV.shape[1] - 1)  # NaN is beyond every sum
    return tokens_B, logits_BV.gather(1, tokens_B[:, None])[:, 0] - lse_B


def keep(logits_BV: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits with everything outside top-k, top-p and min-p at minus infinity (in that order, each on what is left)."""
    if not sampling.top_k and sampling.top_p >= 1.0 and not sampling.min_p:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    out_BV = torch.zeros_like(sorted_BV, dtype=torch.bool)
    if sampling.top_k:
        out_BV[:, sampling.top_k :] = True
    if sampling.top_p < 1.0:
        probability_BV = torch.softmax(sorted_BV.masked_fill(out_BV, float("-inf")), -1)
        before_BV = probability_BV.cumsum(-1) - probability_BV
        out_BV |= before_BV >= sampling.top_p
    if sampling.min_p:
        out_BV |= sorted_BV < sorted_BV[:, :1] + torch.log(torch.tensor(sampling.min_p))
    out_BV[:, 0] = False  # a top_p too small for float32 is nothing, and nothing is reached before the first
    return logits_BV.masked_fill(torch.zeros_like(out_BV).scatter(1, order_BV, out_BV), float("-inf"))


def _mix_int(x: int) -> int:
    x = ((x ^ (x >> 30)) * _MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX_2) & _MASK
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >= 1 << 63 else x


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64 taken as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
