"""The parts of a model's decoder layers, read off its modules: which norms stand where, which activation, which heads are
normalised, how positions rotate. Fused paths, of the engine and of the trainer, are built from them.

Projections that read the same input (query, key, value; gate, up) lie side by side in the weight store (weights.py): one product
serves them all, and an optimizer step is seen at once.

`read_parts` raises `Unfusable` for architectures that no test compares, and for what it doesn't know of the others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from trimtab.model.codes import QuantisedLinear
from trimtab.model.experts import expert_modules
from trimtab.model.norms import CENTRED, OFFSET, ROUNDED, WIDE, HeadNorm, Norm, Rotary
from trimtab.model.policy import Policy
from trimtab.model.shapes import LayerShape
from trimtab.model.sizes import BLOCK, FUSED_FAMILIES
from trimtab.model.weights import WeightStore

SILU, GELU_TANH = 0, 1
ACTIVATIONS = {"SiLU": SILU, "SiLUActivation": SILU, "GELUTanh": GELU_TANH, "PytorchGELUTanh": GELU_TANH}
STATIC_ROTATIONS = {"default", "linear", "llama3", "yarn", "proportional"}
"""tests/rollout/test_decode_kernels.py compares each of them. Others look alike and are not: a layer that does not rotate, or
normalises under another name, would pass a comparison of a few tokens in bfloat16."""
NOT_ROTATED = "not rotated"
"""The kind of a layer whose queries and keys are not turned."""
NEIGHBOURS = {"glm", "glm4", "cohere", "cohere2", "ernie4_5", "helium"}
"""Families in which neighbouring dimensions turn together."""
FROM_HALVES = {"glm", "glm4", "ernie4_5", "helium"}
"""Of these, the ones whose tables are made for halves; each column is used for two neighbours."""
NORM_PLACES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
NORM_NAMES = (
    ("input_layernorm", "", "post_attention_layernorm", ""),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # glm4
    ("", "post_attention_layernorm", "", "post_feedforward_layernorm"),  # olmo2, olmo3, exaone4
    ("input_layernorm", "", "", ""),  # cohere
    ("input_layernorm", "", "pre_feedforward_layernorm", ""),  # vaultgemma
)
"""What decoder layers call their norms, by place."""
SERVED_LINEARS = (nn.Linear, QuantisedLinear)
_norm_kinds: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""Of norms that were tried. They are read again, without a kernel, when their weights have been put elsewhere."""


class Unfusable(Exception):
    """Why a model's layers are not served by a fused path."""


@dataclass(frozen=True)
class Adapter:
    """A low-rank addition to rows [start, end) of a product: scale * B A."""

    a: nn.Linear
    b: nn.Linear
    scale: float
    start: int
    end: int


