"""How long a device's work stood still for copies from host memory: offloaded optimizer state and activations.

Pairs of CUDA events around the places where a stream waits. They are read when the step is over and the device has passed them,
so nothing waits to be measured. One account a process, as one device a process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_PAIRS = 100_000
"""Where nobody asks for them, the oldest are dropped."""


class CopyWaits:
    """Empty where nothing is offloaded, and on a CPU, where copies are not waited for but made."""

    def __init__(self) -> None:
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=MAX_PAIRS)

    @contextmanager
    def around(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """The block lets the stream wait for something."""
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        yield
        after.record(stream)
        self._pairs.append((before, after))

    def take_s(self) -> float | None:
        """Seconds since the last call; None where nothing waited, or the device is not there yet."""
        pairs = list(self._pairs)
        self._pairs.clear()
        if not pairs or not pairs[-1][1].query():
            return None
        return sum(before.elapsed_time(after) for before, after in pairs) / 1e3


waits = CopyWaits()
"""Those of this process."""
