"""Layers that carry a state from token to token, in the place of keys and values: gated DeltaNet, Mamba-2, short convolutions.

What computes is the mixer of transformers itself, with whatever kernels it finds installed. Only what it calls its cache is ours:
states come in as tensors and go out as tensors, so that a gradient flows through them and nothing is changed in place.

Guarantee: a sequence starts from no state, or from the state that its prompt ended with, whatever lies beside it in the row. A
prompt's state is computed once and given to all its samples, and their gradients add up in it.

Shapes: T tokens of a packed row, E hidden size, N sequences of L tokens, C channels of a convolution of width K.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from trimtab.model.transfer import to_device

CACHE_NAMES = ("cache_params", "past_key_values")
"""What mixers call the cache that they are handed."""
MOST_PADDING = 32
"""Sequences whose lengths differ by at most so many tokens, or by a quarter, run as rows of one batch."""

TakeRows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Rows of a matrix, some of them several times; their gradients add up."""


@dataclass(frozen=True)
class State:
    """What a mixer carries for N sequences."""

    conv: torch.Tensor
    """[N, C, K], the newest inputs of its convolution."""
    recurrent: torch.Tensor | None = None
    """[N, ...]; None: the convolution is all there is."""

    def take(self, rows_M: torch.Tensor, take: TakeRows) -> State:
        """The states of these rows, some of them several times."""
        recurrent = self.recurrent
        if recurrent is not None:
            recurrent = take(recurrent.flatten(1), rows_M).view(-1, *recurrent.shape[1:])
        return State(take(self.conv.flatten(1), rows_M).view(-1, *self.conv.shape[1:]), recurrent)

    @staticmethod
    def join(parts: Sequence[State]) -> State:
        if len(parts) == 1:
            return parts[0]
        recurrent = [part.recurrent for part in parts if part.recurrent is not None]
        return State(torch.cat([part.conv for part in parts]), torch.cat(recurrent) if recurrent else None)


