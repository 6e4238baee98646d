"""Snapshots: every slot belongs to a prompt, holds a snapshot, or is free; and what is going to be copied is not given away."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.rollout.native.snapshots import Snapshots


def test_the_longest_prefix_is_found() -> None:
    held = Snapshots(range(10, 14), page_tokens=2)
    one, two = held.keep([1, 2]), held.keep([1, 2, 3, 4])
    assert held.find([1, 2, 3, 4, 5, 6], 3) == (2, two)
    assert held.find([1, 2, 3, 9, 5, 6], 3) == (1, one)
    assert held.find([1, 2, 3, 4, 5, 6], 1) == (1, one)  # pages of no more are cached
    assert held.find([9, 2, 3, 4], 2) == (0, -1)
    assert held.keep([1, 2]) is None  # there is one
    held.forget_all()
    assert held.find([1, 2, 3, 4], 2) == (0, -1)


def test_what_is_going_to_be_copied_does_not_give_way() -> None:
    held = Snapshots([0], page_tokens=1)
    assert held.keep([1]) == 0
    assert not held.available
    held.copied()
    assert held.find([1, 2], 1) == (1, 0)
    assert not held.available and held.keep([3]) is None
    held.copied()
    assert held.take() == 0
    assert held.find([1, 2], 1) == (0, -1)


def test_a_prompt_does_not_go_on_from_the_only_slot_that_it_could_have() -> None:
    """Its state would be written over the one it reads."""
    held = Snapshots([0], page_tokens=1)
    assert held.keep([1]) == 0
    held.copied()
    assert held.find([1, 2], 1, takes_one=True) == (0, -1)
    assert held.available and held.take() == 0


@given(st.integers(1, 5), st.lists(st.tuples(st.sampled_from("tgkfcp"), st.integers(0, 7)), max_size=60))
def test_slots_add_up(count: int, moves: list[tuple[str, int]]) -> None:
    held, taken = Snapshots(range(count), page_tokens=1), []
    for move, number in moves:
        if move == "t" and held.available:
            taken.append(held.take())
        elif move == "g" and taken:
            held.give(taken.pop(number % len(taken)))
        elif move == "k":
            held.keep([number])
        elif move == "p" and held.available:
            held.find([number, 0], 1, takes_one=True)
            taken.append(held.take())
        elif move == "f":
            held.find([number, 0], 1)
        elif move == "c":
            held.copied()
        everywhere = [*taken, *held._free, *held._kept.values()]
        assert sorted(everywhere) == list(range(count))
