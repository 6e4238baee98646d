"""Runs a training on several ranks again and again, and kills a rank or the driver at a chosen place: the hand that
test_kill_ranks.py uses.

`python -m tests.invariants.killing_ranks SPEC.json` imports torch and transformers once. Attempts are forked from it, and ranks
from attempts. Places are counted, not timed: in a rank the orders that it was given, in the driver the phases of its timeline.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.forked_ranks import fork_ranks, this_rank
from tests.invariants.killing import append, attempt, die, end, leaked, watch_phases

Victim = int | None
"""A rank, or None: the driver."""


def watch_orders(arrive: Callable[[int, str, str], None]) -> None:
    """Have ranks say whenever they are about to carry out an order, and when they have, before they answer."""
    from trimtab.cluster import serve

    original = serve.carry_out

    def carry_out(link: Any, target: Any, order: Any) -> Any:
        rank = this_rank()
        assert rank is not None
        arrive(rank, order.method, "before")
        answer = original(link, target, order)
        arrive(rank, order.method, "after")
        return answer

    serve.carry_out = carry_out


def count_places(folder: Path) -> None:
    """Write down every place of an undisturbed run."""
    watch_orders(lambda rank, method, when: append(folder / f"places-{rank}.txt", f"{method} {when}"))
    watch_phases(lambda place: append(folder / "places-None.txt", place))


def die_as_planned(kills: list[tuple[Victim, int]], done: Path) -> None:
    """Arrange for one death after the other: each `(victim, n)` at the n-th place of the victim's process, or its next.
    `done`: deaths so far."""
    fork_ranks()
    places: dict[Victim, int] = {}

    def arrive(victim: Victim, place: str) -> None:
        places[victim] = places.get(victim, 0) + 1
        so_far = len(done.read_text().splitlines()) if done.exists() else 0
        if so_far < len(kills) and kills[so_far][0] == victim and places[victim] >= kills[so_far][1]:
            append(done, f"{'driver' if victim is None else f'rank {victim}'}: {place}")
            die()

    watch_orders(lambda rank, method, when: arrive(rank, f"{method} {when}"))
    watch_phases(lambda place: arrive(None, place))


def life(name: str, config: dict[str, Any], kills: list[tuple[Victim, int]], folder: Path) -> dict[str, Any]:
    """One run that is killed as planned, resumed where the driver was, until it finishes."""
    done = folder / f"{name}-kills.txt"
    while not end(attempt(config, folder / "log.txt", lambda: die_as_planned(kills, done))):
        assert not leaked(), "ranks or reward workers outlived their driver"
    assert not leaked()
    return {"name": name, "kills": done.read_text().splitlines() if done.exists() else []}


def random_plans(draw: random.Random, ranks: int) -> Iterator[list[tuple[Victim, float]]]:
    """Who dies, and after which share of an undisturbed run's places. Three losses of ranks are survived between two of the
    driver; shares are small enough that most lives see all of their deaths."""
    while True:
        victims: list[Victim] = [*(draw.randrange(ranks) for _ in range(2)), None, draw.randrange(ranks)]
        yield [(victim, draw.uniform(0.02, 0.6)) for victim in victims]


def main(spec_file: Path) -> None:
    import torch

    torch.set_num_threads(1)
    import trimtab.api
    import trimtab.run.rank  # noqa: F401 - imports are what forking saves
    from trimtab.observe import look_back

    look_back.draw_curve = lambda folder, console: None
    spec, folder = json.loads(spec_file.read_text()), spec_file.parent
    ranks = spec["config"]["run"]["devices"]

    def config_of(name: str) -> dict[str, Any]:
        return {**spec["config"], "observe": {**spec["config"]["observe"], "dir": str(folder / name)}}

    def undisturbed() -> None:
        fork_ranks()
        count_places(folder)

    assert end(attempt(config_of("whole"), folder / "log.txt", undisturbed))
    seen = {victim: (folder / f"places-{victim}.txt").read_text().splitlines() for victim in (None, *range(ranks))}
    plans = spec["plans"] or random_plans(random.Random(spec["seed"]), ranks)
    lives: list[dict[str, Any]] = []
    for number, plan in enumerate(plans):
        # A run whose ranks are lost while it is first opened ends: the first is killed later.
        first = seen[0].index("generate before") + 1
        kills = [
            (victim, max(int(share * len(seen[victim])), 0 if at else first)) for at, (victim, share) in enumerate(plan)
        ]
        lives.append(life(f"life-{number}", config_of(f"life-{number}"), kills, folder))
        if sum(len(found["kills"]) for found in lives) >= spec["kills"]:
            break
    print(json.dumps({"places": {str(key): len(places) for key, places in seen.items()}, "lives": lives}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
