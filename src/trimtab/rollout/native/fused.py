"""The decoder layers of a model in a few launches each: products through cuBLAS (of few rows, through a kernel of Trimtab's), and
everything between them through Trimtab's kernels.

The weights are the trainer's (model/parts.py), so an optimizer step is seen at once. The engine compares the log-probs with those
of the model's own forward before a body is used.

Shapes: B batch entries, E hidden size, F feed-forward size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from trimtab.model.kernels.shared import gated, whole_norms
from trimtab.model.kernels.train import rope
from trimtab.model.norms import Norm, Rotary
from trimtab.model.parts import LayerParts, Linears, QuantisedLinears, read_parts, rotary_tables, run_mixture
from trimtab.model.policy import Policy
from trimtab.model.shapes import LayerShape
from trimtab.model.sizes import MERGE_CHUNK_ELEMENTS
from trimtab.rollout.native.arena import piece_bytes
from trimtab.rollout.native.cache import Empty, KVCache, PrefillPlan
from trimtab.rollout.native.kernels.attention import DecodeBatch, DecodeShape, Partials, decode_attention
from trimtab.rollout.native.kernels.layers import embed, residual_norm
from trimtab.rollout.native.kernels.skinny import MAX_ROWS, Cut, cut_for, most_rows, serves, skinny

AddUp = Callable[[torch.Tensor], torch.Tensor]


class Product:
    """x W^T + b, with what adapters add to it.

    Adapters are merged into a copy of the weights where there is room for one (`make_room`), or else applied beside them; both
    are brought up to date by `refresh`.
    """

    def __init__(self, linears: Linears) -> None:
        self.linears, self.bias, self.adapters = linears, linears.bias, linears.adapters
        self.outputs, self.inputs = linears.size
        self._merged: torch.Tensor | None = None
        self._downs: torch.Tensor | None = None
        self._ups: list[torch.Tensor] = []

    @property
    def beside(self) -> bool:
        """Adapters are applied beside the weights."""
        return self._downs is not None

    @property
    def quantised(self) -> bool:
        """The weights are in codes: adapters are applied beside them, and no copy of them is made."""
        return isinstance(self.linears, QuantisedLinears)

    @property
    def weight(self) -> torch.Tensor:
        return self.linears.weight

    @property
    def streams(self) -> bool:
        """A product of few rows has its own kernel."""
        return not self.beside and not self.quantised and serves(self.weight)

    @property
    def mergeable_bytes(self) -> int:
        """Bytes of a copy that adapters are merged into."""
        return piece_bytes(self.weight.shape, self.weight.dtype) if self.adapters and not self.quantised else 0

    def __call__(self, x_BI: torch.Tensor, out_BO: torch.Tensor | None = None) -> torch.Tensor:
        if self._merged is None:
            out_BO = self.linears.product(x_BI, out_BO)
        elif self.bias is None:
            out_BO = torch.mm(x_BI, self._merged.t(), out=out_BO)
        else:
            out_BO = torch.addmm(self.bias, x_BI, self._merged.t(), out=out_BO)
        if self._downs is not None:
            low = torch.mm(x_BI, self._downs.t()).split([a.a.out_features for a in self.adapters], 1)
            for adapter, part, up in zip(self.adapters, low, self._ups):
                out_BO[:, adapter.start : adapter.end].addmm_(part, up.t())
        return out_BO

    def few(
        self, x_BI: torch.Tensor, out: torch.Tensor, activation: int | None = None, whole: bool = True
    ) -> torch.Tensor:
        """The product of a few rows, with no adapters beside it: [S, B, O] parts of a sum, or one where it must be `whole`."""
        assert self._downs is None
        weight = self.weight if self._merged is None else self._merged
        cut = self.cut(x_BI.shape[0], activation is not None, whole)
        return skinny(x_BI, weight, self.bias, out, cut, activation)

    def cut(self, rows: int, gated: bool = False, whole: bool = False) -> Cut:
        outputs = self.outputs // 2 if gated else self.outputs
        return cut_for(rows, outputs, self.inputs, self.linears.dtype.itemsize, gated, whole)

    def make_room(self, empty: Empty | None) -> None:
        """Make room for a copy that adapters are merged into, or give it up (None). `refresh` fills it."""
        merges = empty is not None and self.mergeable_bytes > 0
        self._merged = empty(tuple(self.weight.shape), self.weight.dtype) if empty is not None and merges else None

    @torch.no_grad()
    def refresh(self) -> None:
        """Take over the adapters' current values."""
        if not self.adapters:
            return
        if self._merged is not None:
            self._downs, self._ups = None, []
            self._merged.copy_(self.weight)
            rows = max(1, MERGE_CHUNK_ELEMENTS // self.inputs)
            for start, end in {(a.start, a.end) for a in self.adapters}:
                for first in range(start, end, rows):
                    last = min(end, first + rows)
                    part = self.weight[first:last].to(torch.float32, copy=True)
                    for a in self.adapters:
                        if a.start == start:
                            up = a.b.weight[first - start : last - start].float() * a.scale
                            part += up @ a.a.weight.float()
                    self._merged[first:last] = part
        else:
            dtype = self.linears.dtype
            downs = torch.cat([a.a.weight for a in self.adapters]).to(dtype)
            ups = [(a.b.weight.float() * a.scale).to(dtype) for a in self.adapters]
            if self._downs is None:
                self._downs, self._ups = downs, ups
            else:
                for old, new in zip((self._downs, *self._ups), (downs, *ups)):
                    old.copy_(new)  # in place: graphs know the addresses


@dataclass(frozen=True)
class FusedDense:
    """The products of a dense feed-forward part."""

    gate_up: Product
    activation: int
    down: Product


class FusedLayer:
    """One decoder layer with its products."""

    def __init__(self, parts: LayerParts) -> None:
        self.parts = parts
        self.qkv, self.output = Product(parts.qkv), Product(parts.output)
        dense = parts.dense
        self.dense = (
            None if dense is None else FusedDense(Product(dense.gate_up), dense.activation, Product(dense.down))
        )
        self.decode_shape = DecodeShape.of(parts.shape)

    @property
    def few_rows(self) -> int:
        """Most rows that its products have their own kernel for: 0 with adapters beside them, or weights at odd addresses."""
        widest = self.output.inputs if self.dense is None else self.dense.down.inputs
        return most_rows(widest) if all(p.streams for p in self.products) else 0

    @property
    def products(self) -> list[Product]:
        return [self.qkv, self.output, *self.wide]

    @property
    def wide(self) -> list[Product]:
        """Those of a dense feed-forward part."""
        return [] if self.dense is None else [self.dense.gate_up, self.dense.down]

    def feed(self, x_BE: torch.Tensor, y_BE: torch.Tensor, space: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """[B, E]: the feed-forward part of many rows. `space`: a table of so many columns to work in."""
        if self.dense is None:
            assert self.parts.mixture is not None
            return run_mixture(self.parts.mixture, x_BE)
        narrow = space(self.dense.down.inputs)
        gated(self.dense.gate_up(x_BE), narrow, self.dense.activation)
        return self.dense.down(narrow, y_BE)


class Workspace:
    """Every intermediate of a decode step of up to `batch` entries, used by all layers in turn."""

    def __init__(self, batch: int, layers: list[FusedLayer], hidden: int, dtype: torch.dtype, empty: Empty) -> None:
        self.residual = empty((batch, hidden), torch.float32)
        self.x, self.y = (empty((batch, hidden), dtype) for _ in range(2))
        self.qkv = empty((batch * max(l.qkv.outputs for l in layers),), dtype)
        self.head_scales = empty((2, batch), torch.float32)
        self.attended = empty((batch * max(l.output.inputs for l in layers),), dtype)
        dense = [l.dense for l in layers if l.dense is not None]
        self.gate_up = empty((batch * max((d.gate_up.outputs for d in dense), default=0),), dtype)
        self.gated = empty((batch * max((d.down.inputs for d in dense), default=0),), dtype)
        few = range(1, min(batch, MAX_ROWS) + 1)
        parts = max(
            rows * p.cut(rows).parts * p.outputs for l in layers for p in (l.output, *l.wide[1:]) for rows in few
        )
        self.parts = empty((parts,), torch.float32)
        self.partials = Partials(batch, [l.decode_shape for l in layers], empty)


class FusedBody:
    """Decode steps of a model whose layers are known."""

    def __init__(self, policy: Policy, shapes: dict[int, LayerShape], add_up: AddUp | None = None) -> None:
        """`add_up`: where layers are cut over devices, the sum of what each has of an output, in place."""
        self.policy, self._add_up = policy, add_up
        parts = read_parts(policy, shapes)
        self.layers = [FusedLayer(layer) for layer in parts.layers]
        self.final, self.table, self.factor = parts.final, parts.embedding.data, parts.factor
        self.rotaries: dict[str, Rotary] = {}

    @property
    def products(self) -> list[Product]:
        return [p for layer in self.layers for p in layer.products]

    @property
    def adapted_bytes(self) -> int:
        """Bytes of the weights that adapters add to: what a merged copy takes."""
        return sum(p.mergeable_bytes for p in self.products)

    def make_room(self, empty: Empty | None) -> None:
        for product in self.products:
            product.make_room(empty)

    def refresh(self) -> None:
        """See the adapters' current values; the weights themselves are always current."""
        for product in self.products:
            product.refresh()

    def set_positions(self, positions: int) -> bool:
        """Make rotary tables for at least this many positions; True if they are new."""
        before = self.rotaries
        self.rotaries = rotary_tables(self.policy, (l.parts.kind for l in self.layers), positions, before)
        return self.rotaries is not before

    def workspace(self, batch: int, empty: Empty) -> Workspace:
        return Workspace(batch, self.layers, self.table.shape[1], self.policy.dtype, empty)

    def decode(self, batch: DecodeBatch, tokens_R: torch.Tensor, cache: KVCache, space: Workspace) -> torch.Tensor:
        """Last hidden state of the newest token of every entry, [B, E]; its keys and values are stored."""
        b = batch.index_B.shape[0]
        residual, x, y = space.residual[:b], space.x[:b], space.y[:b]
        embed(self.table, batch.index_B, tokens_R, residual, self.factor)
        residual_norm(residual, None, x, self.layers[0].parts.before_attention)
        for index, layer in enumerate(self.layers):
            few = b <= layer.few_rows
            qkv, attended = _table(space.qkv, b, layer.qkv.outputs), _table(space.attended, b, layer.output.inputs)
            layer.qkv.few(x, qkv) if few else layer.qkv(x, qkv)
            self._attend(batch, layer, qkv, attended, cache, index, space)
            few_of_sum = few and self._add_up is None
            found = (
                layer.output.few(attended, space.parts, whole=False)
                if few_of_sum
                else self._whole(layer.output, attended, y)
            )
            _after_attention(layer.parts, residual, found, x, y)
            dense = layer.dense
            if dense is None:
                found = layer.feed(x, y, x.new_empty)
            else:
                narrow = _table(space.gated, b, dense.down.inputs)
                if few:
                    dense.gate_up.few(x, narrow, dense.activation)
                else:
                    wide = _table(space.gate_up, b, dense.gate_up.outputs)
                    gated(dense.gate_up(x, wide), narrow, dense.activation)
                few_down = few and self._add_up is None
                found = (
                    dense.down.few(narrow, space.parts, whole=False) if few_down else self._whole(dense.down, narrow, y)
                )
            residual_norm(residual, found, x, self._following(index), layer.parts.after_mlp, layer.parts.factor)
        return x

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        """Last hidden state of every token of a packed row, [T, E]; keys and values are stored."""
        x = F.embedding(tokens_T, self.table) * self.factor
        residual, y = x.to(torch.float32, copy=True), torch.empty_like(x)
        residual_norm(residual, None, x, self.layers[0].parts.before_attention)
        for index, layer in enumerate(self.layers):
            shape = layer.decode_shape
            qkv = layer.qkv(x)
            rotary, norm = self.rotaries[layer.parts.kind], layer.parts.each_head_norm
            _normalise_whole(layer.parts, qkv, qkv.new_empty((2, qkv.shape[0]), dtype=torch.float32))
            rotated = rope(qkv, positions_T, shape.heads, shape.kv_heads, rotary, norm)
            q_THD, k_TKD, v_TKD = rotated.split((shape.heads, shape.kv_heads, shape.kv_heads), 1)
            attended = plan.attend(index, q_THD, k_TKD, v_TKD, layer.parts.shape.rules)
            self._whole(layer.output, attended.flatten(1), y)
            _after_attention(layer.parts, residual, y, x, y)
            found = layer.feed(x, y, partial(_rows_like, x))
            found = found if self._add_up is None else self._add_up(found)
            residual_norm(residual, found, x, self._following(index), layer.parts.after_mlp, layer.parts.factor)
        return x

    def _whole(self, product: Product, x_BI: torch.Tensor, out_BE: torch.Tensor) -> torch.Tensor:
        found = product(x_BI, out_BE)
        return found if self._add_up is None else self._add_up(found)

    def _following(self, index: int) -> Norm | None:
        return self.final if index + 1 == len(self.layers) else self.layers[index + 1].parts.before_attention

    def _attend(
        self, batch: DecodeBatch, layer: FusedLayer, qkv: torch.Tensor, out: torch.Tensor, cache: KVCache, index: int,
        space: Workspace,
    ) -> None:  # fmt: skip
        shape = layer.decode_shape
        _normalise_whole(layer.parts, qkv, space.head_scales)
        b, q_size, k_size = qkv.shape[0], shape.heads * shape.size, shape.kv_heads * shape.size
        q_BHD = qkv[:, :q_size].unflatten(1, (shape.heads, shape.size))
        k_BKD = qkv[:, q_size : q_size + k_size].unflatten(1, (shape.kv_heads, shape.size))
        v_BKD = qkv[:, q_size + k_size :].unflatten(1, (shape.kv_heads, shape.value_size))
        decode_attention(
            batch, shape, layer.parts.shape.rules, space.partials, q_BHD, k_BKD, v_BKD, cache.keys[index], cache.values[index],
            out.view(b, shape.heads, shape.value_size), self.rotaries[layer.parts.kind],
            layer.parts.each_head_norm, cache.powers(index),
        )  # fmt: skip


def _rows_like(x: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty((x.shape[0], columns))


def _after_attention(
    parts: LayerParts, residual: torch.Tensor, found: torch.Tensor, x: torch.Tensor, spare: torch.Tensor
) -> None:
    """Add what attention gives to the residual; the feed-forward part reads its norm, or what attention has read."""
    if parts.parallel:
        residual_norm(residual, found, spare, None, None, parts.factor)
    else:
        residual_norm(residual, found, x, parts.before_mlp, parts.after_attention, parts.factor)


def _normalise_whole(parts: LayerParts, qkv_BX: torch.Tensor, scales: torch.Tensor) -> None:
    """Normalise queries and keys in place, where that is done over all heads together."""
    if parts.head_norm is not None and parts.head_norm.whole:
        whole_norms(qkv_BX, parts.head_norm, qkv_BX, scales)


def _table(space: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return space[: rows * columns].view(rows, columns)
