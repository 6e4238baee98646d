"""Which of the GPUs that a process sees a run takes: as many alike ones as it asks for, or by itself all that are alike and free.

Ranks share their work evenly, so a plan is made for devices that are the same; it counts on the least memory that is free on any
of them. Pure: run/machine.py looks at the devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.config.run import Run

MIN_FREE_SHARE = 0.5
"""A device with less of its memory free than this is somebody else's: `auto` leaves it out."""


@dataclass(frozen=True)
class VisibleDevice:
    """A GPU that this process sees."""

    index: int
    """As torch counts: cuda:INDEX."""
    name: str
    total: int
    free: int
    """Bytes."""
    capability: tuple[int, int] = (0, 0)

    @property
    def taken(self) -> bool:
        return self.free < MIN_FREE_SHARE * self.total

    @property
    def kind(self) -> tuple[str, tuple[int, int]]:
        return self.name, self.capability


@dataclass(frozen=True)
class ChosenDevices:
    """The devices that a run may use, and what is said of those that it may not."""

    devices: tuple[VisibleDevice, ...]
    notes: tuple[str, ...] = ()

    @property
    def free(self) -> int:
        """Bytes that are free on each of them."""
        return min(device.free for device in self.devices)


def choose_devices(run: Run, found: Sequence[VisibleDevice], where: str = "this machine") -> ChosenDevices:
    """Those that a run may use; raises where there are fewer alike and free ones than it asks for."""
    assert found, "torch sees a CUDA device"
    alike, notes = _alike(found)
    free = [device for device in alike if not device.taken]
    if run.devices == "auto":
        # With nothing free a run is planned for what there is, as on one device, and refused if that is too little.
        chosen = free or [max(alike, key=lambda device: device.free)]
        left = [device for device in alike if device not in chosen]
        notes += [f"{_named(device)} is left out: {_held(device)}" for device in left]
        return ChosenDevices(tuple(chosen), tuple(notes))
    _refuse_too_few(run.devices, found, alike, free, where)
    enough = free if len(free) >= run.devices else sorted(alike, key=lambda device: -device.free)
    return ChosenDevices(tuple(sorted(enough[: run.devices], key=lambda device: device.index)))


def _alike(found: Sequence[VisibleDevice]) -> tuple[list[VisibleDevice], list[str]]:
    """The largest group of identical devices, of equal groups the one with more memory; and which others there are."""
    kinds = Counter(device.kind for device in found)
    kind = max(kinds, key=lambda kind: (kinds[kind], max(d.total for d in found if d.kind == kind)))
    others = [device for device in found if device.kind != kind]
    notes = [f"{_named(device)} is left out: it is not a {kind[0]}" for device in others]
    return [device for device in found if device.kind == kind], notes


def _refuse_too_few(
    count: int, found: Sequence[VisibleDevice], alike: list[VisibleDevice], free: list[VisibleDevice], where: str
) -> None:
    here = "1 GPU" if len(found) == 1 else f"{len(found)} GPUs"
    if count > len(found):
        what, most = f"is {count}, but {where} has {here}", len(alike)
    elif count > len(alike):
        kinds = Counter(device.name for device in found)
        mixed = ", ".join(f"{number} × {name}" for name, number in kinds.most_common())
        what, most = f"is {count}, but the {here} here are not alike ({mixed})", len(alike)
    elif count > max(1, len(free)):
        taken = "; ".join(f"{_named(device)}: {_held(device)}" for device in alike if device.taken)
        what, most = f"is {count}, but other processes hold memory of the GPUs here ({taken})", max(1, len(free))
    else:
        return
    raise ConfigError([Problem("run.devices", what, f"Write {most} or less, or auto.")])


def _named(device: VisibleDevice) -> str:
    return f"GPU {device.index} ({device.name})"


def _held(device: VisibleDevice) -> str:
    return f"{(device.total - device.free) / GIB:.0f} of {device.total / GIB:.0f} GiB are in use"