class _Handed:
    """One mixer's cache in one call, as transformers knows it."""

    def __init__(self, state: State | None) -> None:
        self.conv = None if state is None else state.conv
        self.recurrent = None if state is None else state.recurrent

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def update_conv_state(
        self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """What the convolution reads: the state and the new inputs. Keeps the newest of them."""
        assert state_idx == 0 and conv_kernel_size is not None, "a mixer with several convolutions"
        whole = new if self.conv is None else torch.cat((self.conv, new), -1)
        short = conv_kernel_size - whole.shape[-1]
        self.conv = nn.functional.pad(whole, (short, 0)) if short > 0 else whole[..., -conv_kernel_size:]
        return whole

    def update_recurrent_state(self, new: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> torch.Tensor:
        assert state_idx == 0
        self.recurrent = new
        return new


class Mixer(nn.Module):
    """Put before the class of a mixer of transformers: a call that brings an attention plan is the plan's to make."""

    layer_idx: int
    cache_name: str
    """What its class calls the cache that it is handed."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, attention_plan: Any = None, **kwargs: Any) -> Any:
        if attention_plan is None:
            return super().forward(hidden_states, *args, **kwargs)
        assert hidden_states.shape[0] == 1
        return attention_plan.recur(self, hidden_states.squeeze(0))[None]

    def mix(
        self, x_NLE: torch.Tensor, state: State | None, mask_NL: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, State]:
        """N sequences that go on from their states, or begin; `mask_NL` is 0 for padding before a sequence that begins.

        With one token each, what `state` holds may be changed.
        """
        handed: Any = _Handed(state)
        named = {self.cache_name: handed, "attention_mask": mask_NL}
        limit = getattr(self, "time_step_limit", None)
        if limit is not None and state is not None and x_NLE.shape[1] == 1:
            named["dt_limit"] = limit
        out_NLE = super().forward(x_NLE, **named)
        return out_NLE, State(handed.conv, handed.recurrent)

    @property
    def can_pad(self) -> bool:
        """Padding before a sequence leaves no trace in its state: nothing is added to the zeros that it is made of."""
        linears = [m for m in self.children() if isinstance(m, nn.Linear)]
        return all(linear.bias is None for linear in linears)


_planned_kinds: dict[type[nn.Module], type[nn.Module]] = {}


def _planned(kind: type[nn.Module]) -> type[nn.Module]:
    if kind not in _planned_kinds:
        named = inspect.signature(kind.forward).parameters
        cache_name = next(name for name in CACHE_NAMES if name in named)
        _planned_kinds[kind] = type(kind.__name__, (Mixer, kind), {"cache_name": cache_name})
    return _planned_kinds[kind]


def let_plans_mix(body: nn.Module) -> None:
    """From now on every mixer of the model does as the attention plan of a call says; without a plan, as before."""
    for module in body.modules():
        if is_mixer(module) and not isinstance(module, Mixer):
            _limit_steps(sys.modules[type(module).__module__])
            module.__class__ = _planned(type(module))


def has_mixers(body: nn.Module) -> bool:
    return any(isinstance(module, Mixer) for module in body.modules())


def _limit_steps(code: ModuleType) -> None:
    """Have a step of Mamba-2 keep to the limits of its time steps, as passes over several tokens do: transformers' step is not
    told of them, so that what it generates is not quite what it computes for the same tokens."""
    step = getattr(code, "mamba2_selective_state_update", None)
    if step is None or hasattr(step, "keeps_limits"):
        return

    def limited(
        state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, *more: Any, dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False, dt_limit: tuple[float, float] | None = None, **named: Any,
    ) -> torch.Tensor:  # fmt: skip
        if dt_limit is not None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (nn.functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
            dt_bias, dt_softplus = None, False
        out: torch.Tensor = step(state, x, dt, *more, dt_bias=dt_bias, dt_softplus=dt_softplus, **named)
        return out

    limited.keeps_limits = True  # type: ignore[attr-defined]
    code.mamba2_selective_state_update = limited  # type: ignore[attr-defined]


def is_mixer(module: nn.Module) -> bool:
    """A convolution over tokens, and a cache to keep its state in."""
    if isinstance(module, Mixer):
        return True
    takes = inspect.signature(module.forward).parameters
    return any(isinstance(child, nn.Conv1d) for child in module.children()) and any(n in takes for n in CACHE_NAMES)


@dataclass(frozen=True)
class Alike:
    """Segments of a row that run together."""

    segments: list[int]
    length: int
    """Of the longest; the others are padded."""
    begins: bool
    """They start sequences; else they go on from states."""

    padded: bool


def batches_of(lengths: Sequence[int], begins: Sequence[bool], exact: Sequence[bool]) -> list[Alike]:
    """The segments in batches of about equal length. `exact`: padding would change what comes of a segment."""
    found: list[Alike] = []
    for first in (True, False):
        for alone in (True, False):
            chosen = [i for i in range(len(lengths)) if begins[i] == first and exact[i] == alone]
            for group in _alike(sorted(chosen, key=lambda i: lengths[i]), lengths, 0 if alone else MOST_PADDING):
                longest = max(lengths[i] for i in group)
                found.append(Alike(sorted(group), longest, first, any(lengths[i] != longest for i in group)))
    return found


def _alike(ordered: Iterable[int], lengths: Sequence[int], most: int) -> list[list[int]]:
    groups: list[list[int]] = []
    for i in ordered:
        shortest = lengths[groups[-1][0]] if groups else 0
        if groups and lengths[i] - shortest <= (max(most, shortest // 4) if most else 0):
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


class PackedMixing:
    """How segments of a packed row go through a mixer; the same for all layers of a forward pass.

    `prefixes` names for each segment the segment that it goes on from, which begins a sequence; None: it begins one itself.
    """

    def __init__(
        self, lengths: Sequence[int], prefixes: Sequence[int | None], device: torch.device, take: TakeRows
    ) -> None:
        self.lengths, self.prefixes, self.device, self._take = list(lengths), list(prefixes), device, take
        self._starts = [sum(lengths[:i]) for i in range(len(lengths))]
        self._made: dict[bool, tuple[list[Alike], list[torch.Tensor], list[torch.Tensor | None], torch.Tensor]] = {}

    def __call__(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        batches, rows, masks, back_T = self._plan(mixer.can_pad)
        place = self._place(batches)
        states: list[State] = []
        outs: list[torch.Tensor] = []
        for batch, rows_NL, mask_NL in zip(batches, rows, masks):
            state = None
            if not batch.begins:
                state = self._given(batch, place, states)
            x_NLE = x_TE.index_select(0, rows_NL.flatten()).view(*rows_NL.shape, -1)
            out_NLE, after = mixer.mix(x_NLE, state, mask_NL)
            outs.append(out_NLE.flatten(0, 1))
            if batch.begins:
                states.append(after)
        return torch.cat(outs).index_select(0, back_T)

    def _given(self, batch: Alike, place: dict[int, int], states: list[State]) -> State:
        """The states that the prompts of these segments ended with."""
        at = [place[prefix] for i in batch.segments if (prefix := self.prefixes[i]) is not None]
        return State.join(states).take(to_device(torch.tensor(at), self.device), self._take)

    def _place(self, batches: list[Alike]) -> dict[int, int]:
        """Where the state of each segment that begins is, among those of all batches."""
        return {i: at for at, i in enumerate(i for batch in batches if batch.begins for i in batch.segments)}

    def _plan(self, can_pad: bool) -> tuple[list[Alike], list[torch.Tensor], list[torch.Tensor | None], torch.Tensor]:
        """Batches, the rows of x that each reads, its mask, and where in their outputs each token of the row is."""
        if can_pad not in self._made:
            begins = [prefix is None for prefix in self.prefixes]
            # Nothing goes on from a segment that goes on: what follows it is as good as nothing.
            batches = batches_of(self.lengths, begins, [first and not can_pad for first in begins])
            rows, masks, taken, at = [], [], torch.empty(sum(self.lengths), dtype=torch.int64), 0
            for batch in batches:
                # A single token that goes on would be taken for a step of decoding, which changes states in place.
                length = batch.length if batch.begins else max(2, batch.length)
                rows_NL, mask_NL = self._rows(batch, length)
                real = mask_NL.flatten().nonzero()[:, 0]
                taken[rows_NL.flatten()[real]] = at + real
                at += rows_NL.numel()
                rows.append(to_device(rows_NL, self.device))
                masks.append(to_device(mask_NL, self.device) if batch.begins and batch.padded else None)
            self._made[can_pad] = batches, rows, masks, to_device(taken, self.device)
        return self._made[can_pad]

    def _rows(self, batch: Alike, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row positions of a batch, padding before segments that begin and after those that go on; and 1 where there is none."""
        column = torch.arange(length)
        rows, masks = [], []
        for i in batch.segments:
            at = column - (length - self.lengths[i]) if batch.begins else column
            masks.append((at >= 0) & (at < self.lengths[i]))
            rows.append(self._starts[i] + at.clamp(0, self.lengths[i] - 1))
        return torch.stack(rows), torch.stack(masks)
