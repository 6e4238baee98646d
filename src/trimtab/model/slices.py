"""What one of N ranks holds of a model that is cut over them to generate: heads of the attention, columns of the feed-forward
layers, rows of the head.

    q, k, v, gate, up    rows of the weight: this rank's heads and columns
    o, down              columns: what the rank computes is one term of a sum over all ranks
    head                 rows: this rank's words; the embedding is whole
    norms, the rest      whole

Where there are fewer key/value heads than ranks, several ranks hold the same one. Adapters are cut with what they are added to. A
bias that belongs to a sum is the first rank's alone. Works on a model without values: `cut_model` gives the sizes, and `Slices`
say what of each weight goes there (replica.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.base.errors import EngineError
from trimtab.model.replica import with_parameters


@dataclass(frozen=True)
class Slice:
    """Stretches of one dimension, end to end; what lies beyond the weight is zero, and so is all of it where it is not `held`."""

    dim: int
    stretches: tuple[tuple[int, int], ...]
    held: bool = True

    def shape(self, whole: torch.Size) -> tuple[int, ...]:
        size = sum(end - begin for begin, end in self.stretches)
        return (*whole[: self.dim], size, *whole[self.dim + 1 :])

    @torch.no_grad()
    def fill(self, own: torch.Tensor, whole: torch.Tensor) -> None:
        """Make a rank's tensor what it holds of the whole."""
        if not self.held:
            own.zero_()
            return
        at = 0
        for begin, end in self.stretches:
            there = max(0, min(end, whole.shape[self.dim]) - begin)
            if there:
                own.narrow(self.dim, at, there).copy_(whole.narrow(self.dim, begin, there))
            if there < end - begin:
                own.narrow(self.dim, at + there, end - begin - there).zero_()
            at += end - begin


Slices = Mapping[str, Slice]
"""By name of the parameter; those that are not there are whole."""


@dataclass(frozen=True)
class CutModel:
    """A model of a rank's sizes."""

    model: Any
    slices: Slices
    sums: tuple[nn.Module, ...]
    """Modules whose outputs are terms of a sum over the ranks, in the order in which they run."""
    vocabulary: int
    """Words of the whole head."""
    words: tuple[int, int]
    """Those of this rank; the last rank's may reach beyond the vocabulary."""


def cut_model(skeleton: Any, rank: int, parts: int, device: torch.device) -> CutModel:
    """A copy of a model whose parameters have this rank's sizes and undefined values."""
    cutter = _Cutter(skeleton, rank, parts)
    named = dict(skeleton.named_parameters())
    shapes = {id(named[name]): cut.shape(named[name].shape) for name, cut in cutter.slices.items()}
    made = with_parameters(skeleton, device, shapes)
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    _tell_heads(made, parts)
    modules = dict(made.named_modules())
    sums = tuple(modules[name] for name in cutter.sums)
    return CutModel(made, cutter.slices, sums, cutter.vocabulary, cutter.words)


