"""How far a device is behind the host that launches its work. One that is not behind waits for the host: then fewer and larger
micro-batches are faster, whatever the device could do.
"""

from __future__ import annotations

import time

import torch


class Launching:
    """Made when the device is idle; asked when all is done."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if self._cuda:
            self._began, self._launched = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._began.record()
        self._host_s = -time.perf_counter()

    def end(self) -> None:
        """Everything is launched."""
        self._host_s += time.perf_counter()
        if self._cuda:
            self._launched.record()

    def behind(self, passes: int) -> float | None:
        """What the device had left to do at `end`, in equal passes of the whole; on a CPU, where nothing is launched, None."""
        if not self._cuda:
            return None
        self._launched.synchronize()
        device_s = self._began.elapsed_time(self._launched) / 1e3
        return max(0.0, device_s - self._host_s) / device_s * passes
