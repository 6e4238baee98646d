"""The KV cache as tensors, and attention over it.

Shapes: B sequences, T tokens of a packed row, P pages of a sequence, H query heads, K key/value heads, D head size, S cached
tokens in view. Page layout is [page, token in page, K, D] for keys and values of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from trimtab.model.attention import Rules, causal_window, dense_attention
from trimtab.model.packed import PackedPlan
from trimtab.model.recurrent import Mixer
from trimtab.model.shapes import LayerShape, StateShape
from trimtab.model.transfer import to_device
from trimtab.rollout.native.kv_codes import Stored, decode, encode
from trimtab.rollout.native.states import PrefillMixing, StateCache

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a tensor of a shape and type, contents undefined."""


@dataclass(frozen=True)
class Carried:
    """What layers carry beside keys and values, and for how many rows."""

    shapes: dict[int, StateShape]
    rows: int


class KVCache:
    """Keys and values of every layer: a tensor of keys and one of values for each, and where these are codes their powers;
    and the states of those that carry one.

    What is read is what was stored: with `stored` other than auto, keys and values are rounded, and attention sees them so from
    their first use on. So it makes no difference which of them a sequence finds in its pages and which it computes again.
    """

    def __init__(
        self, shapes: dict[int, LayerShape], pages: int, page_tokens: int, dtype: torch.dtype, empty: Empty,
        carried: Carried | None = None, stored: Stored = "auto",
    ) -> None:  # fmt: skip
        self.states = StateCache(carried.shapes, carried.rows, empty) if carried is not None else None
        self.page_tokens, self.dtype, self.stored = page_tokens, dtype, stored
        kind = {"auto": dtype, "bf16": torch.bfloat16, "fp8": torch.uint8}[stored]
        self.keys = {layer: empty((pages, page_tokens, *shape.key), kind) for layer, shape in shapes.items()}
        self.latents = {layer for layer, shape in shapes.items() if shape.value_in_key}
        """Layers whose values are the first part of their keys; these are stored plain."""
        assert not (self.latents and stored == "fp8"), "latents have no codes"
        self.values = {
            layer: self.keys[layer][..., : shape.value[1]]
            if layer in self.latents
            else empty((pages, page_tokens, *shape.value), kind)
            for layer, shape in shapes.items()
        }
        coded = shapes.items() if stored == "fp8" else ()
        self.key_powers = {layer: empty((pages, page_tokens, shape.key[0]), torch.int8) for layer, shape in coded}
        self.value_powers = {layer: empty((pages, page_tokens, shape.value[0]), torch.int8) for layer, shape in coded}

    @property
    def _stores(self) -> list[torch.Tensor]:
        values = {layer: store for layer, store in self.values.items() if layer not in self.latents}
        kept = (self.keys, values, self.key_powers, self.value_powers)
        return [tensor for store in kept for tensor in store.values()]

    def powers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Those of keys and of values, where they are stored in codes."""
        return (self.key_powers[layer], self.value_powers[layer]) if self.stored == "fp8" else None

    def write(
        self, layer: int, slots_T: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values; returns them as they will be read."""
        if self.stored == "fp8":
            return (
                self._encode(self.keys[layer], self.key_powers[layer], slots_T, k_TKD),
                self._encode(self.values[layer], self.value_powers[layer], slots_T, v_TKD),
            )
        kind = self.keys[layer].dtype
        k, v = k_TKD.to(kind), v_TKD.to(kind)
        self.keys[layer].flatten(0, 1).index_copy_(0, slots_T, k)
        if layer not in self.latents:
            self.values[layer].flatten(0, 1).index_copy_(0, slots_T, v)
        return k.to(k_TKD.dtype), v.to(v_TKD.dtype)

    def _encode(
        self, store: torch.Tensor, powers: torch.Tensor, slots_T: torch.Tensor, x_TKD: torch.Tensor
    ) -> torch.Tensor:
        codes, power = encode(x_TKD)
        store.flatten(0, 1).index_copy_(0, slots_T, codes)
        powers.flatten(0, 1).index_copy_(0, slots_T, power)
        return decode(codes, power, x_TKD.dtype)

    def read(self, layer: int, pages_BP: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K, S, D] keys and values of each row's pages, S = P * page_tokens."""
        b, p = pages_BP.shape
        found = self._taken(layer, lambda store: store.index_select(0, pages_BP.flatten()))
        k, v = (x.view(b, p * self.page_tokens, *x.shape[2:]).transpose(1, 2) for x in found)
        return k, v

    def read_slots(self, layer: int, slots_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, K, D] keys and values of tokens by where they are stored."""
        return self._taken(layer, lambda store: store.flatten(0, 1).index_select(0, slots_S))

    def view(self, layer: int, first: int, pages: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, K, S, D] keys and values of neighbouring pages that hold one sequence each, without a copy where they are plain."""
        found = self._taken(layer, lambda store: store[first : first + pages, :tokens])
        k, v = (x.transpose(1, 2) for x in found)
        return k, v

    def _taken(self, layer: int, take: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = take(self.keys[layer]), take(self.values[layer])
        if self.stored == "fp8":
            powers = take(self.key_powers[layer]), take(self.value_powers[layer])
            return decode(k, powers[0], self.dtype), decode(v, powers[1], self.dtype)
        return k.to(self.dtype), v.to(self.dtype)

    def clear(self) -> None:
        """Free the memory, where it is the cache's own."""
        for store in (self.keys, self.values, self.key_powers, self.value_powers):
            store.clear()
        if self.states is not None:
            self.states.clear()

    def copy_page(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of a page, in every layer."""
        for store in self._stores:
            store[target, :tokens] = store[source, :tokens]

    def copy_pages(self, pairs: torch.Tensor) -> None:
        """Copy whole pages in every layer; `pairs` is [2, N], the pages to copy from and to."""
        source, target = pairs
        for store in self._stores:
            store[target] = store[source]

    def slots(self, pages_BP: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
        """Where the token at each row's position is stored."""
        page = pages_BP.gather(1, (positions_B // self.page_tokens)[:, None])[:, 0]
        return page * self.page_tokens + positions_B % self.page_tokens


@dataclass
class DecodePlan:
    """One new token for each of B sequences, each seeing its own pages."""

    cache: KVCache
    pages_BP: torch.Tensor
    positions_B: torch.Tensor
    slots_B: torch.Tensor
    longest: int
    """Tokens of the longest sequence, the new one included."""
    rows_B: torch.Tensor
    """Rows of the sequences: the slots of what they carry."""
    first_page: int | None = None
    """The first page, where each sequence has one page and these lie side by side in order: nothing has to be gathered then."""

    def __post_init__(self) -> None:
        self._masks: dict[int | None, torch.Tensor] = {}
        self.latents = bool(self.cache.latents)

    def _allowed(self, window: int | None) -> torch.Tensor:
        """The mask, made once a forward pass: it is the same for all layers with the same window."""
        if window not in self._masks:
            view = torch.arange(self.longest, device=self.pages_BP.device)
            self._masks[window] = causal_window(self.positions_B[:, None, None], view, window)
        return self._masks[window]

    def attend(
        self, layer: int, q_BHD: torch.Tensor, k_BKD: torch.Tensor, v_BKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        self.cache.write(layer, self.slots_B, k_BKD, v_BKD)
        if self.first_page is not None:
            k_BKSD, v_BKSD = self.cache.view(layer, self.first_page, self.pages_BP.shape[0], self.longest)
        else:
            k_BKSD, v_BKSD = (x[:, :, : self.longest] for x in self.cache.read(layer, self.pages_BP))
        return dense_attention(q_BHD[:, :, None], k_BKSD, v_BKSD, rules, self._allowed(rules.window))[:, :, 0]

    def recur(self, mixer: Mixer, x_BE: torch.Tensor) -> torch.Tensor:
        assert self.cache.states is not None
        return self.cache.states.step(mixer, x_BE, self.rows_B)


@dataclass(frozen=True)
class PrefillSegment:
    """Tokens [start, end) of one sequence, whose pages hold everything before them."""

    tokens: list[int]
    start: int
    pages: list[int]
    slot: int = -1
    """Where what layers carry is kept."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class PrefillPlan:
    """Several segments in one row; each sees the cached beginning of its own sequence and itself."""

    def __init__(self, cache: KVCache, segments: list[PrefillSegment], device: torch.device) -> None:
        self.cache, self.latents = cache, bool(cache.latents)
        self.segments = segments
        self.lengths = [len(s.tokens) for s in segments]
        slots = [cache_slots(s, cache.page_tokens) for s in segments]
        self.positions = to_device(torch.cat([torch.arange(s.start, s.end) for s in segments]), device)
        self.slots = to_device(torch.cat([seen[s.start :] for s, seen in zip(segments, slots)]), device)
        begins = all(s.start == 0 for s in segments)
        self._seen = None if begins else to_device(torch.cat(slots), device)
        """Where everything that a segment sees is stored, segment after segment; None where that is the row itself."""
        starts = [s.start for s in segments]
        self._packed = PackedPlan(self.lengths, device, before=starts)
        self._mixing = None
        if cache.states is not None:
            self._mixing = PrefillMixing(cache.states, self.lengths, starts, [s.slot for s in segments], device)

    def attend(
        self, layer: int, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        k_TKD, v_TKD = self.cache.write(layer, self.slots, k_TKD, v_TKD)
        if self._seen is not None:
            k_TKD, v_TKD = self.cache.read_slots(layer, self._seen)
        return self._packed.attend(layer, q_THD, k_TKD, v_TKD, rules)

    def recur(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        assert self._mixing is not None
        return self._mixing(mixer, x_TE)

    def commit(self) -> None:
        """Keep what layers carry at the end of every segment; keys and values are in their pages already."""
        if self._mixing is not None:
            self._mixing.commit()


def cache_slots(segment: PrefillSegment, page_tokens: int) -> torch.Tensor:
    """Where each token up to the segment's end is stored."""
    at = torch.arange(segment.end)
    return torch.tensor(segment.pages)[at // page_tokens] * page_tokens + at % page_tokens
