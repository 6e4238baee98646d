"""The decoder layers of a model in a few launches each: products through cuBLAS (or, of few rows, an own kernel), and everything
between them in own kernels.

The weights are the trainer's. Projections that read the same input (query, key, value; gate, up) are moved into one storage,
of which the model's own parameters become views: one product serves them all, and an optimizer step is seen at once.

What a layer does is read off its modules: which norms stand where, which activation, which heads are normalised, how positions
rotate. `FusedBody` raises `Unfusable` for architectures that no test compares and for what it doesn't know of the others, and the
engine compares its log-probs with those of the model's own forward before it is used.

Shapes: B batch entries, E hidden size, F feed-forward size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.model.policy import Policy
from trimtab.rollout.native.cache import Empty, KVCache, LayerShape, PrefillPlan
from trimtab.rollout.native.kernels.attention import (
    OFFSET,
    ROUNDED,
    WIDE,
    Batch,
    DecodeShape,
    HeadNorm,
    Partials,
    Rotary,
    decode_attention,
    rotate,
)  # fmt: skip
from trimtab.rollout.native.kernels.layers import GELU_TANH, SILU, Norm, embed, gated, residual_norm
from trimtab.rollout.native.kernels.skinny import MOST_ROWS, Cut, cut_for, most_rows, serves, skinny

ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH, "PytorchGELUTanh": GELU_TANH}
STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn", "proportional"}
KNOWN = {"llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite"}
"""tests/rollout/test_decode_kernels.py compares each of them. Others look alike and are not: a layer that does not rotate, or
normalises under another name, would pass a comparison of a few tokens in bfloat16."""


class Unfusable(Exception):
    """Why a model's layers are not served by the fused path."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank addition to rows [start, end) of a product: scale * B A."""

    a: nn.Linear
    b: nn.Linear
    scale: float
    start: int
    end: int


class Product:
    """x W^T + b, with what adapters add to it.

    Adapters are either merged into a copy of the weights or applied beside them; both are brought up to date by `refresh`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, adapters: list[Adapter]) -> None:
        self.weight, self.bias, self.adapters = weight, bias, adapters
        self._merged: torch.Tensor | None = None
        self._downs: torch.Tensor | None = None
        self._ups: list[torch.Tensor] = []

    @property
    def beside(self) -> bool:
        """Adapters are applied beside the weights."""
        return self._downs is not None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x_BI: torch.Tensor, out_BO: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.weight if self._merged is None else self._merged
        if self.bias is None:
            out_BO = torch.mm(x_BI, weight.t(), out=out_BO)
        else:
            out_BO = torch.addmm(self.bias, x_BI, weight.t(), out=out_BO)
        if self._downs is not None:
            low = torch.mm(x_BI, self._downs.t()).split([a.a.out_features for a in self.adapters], 1)
            for adapter, part, up in zip(self.adapters, low, self._ups):
                out_BO[:, adapter.start : adapter.end].addmm_(part, up.t())
        return out_BO

    def few(
        self, x_BI: torch.Tensor, out: torch.Tensor, activation: int | None = None, whole: bool = True
    ) -> torch.Tensor:
        """The product of a few rows without adapters beside it: [S, B, O] parts of a sum, one where it must be `whole`."""
        assert self._downs is None
        weight = self.weight if self._merged is None else self._merged
        cut = self.cut(x_BI.shape[0], activation is not None, whole)
        return skinny(x_BI, weight, self.bias, out, cut, activation)

    def cut(self, rows: int, gated: bool = False, whole: bool = False) -> Cut:
        outputs = self.outputs // 2 if gated else self.outputs
        return cut_for(rows, outputs, self.inputs, self.weight.element_size(), gated, whole)

    @torch.no_grad()
    def refresh(self, merge: bool) -> None:
        """Take over the adapters' current values."""
        if not self.adapters:
            return
        if merge:
            self._downs, self._ups = None, []
            if self._merged is None:
                self._merged = torch.empty_like(self.weight)
            self._merged.copy_(self.weight)
            for start, end in {(a.start, a.end) for a in self.adapters}:
                part = self.weight[start:end].to(torch.float32, copy=True)
                for a in self.adapters:
                    if a.start == start:
                        part += a.b.weight.float() @ a.a.weight.float() * a.scale
                self._merged[start:end] = part.to(self.weight.dtype)
        else:
            self._merged = None
            downs = torch.cat([a.a.weight for a in self.adapters]).to(self.weight.dtype)
            ups = [(a.b.weight.float() * a.scale).to(self.weight.dtype) for a in self.adapters]
            if self._downs is None:
                self._downs, self._ups = downs, ups
            else:
                for old, new in zip((self._downs, *self._ups), (downs, *ups)):
                    old.copy_(new)  # in place: graphs know the addresses


