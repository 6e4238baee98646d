"""Bytes that a micro-batch of the update keeps alive, and the most that exist at one time beside models and optimizer.

For the fused layers the figures are counted from what model/layer.py, head.py and packed.py allocate: a test runs that code with
kernels that only allocate, over random shapes, and compares. For a model's own modules they are what autograd saves for
transformers' usual layers. Both are affine in the tokens of a micro-batch, so that two measurements on a device correct them
(run/calibrate.py).

Shapes: T tokens of a packed row, prompts once; R of them predict a token that is trained on; S keys that attention sees, where
prompts are laid out once a sample. E hidden, X queries, keys and values together, F feed-forward, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from trimtab.config.run import Recompute
from trimtab.model.sizes import HEAD_TILE_VOCAB, TOKEN_SUM_PROGRAMS
from trimtab.plan.shape import Block, ModelShape


@dataclass(frozen=True)
class MicroBatchSize:
    """A micro-batch."""

    tokens: int
    predicted: int
    seen: int
    segments: int
    """Prompts and samples."""
    pairs: int = 0
    """Pairs of a query and a key, over all segments."""
    row: int = 0
    """Tokens of the whole row, of which these are what one of several ranks has; 0: they are all."""

    @classmethod
    def of_groups(cls, groups: int, prompt: int, samples: int, completion: int) -> MicroBatchSize:
        """Whole groups: each prompt once, and all tokens of each sample but the last; they see their prompt again."""
        own = completion - 1
        return cls(
            groups * (prompt + samples * own),
            groups * samples * completion,
            groups * (prompt + samples * (prompt + own)),
            groups * (samples + 1),
            groups * (prompt * prompt + samples * own * (prompt + own)),
        )

    def times(self, factor: float) -> MicroBatchSize:
        return MicroBatchSize(*(math.ceil(factor * getattr(self, field.name)) for field in fields(self)))

    @property
    def numbers(self) -> int:
        """Bytes of positions, targets, weights and the like."""
        return 24 * self.tokens + 64 * self.predicted + 24 * self.seen


@dataclass(frozen=True)
class UpdatePath:
    """How the update computes."""

    itemsize: int
    fused: bool
    recompute: Recompute
    chunk: int
    """`run.logprob_chunk`."""
    tiled_head: bool
    """Log-probs come from kernels that store no logits."""
    rank: int = 0
    """Rank of the adapters on every linear layer, under which weights have no gradient; 0: there are none."""
    away: bool = False
    """Layers' inputs wait in host memory."""
    liger: bool = False
    """The model's modules run Liger's kernels."""


def kept_by_layer(shape: ModelShape, block: Block, row: MicroBatchSize, path: UpdatePath) -> int:
    """Bytes that a layer keeps from its forward pass to its backward pass."""
    T, E, s = row.tokens, shape.hidden, path.itemsize
    if not path.fused:
        return _kept_by_modules(shape, block, row, path)
    if path.recompute is True:
        return 0 if path.away else 4 * E * T
    attention = s * block.projected * (2 if block.head_norm else 1) + s * block.attended + 4 * block.heads
    residuals = 8 * E + 16 + (2 * s * E if block.sandwich else 0)
    gathered = _keys_and_scores(block, row, s)
    low = s * path.rank
    if block.experts:
        # Adapters on experts have an image of each expert that a token uses.
        if path.recompute == "some":
            return T * (attention + residuals + 4 * low) + gathered
        return T * (attention + residuals + 2 * s * E + _kept_by_experts(block, path) + 4 * low) + gathered
    if path.recompute == "some":
        return T * (attention + residuals + 5 * low) + gathered
    return T * (attention + residuals + 2 * s * E + 2 * s * block.width + 7 * low) + gathered


def _kept_by_experts(block: Block, path: UpdatePath) -> int:
    """Bytes of a token: gate and up of each of its experts and of those that all tokens use, their order, and what the router
    computes in float32."""
    s, used = path.itemsize, block.experts_used
    pairs = used * (2 * s * block.width + 3 * 8 + s + 2 * s * path.rank)
    return pairs + 4 * s * block.shared_width + 4 * block.experts


