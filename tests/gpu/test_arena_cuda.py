"""The arena on a real driver: memory really leaves and comes back, and captured graphs never notice. Skipped without a device."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from trimtab.base.errors import EngineError
from trimtab.rollout.native.arena import Arena, ArenaMemoryError, CudaDriver

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NBYTES = (1 << 30) + 12345
CUDA = torch.device("cuda")


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    monkeypatch.setattr(CudaDriver, "chunk_bytes", 64 << 20)
    gc.collect()
    torch.cuda.empty_cache()
    arena = Arena(NBYTES, CUDA)
    assert arena.lendable, arena.not_lendable
    yield arena
    arena.close()


def test_lending_gives_the_memory_to_the_driver_and_reclaiming_takes_it(arena: Arena) -> None:
    assert arena.mapped
    x = arena.tensor((1 << 20,), torch.bfloat16)
    address, granule = x.data_ptr(), CudaDriver(CUDA).granule
    for _ in range(3):
        before = free_bytes()
        freed = arena.lend()
        assert NBYTES <= freed < NBYTES + granule and not arena.mapped
        assert free_bytes() - before >= NBYTES - granule
        assert arena.lend() == 0
        arena.reclaim()
        assert abs(free_bytes() - before) <= granule and arena.mapped
        assert x.data_ptr() == address
        assert x.fill_(3).float().sum().item() == 3 * len(x)


def test_all_of_the_range_can_be_written_and_read(arena: Arena) -> None:
    whole = arena.tensor((NBYTES // 8,), torch.int64)
    for _ in range(2):
        torch.arange(len(whole), out=whole)
        assert bool((whole[1:] - whole[:-1] == 1).all())
        arena.lend()
        arena.reclaim()


def test_a_captured_graph_replays_after_lending_without_capture(arena: Arena) -> None:
    """Kernels, a copy and a memset: each kind of node that can hold an address of the arena."""
    spread = (1 << 26) + 3
    x, doubled, copied, zeroed = (arena.tensor((spread,), torch.float32) for _ in range(4))
    graph = torch.cuda.CUDAGraph()

    def step() -> None:
        torch.mul(x, 2, out=doubled)
        copied.copy_(doubled)
        zeroed.zero_()
        zeroed[:5].add_(copied[:5] + 1)

    x.fill_(1)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        step()
    for value in range(4):
        arena.lend()
        between = torch.full((1 << 28,), -1.0, device=CUDA)  # what was lent is used by others
        del between
        torch.cuda.empty_cache()
        arena.reclaim()
        for t in (x, doubled, copied, zeroed):
            t.fill_(float("nan"))
        x.fill_(value)
        graph.replay()
        assert bool((copied == 2 * value).all()) and bool((doubled == 2 * value).all())
        assert zeroed[:6].tolist() == [2 * value + 1.0] * 5 + [0.0] and not bool(zeroed[5:].any())


def test_reclaim_fails_cleanly_when_memory_is_short_and_works_later(arena: Arena) -> None:
    x = arena.tensor((1 << 20,), torch.int32)
    address = x.data_ptr()
    arena.lend()
    hog = torch.empty(free_bytes() - NBYTES // 2, dtype=torch.uint8, device=CUDA)
    before = free_bytes()
    assert before < NBYTES
    with pytest.raises(ArenaMemoryError, match=r"needs 1\.00 GiB, but the device has 0\.\d\d GiB free"):
        arena.reclaim()
    assert not arena.mapped and abs(free_bytes() - before) <= 64 << 20
    del hog  # to torch's cache, from which reclaim itself has to fetch it
    assert free_bytes() < NBYTES
    arena.reclaim()
    assert arena.mapped and x.data_ptr() == address
    assert int(x.fill_(7).sum()) == 7 * len(x)


def test_close_and_dropping_the_last_tensor_both_free_everything(arena: Arena) -> None:
    arena.lend()
    before = free_bytes()
    for drop in (False, True):
        other = Arena(NBYTES, CUDA)
        x = other.tensor((8,), torch.float32)
        assert before - free_bytes() >= NBYTES
        if not drop:
            other.close()
            other.close()
        del other, x
        assert free_bytes() == before


def test_an_error_names_the_call() -> None:
    driver = CudaDriver(CUDA)
    address = driver.reserve(driver.granule)
    with pytest.raises(EngineError, match="cuMemSetAccess on cuda:0 gave CUDA_ERROR"):
        driver.set_access(address, driver.granule)
    driver.free(address, driver.granule)
    with pytest.raises(ArenaMemoryError, match="cuMemCreate"):
        driver.create(1 << 42)
