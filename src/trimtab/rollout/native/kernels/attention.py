"""Decode attention over paged keys and values: one new token for each of B sequences, for grouped-query heads.

One program handles the G query heads that share a key/value head, so keys and values are read once. It normalises and rotates
the new query and key where the layer asks for that, writes the new key and value to their page, and attends to the pages and
to the new token, which it has in registers: nothing written in a launch is read in it.

Three launches where they pay, one where not:
- `_prefix`: the samples of a prompt see the same pages; their queries form one tile and these pages are read once for all.
- `_decode`: each sequence's own pages, going on from what `_prefix` left; along the sequence in `splits` parts.
- `_merge`: puts the parts together.
Softmax runs in float32 in powers of two, as sums over disjoint sets of keys that are rescaled to a common maximum, so the
order of parts does not matter beyond rounding.

Shapes: B batch entries, R rows of state (an entry's row is index[b]), H query heads, K key/value heads, G = H / K, D head size,
T tokens of a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from trimtab.model.attention import Rules
from trimtab.model.kernels.chain import follow, launch_options
from trimtab.model.kernels.e4m3 import from_e4m3, to_e4m3
from trimtab.model.kernels.shared import partner, turns_back, weighted
from trimtab.model.norms import HeadNorm, Rotary
from trimtab.model.shapes import LayerShape

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)


@triton.jit
def _head_rows(
    X, at_R, valid_R, pos_R, COS, SIN, W, eps, d, D: tl.constexpr, RD: tl.constexpr, NORM: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """[R, D] head vectors at the offsets given, normalised (NORM) and rotated (RD > 0) as transformers does it."""
    real = valid_R[:, None] & (d < D)[None, :]
    x = tl.load(X + at_R[:, None] + d[None, :], mask=real, other=0.0)
    dtype: tl.constexpr = X.dtype.element_ty
    x = x.to(tl.float32)
    if NORM > 0:
        rms = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = weighted(x * rms, tl.load(W + d, mask=d < D, other=0.0)[None, :], dtype, NORM)
    if RD > 0:
        pair = partner(d, RD, NEIGHBOURS)
        y = tl.load(X + at_R[:, None] + pair[None, :], mask=real, other=0.0).to(tl.float32)
        if NORM > 0:
            y = weighted(y * rms, tl.load(W + pair, mask=pair < D, other=0.0)[None, :], dtype, NORM)
        y = tl.where(turns_back(d, RD, NEIGHBOURS)[None, :], -y, y)
        rotated = valid_R[:, None] & (d < RD)[None, :]
        cos = tl.load(COS + pos_R[:, None] * RD + d[None, :], mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(SIN + pos_R[:, None] * RD + d[None, :], mask=rotated, other=0.0).to(tl.float32)
        x = (x * cos).to(dtype).to(tl.float32) + (y * sin).to(dtype).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _scores(s, scale, softcap, CAP: tl.constexpr):
    """Dot products as base-2 exponents."""
    s = s * scale
    if CAP:
        s = softcap * (2.0 * tl.sigmoid(2.0 * s / softcap) - 1.0)
    return s * LOG2E


@triton.jit
def _page(PAGES, row_at, t0, end, PAGE: tl.constexpr, T: tl.constexpr):
    """Pages of the T tokens from t0 on, one number where a page holds them all."""
    if PAGE % T == 0:
        page = tl.load(PAGES + row_at + t0 // PAGE, mask=t0 < end, other=0).to(tl.int64)
    else:
        t = t0 + tl.arange(0, T)
        page = tl.load(PAGES + row_at + t // PAGE, mask=t < end, other=0).to(tl.int64)
    return page


@triton.jit
def _power(exponent):
    """2 to the power, exactly."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _store_codes(x, at, d, X, POWERS, at_power, D: tl.constexpr):
    """Store a head [1, D] as codes with a power of two (kv_codes.py); returns what they stand for."""
    wide = tl.where((d < D)[None, :], x.to(tl.float32), 0.0)
    largest = tl.max(tl.abs(wide), 1)
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 134, -107)
    codes = to_e4m3(wide * _power(-exponent)[:, None])
    tl.store(X + at + d[None, :], codes.to(tl.uint8), mask=(d < D)[None, :])
    tl.store(POWERS + at_power, exponent.to(tl.int8))
    return (from_e4m3(codes) * _power(exponent)[:, None]).to(x.dtype)


