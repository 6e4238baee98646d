"""Triton kernels from logits to the drawn token, its log-prob and the row's new state, with the semantics of `sampler.sample`.

Guarantees. A row draws the same token in any batch: its uniform number is a function of its key and of how many tokens it has,
and all sums over the vocabulary run in a fixed order. The drawn token always has mass and passed the filters. The log-prob is
under the whole distribution, filtered or not. A row that is done is neither read nor changed. Nothing is allocated or waited
for at call time. A row whose logits hold NaN, or no finite value, draws some token of the vocabulary with a NaN log-prob.

Why it is right. `_reduce` reads each logit once and leaves every chunk's maximum and sum of exponentials; from these `_draw`
has the log-sum-exp in float64, finds the chunk in which u times the total mass falls, and inverts the cumulative distribution
inside that chunk only. Where rounding lets no token pass the target, the last token that has mass is taken.

With filters the kept set is a prefix of the stable descending order for each of top-k, top-p and min-p, so the tightest prefix
is their intersection. A prefix is (floor, quota): all scores above `floor`, and the first `quota` by index of those equal to
it. `_search` finds it without sorting, on integers that order as the floats do: the invariant is that the scores >= high fall
short of the target (a count for top-k, a mass for top-p) and the scores >= low do not, and every pass narrows [low, high) by 16
pivots until it is one value or one token. `_mass` then sums what is kept in every chunk for `_draw`.

Shapes: B batch entries, V vocabulary, R rows, L most new tokens, S stop ids, C chunks of the vocabulary, N tokens of a chunk,
T tokens of a tile, P pivots.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from trimtab.config.learn import Sampling
from trimtab.rollout.native.rows import RowState

_CHUNK = 4096
_TILE = 512
_PIVOTS = tl.constexpr(16)
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_LOWEST = tl.constexpr(-0x7F800001)
"""The integer image of minus infinity."""


class Draw:
    """Scratch and launches for up to `batch` rows of `vocabulary` logits.

    In `RowState`, `last_tokens`, `positions`, `generated`, `keys` and `limits` are int64 [R], `done` is int32 [R] (0 running, 1
    ended by a stop token, 2 by its limit), `tokens` int64 and `logprobs` float32 [R, L], `stop_ids` int64 [S], S may be 0. A
    running row has `generated` < `limits` <= L.

    The first call with a new logits type or another kind of sampling compiles; make one before a CUDA graph is captured.
    """

    def __init__(self, batch: int, vocabulary: int, device: torch.device | str) -> None:
        self.batch, self.vocabulary = batch, vocabulary
        self._chunk, self._chunks = _chunking(vocabulary)

        def scratch(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        self._peak_BC = scratch(batch, self._chunks, dtype=torch.float32)
        self._sum_BC = scratch(batch, self._chunks, dtype=torch.float32)
        self._above_BC = scratch(batch, self._chunks, dtype=torch.float32)
        self._equal_BC = scratch(batch, self._chunks, dtype=torch.int32)
        self._floor_B = scratch(batch, dtype=torch.int32)
        self._quota_B = scratch(batch, dtype=torch.int32)

    def __call__(
        self,
        logits_BV: Tensor,
        index_B: Tensor,
        rows: RowState,
        sampling: Sampling,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """Draw one token for each row of `index_B` that is not done. No row may be named twice, unless it is done."""
        count, vocabulary = logits_BV.shape
        assert count <= self.batch and vocabulary == self.vocabulary and index_B.shape == (count,)
        assert logits_BV.stride(1) == 1 and rows.tokens.stride(1) == 1 and rows.logprobs.stride(1) == 1
        if count == 0:
            return
        greedy = sampling.temperature == 0
        top_k = sampling.top_k if sampling.top_k < vocabulary else 0
        filtered = not greedy and bool(top_k or sampling.top_p < 1.0 or sampling.min_p)
        transform = (scale, softcap or 1.0, sampling.temperature)
        source = (logits_BV, logits_BV.stride(0), vocabulary, index_B, rows.done, *transform)
        flags = {
            "CHUNK": self._chunk,
            "CHUNKS": triton.next_power_of_2(self._chunks),
            "SOFTCAP": softcap is not None,
            "TEMPERED": sampling.temperature not in (0.0, 1.0),
            # A fused multiply-add in one kernel and not in another would give one token two scores.
            "enable_fp_fusion": False,
        }
        totals = (self._peak_BC, self._sum_BC, self._chunks)
        prefix = (self._floor_B, self._quota_B, self._above_BC, self._equal_BC)
        _reduce[(count, self._chunks)](*source, *totals, **flags, num_warps=4)
        if filtered:
            bounds = (top_k, sampling.top_p, math.log(sampling.min_p) if sampling.min_p else -math.inf)
            tile = min(_TILE, self._chunk)
            kinds = {"TOP_K": top_k > 0, "TOP_P": sampling.top_p < 1.0, "TILE": tile}
            _threshold[(count,)](*source, *totals, *prefix[:2], *bounds, **kinds, **flags, num_warps=8)
            _mass[(count, self._chunks)](*source, *totals, *prefix, **flags, num_warps=4)
        _draw[(count,)](
            *source,
            *totals,
            *prefix,
            rows.last_tokens,
            rows.positions,
            rows.generated,
            rows.keys,
            rows.limits,
            rows.tokens,
            rows.tokens.stride(0),
            rows.logprobs,
            rows.logprobs.stride(0),
            rows.stop_ids,
            rows.stop_ids.numel(),
            **flags,
            STOPS=triton.next_power_of_2(max(1, rows.stop_ids.numel())),
            GREEDY=greedy,
            FILTERED=filtered,
            num_warps=8,
        )


def _chunking(vocabulary: int) -> tuple[int, int]:
    """Tokens of a chunk, and how many chunks."""
    chunk = min(_CHUNK, triton.next_power_of_2(vocabulary))
    return chunk, triton.cdiv(vocabulary, chunk)


@triton.jit
def _reduce(
    logits: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, index: tl.tensor, done: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor, peak_BC: tl.tensor, sum_BC: tl.tensor,
    chunks: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a chunk: its largest score, and the sum of exp(score - largest)."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(done + tl.load(index + b)) != 0:
        return
    at_N = c * CHUNK + tl.arange(0, CHUNK)
    z_N = _scores(logits + b * stride, at_N, vocabulary, scale, softcap, temperature, SOFTCAP, TEMPERED)
    peak = tl.max(z_N, 0)
    tl.store(peak_BC + b * chunks + c, peak)
    tl.store(sum_BC + b * chunks + c, tl.sum(tl.exp(z_N - _finite(peak)), 0))


@triton.jit
def _threshold(
    logits: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, index: tl.tensor, done: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor, peak_BC: tl.tensor, sum_BC: tl.tensor,
    chunks: tl.tensor, floor_B: tl.tensor, quota_B: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    log_min_p: tl.tensor,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row: the prefix of the descending order that top-k, then top-p, then min-p keep."""
    b = tl.program_id(0).to(tl.int64)
    if tl.load(done + tl.load(index + b)) != 0:
        return
    row, peaks = logits + b * stride, peak_BC + b * chunks
    peak_C, sum_C = _totals(peaks, sum_BC + b * chunks, chunks, CHUNKS)
    peak = tl.max(peak_C, 0)
    mass = tl.sum(sum_C.to(tl.float64) * tl.exp((peak_C - _finite(peak)).to(tl.float64)), 0).to(tl.float32)
    floor = tl.full((), _LOWEST, tl.int32)
    quota = tl.zeros((), tl.int32) + vocabulary
    above = quota
    if TOP_K:
        target = tl.zeros((), tl.float32) + top_k
        floor, above, short, mass, short_mass = _search(
            row, vocabulary, scale, softcap, temperature, peaks, chunks, peak, floor, above, mass, target,
            False, TOP_P, TILE, CHUNK, SOFTCAP, TEMPERED,
        )  # fmt: skip
        quota = top_k - short
        if above > top_k:
            mass = short_mass + quota.to(tl.float32) * tl.exp(_value(floor) - _finite(peak))
    if TOP_P:
        target = top_p * mass
        low, above, short, mass, short_mass = _search(
            row, vocabulary, scale, softcap, temperature, peaks, chunks, peak, floor, above, mass, target,
            True, True, TILE, CHUNK, SOFTCAP, TEMPERED,
        )  # fmt: skip
        # Of equal scores the j-th is kept while what comes before it falls short: short_mass + j * each < target.
        wanted = tl.ceil((target - short_mass) / tl.exp(_value(low) - _finite(peak)))
        wanted = tl.maximum(tl.minimum(wanted, tl.zeros((), tl.float32) + vocabulary), 1.0).to(tl.int32)
        quota = tl.where(low > floor, wanted, tl.minimum(wanted, quota))
        floor = tl.maximum(low, floor)
    least = _image(peak + log_min_p)
    tl.store(floor_B + b, tl.maximum(floor, least))
    tl.store(quota_B + b, tl.where(least > floor, vocabulary, quota))


