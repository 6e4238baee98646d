"""What layers that carry a state keep beside the pages: one slot of fixed size a sequence, whatever its length.

Slots are tensors at fixed places: those of rows first, by the number of the row, with the row that no sequence has; then those of
prompts that are being filled or wait to be forked. A fork copies a prompt's slot to a row's. So a decode step reads and writes by
index, and a CUDA graph of it serves any set of rows.

A prefill changes no slot before it is complete: should memory run out half-way, it can be tried again from where it began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from trimtab.model.recurrent import Mixer, State, batches_of
from trimtab.model.shapes import StateShape
from trimtab.model.sizes import prompt_slots
from trimtab.model.transfer import to_device

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]


class StateCache:
    """The states of every layer that has one, for `rows` rows and the prompts beside them."""

    def __init__(self, shapes: dict[int, StateShape], rows: int, empty: Empty) -> None:
        self.prompts = list(range(rows + 1, rows + 1 + prompt_slots(rows)))
        """Slots of prompts."""
        count = rows + 1 + len(self.prompts)
        self._conv = {i: empty((count, *shape.conv), shape.conv_dtype) for i, shape in shapes.items()}
        self._recurrent = {
            i: empty((count, *shape.recurrent), shape.recurrent_dtype)
            for i, shape in shapes.items()
            if shape.recurrent is not None
        }

    @property
    def layers(self) -> list[int]:
        return list(self._conv)

    def read(self, layer: int, slots_B: torch.Tensor) -> State:
        """A copy of what these slots hold."""
        recurrent = self._recurrent.get(layer)
        found = None if recurrent is None else recurrent.index_select(0, slots_B)
        return State(self._conv[layer].index_select(0, slots_B), found)

    def write(self, layer: int, slots_B: torch.Tensor, state: State) -> None:
        conv = self._conv[layer]
        conv.index_copy_(0, slots_B, state.conv.to(conv.dtype))
        if state.recurrent is not None:
            self._recurrent[layer].index_copy_(0, slots_B, state.recurrent.to(self._recurrent[layer].dtype))

    def copy(self, pairs: torch.Tensor) -> None:
        """Copy whole slots in every layer; `pairs` is [2, N], the slots to copy from and to."""
        source, target = pairs
        for layer in self.layers:
            self.write(layer, target, self.read(layer, source))

    def step(self, mixer: Mixer, x_BE: torch.Tensor, slots_B: torch.Tensor) -> torch.Tensor:
        """One token for each slot."""
        out_BLE, state = mixer.mix(x_BE[:, None], self.read(mixer.layer_idx, slots_B))
        self.write(mixer.layer_idx, slots_B, state)
        return out_BLE.squeeze(1)

    def clear(self) -> None:
        self._conv.clear()
        self._recurrent.clear()


class PrefillMixing:
    """Pieces of sequences in one row: each goes on from its slot, or begins, and what it ends with is written by `commit`."""

    def __init__(
        self,
        states: StateCache,
        lengths: Sequence[int],
        starts: Sequence[int],
        slots: Sequence[int],
        device: torch.device,
    ) -> None:
        self._states, self._lengths, self._slots, self._device = states, list(lengths), list(slots), device
        self._begins = [start == 0 for start in starts]
        self._after: list[tuple[int, torch.Tensor, State]] = []

    def __call__(self, mixer: Mixer, x_TE: torch.Tensor) -> torch.Tensor:
        exact = [not (first and mixer.can_pad) for first in self._begins]  # what each ends with is needed
        pieces, outs = x_TE.split(self._lengths), [x_TE] * len(self._lengths)
        for batch in batches_of(self._lengths, self._begins, exact):
            slots_N = to_device(torch.tensor([self._slots[i] for i in batch.segments]), self._device)
            short = [batch.length - self._lengths[i] for i in batch.segments]
            x_NLE = torch.stack(
                [torch.nn.functional.pad(pieces[i], (0, 0, s, 0)) for i, s in zip(batch.segments, short)]
            )
            mask_NL = None
            if batch.padded:
                before = to_device(torch.tensor(short), self._device)
                mask_NL = torch.arange(batch.length, device=self._device) >= before[:, None]
            state = None if batch.begins else self._states.read(mixer.layer_idx, slots_N)
            out_NLE, after = mixer.mix(x_NLE, state, mask_NL)
            self._after.append((mixer.layer_idx, slots_N, after))
            for i, out_LE, s in zip(batch.segments, out_NLE, short):
                outs[i] = out_LE[s:]
        return torch.cat(outs)

    def commit(self) -> None:
        """Write what all pieces ended with."""
        for layer, slots_N, after in self._after:
            self._states.write(layer, slots_N, after)
        self._after.clear()
