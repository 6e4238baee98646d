"""The watch over host memory: silent about noise and about growth that has ended, early about a leak, never every step."""

from __future__ import annotations

import random

from trimtab.observe.host import GIB, HostWatch, slope


def watch(left_gib: list[float], steps: int = 1000) -> tuple[list[str], list[dict[str, float]]]:
    """Warnings and metrics of a run of ten seconds a step in which so much was left after each."""
    said: list[str] = []
    values, now = iter(left_gib), iter(range(0, 10 * len(left_gib), 10))
    host = HostWatch(said.append, lambda: (64 * GIB, int(next(values) * GIB)), lambda: float(next(now)))
    metrics = [host.end_step(steps - step) for step in range(1, len(left_gib) + 1)]
    return said, metrics


def test_a_leak_is_told_once_and_again_when_half_of_it_is_left() -> None:
    said, metrics = watch([32 - step / 10 for step in range(300)])
    assert metrics[6].keys() == {"memory/host_left_gib"}
    assert abs(metrics[7]["memory/host_slope_mib_per_step"] - 102.4) < 0.1
    assert abs(metrics[7]["memory/host_left_gib"] - 31.3) < 1e-6
    assert len(said) == 4, "at 313 steps, 156, 78 and 39"
    assert said[0].startswith("free host memory falls by 102 MiB per step and runs out in about 313 steps (52m")
    assert "before the 992 to go; 31.3 GiB are left" in said[0]


def test_a_leak_that_the_run_will_not_live_to_see_is_not_told() -> None:
    said, _ = watch([32 - step / 10 for step in range(100)], steps=200)
    assert said == []


def test_memory_that_fills_up_at_first_and_then_stays_is_no_leak() -> None:
    said, _ = watch([30 - 2 * min(step, 4) for step in range(40)])
    assert said == []


def test_noise_is_no_leak() -> None:
    numbers = random.Random(0)
    said, _ = watch([32 + numbers.gauss(0, 0.2) for _ in range(200)], steps=400)
    assert said == []


def test_a_slope_is_not_moved_by_a_few_odd_values() -> None:
    values = [3.0 * i for i in range(20)]
    values[5] = values[13] = 1000.0
    assert abs(slope(values) - 3.0) < 0.1
