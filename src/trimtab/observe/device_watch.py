"""What the driver says of the GPUs of a run: use, power, temperature, clock and memory. Sampled once a second by a thread.

By NVML, which is no part of CUDA: it disturbs neither streams nor graphs that are being captured. Where nvidia-ml-py is not
installed, or a device does not tell, the metric is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from trimtab.base.spans import SpanLog, log
from trimtab.base.units import GIB

SAMPLE_EVERY_S = 1.0


class DeviceWatch:
    """Means over devices, and over the samples of a step; of memory and temperature, the highest."""

    def __init__(self, nvml: Any, handles: Sequence[Any], spans: SpanLog = log) -> None:
        """`nvml`: the module pynvml, started."""
        self._nvml, self._handles, self._spans = nvml, handles, spans
        self._sampled = -SAMPLE_EVERY_S
        self._samples: list[dict[str, float]] = []

    def look(self) -> None:
        if time.monotonic() - self._sampled < SAMPLE_EVERY_S:
            return
        self._sampled = time.monotonic()
        found = [self._read(handle) for handle in self._handles]
        sample = _over(found)
        if used := sample.get("memory/device_used_gib"):
            self._spans.count("device memory", time.perf_counter(), used * GIB)
        self._samples = [*self._samples, sample]

    def end_step(self) -> dict[str, float]:
        """Since the last call; a step that is too short for a sample has that of the step before."""
        found = self._samples
        self._samples = found[-1:] if len(found) == 1 else []
        return _over(found)

    def close(self) -> None:
        self._nvml.nvmlShutdown()

    def _read(self, handle: Any) -> dict[str, float]:
        nvml = self._nvml
        asked: dict[str, Callable[[], float]] = {
            "device/util": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "device/power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "device/temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            "device/clock_share": lambda: (
                nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)
                / nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)
            ),
            "memory/device_used_gib": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / GIB,
        }
        found = {}
        for name, ask in asked.items():
            try:
                found[name] = ask()
            except (nvml.NVMLError, ZeroDivisionError):  # not supported by this device, or not allowed to us
                continue
        return found


def open_device_watch(uuids: Sequence[str]) -> DeviceWatch | None:
    """A watch over GPUs, by the UUIDs that CUDA has for them; None where NVML or any of them cannot be had."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        handles = [
            pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}") for uuid in uuids
        ]
    except pynvml.NVMLError:  # no driver, or a container that hides it
        return None
    return DeviceWatch(pynvml, handles) if handles else None


def _over(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means, and the highest of what has a limit."""
    together: dict[str, float] = {}
    for name in dict.fromkeys(name for each in found for name in each):
        values = [each[name] for each in found if name in each]
        highest = name.startswith("memory/") or name == "device/temperature_c"
        together[name] = max(values) if highest else sum(values) / len(values)
    return together