@triton.jit
def _mass(
    logits: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, index: tl.tensor, done: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor, peak_BC: tl.tensor, sum_BC: tl.tensor,
    chunks: tl.tensor, floor_B: tl.tensor, quota_B: tl.tensor, above_BC: tl.tensor, equal_BC: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a chunk: the mass of the scores above the floor, relative to the chunk's peak, and how many equal it."""
    b, c = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(done + tl.load(index + b)) != 0:
        return
    peak, floor = tl.load(peak_BC + b * chunks + c), tl.load(floor_B + b)
    above, equal = tl.zeros((), tl.float32), tl.zeros((), tl.int32)
    if _image(peak) >= floor:
        at_N = c * CHUNK + tl.arange(0, CHUNK)
        z_N = _scores(logits + b * stride, at_N, vocabulary, scale, softcap, temperature, SOFTCAP, TEMPERED)
        image_N = _image(z_N)
        above = tl.sum(tl.where(image_N > floor, tl.exp(z_N - _finite(peak)), 0.0), 0)
        equal = tl.sum(((image_N == floor) & (at_N < vocabulary)).to(tl.int32), 0)
    tl.store(above_BC + b * chunks + c, above)
    tl.store(equal_BC + b * chunks + c, equal)


@triton.jit
def _draw(
    logits: tl.tensor, stride: tl.tensor, vocabulary: tl.tensor, index: tl.tensor, done: tl.tensor,
    scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor, peak_BC: tl.tensor, sum_BC: tl.tensor,
    chunks: tl.tensor, floor_B: tl.tensor, quota_B: tl.tensor, above_BC: tl.tensor, equal_BC: tl.tensor,
    last_tokens: tl.tensor, positions: tl.tensor, generated: tl.tensor, keys: tl.tensor, limits: tl.tensor,
    tokens: tl.tensor, tokens_stride: tl.tensor, logprobs: tl.tensor, logprobs_stride: tl.tensor,
    stop_ids: tl.tensor, stops: tl.tensor,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr, STOPS: tl.constexpr,
    GREEDY: tl.constexpr, FILTERED: tl.constexpr,
) -> None:  # fmt: skip
    """One program a row: the chunk, the token in it, the log-prob, and the row's new state."""
    b = tl.program_id(0).to(tl.int64)
    r = tl.load(index + b).to(tl.int64)
    if tl.load(done + r) != 0:
        return
    at = tl.load(generated + r)
    peak_C, sum_C = _totals(peak_BC + b * chunks, sum_BC + b * chunks, chunks, CHUNKS)
    peak = tl.max(peak_C, 0)
    weight_C = tl.exp((peak_C - _finite(peak)).to(tl.float64))
    lse = tl.log(tl.sum(sum_C.to(tl.float64) * weight_C, 0)) + peak.to(tl.float64)

    c_C, n_N = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    room_C = tl.zeros([CHUNKS], tl.int32)
    floor = tl.zeros((), tl.int32)
    mass_C = sum_C.to(tl.float64) * weight_C
    target = tl.zeros((), tl.float64)
    if GREEDY:
        c = tl.minimum(tl.min(tl.where(peak_C == peak, c_C, CHUNKS), 0), chunks - 1)
    else:
        if FILTERED:
            floor = tl.load(floor_B + b)
            above_C = tl.load(above_BC + b * chunks + c_C, mask=c_C < chunks, other=0.0)
            equal_C = tl.load(equal_BC + b * chunks + c_C, mask=c_C < chunks, other=0)
            room_C = tl.maximum(tl.load(quota_B + b) - (tl.cumsum(equal_C, 0) - equal_C), 0)
            kept_C = tl.minimum(room_C, equal_C)
            each_C = tl.where(kept_C > 0, tl.exp(_value(floor) - _finite(peak_C)), 0.0)
            mass_C = (above_C.to(tl.float64) + kept_C.to(tl.float64) * each_C.to(tl.float64)) * weight_C
        target = _uniform(tl.load(keys + r), at) * tl.sum(mass_C, 0)
        c = _invert(mass_C, target, CHUNKS)
        # The target inside the chunk, in units of the chunk's own peak.
        target = tl.maximum(target - tl.sum(tl.where(c_C < c, mass_C, 0.0), 0), 0.0)
        target = target / tl.sum(tl.where(c_C == c, weight_C, 0.0), 0)

    z_N = _scores(logits + b * stride, c * CHUNK + n_N, vocabulary, scale, softcap, temperature, SOFTCAP, TEMPERED)
    top = tl.max(z_N, 0)
    if GREEDY:
        n = tl.min(tl.where(z_N == top, n_N, CHUNK), 0)
    else:
        mass_N = tl.exp(z_N - _finite(top))
        if FILTERED:
            image_N = _image(z_N)
            equal_N = (image_N == floor).to(tl.int32)
            room = tl.sum(tl.where(c_C == c, room_C, 0), 0)
            first_N = (equal_N > 0) & (tl.cumsum(equal_N, 0) <= room)
            mass_N = tl.where((image_N > floor) | first_N, mass_N, 0.0)
        n = _invert(mass_N.to(tl.float64), target, CHUNK)
    token = tl.minimum(c * CHUNK + n, vocabulary - 1).to(tl.int64)
    score = tl.sum(tl.where(n_N == n, z_N, 0.0), 0)

    s_S = tl.arange(0, STOPS)
    stop_S = (tl.load(stop_ids + s_S, mask=s_S < stops, other=-1) == token).to(tl.int32)
    ended = tl.where(at + 1 >= tl.load(limits + r), 2, 0)
    tl.store(tokens + r * tokens_stride + at, token)
    tl.store(logprobs + r * logprobs_stride + at, (score.to(tl.float64) - lse).to(tl.float32))
    tl.store(last_tokens + r, token)
    tl.store(positions + r, tl.load(positions + r) + 1)
    tl.store(generated + r, at + 1)
    tl.store(done + r, tl.where(tl.max(stop_S, 0) > 0, 1, ended))


@triton.jit
def _scores(
    row: tl.tensor, at_N: tl.tensor, vocabulary: tl.tensor, scale: tl.tensor, softcap: tl.tensor,
    temperature: tl.tensor,
    SOFTCAP: tl.constexpr, TEMPERED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Logits scaled, capped and over the temperature, in float32 with the rounding of PyTorch; -inf past the vocabulary."""
    z_N = tl.load(row + at_N, mask=at_N < vocabulary, other=0.0).to(tl.float32) * scale
    if SOFTCAP:
        z_N = _tanh(tl.div_rn(z_N, softcap)) * softcap
    if TEMPERED:
        z_N = tl.div_rn(z_N, temperature)
    return tl.where(at_N < vocabulary, z_N, -float("inf"))


@triton.jit
def _tanh(x_N: tl.tensor) -> tl.tensor:
    """To a few units in the last place: the series near 0, where the quotient of exponentials would cancel."""
    size_N, square_N = tl.abs(x_N), x_N * x_N
    series_N = 1.0 + square_N * (-1 / 3 + square_N * (2 / 15 + square_N * (-17 / 315 + square_N * (62 / 2835))))
    falling_N = tl.exp(-2.0 * size_N)
    quotient_N = (1.0 - falling_N) / (1.0 + falling_N)
    return tl.where(size_N < 0.25, x_N * series_N, tl.where(x_N < 0, -quotient_N, quotient_N))


@triton.jit
def _finite(peak: tl.tensor) -> tl.tensor:
    """What to subtract from scores whose largest is `peak`: an empty chunk has no mass, not NaN."""
    return tl.where(peak == -float("inf"), 0.0, peak)


@triton.jit
def _totals(peaks: tl.tensor, sums: tl.tensor, chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    c_C = tl.arange(0, CHUNKS)
    peak_C = tl.load(peaks + c_C, mask=c_C < chunks, other=-float("inf"))
    return peak_C, tl.load(sums + c_C, mask=c_C < chunks, other=0.0)


@triton.jit
def _uniform(key: tl.tensor, position: tl.tensor) -> tl.tensor:
    """`sampler.uniforms` of one row."""
    x = key.to(tl.uint64, bitcast=True) + (position + 1).to(tl.uint64, bitcast=True) * _GOLDEN
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def _invert(mass_N: tl.tensor, target: tl.tensor, N: tl.constexpr) -> tl.tensor:
    """The first entry with mass at which the cumulative sum passes `target`; where none does, the last with mass.

    A parallel cumulative sum need not be monotone in its last bit, so that an entry without mass is excluded by name.
    """
    n_N = tl.arange(0, N)
    first = tl.min(tl.where((tl.cumsum(mass_N, 0) > target) & (mass_N > 0), n_N, N), 0)
    return tl.minimum(first, tl.max(tl.where(mass_N > 0, n_N, 0), 0))


@triton.jit
def _image(z_N: tl.tensor) -> tl.tensor:
    """An int32 that orders as the float32 does, the two zeros being equal."""
    bits_N = tl.where(z_N == 0.0, 0.0, z_N).to(tl.int32, bitcast=True)
    return bits_N ^ ((bits_N >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(image: tl.tensor) -> tl.tensor:
    """The float32 of an image."""
    return (image ^ ((image >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _search(
    row: tl.tensor, vocabulary: tl.tensor, scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor,
    peaks: tl.tensor, chunks: tl.tensor, peak: tl.tensor, low: tl.tensor, low_count: tl.tensor,
    low_mass: tl.tensor, target: tl.tensor,
    BY_MASS: tl.constexpr, WITH_MASS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Narrow [low, high) as the module says; with both ends come the count and the mass of the scores not below them."""
    high = _image(peak) + 1
    high_count, high_mass = tl.zeros((), tl.int32), tl.zeros((), tl.float32)
    p_P = tl.arange(0, _PIVOTS)
    # The first pivots are a nat apart, where thresholds mostly lie; after them the images in between are cut evenly.
    pivot_P = tl.minimum(tl.maximum(_image(peak - p_P.to(tl.float32)), low), high)
    searching = high.to(tl.int64) - low > 1
    while searching:
        count_P, mass_P = _tally(
            row, vocabulary, scale, softcap, temperature, peaks, chunks, peak, low, pivot_P,
            WITH_MASS, TILE, CHUNK, SOFTCAP, TEMPERED,
        )  # fmt: skip
        if BY_MASS:
            reached_P = mass_P >= target
        else:
            reached_P = count_P.to(tl.float32) >= target
        # Where rounding of the mass would deny it, what holds at `low` still holds there.
        reached_P = reached_P | (pivot_P <= low)
        low = tl.maximum(low, tl.max(tl.where(reached_P, pivot_P, low), 0))
        low_count = tl.min(tl.where(reached_P, count_P, low_count), 0)
        low_mass = tl.min(tl.where(reached_P, mass_P, low_mass), 0)
        high = tl.min(tl.where(reached_P, high, pivot_P), 0)
        high_count = tl.max(tl.where(reached_P, high_count, count_P), 0)
        high_mass = tl.max(tl.where(reached_P, high_mass, mass_P), 0)
        width = high.to(tl.int64) - low
        pivot_P = (low + width * (p_P + 1) // (_PIVOTS + 1)).to(tl.int32)
        searching = (width > 1) & (low_count - high_count > 1)
        if not BY_MASS:
            searching = searching & (low_count.to(tl.float32) > target)
    return low, low_count, high_count, low_mass, high_mass


@triton.jit
def _tally(
    row: tl.tensor, vocabulary: tl.tensor, scale: tl.tensor, softcap: tl.tensor, temperature: tl.tensor,
    peaks: tl.tensor, chunks: tl.tensor, peak: tl.tensor, low: tl.tensor, pivot_P: tl.tensor,
    WITH_MASS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr, SOFTCAP: tl.constexpr,
    TEMPERED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """How many scores reach each pivot, and their mass relative to the peak. Chunks that lie below `low` are not read."""
    count_TP = tl.zeros([TILE, _PIVOTS], tl.int32)
    mass_TP = tl.zeros([TILE, _PIVOTS], tl.float32)
    for c in range(chunks):
        if _image(tl.load(peaks + c)) >= low:
            for start in tl.static_range(0, CHUNK, TILE):
                at_T = c * CHUNK + start + tl.arange(0, TILE)
                z_T = _scores(row, at_T, vocabulary, scale, softcap, temperature, SOFTCAP, TEMPERED)
                reached_TP = _image(z_T)[:, None] >= pivot_P[None, :]
                count_TP += reached_TP.to(tl.int32)
                if WITH_MASS:
                    mass_TP += tl.where(reached_TP, tl.exp(z_T - _finite(peak))[:, None], 0.0)
    return tl.sum(count_TP, 0), tl.sum(mass_TP, 0)