@dataclass(frozen=True)
class FusedLayer:
    """One decoder layer; norms that an architecture lacks are None."""

    kind: str
    shape: LayerShape
    before_attention: Norm | None
    qkv: Product
    head_norm: HeadNorm | None
    output: Product
    after_attention: Norm | None
    before_mlp: Norm | None
    gate_up: Product
    activation: int
    down: Product
    after_mlp: Norm | None
    factor: float

    @property
    def few_rows(self) -> int:
        """Up to how many rows its products have a kernel of their own: 0 with adapters beside them, or rows at odd addresses."""
        products = (self.qkv, self.output, self.gate_up, self.down)
        return most_rows(self.down.inputs) if all(not p.beside and serves(p.weight) for p in products) else 0

    @property
    def decode_shape(self) -> DecodeShape:
        return DecodeShape(self.shape.heads, self.shape.key[0], self.shape.key[1], self.shape.value[1])


class Workspace:
    """Every intermediate of a decode step of up to `batch` entries, used by all layers in turn."""

    def __init__(self, batch: int, layers: list[FusedLayer], hidden: int, dtype: torch.dtype, empty: Empty) -> None:
        self.residual = empty((batch, hidden), torch.float32)
        self.x, self.y = (empty((batch, hidden), dtype) for _ in range(2))
        self.qkv = empty((batch * max(l.qkv.outputs for l in layers),), dtype)
        self.attended = empty((batch * max(l.output.inputs for l in layers),), dtype)
        self.gate_up = empty((batch * max(l.gate_up.outputs for l in layers),), dtype)
        self.gated = empty((batch * max(l.down.inputs for l in layers),), dtype)
        few = range(1, min(batch, MOST_ROWS) + 1)
        parts = max(rows * p.cut(rows).parts * p.outputs for l in layers for p in (l.output, l.down) for rows in few)
        self.parts = empty((parts,), torch.float32)
        self.partials = Partials(batch, [l.decode_shape for l in layers], empty)


