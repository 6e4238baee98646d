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

Victim = int | str | None
"""A rank that trains the policy, one of other roles such as `critic 0`, or None: the driver."""
WORK = ("generate before", "score before", "accumulate before", "score_rewards before")
"""What ranks do once a run is open."""


def victim_of(target: Any) -> Victim:
    from trimtab.run.role_rank import RoleRank
    from trimtab.run.sampler_rank import SamplerRank

    if isinstance(target, SamplerRank):
        return f"rollout {target._rank}"
    rank = this_rank()
    assert rank is not None
    return f"{target.roles[0]} {rank}" if isinstance(target, RoleRank) else rank


def watch_orders(arrive: Callable[[Victim, str, str], None]) -> None:
    """Have ranks say whenever they are about to carry out an order, and when they have, before they answer."""
    from trimtab.cluster import serve

    original = serve.carry_out

    def carry_out(link: Any, target: Any, order: Any) -> Any:
        victim = victim_of(target)
        arrive(victim, order.method, "before")
        answer = original(link, target, order)
        arrive(victim, order.method, "after")
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
            name = "driver" if victim is None else victim if isinstance(victim, str) else f"rank {victim}"
            append(done, f"{name}: {place}")
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


def victim_named(stem: str) -> Victim:
    """Whose places a file holds."""
    name = stem.removeprefix("places-")
    return None if name == "None" else int(name) if name.isdigit() else name


def first_work(places: list[str]) -> int:
    return next(number for number, place in enumerate(places, 1) if place in WORK)


def random_plans(draw: random.Random, ranks: list[Victim]) -> Iterator[list[tuple[Victim, float]]]:
    """Who dies, and after which share of an undisturbed run's places. Three losses of ranks are survived between two of the
    driver; shares are small enough that most lives see all of their deaths."""
    while True:
        victims: list[Victim] = [*draw.choices(ranks, k=2), None, draw.choice(ranks)]
        yield [(victim, draw.uniform(0.02, 0.6)) for victim in victims]


def main(spec_file: Path) -> None:
    import torch

    torch.set_num_threads(1)
    import trimtab.api
    import trimtab.run.rank
    import trimtab.run.role_rank
    import trimtab.run.sampler_rank  # noqa: F401 - imports are what forking saves
    from trimtab.observe import look_back

    look_back.draw_curve = lambda folder, console: None
    spec, folder = json.loads(spec_file.read_text()), spec_file.parent

    def config_of(name: str) -> dict[str, Any]:
        return {**spec["config"], "observe": {**spec["config"]["observe"], "dir": str(folder / name)}}

    def undisturbed() -> None:
        fork_ranks()
        count_places(folder)

    assert end(attempt(config_of("whole"), folder / "log.txt", undisturbed))
    seen = {victim_named(file.stem): file.read_text().splitlines() for file in sorted(folder.glob("places-*.txt"))}
    ranks = [victim for victim in seen if victim is not None]
    plans = spec["plans"] or random_plans(random.Random(spec["seed"]), ranks)
    lives: list[dict[str, Any]] = []
    for number, plan in enumerate(plans):
        # A run whose ranks are lost while it is first opened ends: they are killed later.
        kills = [
            (victim, max(int(share * len(seen[victim])), 0 if victim is None else first_work(seen[victim])))
            for victim, share in plan
        ]
        lives.append(life(f"life-{number}", config_of(f"life-{number}"), kills, folder))
        if sum(len(found["kills"]) for found in lives) >= spec["kills"]:
            break
    print(json.dumps({"places": {str(key): len(places) for key, places in seen.items()}, "lives": lives}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
