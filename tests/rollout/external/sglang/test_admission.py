"""Sequences enter once, in order, and a prompt's first sample before its others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.rollout.external.messages import Ask
from trimtab.rollout.external.sglang.admission import Admission


def asks(*sizes: int) -> list[Ask]:
    prompts = [prompt for prompt, size in enumerate(sizes) for _ in range(size)]
    return [Ask(id, [prompt, 7], 5, 100 + id) for id, prompt in enumerate(prompts)]


def ids(entered: list[Ask]) -> list[int]:
    return [ask.id for ask in entered]


def test_others_follow_when_the_first_has_begun() -> None:
    admission = Admission(8, share=True)
    admission.add(asks(3, 3, 3))
    assert ids(admission.enter(0, lambda ask: False)) == [0, 3, 6], "6 of 8 are taken by two prompts, so a third begins"
    assert ids(admission.enter(3, lambda ask: False)) == []
    assert ids(admission.enter(3, lambda ask: ask.id == 3)) == [4, 5]
    assert admission
    assert ids(admission.enter(5, lambda ask: True)) == [1, 2, 7, 8]
    assert not admission


def test_those_that_wait_or_enter_take_room_as_those_that_run_do() -> None:
    admission = Admission(5, share=True)
    admission.add(asks(3, 3, 3))
    assert ids(admission.enter(0, lambda ask: False)) == [0, 3]
    assert ids(admission.enter(2, lambda ask: False)) == [], "four wait"
    assert ids(admission.enter(2, lambda ask: True)) == [1, 2, 4, 5], "four enter"
    assert ids(admission.enter(4, lambda ask: True)) == [6], "until there is room"


def test_nobody_enters_where_all_room_is_taken() -> None:
    admission = Admission(6, share=True)
    admission.add(asks(3, 3, 3))
    assert ids(admission.enter(0, lambda ask: False)) == [0, 3]
    assert ids(admission.enter(6, lambda ask: True)) == [1, 2, 4, 5]


def test_without_a_prefix_cache_all_enter_at_once() -> None:
    admission = Admission(4, share=False)
    admission.add(asks(3, 3, 3))
    assert ids(admission.enter(0, lambda ask: False)) == [0, 1, 2, 3, 4, 5]
    assert ids(admission.enter(6, lambda ask: False)) == []
    assert ids(admission.enter(1, lambda ask: False)) == [6, 7, 8]


def test_nothing_is_left_of_what_was_cleared() -> None:
    admission = Admission(2, share=True)
    admission.add(asks(4, 4))
    admission.enter(0, lambda ask: False)
    admission.clear()
    assert not admission and admission.enter(0, lambda ask: True) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 9), st.booleans(), st.randoms())
def test_every_sequence_enters_once_whatever_ends_when(sizes: list[int], room: int, share: bool, random) -> None:
    admission = Admission(room, share)
    admission.add(asks(*sizes))
    entered: list[int] = []
    running: set[int] = set()
    for _ in range(10 * sum(sizes) + 10):
        if not admission:
            break
        new = ids(admission.enter(len(running), lambda ask, entered=frozenset(entered): ask.id in entered))
        entered += new
        running |= set(new)
        running -= {id for id in running if random.random() < 0.5}
    assert sorted(entered) == list(range(sum(sizes)))
