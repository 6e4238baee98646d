"""Host memory that is worked on by the device: each piece is fetched while the one before is worked on, and sent back while
the next is. On a device without streams of its own the pieces are simply copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch

from trimtab.model.sizes import PIECES_ON_DEVICE
from trimtab.model.waits import waits

Piece = tuple[torch.Tensor, ...]
ALIGNMENT_BYTES = 256
"""Bytes."""


class StateStreamer:
    """Takes pieces of host memory to the device and back. A piece is a stretch of columns of one or more matrices."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []

    def slots(self, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """All the device memory that `run` needs for these pieces, or for any that are no larger and no more."""
        largest = max((sum(map(_room, piece)) for piece in pieces), default=0)
        count = min(PIECES_ON_DEVICE if self._streams else 1, len(pieces))
        return [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]

    def run(self, pieces: Sequence[Piece], work: Callable[[int, Piece], None], slots: Sequence[torch.Tensor]) -> None:
        """`work` changes the copy of each piece that it is given; the pieces are changed when `settle` has returned."""
        here = [_views(slots[i % len(slots)], piece) for i, piece in enumerate(pieces)]
        if not self._streams:
            for index, piece in enumerate(pieces):
                _copy_rows(here[index], piece)
                work(index, here[index])
                _copy_rows(piece, here[index])
            return
        inward, outward = self._streams
        current = torch.cuda.current_stream(self._device)
        arrived, left = ([torch.cuda.Event() for _ in pieces] for _ in range(2))
        inward.wait_stream(current)
        inward.wait_stream(outward)

        def fetch(index: int) -> None:
            if index >= len(slots):
                inward.wait_event(left[index - len(slots)])
            with torch.cuda.stream(inward):
                _copy_rows(here[index], pieces[index])
            arrived[index].record(inward)

        try:
            fetch(0)
            for index in range(len(pieces)):
                if index + 1 < len(pieces):
                    fetch(index + 1)
                with waits.around(current):
                    current.wait_event(arrived[index])
                work(index, here[index])
                outward.wait_stream(current)
                with torch.cuda.stream(outward):
                    _copy_rows(pieces[index], here[index])
                left[index].record(outward)
        finally:  # before the slots are anybody else's
            current.wait_stream(inward)
            current.wait_stream(outward)

    def settle(self) -> None:
        """Wait until the host may read what was sent back."""
        for stream in self._streams:
            stream.synchronize()


def _room(matrix: torch.Tensor) -> int:
    """Bytes in a slot, so that the next matrix begins where kernels read whole lines."""
    return -(-matrix.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _views(slot: torch.Tensor, piece: Piece) -> Piece:
    """A slot as the matrices of a piece, one after the other."""
    starts = accumulate(map(_room, piece), initial=0)
    return tuple(slot[at : at + m.nbytes].view(m.dtype).view(m.shape) for at, m in zip(starts, piece))


def _copy_rows(to: Piece, source: Piece) -> None:
    """Row by row: each is contiguous on both sides, which copies beside the host's work need."""
    for target, matrix in zip(to, source):
        for a, b in zip(target, matrix):
            a.copy_(b, non_blocking=True)
