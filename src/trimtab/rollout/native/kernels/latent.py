"""Decode attention over paged latents (model/latent.py): one new token for each of B sequences.

All heads of a token share one key, [latent | rotated], whose first part is also the value. A program takes a block of heads, so
that a tile of keys is read once for them, is multiplied by the queries, and by what the softmax gives: the value is never read
apart. The first block stores the new token's key; nothing written in a launch is read in it. Long sequences are cut into `splits`
parts, which the merge of attention.py puts together.

Shapes: B batch entries, H heads, L latent, R rotated part, T tokens of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.model.attention import Rules
from trimtab.model.kernels.chain import follow, launch_options
from trimtab.rollout.native.kernels.attention import (
    LOG2E,
    LOWEST,
    MAX_SPLITS,
    DecodeBatch,
    Partials,
    _merge,
    splits_for,
)

HEADS_OF_A_PROGRAM = 16
TILE = 32


@triton.jit(do_not_specialize=["batch", "splits"])
def _decode_latent(
    Q, q_b, q_h, C, c_b, KC, PAGES, width, INDEX, POS, DONE, SM, SL, SACC, OUT, batch, splits, scale, H: tl.constexpr,
    HB: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, RP: tl.constexpr, PAGE: tl.constexpr, T: tl.constexpr,
    SPLIT: tl.constexpr, CHAIN: tl.constexpr,
):  # fmt: skip
    b, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(INDEX + b)
    done, pos = tl.load(DONE + row), tl.load(POS + row).to(tl.int32)
    head, d, e = block * HB + tl.arange(0, HB), tl.arange(0, LP), tl.arange(0, RP)
    real = (head < H)[:, None] & (d < L)[None, :]
    out = OUT + (b * H + head)[:, None] * L + d[None, :]
    row_at = row.to(tl.int64) * width
    tiles = (pos + T - 1) // T
    share = (tiles + splits - 1) // splits * T
    lo = split * share
    hi = tl.minimum(lo + share, pos)
    follow(CHAIN)
    if done != 0:
        if not SPLIT:
            tl.store(out, tl.zeros([HB, LP], OUT.dtype.element_ty), mask=real)
        return
    q_at = Q + b * q_b + head[:, None] * q_h
    q = tl.load(q_at + d[None, :], mask=real, other=0.0)
    qr = tl.load(q_at + L + e[None, :], mask=(head < H)[:, None] & (e < R)[None, :], other=0.0)
    m = tl.full([HB], LOWEST, tl.float32)
    l = tl.zeros([HB], tl.float32)
    acc = tl.zeros([HB, LP], tl.float32)
    if split == 0:
        c = tl.load(C + b * c_b + d, mask=d < L, other=0.0)
        r = tl.load(C + b * c_b + L + e, mask=e < R, other=0.0)
        if block == 0:
            slot = tl.load(PAGES + row_at + pos // PAGE).to(tl.int64) * PAGE + pos % PAGE
            tl.store(KC + slot * (L + R) + d, c, mask=d < L)
            tl.store(KC + slot * (L + R) + L + e, r, mask=e < R)
        wide = tl.sum(q.to(tl.float32) * c.to(tl.float32)[None, :], 1)
        m = (wide + tl.sum(qr.to(tl.float32) * r.to(tl.float32)[None, :], 1)) * scale * LOG2E
        l += 1.0
        acc += c.to(tl.float32)[None, :]
    for t0 in range(lo, hi, T):
        t = t0 + tl.arange(0, T)
        page = tl.load(PAGES + row_at + t // PAGE, mask=t < hi, other=0).to(tl.int64)
        at = KC + (page * PAGE + t % PAGE)[:, None] * (L + R)
        c = tl.load(at + d[None, :], mask=(t < hi)[:, None] & (d < L)[None, :], other=0.0)
        r = tl.load(at + L + e[None, :], mask=(t < hi)[:, None] & (e < R)[None, :], other=0.0)
        s = tl.dot(q, tl.trans(c), input_precision="ieee") + tl.dot(qr, tl.trans(r), input_precision="ieee")
        s = tl.where((t < hi)[None, :], s * scale * LOG2E, LOWEST)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        p = tl.where(s > LOWEST, p, 0.0)
        fade = tl.exp2(m - m_new)
        acc = tl.dot(p.to(c.dtype), c, acc * fade[:, None], input_precision="ieee")
        l = l * fade + tl.sum(p, 1)
        m = m_new
    if not SPLIT:
        tl.store(out, (acc / l[:, None]).to(OUT.dtype.element_ty), mask=real)
    else:
        part = (split * batch + b) * H + head
        tl.store(SM + part, m, mask=head < H)
        tl.store(SL + part, l, mask=head < H)
        tl.store(SACC + part[:, None] * L + d[None, :], acc, mask=real)


def latent_attention(
    batch: DecodeBatch, rules: Rules, partials: Partials, q_BHD: torch.Tensor, k_B1D: torch.Tensor, keys: torch.Tensor,
    out_BHL: torch.Tensor,
) -> None:  # fmt: skip
    """Store the new keys and attend. Rows of q and k have contiguous elements; no window, soft cap or sink."""
    assert rules.plain and rules.window is None, "no family with latents asks for more"
    b, heads, size = q_BHD.shape
    latent = out_BHL.shape[2]
    splits = splits_for(b, 1)
    split = (partials.split_m, partials.split_l, partials.split_acc)
    padded = max(16, triton.next_power_of_2(latent))
    _decode_latent[(b, triton.cdiv(heads, HEADS_OF_A_PROGRAM), splits)](
        q_BHD, q_BHD.stride(0), q_BHD.stride(1), k_B1D, k_B1D.stride(0), keys, batch.pages_RP, batch.pages_RP.stride(0),
        batch.index_B, batch.positions_R, batch.done_R, *split, out_BHL, b, splits, rules.scale, H=heads, HB=HEADS_OF_A_PROGRAM,
        L=latent, LP=padded, R=size - latent, RP=max(16, triton.next_power_of_2(size - latent)), PAGE=batch.page_tokens, T=TILE,
        SPLIT=splits > 1, num_warps=8, **launch_options(),
    )  # fmt: skip
    if splits > 1:
        _merge[(b, heads)](
            *split, q_BHD, batch.index_B, batch.done_R, out_BHL, b, splits, H=heads, DV=latent, DVP=padded, MOST=MAX_SPLITS,
            SINK=False, num_warps=1, **launch_options(),
        )  # fmt: skip
