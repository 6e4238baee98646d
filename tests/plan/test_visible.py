"""Which GPUs a run takes: alike and free ones; what is left out is said, what is asked for and missing is refused."""

from __future__ import annotations

import pytest

from trimtab.base.errors import ConfigError
from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.plan.visible import VisibleDevice, choose_devices


def gpu(index: int, name: str = "NVIDIA H200", free: float = 139, total: float = 140) -> VisibleDevice:
    return VisibleDevice(index, name, int(total * GIB), int(free * GIB), (9, 0))


def test_auto_takes_all_that_are_alike_and_free_and_says_what_it_leaves() -> None:
    found = [gpu(0), gpu(1, free=20), gpu(2, free=130), gpu(3, "NVIDIA T4", 14, 15)]
    chosen = choose_devices(Run(), found)
    assert [device.index for device in chosen.devices] == [0, 2] and chosen.free == 130 * GIB
    assert chosen.notes == (
        "GPU 3 (NVIDIA T4) is left out: it is not a NVIDIA H200",
        "GPU 1 (NVIDIA H200) is left out: 120 of 140 GiB are in use",
    )


def test_where_all_are_in_use_the_one_with_the_most_is_planned_for() -> None:
    chosen = choose_devices(Run(), [gpu(0, free=10), gpu(1, free=30)])
    assert [device.index for device in chosen.devices] == [1]


def test_a_number_takes_free_ones_first() -> None:
    chosen = choose_devices(Run(devices=2), [gpu(0, free=10), gpu(1), gpu(2)])
    assert [device.index for device in chosen.devices] == [1, 2]
    assert len(choose_devices(Run(devices=1), [gpu(0, free=10)]).devices) == 1


@pytest.mark.parametrize(
    ("count", "found", "words"),
    [
        (4, [gpu(0), gpu(1)], r"run\.devices: is 4, but this machine has 2 GPUs"),
        (2, [gpu(0), gpu(1, "NVIDIA T4")], r"not alike \(1 × NVIDIA H200, 1 × NVIDIA T4\)"),
        (2, [gpu(0), gpu(1, free=20)], r"GPU 1 \(NVIDIA H200\): 120 of 140 GiB are in use"),
    ],
)
def test_what_is_missing_is_refused(count: int, found: list[VisibleDevice], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_devices(Run(devices=count), found)