class FusedBody:
    """Decode steps of a model whose layers are known."""

    def __init__(self, policy: Policy, shapes: dict[int, LayerShape]) -> None:
        self.policy = policy
        body = policy.body
        if policy.config.model_type not in KNOWN:
            raise Unfusable(
                f"{policy.config.model_type} is not among the architectures that the fused layers were checked with"
            )
        missing = [name for name in ("layers", "norm", "embed_tokens") if not hasattr(body, name)]
        if missing:
            raise Unfusable(f"{type(body).__name__} has no {', '.join(missing)}")
        if len(body.layers) != len(shapes):
            raise Unfusable("it has layers without attention")
        kinds = getattr(policy.config, "layer_types", None) or ["full_attention"] * len(shapes)
        self.layers = [_read_layer(layer, shapes[i], kinds[i]) for i, layer in enumerate(body.layers)]
        self.final = _norm(body.norm)
        self.table, self.factor = _embedding(body.embed_tokens, policy)
        self.rotaries: dict[str, Rotary] = {}
        _check_rotation(body)

    @property
    def products(self) -> list[Product]:
        return [p for layer in self.layers for p in (layer.qkv, layer.output, layer.gate_up, layer.down)]

    @property
    def adapted_bytes(self) -> int:
        """Of the weights that adapters add to: what a merged copy takes."""
        return sum(p.weight.nbytes for p in self.products if p.adapters)

    def refresh(self, merge: bool) -> None:
        """See the adapters' current values; the weights themselves are always current."""
        for product in self.products:
            product.refresh(merge)

    def set_positions(self, positions: int) -> bool:
        """Know the rotation of at least so many positions; True if the tables are new."""
        if self.rotaries and next(iter(self.rotaries.values())).cos.shape[0] >= positions:
            return False
        positions = max(1024, 1 << (positions - 1).bit_length())
        self.rotaries = {kind: _rotary(self.policy, kind, positions) for kind in {l.kind for l in self.layers}}
        return True

    def workspace(self, batch: int, empty: Empty) -> Workspace:
        return Workspace(batch, self.layers, self.table.shape[1], self.policy.dtype, empty)

    def decode(self, batch: Batch, tokens_R: torch.Tensor, cache: KVCache, space: Workspace) -> torch.Tensor:
        """Last hidden state of the newest token of every entry, [B, E]; its keys and values are stored."""
        b = batch.index_B.shape[0]
        residual, x, y = space.residual[:b], space.x[:b], space.y[:b]
        embed(self.table, batch.index_B, tokens_R, residual, self.factor)
        residual_norm(residual, None, x, self.layers[0].before_attention)
        for index, layer in enumerate(self.layers):
            few = b <= layer.few_rows
            qkv, attended = _table(space.qkv, b, layer.qkv.outputs), _table(space.attended, b, layer.output.inputs)
            narrow = _table(space.gated, b, layer.down.inputs)
            layer.qkv.few(x, qkv) if few else layer.qkv(x, qkv)
            self._attend(batch, layer, qkv, attended, cache, index, space)
            found = layer.output.few(attended, space.parts, whole=False) if few else layer.output(attended, y)
            residual_norm(residual, found, x, layer.before_mlp, layer.after_attention, layer.factor)
            if few:
                layer.gate_up.few(x, narrow, layer.activation)
                found = layer.down.few(narrow, space.parts, whole=False)
            else:
                gated(layer.gate_up(x, _table(space.gate_up, b, layer.gate_up.outputs)), narrow, layer.activation)
                found = layer.down(narrow, y)
            residual_norm(residual, found, x, self._following(index), layer.after_mlp, layer.factor)
        return x

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor:
        """Last hidden state of every token of a packed row, [T, E]; keys and values are stored."""
        x = F.embedding(tokens_T, self.table) * self.factor
        residual, y = x.to(torch.float32, copy=True), torch.empty_like(x)
        residual_norm(residual, None, x, self.layers[0].before_attention)
        for index, layer in enumerate(self.layers):
            shape = layer.decode_shape
            qkv = layer.qkv(x)
            turned = rotate(qkv, positions_T, shape, self.rotaries[layer.kind], layer.head_norm)
            q_THD, k_TKD = turned.split((shape.heads, shape.kv_heads), 1)
            v_TKD = qkv[:, -shape.kv_heads * shape.value_size :].unflatten(1, (shape.kv_heads, shape.value_size))
            attended = plan.attend(index, q_THD, k_TKD, v_TKD, layer.shape.rules)
            layer.output(attended.flatten(1), y)
            residual_norm(residual, y, x, layer.before_mlp, layer.after_attention, layer.factor)
            narrow = x.new_empty((x.shape[0], layer.down.inputs))
            gated(layer.gate_up(x), narrow, layer.activation)
            layer.down(narrow, y)
            residual_norm(residual, y, x, self._following(index), layer.after_mlp, layer.factor)
        return x

    def _following(self, index: int) -> Norm | None:
        return self.final if index + 1 == len(self.layers) else self.layers[index + 1].before_attention

    def _attend(
        self, batch: Batch, layer: FusedLayer, qkv: torch.Tensor, out: torch.Tensor, cache: KVCache, index: int,
        space: Workspace,
    ) -> None:  # fmt: skip
        shape = layer.decode_shape
        b, q_size, k_size = qkv.shape[0], shape.heads * shape.size, shape.kv_heads * shape.size
        q_BHD = qkv[:, :q_size].unflatten(1, (shape.heads, shape.size))
        k_BKD = qkv[:, q_size : q_size + k_size].unflatten(1, (shape.kv_heads, shape.size))
        v_BKD = qkv[:, q_size + k_size :].unflatten(1, (shape.kv_heads, shape.value_size))
        decode_attention(
            batch, shape, layer.shape.rules, space.partials, q_BHD, k_BKD, v_BKD, cache.keys[index], cache.values[index],
            out.view(b, shape.heads, shape.value_size), self.rotaries[layer.kind], layer.head_norm,
        )  # fmt: skip


