"""The simulator against the real loop: engines and updates take known times, and a step takes what the simulator says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests import running
from tests.cluster.conftest import USUAL
from tests.forked_ranks import fork_ranks
from trimtab.plan.simulate import EngineSpeed, Scenario, simulate
from trimtab.rollout.native.eager import EagerDecoder
from trimtab.run import loop
from trimtab.update.updater import Updater

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
WITHIN = 0.10
STEPS = 6
STEP_S, ROW_S = 0.06, 0.002
"""Seconds of a decode step, and for each sequence in it besides."""


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, train_s: float) -> list[list[int]]:
    """Engines and updates take so long, in this process and in ranks; what each step sampled, in tokens."""
    fork_ranks(monkeypatch)
    run, accumulate, update = EagerDecoder.run, Updater.accumulate_share, loop.update
    lengths: list[list[int]] = []

    def lasting(seconds: float, began: float) -> None:
        time.sleep(max(0.0, began + seconds - time.perf_counter()))

    def decodes(self: EagerDecoder, live: Any, steps: int) -> None:
        began = time.perf_counter()
        run(self, live, steps)
        lasting(steps * (STEP_S + ROW_S * len(live)), began)

    def learns(self: Updater, *args: Any) -> Any:
        began = time.perf_counter()
        found = accumulate(self, *args)
        lasting(train_s, began)
        return found

    def noted(session: Any, groups: Any) -> Any:
        lengths.append([len(trajectory) for group in groups for trajectory in group.trajectories])
        return update(session, groups)

    monkeypatch.setattr(EagerDecoder, "run", decodes)
    monkeypatch.setattr(Updater, "accumulate_share", learns)
    monkeypatch.setattr(loop, "update", noted)
    return lengths


def seconds_a_step(model: Path, folder: Path, learn: dict[str, Any], run: dict[str, Any]) -> float:
    """Of the steps after the first, in which things are made."""
    ends: list[float] = []
    changes = {
        "learn": {"steps": STEPS, "max_new_tokens": 16, **learn},
        "run": {"shard": "auto", "rollout": {"max_sequences": 15}, **run},
        "observe": {"checkpoint_every": 0, "report": False},
        "callbacks": [lambda step, metrics: ends.append(time.perf_counter())],
    }
    running.train(model, folder, USUAL, changes)
    return (ends[-1] - ends[1]) / (len(ends) - 2)


@pytest.mark.parametrize(
    ("staleness", "train_s", "engines", "run"),
    [
        pytest.param(0, 0.8, 1, {"devices": 1}, id="synchronous"),
        pytest.param(0, 0.8, 2, {"devices": "auto", "placement": {"actor": 1, "rollout": 2}}, id="split, in turn"),
        pytest.param(1, 1.2, 1, {"devices": "auto", "placement": {"actor": 1, "rollout": 1}}, id="update is longer"),
        pytest.param(1, 0.4, 1, {"devices": "auto", "placement": {"actor": 1, "rollout": 1}}, id="rollout is longer"),
    ],
)
def test_a_step_takes_what_the_simulator_says(
    model_folder: Path,
    tmp_path: Path,
    timed: list[list[int]],
    staleness: int,
    train_s: float,
    engines: int,
    run: dict[str, Any],
) -> None:
    real = seconds_a_step(model_folder, tmp_path / "run", {"staleness": staleness}, run)
    engine = EngineSpeed(15, lambda rows, context: STEP_S + ROW_S * rows)
    scenario = Scenario(
        engines=(engine,) * engines,
        lengths=tuple(tuple(step) for step in timed),
        samples=USUAL["learn"]["samples_per_prompt"],
        staleness=staleness,
        train_s=train_s,
        colocated="placement" not in run,
    )
    steps = simulate(scenario).steps
    said = (steps[-1].train_end - steps[1].train_end) / (len(steps) - 2)
    print(f"real {real:.3f} s, simulated {said:.3f} s")
    assert real == pytest.approx(said, rel=WITHIN)