@triton.jit
def _attend(
    q, m, l, acc, KC, VC, KP, VP, PAGES, row_at, h, lo, hi, first_R, scale, softcap, d, dv,
    HK: tl.constexpr, CODES: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    CAP: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Take tokens [lo, hi) of one sequence's pages into the running softmax of the queries."""
    page = _page(PAGES, row_at, lo, hi, PAGE, T)
    for t0 in tl.range(lo, hi, T, num_stages=STAGES):
        t = t0 + tl.arange(0, T)
        slot = page * PAGE + t % PAGE
        k = tl.load(KC + slot[None, :] * KD + h * D + d[:, None], mask=(t < hi)[None, :] & (d < D)[:, None], other=0.0)
        if CODES:
            factor = _power(tl.load(KP + slot * HK + h, mask=t < hi, other=0))
            s = tl.dot(q, from_e4m3(k.to(tl.int32)).to(q.dtype), input_precision="ieee") * factor[None, :]
        else:
            s = tl.dot(q, k.to(q.dtype), input_precision="ieee")
        s = _scores(s, scale, softcap, CAP)
        s = tl.where((t < hi)[None, :], s, LOWEST)
        if WINDOW:
            s = tl.where(t[None, :] >= first_R[:, None], s, LOWEST)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        p = tl.where(s > LOWEST, p, 0.0)
        fade = tl.exp2(m - m_new)
        v = tl.load(
            VC + slot[:, None] * VD + h * DV + dv[None, :], mask=(t < hi)[:, None] & (dv < DV)[None, :], other=0.0
        )
        if CODES:
            factor = _power(tl.load(VP + slot * HK + h, mask=t < hi, other=0))
            v = from_e4m3(v.to(tl.int32)).to(q.dtype)
            acc = tl.dot((p * factor[None, :]).to(q.dtype), v, acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(p.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        l = l * fade + tl.sum(p, 1)
        m = m_new
        # Looked up a tile ahead: a load whose address is a load of the same round would not be kept in flight.
        page = _page(PAGES, row_at, t0 + T, hi, PAGE, T)
    return m, l, acc


@triton.jit
def _prefix(
    Q, q_b, q_h, KC, VC, KP, VP, PAGES, width, INDEX, POS, ITEMS, COS, SIN, QN, PM, PL, PACC, scale, softcap, eps, window,
    H: tl.constexpr, G: tl.constexpr, HK: tl.constexpr, CODES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    KD: tl.constexpr, VD: tl.constexpr, RD: tl.constexpr, NORM: tl.constexpr, NEIGHBOURS: tl.constexpr, PAGE: tl.constexpr,
    T: tl.constexpr, M: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Queries of up to M / G samples of one prompt against the pages they share."""
    follow(CHAIN)
    item, h = tl.program_id(0), tl.program_id(1)
    first, count = tl.load(ITEMS + item * 3), tl.load(ITEMS + item * 3 + 1)
    tokens = tl.load(ITEMS + item * 3 + 2).to(tl.int32) * PAGE
    if count > 0:
        r = tl.arange(0, M)
        valid = r // G < count
        b = first + r // G
        head = h * G + r % G
        pos = tl.load(POS + tl.load(INDEX + b, mask=valid, other=0), mask=valid, other=0).to(tl.int32)
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        q = _head_rows(Q, b * q_b + head * q_h, valid, pos, COS, SIN, QN, eps, d, D, RD, NORM, NEIGHBOURS)
        m = tl.full([M], LOWEST, tl.float32)
        l = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DVP], tl.float32)
        lo = tokens * 0
        if WINDOW:
            earliest = tl.min(tl.where(valid, pos, 1 << 30), 0) - window + 1
            lo = tl.maximum(lo, earliest // T * T)
        row_at = tl.load(INDEX + first).to(tl.int64) * width
        m, l, acc = _attend(
            q, m, l, acc, KC, VC, KP, VP, PAGES, row_at, h, lo, tokens, pos - window + 1, scale, softcap, d, dv,
            HK, CODES, KD, VD, D, DV, PAGE, T, CAP, WINDOW, STAGES,
        )  # fmt: skip
        at = b * H + head
        tl.store(PM + at, m, mask=valid)
        tl.store(PL + at, l, mask=valid)
        tl.store(PACC + at[:, None] * DV + dv[None, :], acc, mask=valid[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["batch", "splits"])
def _decode(
    Q, K, V, q_b, q_h, k_b, k_h, v_b, v_h, KC, VC, KP, VP, PAGES, width, INDEX, POS, DONE, SHARED, COS, SIN, QN, KN, SINKS,
    PM, PL, PACC, SM, SL, SACC, OUT, batch, splits, scale, softcap, eps, window,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, HK: tl.constexpr, CODES: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, KD: tl.constexpr, VD: tl.constexpr, RD: tl.constexpr, NORM: tl.constexpr, NEIGHBOURS: tl.constexpr,
    PAGE: tl.constexpr, T: tl.constexpr, SPLIT: tl.constexpr, SHARE: tl.constexpr, CAP: tl.constexpr, WINDOW: tl.constexpr,
    SINK: tl.constexpr, STAGES: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """Own pages of one sequence for one key/value head; the first split also takes in the new token and stores it."""
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(INDEX + b)
    done, pos = tl.load(DONE + row), tl.load(POS + row).to(tl.int32)
    g = tl.arange(0, GP)
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    head = h * G + g
    out = OUT + (b * H + head)[:, None] * DV + dv[None, :]
    real = (g < G)[:, None] & (dv < DV)[None, :]
    base = pos * 0
    row_at = row.to(tl.int64) * width
    if SHARE:
        base = tl.load(SHARED + b).to(tl.int32) * PAGE
    if WINDOW:
        base = tl.maximum(base, (pos - window + 1) // T * T)
    tiles = tl.maximum(0, (pos - base + T - 1) // T)
    share = (tiles + splits - 1) // splits * T
    lo = base + split * share
    hi = tl.minimum(lo + share, pos)
    follow(CHAIN)
    if done != 0:
        if not SPLIT:
            tl.store(out, tl.zeros([GP, DVP], OUT.dtype.element_ty), mask=real)
        return
    q = _head_rows(Q, b * q_b + head * q_h, g < G, g * 0 + pos, COS, SIN, QN, eps, d, D, RD, NORM, NEIGHBOURS)
    m = tl.full([GP], LOWEST, tl.float32)
    l = tl.zeros([GP], tl.float32)
    acc = tl.zeros([GP, DVP], tl.float32)
    if split == 0:
        if SHARE:
            at = b * H + head
            there = (g < G) & (g * 0 + tl.load(SHARED + b) > 0)
            m = tl.load(PM + at, mask=there, other=LOWEST)
            l = tl.load(PL + at, mask=there, other=0.0)
            acc = tl.load(PACC + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
        one = tl.arange(0, 1)
        k = _head_rows(K, one + b * k_b + h * k_h, one == 0, one + pos, COS, SIN, KN, eps, d, D, RD, NORM, NEIGHBOURS)
        v = tl.load(V + b * v_b + h * v_h + one[:, None] + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        slot = tl.load(PAGES + row_at + pos // PAGE).to(tl.int64) * PAGE + pos % PAGE
        if CODES:
            k = _store_codes(k, slot * KD + h * D + one[:, None], d, KC, KP, slot * HK + h + one, D)
            v = _store_codes(v, slot * VD + h * DV + one[:, None], dv, VC, VP, slot * HK + h + one, DV)
        else:
            stored: tl.constexpr = KC.dtype.element_ty
            k, v = k.to(stored), v.to(stored)
            tl.store(KC + slot * KD + h * D + one[:, None] + d[None, :], k, mask=(d < D)[None, :])
            tl.store(VC + slot * VD + h * DV + one[:, None] + dv[None, :], v, mask=(dv < DV)[None, :])
        s = _scores(tl.sum(q.to(tl.float32) * k.to(tl.float32), 1), scale, softcap, CAP)
        m_new = tl.maximum(m, s)
        p, fade = tl.exp2(s - m_new), tl.exp2(m - m_new)
        acc = acc * fade[:, None] + p.to(q.dtype).to(tl.float32)[:, None] * v.to(tl.float32)
        l = l * fade + p
        m = m_new
    m, l, acc = _attend(
        q, m, l, acc, KC, VC, KP, VP, PAGES, row_at, h, lo, hi, g * 0 + pos - window + 1, scale, softcap, d, dv,
        HK, CODES, KD, VD, D, DV, PAGE, T, CAP, WINDOW, STAGES,
    )  # fmt: skip
    if not SPLIT:
        if SINK:
            l += tl.exp2(tl.load(SINKS + head, mask=g < G, other=0.0).to(tl.float32) * LOG2E - m)
        tl.store(out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=real)
    else:
        at = (split * batch + b) * H + head
        tl.store(SM + at, m, mask=g < G)
        tl.store(SL + at, l, mask=g < G)
        tl.store(SACC + at[:, None] * DV + dv[None, :], acc, mask=real)


@triton.jit(do_not_specialize=["batch", "splits"])
def _merge(
    SM, SL, SACC, SINKS, INDEX, DONE, OUT, batch, splits, H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    MOST: tl.constexpr, SINK: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one sequence become its output."""
    follow(CHAIN)
    b, head = tl.program_id(0), tl.program_id(1)
    dv = tl.arange(0, DVP)
    out = OUT + (b * H + head) * DV + dv
    if tl.load(DONE + tl.load(INDEX + b)) != 0:
        tl.store(out, tl.zeros([DVP], OUT.dtype.element_ty), mask=dv < DV)
        return
    part = tl.arange(0, MOST)
    there = part < splits
    at = (part * batch + b) * H + head
    m = tl.load(SM + at, mask=there, other=LOWEST)
    top = tl.max(m, 0)
    weight = tl.exp2(m - top)
    l = tl.sum(tl.load(SL + at, mask=there, other=0.0) * weight, 0)
    if SINK:
        l += tl.exp2(tl.load(SINKS + head).to(tl.float32) * LOG2E - top)
    acc = tl.load(SACC + at[:, None] * DV + dv[None, :], mask=there[:, None] & (dv < DV)[None, :], other=0.0)
    tl.store(out, (tl.sum(acc * weight[:, None], 0) / l).to(OUT.dtype.element_ty), mask=dv < DV)


@dataclass(frozen=True)
class DecodeShape:
    """What a layer's launch is compiled for."""

    heads: int
    kv_heads: int
    size: int
    value_size: int

    @classmethod
    def of(cls, layer: LayerShape) -> DecodeShape:
        return cls(layer.heads, layer.key[0], layer.key[1], layer.value[1])


SHARED_TILE = 64
"""Query rows of a shared-prefix program."""
PROGRAMS = 384
"""Programs that keep the device busy: fewer sequences are split along their length."""
MAX_SPLITS = 16


def splits_for(batch: int, kv_heads: int) -> int:
    """Parts that a sequence is cut into, a power of two."""
    splits = 1
    while splits < MAX_SPLITS and batch * kv_heads * splits < PROGRAMS:
        splits *= 2
    return splits


def samples_per_item(shape: DecodeShape) -> int:
    """Samples whose query heads fill one shared-prefix tile."""
    return max(1, SHARED_TILE // (shape.heads // shape.kv_heads))


class Partials:
    """Room for unfinished softmax sums of the largest batch, used by every layer in turn."""

    def __init__(self, batch: int, shapes: list[DecodeShape], empty) -> None:
        heads = max(s.heads for s in shapes)
        size = max(s.value_size for s in shapes)
        parts = max(b * splits_for(b, s.kv_heads) for s in shapes for b in range(1, batch + 1))
        self.prefix_m, self.prefix_l = (empty((batch, heads), torch.float32) for _ in range(2))
        self.prefix_acc = empty((batch, heads, size), torch.float32)
        self.split_m, self.split_l = (empty((parts, heads), torch.float32) for _ in range(2))
        self.split_acc = empty((parts, heads, size), torch.float32)


@dataclass
class DecodeBatch:
    """Who decodes: entries, their rows, their pages, and which entries share pages."""

    index_B: torch.Tensor
    pages_RP: torch.Tensor
    positions_R: torch.Tensor
    done_R: torch.Tensor
    shared_B: torch.Tensor
    """Pages at the beginning of each entry that `items` cover."""
    items: torch.Tensor | None
    """[N, 3] first entry, entries, pages; None where nothing is shared."""
    page_tokens: int


@dataclass(frozen=True)
class Launch:
    """How a kernel is cut and run: tokens of a tile, warps of a program, tiles in flight."""

    tile: int
    warps: int
    stages: int


def decode_launch(row_bytes: int, programs: int, split: bool) -> Launch:
    """What was fastest on an H200 in bfloat16 at head sizes 64, 128 and 256 (docs/log.md). Tiles are
    smaller where that lets all programs run at once, and larger ones would leave a few of them for a second round."""
    if row_bytes <= 128:
        return Launch(64, 2, 2) if split else Launch(32, 1, 4)
    all_at_once = 800 < programs <= 1400
    return Launch(16 if row_bytes > 256 or all_at_once else 32, 2, 3)


def prefix_launch(row_bytes: int) -> Launch:
    return Launch(64, 4, 2) if row_bytes <= 128 else Launch(32, 4, 3)


def decode_attention(
    batch: DecodeBatch, shape: DecodeShape, rules: Rules, partials: Partials,
    q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor, keys: torch.Tensor, values: torch.Tensor,
    out_BHD: torch.Tensor, rotary: Rotary | None = None, norm: HeadNorm | None = None,
    powers: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:  # fmt: skip
    """Store the new keys and values and attend. q, k, v have contiguous heads and any batch and head stride. `powers`: of
    keys and values that are stored in codes (kv_codes.py)."""
    b = batch.index_B.shape[0]
    group = shape.heads // shape.kv_heads
    splits = splits_for(b, shape.kv_heads)
    row_bytes = shape.size * keys.dtype.itemsize
    own, common_pages = decode_launch(row_bytes, b * shape.kv_heads * splits, splits > 1), prefix_launch(row_bytes)
    common = {
        "H": shape.heads, "G": group, "HK": shape.kv_heads, "CODES": powers is not None,
        "D": shape.size, "DP": max(16, triton.next_power_of_2(shape.size)), "DV": shape.value_size,
        "DVP": max(16, triton.next_power_of_2(shape.value_size)), "KD": shape.kv_heads * shape.size,
        "VD": shape.kv_heads * shape.value_size, "RD": rotary.cos.shape[-1] if rotary else 0, "NORM": norm.kind if norm else 0,
        "NEIGHBOURS": rotary is not None and rotary.neighbours, "PAGE": batch.page_tokens,
        "CAP": rules.softcap is not None, "WINDOW": rules.window is not None, **launch_options(),
    }  # fmt: skip
    cos, sin = (rotary.cos, rotary.sin) if rotary else (q_BHD, q_BHD)
    query_norm, key_norm, eps = (norm.query, norm.key, norm.eps) if norm else (q_BHD, q_BHD, 0.0)
    limits = (rules.scale, rules.softcap or 0.0, eps, rules.window or 0)
    stores = (keys, values, *(powers or (keys, values)))
    at = (batch.pages_RP, batch.pages_RP.stride(0), batch.index_B, batch.positions_R)
    prefix = (partials.prefix_m, partials.prefix_l, partials.prefix_acc)
    if batch.items is not None:
        _prefix[(batch.items.shape[0], shape.kv_heads)](
            q_BHD, q_BHD.stride(0), q_BHD.stride(1), *stores, *at, batch.items, cos, sin, query_norm, *prefix, *limits,
            M=max(SHARED_TILE, triton.next_power_of_2(group)), T=common_pages.tile, STAGES=common_pages.stages,
            num_warps=common_pages.warps, **common,
        )  # fmt: skip
    split = (partials.split_m, partials.split_l, partials.split_acc)
    sinks = rules.sinks_H if rules.sinks_H is not None else q_BHD
    _decode[(b, shape.kv_heads, splits)](
        q_BHD, k_BKD, v_BKD, q_BHD.stride(0), q_BHD.stride(1), k_BKD.stride(0), k_BKD.stride(1), v_BKD.stride(0),
        v_BKD.stride(1), *stores, *at, batch.done_R, batch.shared_B, cos, sin, query_norm, key_norm, sinks, *prefix,
        *split, out_BHD, b, splits, *limits, GP=max(16, triton.next_power_of_2(group)), SPLIT=splits > 1,
        SHARE=batch.items is not None, SINK=rules.sinks_H is not None, T=own.tile, STAGES=own.stages,
        num_warps=own.warps, **common,
    )  # fmt: skip
    if splits > 1:
        _merge[(b, shape.heads)](
            *split, sinks, batch.index_B, batch.done_R, out_BHD, b, splits, H=shape.heads, DV=shape.value_size,
            DVP=common["DVP"], MOST=MAX_SPLITS, SINK=rules.sinks_H is not None, num_warps=1, **launch_options(),
        )  # fmt: skip
