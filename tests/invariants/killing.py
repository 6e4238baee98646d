"""Runs a training again and again in forked children, each killed at a chosen moment: the hand that test_kill_resume.py uses.

`python -m tests.invariants.killing SPEC.json` imports torch and transformers once and forks for every attempt, before any thread
exists, so an attempt costs a second and not ten. What was imported is frozen, or every attempt would look through it for cycles.
The answer is a JSON list of lives, one for each finished run.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil

MARK = "TRIMTAB_TEST_KILLING"
"""A variable of everything that attempts start."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Places:
    """Where a child is, in memory that outlives it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 128)

    def set(self, text: str) -> None:
        self.memory[:] = text.encode()[:128].ljust(128)

    def get(self) -> str:
        return self.memory[:].decode().strip()


def append(file: Path, line: str) -> None:
    with file.open("a") as out:
        out.write(f"{line}\n")


def attempt(config: dict[str, Any], log: Path, prepare: Callable[[], None]) -> int:
    """Fork a child that trains to the end, resuming; returns its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        prepare()
        import trimtab

        trimtab.train(config, resume=True)
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def end(pid: int) -> bool:
    """Wait for a child. True: it finished; False: it was killed; anything else is a failure."""
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return False
    assert os.WEXITSTATUS(status) == 0, "the training failed; see the log"
    return True


def leaked(patience_s: float = 10.0) -> list[int]:
    """Reward workers of this test that are still alive after their trainer's death."""
    until = time.monotonic() + patience_s
    while True:
        alive = [p.pid for p in psutil.process_iter() if p.pid != os.getpid() and _ours(p)]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.05)


def _ours(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK) == os.environ[MARK] and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def watch_phases(arrive: Callable[[str], None]) -> None:
    """Have the timeline say whenever the child comes to another place: in a phase, or after it."""
    from trimtab.observe.timeline import Timeline

    original = Timeline.phase

    @contextmanager
    def phase(self: Timeline, name: str):  # type: ignore[no-untyped-def]
        arrive(name)
        with original(self, name):
            yield
        arrive(f"after {name}")

    Timeline.phase = phase  # type: ignore[method-assign]


def die_soon_after(arrivals: int, delay_s: float, places: Places) -> None:
    """Arrange for the child's death, a moment after it came to its n-th place, fast or slow."""
    left = arrivals

    def arrive(place: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            places.set(place)
            threading.Timer(delay_s, die).start()

    watch_phases(arrive)
    if arrivals == 0:
        places.set("starting")
        threading.Timer(delay_s, die).start()


def die_at(point: str) -> None:
    """Arrange for the child's death at a named point: `module.function before|after|half`."""
    where, when = point.split()
    module_name, name = where.rsplit(".", 1)
    if module_name == "Path":
        owner: Any = Path
    else:
        import importlib

        owner = importlib.import_module(module_name)
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if owner is Path and "checkpoints" not in str(args[0]):
            return original(*args, **kwargs)
        if when == "before":
            die()
        result = original(*args, **kwargs)
        if when == "half":  # the file that was being written is there in part
            file = Path(args[0])
            os.truncate(file, file.stat().st_size // 2)
        die()
        return result

    setattr(owner, name, wrapped)


def random_lives(spec: dict[str, Any], config_of: Callable[[str], dict[str, Any]], log: Path) -> list[dict[str, Any]]:
    """Whole runs, each attempt killed soon after a place drawn at random, until there were enough kills."""
    draw, lives, kills = random.Random(spec["seed"]), [], 0
    while kills < spec["kills"]:
        name, places, seen = f"random-{len(lives)}", Places(), []
        finished = False
        while not finished:
            arrivals, delay_s = draw.randrange(spec["arrivals"] // 3), draw.uniform(0, 0.1)
            finished = end(attempt(config_of(name), log, partial(die_soon_after, arrivals, delay_s, places)))
            if not finished:
                seen.append(places.get())
                kills += 1
                assert not leaked(), "reward workers outlived their trainer"
        lives.append({"name": name, "kills": seen})
    return lives


def pointed_life(points: list[str], config: dict[str, Any], log: Path) -> dict[str, Any]:
    """One run that dies once at every named point, in this order, then finishes."""
    for point in points:
        assert not end(attempt(config, log, lambda point=point: die_at(point))), f"{point} was never reached"
    assert not leaked()
    assert end(attempt(config, log, lambda: None))
    return {"name": "pointed", "kills": points}


def main(spec_file: Path) -> None:
    import torch

    os.environ[MARK] = uuid.uuid4().hex
    torch.set_num_threads(1)
    import trimtab.api  # noqa: F401 - imports are what forking saves

    gc.collect()
    gc.freeze()
    spec = json.loads(spec_file.read_text())
    folder = spec_file.parent
    log = folder / "log.txt"

    def config_of(name: str) -> dict[str, Any]:
        return {**spec["config"], "observe": {**spec["config"]["observe"], "dir": str(folder / name)}}

    arrivals = folder / "arrivals.txt"
    assert end(attempt(config_of("whole"), log, lambda: watch_phases(lambda place: append(arrivals, place))))
    spec["arrivals"] = len(arrivals.read_text().splitlines())
    lives = [pointed_life(spec["points"], config_of("pointed"), log), *random_lives(spec, config_of, log)]
    print(json.dumps({"arrivals": spec["arrivals"], "lives": lives}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
