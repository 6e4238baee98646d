"""What waits in host memory comes back as it was, whatever is put and taken in between."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.model.activation_offload import ActivationOffload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(st.lists(st.integers(1, 400_000) | st.none(), max_size=30), st.randoms(use_true_random=False))
def test_last_in_first_out(sizes: list[int | None], numbers) -> None:
    """A number puts a tensor of that size, None takes the last one."""
    offload, waiting = ActivationOffload(DEVICE), []
    for size in [*sizes, *[None] * len(sizes)]:
        if size is not None:
            dtype = numbers.choice([torch.float32, torch.bfloat16])
            x = torch.full((size,), float(numbers.randrange(100)), dtype=dtype, device=DEVICE)
            waiting.append((offload.put(x), x.clone()))
            del x
            torch.full((size,), -1.0, dtype=dtype, device=DEVICE)  # somebody else's memory now, perhaps the same
        elif waiting:
            offloaded, expected = waiting.pop()
            found = offload.take(offloaded)
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert not offload._waiting


def test_host_memory_is_used_again() -> None:
    offload = ActivationOffload(DEVICE)
    for size in (1000, 500_000, 300_000):
        for offloaded in reversed([offload.put(torch.ones(size, device=DEVICE)) for _ in range(4)]):
            offload.take(offloaded)
    assert len(offload._free) == 4


def test_what_was_taken_belongs_to_the_taker_alone() -> None:
    """Tickets live as long as the graph that holds them; the tensors must not."""
    offload = ActivationOffload(DEVICE)
    waiting_tensors = [offload.put(torch.ones(10, device=DEVICE)) for _ in range(3)]
    seen = []
    for offloaded in reversed(waiting_tensors):
        x = offload.take(offloaded)
        seen.append(weakref.ref(x))
        del x
    assert [found() for found in seen] == [None] * 3


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    offload = ActivationOffload(DEVICE)
    for _ in range(3):
        offload.put(torch.ones(10, device=DEVICE))
    offload.clear()
    offloaded = offload.put(torch.full((10,), 7.0, device=DEVICE))
    assert torch.equal(offload.take(offloaded), torch.full((10,), 7.0, device=DEVICE))
    assert not offload._waiting and len(offload._free) == 3
