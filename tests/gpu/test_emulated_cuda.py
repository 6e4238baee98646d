"""The device that the CPU plays (tests/emulated_cuda) refuses what a GPU refuses: faults that are planted here are found."""

from __future__ import annotations

from collections.abc import Iterator

import emulated_cuda
import pytest
import torch
from emulated_cuda.memory import DeviceMemory

from trimtab.rollout.native.arena import Arena, ArenaMemoryError

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and emulated_cuda.current is None, reason="there is a CUDA device"
)
MIB = 2**20


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[DeviceMemory]:
    if emulated_cuda.current is not None:
        yield emulated_cuda.current
    else:
        with emulated_cuda.installed(total_memory=512 * MIB) as found:
            yield found


def numbers(count: int = 4) -> torch.Tensor:
    return torch.arange(float(count), device="cuda")


def test_tensors_say_where_they_are_and_numbers_are_the_cpus() -> None:
    x = torch.nn.Parameter(numbers())
    assert x.device == torch.device("cuda", 0) and x.is_cuda and (x * 2).view(2, 2).T.is_cuda
    (x.detach().cpu() * 2).sum()
    (x**2).sum().backward()
    assert x.grad is not None and x.grad.is_cuda and x.grad.cpu().tolist() == [0.0, 2.0, 4.0, 6.0]
    assert not x.cpu().is_cuda and x.to("cuda") is x and x.half().float().is_cuda


def test_operands_on_two_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        numbers() + torch.ones(4)
    assert (numbers() + torch.tensor(1.0)).sum().item() == 10.0
    with pytest.raises(TypeError, match=r"cpu\(\)"):
        numbers().numpy()


def test_a_copy_that_nobody_waited_for_is_garbage() -> None:
    home = numbers().to("cpu", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert home.isnan().all()
    done.synchronize()
    assert home.tolist() == [0.0, 1.0, 2.0, 3.0]


def captured(work) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph


def test_a_graph_does_its_work_again_at_the_same_addresses() -> None:
    x, out = numbers(), numbers() * 0
    graph = captured(lambda: out.copy_((x + 1).cumsum(0)))
    assert out.sum().item() == 0.0, "recording changes nothing"
    x.fill_(1.0)
    graph.replay()
    assert out.cpu().tolist() == [2.0, 4.0, 6.0, 8.0]


def test_the_host_may_not_wait_while_a_graph_is_recorded() -> None:
    x = numbers()
    for wait in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), torch.cuda.synchronize, x.tolist):
        with pytest.raises(RuntimeError, match="captur"):
            captured(wait)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchronizing"):
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_graph_over_memory_that_is_gone_is_refused() -> None:
    there, out = [numbers()], numbers()
    graph = captured(lambda: out.copy_(there[0]))
    there.clear()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        graph.replay()


def test_lent_memory_is_not_touched_and_comes_back_overwritten(device: DeviceMemory) -> None:
    arena = Arena(4 * MIB, torch.device("cuda"))
    x = arena.tensor((1000,), torch.float32).fill_(1.0)
    before = torch.cuda.mem_get_info()[0]
    assert arena.lend() == 4 * MIB == torch.cuda.mem_get_info()[0] - before
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x.add_(1)
    arena.reclaim()
    assert x.isnan().all()
    arena.lend()
    device.others = torch.cuda.mem_get_info()[0] - MIB
    try:
        with pytest.raises(ArenaMemoryError):
            arena.reclaim()
    finally:
        device.others = 0
    arena.reclaim()
    arena.close()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        x.add_(1)


def test_memory_is_counted_and_runs_out(device: DeviceMemory) -> None:
    torch.cuda.empty_cache()
    held, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    x = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == held + MIB and x.view(2, -1).is_cuda
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(free, dtype=torch.uint8, device="cuda")
    del x
    assert torch.cuda.memory_allocated() == held and torch.cuda.memory_reserved() >= held + MIB
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] == free
    device.fail_allocation(2)
    numbers()
    with pytest.raises(torch.OutOfMemoryError):
        numbers()
    device.refuse = None
