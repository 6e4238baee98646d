"""Peak memory, of the device by phase and of the host, in GiB under the stable `memory/` names.

A device peak is what torch's allocator handed out at most while the phase ran, and what the rollout engine holds beside it
at its end. Where there is no CUDA device, peaks are those of the process tree (process_memory.py), and the device's own metrics
are absent: an absent number is honest, a zero is not.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trimtab.base.units import GIB
from trimtab.observe.process_memory import HostPeaks, ProcessTree

if TYPE_CHECKING:
    import torch

RESERVED = "reserved"
"""Among peaks by phase: what the allocator took of the device, in any phase."""
MEMORY_PHASES = ("rollout", "score", "update", "optimizer")


def host_peak_gib() -> float:
    """The most resident memory this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def device_peak_gib(device: torch.device | str) -> float | None:
    """Peak allocated on the device since `reset_device_peak`; None where it has no such meter."""
    import torch

    return torch.cuda.max_memory_allocated(device) / GIB if _is_cuda(device) else None


def device_reserved_gib(device: torch.device | str) -> float | None:
    """The most that torch's allocator has taken of the device since `reset_device_peak`; None where it has no such meter."""
    import torch

    return torch.cuda.max_memory_reserved(device) / GIB if _is_cuda(device) else None


def device_state(device: torch.device | str) -> dict[str, float]:
    """The device's size; none on a CPU."""
    import torch

    if not _is_cuda(device):
        return {}
    return {"memory/device_total_gib": torch.cuda.get_device_properties(device).total_memory / GIB}


def reset_device_peak(device: torch.device | str) -> None:
    """Start a new peak at what is allocated now. Does nothing on a CPU."""
    import torch

    if _is_cuda(device) and torch.cuda.is_initialized():  # torch refuses before its first allocation
        torch.cuda.reset_peak_memory_stats(device)


class MemoryMeter:
    """Device peak of each phase of a step. Phases may nest (optimizer in update): an outer peak covers inner ones."""

    def __init__(
        self,
        device: torch.device | str,
        peak_gib: Callable[[torch.device | str], float | None] = device_peak_gib,
        reset: Callable[[torch.device | str], None] = reset_device_peak,
        outside: Callable[[], int] = lambda: 0,
        tree: ProcessTree | None = None,
    ) -> None:
        """`outside`: bytes held now that torch's allocator does not know of."""
        self._outside = outside
        self._tree = tree or ProcessTree()
        self.host_peaks = None if str(device).startswith("cuda") else HostPeaks(self._tree)
        """Where there is no device: peaks of the process tree."""
        self._device = device
        self._peak_gib = peak_gib
        self._reset = reset
        self._open: list[str] = []
        self._peaks: dict[str, float] = {}
        self._highest = self._processes = 0.0

    @property
    def peak_gib(self) -> float:
        """Peak of the whole run: the device's, or where it has no meter the host's, with other processes at the end of a step."""
        return self._highest or max(host_peak_gib(), self._processes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end()

    def begin(self, name: str) -> None:
        assert name in MEMORY_PHASES, f"unknown memory phase {name!r}; phases are {', '.join(MEMORY_PHASES)}"
        self._turn()
        self._open.append(name)
        if self.host_peaks is not None:
            self.host_peaks.begin(name)

    def end(self) -> None:
        """The innermost phase has ended."""
        self._turn()
        self._open.pop()
        if self.host_peaks is not None:
            self.host_peaks.end()

    def take_peaks(self) -> dict[str, float]:
        """Peaks by phase since the last call, in GiB."""
        found, self._peaks = self._peaks, {}
        return found

    def end_step(self) -> dict[str, float]:
        """`memory/<phase>_peak_gib` of phases since the last call, the device's state, and `memory/host_gib` of all processes."""
        metrics = {f"memory/{name}_peak_gib": peak for name, peak in self.take_peaks().items()}
        here = self._tree.rss_bytes() / GIB
        self._processes = max(self._processes, here)
        return metrics | device_state(self._device) | {"memory/host_gib": here}

    def close(self) -> None:
        self._tree.close()

    def _turn(self) -> None:
        """At each boundary the peak so far goes to every open phase and a new one starts."""
        peak = self._peak_gib(self._device)
        if peak is None:
            return
        peak += self._outside() / GIB
        self._highest = max(self._highest, peak)
        reserved = device_reserved_gib(self._device)
        if self._open and reserved is not None:
            self._peaks[RESERVED] = max(reserved, self._peaks.get(RESERVED, 0.0))
        for name in self._open:
            self._peaks[name] = max(peak, self._peaks.get(name, 0.0))
        self._reset(self._device)


def _is_cuda(device: torch.device | str) -> bool:
    import torch

    return torch.device(device).type == "cuda" and torch.cuda.is_available()