def _tell_heads(model: Any, parts: int) -> None:
    """Some architectures read the number of heads in their passes."""
    config = model.config
    heads = config.num_attention_heads
    if getattr(config, "head_dim", None) is None:
        config.head_dim = config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    config.num_attention_heads, config.num_key_value_heads = heads // parts, max(1, kv_heads // parts)
    for layer in model.get_decoder().layers:
        attention = layer.self_attn
        for name in ("num_heads", "num_attention_heads", "num_key_value_heads"):
            if isinstance(getattr(attention, name, None), int):
                setattr(attention, name, max(1, getattr(attention, name) // parts))
        if hasattr(attention, "num_key_value_groups"):
            attention.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads


class _Cutter:
    """Finds the slices."""

    def __init__(self, model: Any, rank: int, parts: int) -> None:
        self._rank, self._parts, self._model = rank, parts, model
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._modules = {id(module): name for name, module in model.named_modules()}
        self.slices: dict[str, Slice] = {}
        self.sums: list[str] = []
        layers = getattr(model.get_decoder(), "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise self._unknown("has no list of layers")
        for layer in layers:
            self._cut_attention(_part(layer, "self_attn") or self._none("an attention that is not self_attn"))
            self._cut_mlp(_part(layer, "mlp") or self._none("feed-forward layers that are not mlp"))
        self._cut_head()

    def _cut_attention(self, attention: nn.Module) -> None:
        config = self._model.config
        size = getattr(attention, "head_dim", None) or config.hidden_size // config.num_attention_heads
        out = _part(attention, "o_proj", "dense") or self._none("no output projection that is known")
        heads = _base(out).weight.shape[1] // size
        joined = _part(attention, "qkv_proj")
        if joined is not None:
            kv_heads = (_base(joined).weight.shape[0] // size - heads) // 2
            q, kv = self._heads(heads, size), self._kv_heads(kv_heads, size)
            at_k, at_v = heads * size, (heads + kv_heads) * size
            self._rows(joined, (q, _shifted(kv, at_k), _shifted(kv, at_v)))
            parts = [joined]
        else:
            found = [_part(attention, name) for name in ("q_proj", "k_proj", "v_proj")]
            parts = [part or self._none("no query, key and value projections") for part in found]
            kv_heads = _base(parts[1]).weight.shape[0] // size
            if _base(parts[2]).weight.shape[0] != kv_heads * size:
                raise self._unknown("has keys and values of different sizes")
            self._rows(parts[0], (self._heads(heads, size),))
            for part in parts[1:]:
                self._rows(part, (self._kv_heads(kv_heads, size),))
        self._columns(out, self._heads(heads, size))
        self._refuse_others(attention, [*parts, out], size)

    def _cut_mlp(self, mlp: nn.Module) -> None:
        down = _part(mlp, "down_proj")
        joined, gate, up = (_part(mlp, name) for name in ("gate_up_proj", "gate_proj", "up_proj"))
        if down is None or (joined is None and (gate is None or up is None)):
            raise self._unknown("has feed-forward layers (experts?) that are not cut over devices")
        width = _base(down).weight.shape[1]
        own = self._share(width, "feed-forward columns")
        if joined is not None:
            self._rows(joined, (own, _shifted(own, width)))
            parts = [joined]
        else:
            assert gate is not None and up is not None
            parts = [gate, up]
            for part in parts:
                self._rows(part, (own,))
        self._columns(down, own)
        self._refuse_others(mlp, [*parts, down], 0)

    def _cut_head(self) -> None:
        embedding, head = self._model.get_input_embeddings(), self._model.get_output_embeddings()
        self.vocabulary = head.weight.shape[0]
        each = -(-self.vocabulary // self._parts)
        self.words = (self._rank * each, (self._rank + 1) * each)
        if head.weight is not embedding.weight:
            self._note(head.weight, Slice(0, (self.words,)))

    def _rows(self, module: nn.Module, stretches: tuple[tuple[int, int], ...]) -> None:
        base, rows = _base(module), Slice(0, stretches)
        for tensor in (base.weight, base.bias, *(up.weight for _, up in _adapters(module, self))):
            if tensor is not None:
                self._note(tensor, rows)

    def _columns(self, module: nn.Module, stretch: tuple[int, int]) -> None:
        base = _base(module)
        for weight in (base.weight, *(down.weight for down, _ in _adapters(module, self))):
            self._note(weight, Slice(1, (stretch,)))
        if base.bias is not None:
            self._note(base.bias, Slice(0, ((0, base.bias.shape[0]),), held=self._rank == 0))
        self.sums.append(self._modules[id(module)])

    def _note(self, parameter: torch.Tensor, cut: Slice) -> None:
        self.slices[self._names[id(parameter)]] = cut

    def _refuse_others(self, owner: nn.Module, known: list[nn.Module], head_size: int) -> None:
        """Whatever else has weights has to be the same for every head."""
        seen = {id(parameter) for module in known for parameter in module.parameters()}
        for name, parameter in owner.named_parameters():
            if id(parameter) not in seen and parameter.numel() != head_size:
                raise self._unknown(f"has {name} in its {type(owner).__name__}, which is not cut over devices")

    def _heads(self, heads: int, size: int) -> tuple[int, int]:
        begin, end = self._share(heads, "heads")
        return begin * size, end * size

    def _kv_heads(self, heads: int, size: int) -> tuple[int, int]:
        if heads % self._parts and self._parts % heads == 0:
            mine = self._rank * heads // self._parts
            return mine * size, (mine + 1) * size
        begin, end = self._share(heads, "KV heads")
        return begin * size, end * size

    def _share(self, whole: int, what: str) -> tuple[int, int]:
        if whole % self._parts:
            raise EngineError(
                f"run.rollout.tensor_parallel: {whole} {what} cannot be divided evenly by {self._parts}. Write a divisor of both"
            )
        each = whole // self._parts
        return self._rank * each, (self._rank + 1) * each

    def _none(self, what: str) -> nn.Module:
        raise self._unknown(f"has {what}")

    def _unknown(self, why: str) -> EngineError:
        name = type(self._model).__name__
        return EngineError(f"run.rollout.tensor_parallel: {name} {why}. Write run.rollout.tensor_parallel: 1")


def _part(owner: nn.Module, *names: str) -> nn.Module | None:
    """The first of these modules that there is; a list of experts is none."""
    for name in names:
        found = getattr(owner, name, None)
        if isinstance(found, nn.Module):
            return found
    return None


def _base(module: nn.Module) -> Any:
    return getattr(module, "base_layer", module)


def _adapters(module: Any, cutter: _Cutter) -> Iterator[tuple[nn.Linear, nn.Linear]]:
    """(A, B) of each adapter beside a linear layer."""
    if not hasattr(module, "lora_A"):
        return
    if any(module.use_dora.values()):
        raise cutter._unknown("has adapters that are not plain LoRA")
    for name in module.lora_A:
        yield module.lora_A[name], module.lora_B[name]


def _shifted(stretch: tuple[int, int], by: int) -> tuple[int, int]:
    return stretch[0] + by, stretch[1] + by
