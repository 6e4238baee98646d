"""How far a device is behind its host, from two events and a clock."""

from __future__ import annotations

import pytest
import torch

from trimtab.update import launching
from trimtab.update.launching import Launching


class Event:
    """In place of torch's: the device took two seconds, and is not asked before it is done."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.recorded = self.passed = False

    def record(self) -> None:
        self.recorded = True

    def synchronize(self) -> None:
        self.passed = self.recorded

    def elapsed_time(self, other: Event) -> float:
        assert self.recorded and other.passed
        return 2000.0


@pytest.mark.parametrize(
    ("host_s", "behind"), [(0.5, 3.0), (2.0, 0.0), (2.4, 0.0)], ids=["behind", "waits", "waits long"]
)
def test_what_is_left_is_told_in_passes(host_s: float, behind: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0 + host_s])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(launching.time, "perf_counter", lambda: next(times))
    found = Launching(torch.device("cuda"))
    found.end()
    assert found.behind(4) == pytest.approx(behind)


def test_nothing_is_launched_on_a_cpu() -> None:
    found = Launching(torch.device("cpu"))
    found.end()
    assert found.behind(4) is None