def _table(space: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return space[: rows * columns].view(rows, columns)


def _read_layer(layer: nn.Module, shape: LayerShape, kind: str) -> FusedLayer:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    norms = {
        name: _norm(getattr(layer, name)) if hasattr(layer, name) else None
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
    }
    sandwiched = norms["post_feedforward_layernorm"] is not None
    after_attention = norms["post_attention_layernorm"] if sandwiched else None
    before_mlp = norms["pre_feedforward_layernorm"] if sandwiched else norms["post_attention_layernorm"]
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))).__name__)
    if activation is None:
        raise Unfusable(f"its feed-forward layers ({type(mlp).__name__}) have an activation without a kernel")
    return FusedLayer(
        kind,
        shape,
        norms["input_layernorm"],
        _joined(attention, ["qkv_proj"], ["q_proj", "k_proj", "v_proj"]),
        _head_norm(attention, shape),
        _joined(attention, ["o_proj"], ["dense"]),
        after_attention,
        before_mlp,
        _joined(mlp, ["gate_up_proj"], ["gate_proj", "up_proj"]),
        activation,
        _joined(mlp, ["down_proj"]),
        norms["post_feedforward_layernorm"],
        float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _child(module: nn.Module, name: str) -> nn.Module:
    child = getattr(module, name, None)
    if not isinstance(child, nn.Module):
        raise Unfusable(f"{type(module).__name__} has no {name}")
    return child


def _joined(owner: nn.Module, *choices: list[str]) -> Product:
    """The product of the first choice of linear layers that the owner has, their weights in one storage."""
    for names in choices:
        modules = [getattr(owner, name, None) for name in names]
        if any(module is None for module in modules):
            continue
        parts = [_linear(module) for module in modules]  # type: ignore[arg-type]
        linears = [linear for linear, _ in parts]
        biases = [linear.bias for linear in linears]
        if len({bias is None for bias in biases}) > 1:
            raise Unfusable(f"only some of {', '.join(names)} have a bias")
        adapters, start = [], 0
        for linear, added in parts:
            end = start + linear.out_features
            adapters += [Adapter(a, b, scale, start, end) for a, b, scale in added]
            start = end
        return Product(join([l.weight for l in linears]), None if biases[0] is None else join(biases), adapters)
    raise Unfusable(f"{type(owner).__name__} has no linear layers {' or '.join(', '.join(c) for c in choices)}")


def _linear(module: nn.Module) -> tuple[nn.Linear, list[tuple[nn.Linear, nn.Linear, float]]]:
    """A linear layer and what PEFT's LoRA adds to it: (A, B, scale) of each active adapter."""
    if type(module) is nn.Linear:
        return module, []
    base: Any = getattr(module, "base_layer", None)
    if type(base) is not nn.Linear or not hasattr(module, "lora_A"):
        raise Unfusable(f"{type(module).__name__} is not a linear layer that is known")
    layer: Any = module
    if layer.merged or any(layer.use_dora.get(name, False) for name in layer.active_adapters):
        raise Unfusable("its adapters are merged already, or are not plain LoRA")
    if layer.disable_adapters:
        return base, []
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if any(layer.lora_B[name].bias is not None for name in active):
        raise Unfusable("its adapters have a bias")
    return base, [(layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])) for name in active]