class Linears:
    """Linear layers that read one input, their weights in one storage, and the adapters beside them."""

    def __init__(
        self,
        store: WeightStore,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None,
        adapters: list[Adapter],
    ) -> None:
        self.weights, self.biases, self.adapters = weights, biases, adapters
        self.bias = None if biases is None else _side_by_side(store, biases)
        self._weight = self._join(store)

    def _join(self, store: WeightStore) -> torch.Tensor | None:
        return _side_by_side(store, self.weights)

    @property
    def weight(self) -> torch.Tensor:
        """The weights of all, stacked."""
        assert self._weight is not None
        return self._weight

    @property
    def dtype(self) -> torch.dtype:
        """What the products compute in."""
        return self.weights[0].dtype

    @property
    def size(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return sum(weight.shape[0] for weight in self.weights), self.weights[0].shape[1]

    def product(self, x_TI: torch.Tensor, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b, adapters left out."""
        if self.bias is None:
            return torch.mm(x_TI, self.weight.t(), out=out_TO)
        return torch.addmm(self.bias, x_TI, self.weight.t(), out=out_TO)

    def input_gradient(self, dout_TO: torch.Tensor) -> torch.Tensor:
        """The gradient of x, adapters left out."""
        return dout_TO @ self.weight


class QuantisedLinears(Linears):
    """The same with weights in codes, each by itself: they are frozen, and no product of theirs is larger than its matrix."""

    def __init__(
        self,
        store: WeightStore,
        linears: Sequence[QuantisedLinear],
        biases: Sequence[torch.Tensor] | None,
        adapters: list[Adapter],
    ) -> None:
        self.linears = linears
        super().__init__(store, [], biases, adapters)

    def _join(self, store: WeightStore) -> torch.Tensor | None:
        return None

    @property
    def dtype(self) -> torch.dtype:
        return self.linears[0].computes_in

    @property
    def size(self) -> tuple[int, int]:
        return sum(linear.out_features for linear in self.linears), self.linears[0].in_features

    def product(self, x_TI: torch.Tensor, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        out = x_TI.new_empty((x_TI.shape[0], self.size[0])) if out_TO is None else out_TO
        for linear, part in zip(self.linears, out.split([linear.out_features for linear in self.linears], 1)):
            linear.product(x_TI, part)
        return out if self.bias is None else out.add_(self.bias)

    def input_gradient(self, dout_TO: torch.Tensor) -> torch.Tensor:
        parts = dout_TO.split([linear.out_features for linear in self.linears], 1)
        dx, *others = (linear.input_gradient(part) for linear, part in zip(self.linears, parts))
        for other in others:
            dx += other
        return dx


class GatheredLinears(Linears):
    """The same where ranks hold weights in parts: they are there only while their layer runs, each in memory of its own, and are
    copied together for every product. That is little beside the product itself."""

    def _join(self, store: WeightStore) -> torch.Tensor | None:
        return None

    @property
    def weight(self) -> torch.Tensor:
        return self.weights[0] if len(self.weights) == 1 else torch.cat(list(self.weights))


def _side_by_side(store: WeightStore, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    joined = store.joined(tensors)
    if joined is None:
        raise Unfusable(
            f"projections that share an input have sizes that are not multiples of {BLOCK}, so they cannot be joined"
        )
    return joined


@dataclass(frozen=True)
class DensePart:
    """A feed-forward part that every token goes through."""

    gate_up: Linears
    activation: int
    down: Linears


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer; norms that an architecture lacks are None."""

    kind: str
    shape: LayerShape
    before_attention: Norm | None
    qkv: Linears
    head_norm: HeadNorm | None
    output: Linears
    after_attention: Norm | None
    before_mlp: Norm | None
    dense: DensePart | None
    mixture: nn.Module | None
    """The layer's own module of router and experts (experts.py), where it has those instead of a dense part."""
    after_mlp: Norm | None
    factor: float
    """What is added to the residual is multiplied by this."""
    parallel: bool = False
    """Attention and feed-forward part read the same norm, and are added together."""

    @property
    def each_head_norm(self) -> HeadNorm | None:
        """The norm of heads one by one."""
        return None if self.head_norm is None or self.head_norm.whole else self.head_norm

    @property
    def linears(self) -> list[Linears]:
        dense = [] if self.dense is None else [self.dense.gate_up, self.dense.down]
        return [self.qkv, self.output, *dense]


@dataclass(frozen=True)
class ModelParts:
    """From the embedding to the last norm."""

    embedding: torch.Tensor
    padding: int | None
    """The token whose embedding does not learn from being read."""
    factor: float
    """Embeddings are multiplied by this."""
    layers: list[LayerParts]
    final: Norm


class Watch:
    """Sees what parts rely on beyond the values of parameters: where these are, and which adapters are active."""

    def __init__(self, model: nn.Module) -> None:
        self._slots = [
            (m._parameters, name) for m in model.modules() for name, p in m._parameters.items() if p is not None
        ]
        self._adapters: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]

    def look(self) -> tuple[object, ...]:
        return (*(slots[name].data_ptr() for slots, name in self._slots), *self.adapters())  # type: ignore[union-attr]

    def adapters(self) -> tuple[object, ...]:
        return tuple((tuple(m.active_adapters), m.disable_adapters, m.merged) for m in self._adapters)


def read_parts(policy: Policy, shapes: dict[int, LayerShape]) -> ModelParts:
    body = policy.body
    kinds, factor = kinds_and_factor(policy, shapes)
    store = policy.lay_out_weights()  # others may have put parameters elsewhere
    layers = [read_layer(layer, store, shapes[i], kinds[i]) for i, layer in enumerate(body.layers)]
    return ModelParts(body.embed_tokens.weight, body.embed_tokens.padding_idx, factor, layers, read_norm(body.norm))


def kinds_and_factor(policy: Policy, shapes: dict[int, LayerShape]) -> tuple[list[str], float]:
    """Each layer's kind, and what embeddings are multiplied by; refuses what no fused path serves, as far as that is seen without
    weights."""
    body = policy.body
    if policy.config.model_type not in FUSED_FAMILIES:
        raise Unfusable(f"fused layers were not tested with the architecture {policy.config.model_type}")
    missing = [name for name in ("layers", "norm", "embed_tokens") if not hasattr(body, name)]
    if missing:
        raise Unfusable(f"{type(body).__name__} has no {', '.join(missing)}")
    if len(body.layers) != len(shapes):
        raise Unfusable("it has layers without attention")
    if any(shape.key != shape.value for shape in shapes.values()):
        raise Unfusable("its keys and values are of different sizes")
    kinds = getattr(policy.config, "layer_types", None) or ["full_attention"] * len(shapes)
    _check_rotation(body)
    turned = (rotates(policy.config.model_type, _child(layer, "self_attn")) for layer in body.layers)
    kinds = [kind if turns else NOT_ROTATED for kind, turns in zip(kinds, turned)]
    return kinds, _embedding_factor(body.embed_tokens, policy)


def read_layer(
    layer: nn.Module, store: WeightStore, shape: LayerShape, kind: str, linears: type[Linears] = Linears
) -> LayerParts:
    attention, mlp = _child(layer, "self_attn"), _child(layer, "mlp")
    places = _places(layer)
    norms = {place: read_norm(getattr(layer, name)) for place, name in places.items()}
    if any(place.startswith("after") and norm.kind == CENTRED for place, norm in norms.items()):
        raise Unfusable("what is added to the residual is centred")
    joined = partial(_joined, store, linears)
    mixture = mlp if expert_modules(mlp) else None
    return LayerParts(
        kind,
        shape,
        norms.get("before_attention"),
        joined(attention, ["qkv_proj"], ["q_proj", "k_proj", "v_proj"]),
        _head_norm(attention, shape),
        joined(attention, ["o_proj"], ["dense"]),
        norms.get("after_attention"),
        norms.get("before_mlp"),
        None if mixture is not None else _dense(mlp, joined),
        mixture,
        norms.get("after_mlp"),
        float(getattr(layer, "residual_multiplier", 1.0)),
        parallel=set(places) == {"before_attention"},
    )


def _places(layer: nn.Module) -> dict[str, str]:
    """Where a layer has its norms, and what they are called there: names of some places are those of others elsewhere."""
    for names in NORM_NAMES:
        found = {place: name for place, name in zip(NORM_PLACES, names) if name}
        if {name for name, module in layer.named_children() if "norm" in name} == set(found.values()):
            return found
    raise Unfusable(f"{type(layer).__name__} has norms in places that have no kernel")


def rotates(model_type: str, attention: nn.Module) -> bool:
    """The layer turns queries and keys by their positions."""
    if model_type == "smollm3":
        return bool(attention.use_rope)
    if model_type == "cohere2":
        return attention.sliding_window is not None
    if model_type == "exaone4":
        return attention.sliding_window is None or bool(attention.is_sliding)
    return True


def _dense(mlp: nn.Module, joined: Callable[..., Linears]) -> DensePart:
    activation = ACTIVATIONS.get(type(getattr(mlp, "act_fn", getattr(mlp, "activation_fn", None))).__name__)
    if activation is None:
        raise Unfusable(f"its feed-forward layers ({type(mlp).__name__}) have an activation without a kernel")
    gate_up = joined(mlp, ["gate_up_proj"], ["gate_proj", "up_proj"])
    return DensePart(gate_up, activation, joined(mlp, ["down_proj"]))


def run_mixture(mixture: nn.Module, x_TE: torch.Tensor) -> torch.Tensor:
    """[T, E]: what a module of router and experts makes of a row."""
    found = mixture(x_TE[None])
    out: torch.Tensor = found[0] if isinstance(found, tuple) else found  # gpt-oss' gives its scores, too
    return out.reshape(x_TE.shape)


def _child(module: nn.Module, name: str) -> nn.Module:
    child = getattr(module, name, None)
    if not isinstance(child, nn.Module):
        raise Unfusable(f"{type(module).__name__} has no {name}")
    return child


def _joined(store: WeightStore, make: Callable[..., Linears], owner: nn.Module, *choices: list[str]) -> Linears:
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
        codes = [linear for linear in linears if isinstance(linear, QuantisedLinear)]
        if len(codes) == len(linears):
            return QuantisedLinears(store, codes, None if biases[0] is None else biases, adapters)
        if codes:
            raise Unfusable(f"only some of {', '.join(names)} are stored in codes")
        return make(store, [l.weight for l in linears], None if biases[0] is None else biases, adapters)
    raise Unfusable(f"{type(owner).__name__} has no linear layers {' or '.join(', '.join(c) for c in choices)}")


def _linear(module: nn.Module) -> tuple[nn.Linear, list[tuple[nn.Linear, nn.Linear, float]]]:
    """A linear layer and what PEFT's LoRA adds to it: (A, B, scale) of each active adapter."""
    if type(module) in SERVED_LINEARS:
        return module, []  # type: ignore[return-value]
    base: Any = getattr(module, "base_layer", None)
    if type(base) not in SERVED_LINEARS or not hasattr(module, "lora_A"):
        raise Unfusable(f"{type(module).__name__} is not a linear layer that Trimtab supports")
    layer: Any = module
    if layer.merged or any(layer.use_dora.get(name, False) for name in layer.active_adapters):
        raise Unfusable("its adapters are already merged, or are not plain LoRA")
    if layer.disable_adapters:
        return base, []
    active = [name for name in layer.active_adapters if name in layer.lora_A]
    if any(layer.lora_B[name].bias is not None for name in active):
        raise Unfusable("its adapters have a bias")
    return base, [(layer.lora_A[name], layer.lora_B[name], float(layer.scaling[name])) for name in active]


def read_norm(module: nn.Module) -> Norm:
    """An RMS norm as the module computes it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.ndim != 1 or eps is None or getattr(module, "bias", None) is not None:
        raise Unfusable(f"{type(module).__name__} is not an RMS norm")
    if module not in _norm_kinds:
        _norm_kinds[module] = _tried(module, weight.data, eps)
    return Norm(weight, float(eps), _norm_kinds[module])


def _tried(norm: nn.Module, weight: torch.Tensor, eps: float) -> int:
    """How a norm applies its weight, seen by trying."""
    x = torch.linspace(-2.0, 3.0, 4 * weight.shape[0], device=weight.device).view(4, -1).to(weight.dtype)
    with torch.no_grad():
        found = norm(x).float()
    wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    tries = {
        ROUNDED: wide.to(x.dtype) * weight,
        WIDE: (wide * weight.float()).to(x.dtype),
        OFFSET: (wide * (1.0 + weight.float())).to(x.dtype),
    }
    centred = x.float() - x.float().mean(-1, keepdim=True)
    centred = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    tries[CENTRED] = (centred * weight.float()).to(x.dtype)
    gaps = {kind: (found - guess.float()).abs().max().item() for kind, guess in tries.items()}
    kind = min(gaps, key=lambda k: gaps[k])
    if not gaps[kind] <= 0.02 * found.abs().max().item():
        raise Unfusable(f"{type(norm).__name__} is not an RMS norm that has a kernel")
    return kind


def _head_norm(attention: nn.Module, shape: LayerShape) -> HeadNorm | None:
    modules = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
    if modules[0] is None and modules[1] is None:
        return None
    if modules[0] is None or modules[1] is None:
        raise Unfusable("only queries or only keys are normalised")
    query, key = read_norm(modules[0]), read_norm(modules[1])
    sizes = (query.weight.numel(), key.weight.numel())
    whole = sizes == (shape.heads * shape.key[1], shape.key[0] * shape.key[1])
    if sizes != (shape.key[1], shape.key[1]) and not whole:
        raise Unfusable("queries are normalised over some heads together")
    if (query.eps, query.kind) != (key.eps, key.kind) or query.kind == CENTRED:
        raise Unfusable("queries and keys are normalised differently, or centred")
    return HeadNorm(query.weight, key.weight, query.eps, query.kind, whole and sizes[0] != shape.key[1])


def _embedding_factor(module: nn.Module, policy: Policy) -> float:
    if not isinstance(module, nn.Embedding):
        raise Unfusable(f"its embedding is a {type(module).__name__}, not a plain table")
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        raise Unfusable("its embedding is not a plain table")
    factor = float(getattr(policy.config, "embedding_multiplier", None) or 1.0)
    scale = getattr(module, "embed_scale", None)
    return factor if scale is None else factor * float(torch.as_tensor(scale).to(policy.dtype))


def _check_rotation(body: Any) -> None:
    rotary = getattr(body, "rotary_emb", None)
    if rotary is None:
        raise Unfusable("it has no rotary embedding")
    types = getattr(rotary, "rope_type", "default")
    unknown = set(types.values() if isinstance(types, dict) else [types]) - STATIC_ROTATIONS
    if unknown:
        raise Unfusable(f"its rotary embedding is of type {', '.join(sorted(map(str, unknown)))}")


@torch.no_grad()
def _rotary_table(policy: Policy, kind: str, positions: int) -> Rotary:
    """The model's own cos and sin for positions 0, 1, …"""
    if kind == NOT_ROTATED:
        cos = torch.ones((positions, 2), dtype=policy.dtype, device=policy.device)
        return Rotary(cos, torch.zeros_like(cos))
    rotary = policy.body.rotary_emb
    at = torch.arange(positions, device=policy.device)[None]
    like = torch.empty(1, dtype=policy.dtype, device=policy.device)
    takes_kind = "layer_type" in inspect.signature(rotary.forward).parameters
    cos, sin = rotary(like, at, kind) if takes_kind else rotary(like, at)
    cos, sin = cos[0], sin[0]
    if policy.config.model_type == "gpt_oss":  # each column is used twice
        cos, sin = (torch.cat((x, x), 1) for x in (cos, sin))
    if policy.config.model_type in FROM_HALVES:
        cos, sin = (x[:, : x.shape[1] // 2].repeat_interleave(2, 1) for x in (cos, sin))
    return Rotary(cos.contiguous(), sin.contiguous(), policy.config.model_type in NEIGHBOURS)


def rotary_tables(policy: Policy, kinds: Iterable[str], positions: int, known: dict[str, Rotary]) -> dict[str, Rotary]:
    """Rotary tables of at least this many positions for these kinds of layers. Reuses tables that are long enough."""
    if known and next(iter(known.values())).cos.shape[0] >= positions:
        return known
    positions = max(1024, 1 << (positions - 1).bit_length())
    return {kind: _rotary_table(policy, kind, positions) for kind in set(kinds)}