def _backward_of_experts(shape: ModelShape, block: Block, path: UpdatePath) -> int:
    """Bytes of a token: the gradient of the output laid out for each of its experts, then the input; between the two products the
    gated part, its factors and their gradients."""
    s, E, F, used = path.itemsize, shape.hidden, block.width, block.experts_used
    return used * s * max(E + 5 * F, 2 * E + 2 * F, 7 * F) + 4 * s * block.shared_width


def _kept_by_modules(shape: ModelShape, block: Block, row: MicroBatchSize, path: UpdatePath) -> int:
    T, E, s = row.tokens, shape.hidden, path.itemsize
    if path.recompute:
        return 0 if path.away else s * E * T
    # A norm keeps its input and its output, and transformers' also its input in float32; a gated product keeps gate, up and
    # result, and transformers' also the activated gate. Liger's keep neither of these extras.
    again = 0 if path.liger else 4 if s < 4 else s
    norms = (4 if block.sandwich else 2) * (again + 2 * s) * E
    heads = (
        s * (block.projected + block.attended) + 4 * block.heads + (2 * s * block.projected if block.head_norm else 0)
    )
    heads += 0 if block.mixing is None else block.mixing.kept_bytes(s)
    wide = (3 if path.liger else 4) * s * block.used_width
    if block.experts:
        wide = _kept_by_experts(block, path) + 4 * s * block.shared_width
    return 0 if path.away else T * (norms + heads + wide + 7 * s * path.rank) + _keys_and_scores(block, row, s)


def _keys_and_scores(block: Block, row: MicroBatchSize, itemsize: int) -> int:
    """Bytes of keys and values laid out for every segment, and of scores where no fused kernel computes the attention."""
    laid_out = itemsize * block.kv_elements * row.seen if row.seen != row.tokens else 0
    if row.row:  # queries, keys, values and results as they were exchanged
        laid_out += itemsize * (block.projected + block.attended) * row.tokens
    return laid_out + (row.pairs * block.heads * _score_bytes(itemsize) if block.dense else 0)


def _exchanged(block: Block, row: MicroBatchSize, itemsize: int) -> int:
    """Bytes of what ranks that share a row exchange in a layer, at a time: what is sent, what is received, and their gradients;
    or the keys and values of the whole row, and theirs."""
    if not row.row:
        return 0
    tokens = 4 * (block.projected + block.attended) * row.tokens
    return itemsize * max(tokens, 2 * block.kv_elements * row.row)


def _score_bytes(itemsize: int) -> int:
    """Bytes of one pair's score in one head: before and after the softmax in float32, and rounded to half precision."""
    return 8 if itemsize >= 4 else 8 + itemsize


