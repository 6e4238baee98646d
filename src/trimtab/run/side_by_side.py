"""Work on models that are on different devices, at the same time.

Guarantees: what is at one place is done in the order it is given in; nothing is still under way when this returns or raises; the
first place's error is the one that is raised.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Result = TypeVar("Result")
Work = tuple[int, Callable[[], Result]]
"""Where it is done (`Trainer.place_of`), and what."""


def side_by_side(works: Sequence[Work[Result]]) -> list[Result]:
    """What each of these works returned. Works of one place take turns; those of the lowest place are done in this thread."""
    places = sorted({place for place, _ in works})
    results: dict[int, Result] = {}
    failures: dict[int, BaseException] = {}

    def do(at: int) -> None:
        try:
            for number, (place, work) in enumerate(works):
                if place == at:
                    results[number] = work()
        except BaseException as error:  # belongs to the caller: a thread would lose it
            failures[at] = error

    others = [threading.Thread(target=do, args=(place,), name=f"trimtab-place-{place}") for place in places[1:]]
    for thread in others:
        thread.start()
    if places:
        do(places[0])
    for thread in others:
        thread.join()
    if failures:
        raise failures[min(failures)]
    return [results[number] for number in range(len(works))]