@torch.no_grad()
def join(parameters: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor that holds all of them; each goes on as a view of its part. Nothing is copied if they lie so already."""
    first = parameters[0].data
    ends, together = first.data_ptr(), True
    for parameter in parameters:
        together &= parameter.data_ptr() == ends and parameter.is_contiguous()
        together &= parameter.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        ends += parameter.numel() * parameter.element_size()
    rows = sum(p.shape[0] for p in parameters)
    if together:
        return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
    whole = torch.cat([p.data for p in parameters])
    for parameter, part in zip(parameters, whole.split([p.shape[0] for p in parameters])):
        parameter.data = part
    return whole


def _norm(module: nn.Module) -> Norm:
    """An RMS norm as the module computes it: which way of applying the weight is seen by trying."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or eps is None or getattr(module, "bias", None) is not None:
        raise Unfusable(f"{type(module).__name__} is not an RMS norm")
    x = torch.linspace(-2.0, 3.0, 4 * weight.shape[0], device=weight.device).view(4, -1).to(weight.dtype)
    with torch.no_grad():
        found = module(x).float()
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    tries = {
        ROUNDED: wide.to(x.dtype) * weight.data,
        WIDE: (wide * weight.data.float()).to(x.dtype),
        OFFSET: (wide * (1.0 + weight.data.float())).to(x.dtype),
    }
    gaps = {kind: (found - guess.float()).abs().max().item() for kind, guess in tries.items()}
    kind = min(gaps, key=lambda k: gaps[k])
    if not gaps[kind] <= 0.02 * found.abs().max().item():
        raise Unfusable(f"{type(module).__name__} is not an RMS norm that has a kernel")
    return Norm(weight.data, float(eps), kind)


def _head_norm(attention: nn.Module, shape: LayerShape) -> HeadNorm | None:
    modules = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if modules[0] is None and modules[1] is None:
        return None
    if modules[0] is None or modules[1] is None:
        raise Unfusable("only queries or only keys are normalised")
    query, key = _norm(modules[0]), _norm(modules[1])
    if query.weight.numel() != shape.key[1] or key.weight.numel() != shape.key[1]:
        raise Unfusable("queries are normalised over all heads together")
    if (query.eps, query.kind) != (key.eps, key.kind):
        raise Unfusable("queries and keys are normalised differently")
    return HeadNorm(query.weight, key.weight, query.eps, query.kind)


def _embedding(module: nn.Module, policy: Policy) -> tuple[torch.Tensor, float]:
    if not isinstance(module, nn.Embedding):
        raise Unfusable(f"its embedding is a {type(module).__name__}, not a plain table")
    factor = float(getattr(policy.config, "embedding_multiplier", None) or 1.0)
    scale = getattr(module, "embed_scale", None)
    if scale is not None:
        factor *= float(torch.as_tensor(scale).to(policy.dtype))
    return module.weight.data, factor


def _check_rotation(body: Any) -> None:
    rotary = getattr(body, "rotary_emb", None)
    if rotary is None:
        raise Unfusable("it has no rotary embedding")
    types = getattr(rotary, "rope_type", "default")
    unknown = set(types.values() if isinstance(types, dict) else [types]) - STATIC_ROTATIONS
    if unknown:
        raise Unfusable(f"its rotary embedding is of type {', '.join(sorted(map(str, unknown)))}")


@torch.no_grad()
def _rotary(policy: Policy, kind: str, positions: int) -> Rotary:
    """The model's own cos and sin for positions 0, 1, …"""
    rotary = policy.body.rotary_emb
    at = torch.arange(positions, device=policy.device)[None]
    like = torch.empty(1, dtype=policy.dtype, device=policy.device)
    takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(like, at, kind) if takes_kind else rotary(like, at)
    return Rotary(cos[0].contiguous(), sin[0].contiguous())