def backward_of_layer(shape: ModelShape, block: Block, row: MicroBatchSize, path: UpdatePath) -> int:
    """The most bytes that a layer's backward pass holds beside what was kept: what it recomputes, and gradients in between."""
    T, E, s, F = row.tokens, shape.hidden, path.itemsize, block.used_width
    again = 0
    if path.recompute is True or (path.recompute and not path.fused):
        whole = replace(path, recompute=False, away=False)
        again = kept_by_layer(shape, block, row, whole)
    elif path.recompute == "some":
        again = T * (2 * s * E + 2 * s * F + 2 * s * path.rank)
        if block.experts:
            again = T * (2 * s * E + _kept_by_experts(block, path))
    scores = _score_bytes(s) * block.heads * row.pairs if block.dense and not again else 0
    keys = s * block.kv_elements * row.seen + _exchanged(block, row, s)
    if not path.fused:
        feed_forward = T * (3 * s * E + 2 * s * F)
        if block.experts:
            feed_forward = T * (3 * s * E + _backward_of_experts(shape, block, path))
        attention = T * (4 * s * E + 3 * s * block.projected) + 3 * keys
        # Gradients of what a chunk keeps exist beside it, for one operation after the other.
        attention += 0 if block.mixing is None else T * block.mixing.kept_bytes(s) // 2
        return again + max(feed_forward, attention + scores)
    feed_forward = T * (2 * s * E + 4 * E + 4 * s * F)
    if block.experts:
        feed_forward = T * (2 * s * E + 4 * E + _backward_of_experts(shape, block, path))
    norm = T * (3 * s * E + 8 * E) + 4 * E * min(T, TOKEN_SUM_PROGRAMS) * (2 if block.sandwich else 1)
    waiting = T * (2 * s * E + 8 * E + s * block.attended)
    expanded = 2 * s * block.query_width * row.seen if block.heads != block.kv_heads else 0
    sums = 4 * (T + 128 * row.segments) * (block.query_width + block.heads)
    flash = sums + T * s * block.query_width + keys + expanded
    turned = T * (s * E + 2 * s * block.projected)
    return again + max(feed_forward, norm, waiting + flash + scores, waiting + turned)


def head(shape: ModelShape, row: MicroBatchSize, path: UpdatePath) -> tuple[int, int]:
    """Bytes that the log-prob head keeps for its backward pass, and the most that either of its passes needs beside them."""
    R, E, V, s = row.predicted, shape.hidden, shape.vocabulary, path.itemsize
    numbers = 4 * max(1, s // 4)
    kept = R * s * E
    chunk = min(path.chunk, R)
    if path.tiled_head:
        forward = 3 * 4 * R * -(-V // HEAD_TILE_VOCAB)
        backward = R * s * E + s * chunk * -(-V // 8) * 8 + chunk * s * E
    else:
        forward = 3 * numbers * chunk * V + (numbers * V * E if s < 4 else 0)
        backward = R * s * E + chunk * V * (3 * numbers + s) + (numbers * V * E if s < 4 else 0)
    return kept, max(forward, backward)


def update_peak(shape: ModelShape, row: MicroBatchSize, path: UpdatePath) -> dict[str, int]:
    """Bytes by component at the fullest moment of a micro-batch's forward and backward passes, beside weights and gradients."""
    T, E, s = row.tokens, shape.hidden, path.itemsize
    kept = sum(count * kept_by_layer(shape, block, row, path) for block, count in shape.kinds.items())
    if not (path.fused and path.recompute is True):
        kept += 4 * E * T if path.fused else s * E * T
    stays, head_work = head(shape, row, path)
    layer_work = T * s * E + max(backward_of_layer(shape, block, row, path) for block in shape.kinds)
    if stays + head_work >= layer_work:
        return {"activations": kept + row.numbers, "log-prob head": stays + head_work, "backward work": 0}
    return {"activations": kept + row.numbers, "log-prob head": 0, "backward work": layer_work}


def score_peak(shape: ModelShape, row: MicroBatchSize, path: UpdatePath) -> dict[str, int]:
    """The same for a pass without gradients: a layer or two at a time, and the head's forward pass."""
    T, E, s = row.tokens, shape.hidden, path.itemsize
    block = max(shape.kinds, key=lambda b: (b.mixing is not None, b.projected + 2 * b.used_width))
    full = UpdatePath(s, path.fused, False, path.chunk, path.tiled_head, path.rank)
    work = kept_by_layer(shape, block, row, full) + T * (4 + s) * E + T * s * block.used_width
    work += max(T * s * b.pair_elements * E for b in shape.kinds)
    work += _exchanged(block, row, s)
    rows, _ = head(shape, row, path)
    chunk = min(path.chunk, row.predicted)
    logits = (
        12 * row.predicted * -(-shape.vocabulary // HEAD_TILE_VOCAB)
        if path.tiled_head
        else 12 * chunk * shape.vocabulary
    )
    return {"activations": work, "log-prob head": rows + logits}
