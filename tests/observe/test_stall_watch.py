"""A run on one device whose work stands still is ended, with its stacks; one that waits for others is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.running import letters
from trimtab.observe import stall_watch
from trimtab.observe.stall_watch import FIRST_STALL_S, GRACE_S, RunHangs, StallWatch
from trimtab.record.checkpoint import newest_checkpoint
from trimtab.run import stalls
from trimtab.update.updater import Updater

USUAL: dict[str, Any] = {
    "data": [{"prompt": word} for word in ("12+34=", "7+8=", "9+99=")],
    "reward": letters,
    "learn": {"steps": 4, "prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 6},
    "run": {"device": "cpu", "devices": 1, "reward_workers": 1, "threads": 1},
    "observe": {"checkpoint_every": 1, "report": False},
}
STUCK = """
import sys, threading, time
from tests.observe.test_stall_watch import impatient, train, at_third
from trimtab.update.updater import Updater

def wait_in_a_driver():
    held = threading.Lock()
    held.acquire()
    held.acquire()

if __name__ == "__main__":
    impatient(setattr)
    at_third(setattr, wait_in_a_driver)
    train(sys.argv[1], sys.argv[2])
"""


def impatient(patch: Callable[[Any, str, Any], None]) -> None:
    for name, value in (("FIRST_STALL_S", 1.0), ("GRACE_S", 1.0)):
        patch(stall_watch, name, value)
    patch(stalls, "MIN_STALL_S", {"cuda": 1.0})
    patch(stalls, "STALL_STEPS", 0)
    patch(stalls, "CALLS", 0)


def at_third(patch: Callable[[Any, str, Any], None], act: Callable[[], None]) -> None:
    """Do this in the third update."""
    accumulate, calls = Updater.accumulate_share, [0]

    def acts(self: Updater, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            act()
        return accumulate(self, *args)

    patch(Updater, "accumulate_share", acts)


def train(model: str | Path, folder: str | Path, **changes: Any) -> running.Trained:
    return running.train(Path(model), Path(folder), USUAL, changes)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(tmp_path: Path, doing: list[Any], ended: list[int], clock: Clock, said: list[str]) -> StallWatch:
    found = StallWatch(tmp_path, 60.0, lambda: (doing[0], doing[1]), lambda: doing[2], said.append, clock, ended.append)
    found.look()
    return found


def look_and_work(watch: StallWatch) -> None:
    watch.look()
    for _ in range(10**6):
        pass


def test_only_work_of_the_device_that_stands_still_is_a_hang(tmp_path: Path) -> None:
    clock, said, ended = Clock(), list[str](), list[int]()
    doing: list[Any] = ["update", 1, 0]
    watch = watched(tmp_path, doing, ended, clock, said)
    clock.now = FIRST_STALL_S - 1.0
    watch.look()
    assert not said, "kernels are compiled in the first step"
    doing[:] = ["reward", 2, 0]
    watch.look()
    clock.now += 1e4
    watch.look()
    doing[:] = ["update", 2, 1]
    watch.look()
    for progress in range(5):
        clock.now += 59.0
        doing[2] = progress
        watch.look()
    assert not said and not ended
    clock.now += 61.0
    with pytest.raises(RunHangs):
        look_and_work(watch)
    assert "no progress for 61 s in update" in said[0]
    assert "test_only_work_of_the_device" in (tmp_path / "stacks.txt").read_text()
    clock.now += GRACE_S + 1.0
    watch.look()
    assert ended == [stall_watch.EXIT_STATUS]
    watch.close()


def test_a_thread_that_goes_on_after_all_has_its_grace_anew(tmp_path: Path) -> None:
    clock, said, ended = Clock(), list[str](), list[int]()
    doing: list[Any] = ["update", 1, 0]
    watch = watched(tmp_path, doing, ended, clock, said)
    doing[1] = 2
    watch.look()
    clock.now += 61.0
    with pytest.raises(RunHangs):
        look_and_work(watch)
    for step in range(3, 6):  # the last step is being saved
        clock.now += GRACE_S - 1.0
        doing[:] = ["checkpoint", step, step]
        watch.look()
    assert len(said) == 1 and not ended
    watch.close()


def check_ended(folder: Path, where: str) -> None:
    assert where in (folder / "stacks.txt").read_text()
    newest = newest_checkpoint(folder)
    assert newest is not None and newest.name == "step-2"
    events = [json.loads(line) for line in (folder / "events.jsonl").open()]
    assert [event["kind"] for event in events].count("stall") == 1


def test_a_run_that_hangs_ends_with_its_stacks_and_is_resumed(model_folder: Path, tmp_path: Path, monkeypatch) -> None:
    def never_ends() -> None:
        while True:
            time.sleep(0.01)

    whole = train(model_folder, tmp_path / "whole")
    with monkeypatch.context() as patch:
        impatient(patch.setattr)
        at_third(patch.setattr, never_ends)
        with pytest.raises(RunHangs, match="made no progress"):
            train(model_folder, tmp_path / "run")
    check_ended(tmp_path / "run", "in never_ends")
    resumed = train(model_folder, tmp_path / "run", resume=True)
    final = "final/model.safetensors"
    assert (resumed.folder / final).read_bytes() == (whole.folder / final).read_bytes()


def test_a_thread_that_hears_nothing_is_ended_with_its_process(model_folder: Path, tmp_path: Path) -> None:
    """As one that waits in the device's driver."""
    (tmp_path / "stuck.py").write_text(STUCK)
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    arguments = [sys.executable, tmp_path / "stuck.py", model_folder, tmp_path / "run"]
    done = subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == stall_watch.EXIT_STATUS, done.stderr
    assert "error: the run made no progress" in done.stderr and "--resume" in done.stderr
    check_ended(tmp_path / "run", "in wait_in_a_driver")
