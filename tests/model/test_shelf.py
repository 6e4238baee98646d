"""What waits on the shelf comes back as it was, whatever is put and taken in between."""

from __future__ import annotations

import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.model.shelf import Shelf

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@given(st.lists(st.integers(1, 400_000) | st.none(), max_size=30), st.randoms(use_true_random=False))
def test_last_in_first_out(sizes: list[int | None], numbers) -> None:
    """A number puts a tensor of that size, None takes the last one."""
    shelf, waiting = Shelf(DEVICE), []
    for size in [*sizes, *[None] * len(sizes)]:
        if size is not None:
            dtype = numbers.choice([torch.float32, torch.bfloat16])
            x = torch.full((size,), float(numbers.randrange(100)), dtype=dtype, device=DEVICE)
            waiting.append((shelf.put(x), x.clone()))
            del x
            torch.full((size,), -1.0, dtype=dtype, device=DEVICE)  # somebody else's memory now, perhaps the same
        elif waiting:
            ticket, expected = waiting.pop()
            found = shelf.take(ticket)
            assert found.dtype == expected.dtype and torch.equal(found, expected)
    assert not shelf._tickets


def test_host_memory_is_used_again() -> None:
    shelf = Shelf(DEVICE)
    for size in (1000, 500_000, 300_000):
        for ticket in reversed([shelf.put(torch.ones(size, device=DEVICE)) for _ in range(4)]):
            shelf.take(ticket)
    assert len(shelf._free) == 4


def test_what_was_taken_belongs_to_the_taker_alone() -> None:
    """Tickets live as long as the graph that holds them; the tensors must not."""
    shelf = Shelf(DEVICE)
    tickets = [shelf.put(torch.ones(10, device=DEVICE)) for _ in range(3)]
    seen = []
    for ticket in reversed(tickets):
        x = shelf.take(ticket)
        seen.append(weakref.ref(x))
        del x
    assert [found() for found in seen] == [None] * 3


def test_a_pass_that_failed_leaves_nothing_behind() -> None:
    shelf = Shelf(DEVICE)
    for _ in range(3):
        shelf.put(torch.ones(10, device=DEVICE))
    shelf.clear()
    ticket = shelf.put(torch.full((10,), 7.0, device=DEVICE))
    assert torch.equal(shelf.take(ticket), torch.full((10,), 7.0, device=DEVICE))
    assert not shelf._tickets and len(shelf._free) == 3
