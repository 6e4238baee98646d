"""The tail of a rollout, as seen from outside an engine."""

from __future__ import annotations

from trimtab.rollout.external.tail import TailClock


def test_few_of_the_slots_that_could_be_used() -> None:
    tail = TailClock(slots=100)
    for now, left in enumerate((40, 20, 10, 9, 1)):
        tail.see(left, float(now))
    tail.see(0, 7.0)
    assert tail.seconds == 4.0, "with 9 and with 1 of 40 that there were"


def test_sequences_that_come_later_end_it_and_a_pause_is_not_counted() -> None:
    tail = TailClock(slots=8)
    tail.see(8, 0.0)
    tail.see(1, 1.0)
    tail.pause(3.0)
    tail.see(1, 10.0)
    tail.see(8, 11.0)
    assert tail.seconds == 3.0
    tail.see(0, 20.0)
    assert tail.seconds == 3.0
