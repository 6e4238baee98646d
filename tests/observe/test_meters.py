"""Memory meters: right with nested phases, silent about devices that are not there."""

import subprocess
import sys

import psutil
import pytest

from trimtab.observe.meters import MemoryMeter, device_peak_gib, host_peak_gib, reset_device_peak
from trimtab.observe.process_memory import ProcessTree


class FakeDevice:
    """Allocated and peak memory the way torch keeps them."""

    def __init__(self):
        self.now = self.top = 0.0

    def use(self, gib):
        self.now = gib
        self.top = max(self.top, gib)

    def peak(self, device):
        return self.top

    def reset(self, device):
        self.top = self.now


@pytest.fixture
def device():
    return FakeDevice()


@pytest.fixture
def meter(device):
    return MemoryMeter("cuda", peak_gib=device.peak, reset=device.reset)


def tree_gib():
    tree = ProcessTree()
    try:
        return tree.rss_bytes() / 2**30
    finally:
        tree.close()


def device_metrics(meter):
    return {name: value for name, value in meter.end_step().items() if name.endswith("_peak_gib")}


def test_each_phase_has_its_own_peak(meter, device):
    device.use(50.0)  # before any phase: nobody's
    device.use(1.0)
    with meter.phase("rollout"):
        device.use(9.0)
        device.use(2.0)
    with meter.phase("score"):
        device.use(3.0)
    with meter.phase("rollout"):
        device.use(5.0)
    assert device_metrics(meter) == {"memory/rollout_peak_gib": 9.0, "memory/score_peak_gib": 3.0}
    assert device_metrics(meter) == {}


def test_an_outer_phase_covers_its_inner_ones_and_not_the_other_way(meter, device):
    with meter.phase("update"):
        device.use(8.0)
        device.use(2.0)
        with meter.phase("optimizer"):
            device.use(6.0)
        device.use(3.0)
    assert device_metrics(meter) == {"memory/update_peak_gib": 8.0, "memory/optimizer_peak_gib": 6.0}


def test_a_phase_that_runs_out_of_memory_is_still_measured(meter, device):
    def run_out():
        with meter.phase("update"):
            device.use(4.0)
            raise MemoryError

    with pytest.raises(MemoryError):
        run_out()
    assert device_metrics(meter) == {"memory/update_peak_gib": 4.0}


def test_without_a_device_there_are_no_device_metrics():
    meter = MemoryMeter("cpu")
    with meter.phase("update"):
        pass
    assert list(meter.end_step()) == ["memory/host_gib"]
    assert device_peak_gib("cpu") is None
    reset_device_peak("cpu")


def test_unknown_phases_are_refused(meter):
    with pytest.raises(AssertionError, match="unknown memory phase"), meter.phase("lunch"):
        pass


def test_host_peak_is_at_least_what_is_resident_now():
    assert 0.01 < tree_gib() < 64
    assert host_peak_gib() > 0.01


def test_the_tree_includes_children():
    alone = tree_gib()
    program = "data = bytearray(b'x') * (64 << 20); print('ready', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    child.stdout.readline()
    with_child, child_only = tree_gib(), psutil.Process(child.pid).memory_info().rss / 2**30
    child.communicate(b"\n")
    assert child_only > 64 / 1024
    assert with_child == pytest.approx(alone + child_only, abs=0.05)


def test_the_peak_of_a_run_without_a_device_counts_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ProcessTree()
    meter = MemoryMeter("cpu", tree=tree)
    for here in (1000.0, 900.0):
        monkeypatch.setattr(tree, "rss_bytes", lambda here=here: int(here * 2**30))
        meter.end_step()
    assert meter.peak_gib == 1000.0
