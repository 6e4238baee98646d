"""Peak memory of all ranks: the highest of them under the names that one device has, and each rank's own beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trimtab.base.units import GIB
from trimtab.cluster.ranks import Ranks
from trimtab.observe.meters import RESERVED, host_peak_gib
from trimtab.observe.process_memory import HostPeaks, ProcessTree


class RankMeter:
    """Phases begin and end on all ranks. On a CPU the process tree is measured, as with one. See MemoryMeter."""

    def __init__(self, ranks: Ranks, device_bytes: int | None) -> None:
        """`device_bytes`: a device's memory; None on a CPU."""
        self._ranks, self._device_bytes = ranks, device_bytes
        self._highest = self._processes = 0.0
        self._tree = ProcessTree()
        self.host_peaks = HostPeaks(self._tree) if device_bytes is None else None

    @property
    def peak_gib(self) -> float:
        return self._highest or max(host_peak_gib(), self._processes)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.host_peaks is not None:
            self.host_peaks.begin(name)
            try:
                yield
            finally:
                self.host_peaks.end()
            return
        self._ranks.ask("begin_phase", name)
        try:
            yield
        finally:
            if not self._ranks.closed:
                self._ranks.ask("end_phase")

    def close(self) -> None:
        self._tree.close()

    def end_step(self) -> dict[str, float]:
        """See MemoryMeter; and `memory/rank<N>/<phase>_peak_gib`, `time/communication`, `run/communication_gib`."""
        metrics: dict[str, float] = {}
        for rank, peaks in enumerate(self._ranks.ask("peaks")):
            for name, peak in peaks.items():
                metrics[f"memory/rank{rank}/{name}_peak_gib"] = peak
                key = f"memory/{name}_peak_gib"
                metrics[key] = max(peak, metrics.get(key, 0.0))
                if name != RESERVED:
                    self._highest = max(self._highest, peak)
        spent = self._ranks.ask("communication")
        metrics["time/communication"] = max(seconds for seconds, _ in spent)
        metrics["run/communication_gib"] = sum(moved for _, moved in spent) / GIB
        here = self._tree.rss_bytes() / GIB
        self._processes = max(self._processes, here)
        if self._device_bytes is not None:
            metrics["memory/device_total_gib"] = self._device_bytes / GIB
        return metrics | {"memory/host_gib": here}
