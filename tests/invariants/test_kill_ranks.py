"""Law 6 with several ranks: kill any of them, or the driver, anywhere; the final weights are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest
from invariants.test_kill_resume import NOT_LEARNING, REWARD

from trimtab.record.sinks import read_metrics

pytestmark = pytest.mark.timeout(1800)
DRIVER = "tests.invariants.killing_ranks"
ROOT = Path(__file__).parents[2]
STEPS = 3
NOT_LEARNED = (*NOT_LEARNING, "run/rank_restarts", "run/communication", "publish/seconds")


def kill(
    folder: Path,
    model: Path,
    kills: int,
    plans: list[Any] | None = None,
    learn: dict[str, Any] | None = None,
    **run: Any,
) -> list[dict[str, Any]]:
    """Runs in `folder`: `whole`, and those that were killed on their way, as planned or at random."""
    (folder / "rewards.py").write_text(REWARD)
    config = {
        "model": {"path": str(model)},
        "data": {"train": "task:arithmetic", "options": {"size": 24}},
        "reward": [{"fn": f"{folder}/rewards.py:reward"}],
        "learn": {
            "steps": STEPS,
            "prompts_per_step": 4,
            "samples_per_prompt": 3,
            "updates_per_step": 2,
            "max_new_tokens": 6,
            "lr": 1e-2,
            "kl": {"coef": 0.05, "target": 0.01, "horizon": 100},
            **(learn or {}),
        },
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1, **run},
        "observe": {"checkpoint_every": 1, "keep_checkpoints": 1, "tensorboard": False},
    }
    (folder / "spec.json").write_text(json.dumps({"config": config, "kills": kills, "plans": plans, "seed": 0}))
    environment = {**os.environ, "TRIMTAB_TEST_KILLING": uuid.uuid4().hex, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, "-m", DRIVER, folder / "spec.json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    log = (folder / "log.txt").read_text()[-6000:] if (folder / "log.txt").exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    report = json.loads(done.stdout.splitlines()[-1])
    print(report)
    lives: list[dict[str, Any]] = report["lives"]
    return lives


def assert_same_run(folder: Path, life: dict[str, Any], timed: tuple[str, ...] = ()) -> None:
    """`timed`: metrics that depend on who was faster, besides those that always do."""
    run, whole = folder / life["name"], folder / "whole"
    files = [f"final/{path.name}" for path in (whole / "final").glob("*.safetensors")]
    files += [str(path.relative_to(whole)) for path in (whole / f"checkpoints/step-{STEPS}").glob("*.safetensors")]
    assert len(files) >= 4, "weights, and weights and state of at least two ranks or models"
    for file in files:
        assert (run / file).read_bytes() == (whole / file).read_bytes(), (life, file)
    assert learned(run, timed) == learned(whole, timed), life
    assert not [*run.rglob(".writing*"), *run.rglob(".deleting*")], life


def learned(run: Path, timed: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith((*NOT_LEARNED, *timed))} for row in read_metrics(run)]


def test_a_few_kills(tmp_path: Path, model_folder: Path) -> None:
    plan = [(1, 0.35), (0, 0.2), (None, 0.2), (1, 0.2)]
    lives = kill(tmp_path, model_folder, 4, [plan], devices=2, shard="optimizer")
    for life in lives:
        assert_same_run(tmp_path, life)
    victims = [place.partition(":")[0] for life in lives for place in life["kills"]]
    assert victims == ["rank 1", "rank 0", "driver", "rank 1"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shard"), [(2, "none"), (3, "optimizer")])
def test_twenty_kills(tmp_path: Path, model_folder: Path, ranks: int, shard: str) -> None:
    lives = kill(tmp_path, model_folder, 20, devices=ranks, shard=shard)
    for life in lives:
        assert_same_run(tmp_path, life)
    places = [place for life in lives for place in life["kills"]]
    assert len(places) >= 20
    assert len(set(places)) >= 10, sorted(set(places))


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_kills_of_ranks_that_generate_together(tmp_path: Path, model_folder: Path, shard: str) -> None:
    """Of an engine that is cut over both ranks: each waits for the other in every layer."""
    cut = {"engine": "native", "rollout": {"tensor_parallel": 2}}
    lives = kill(tmp_path, model_folder, 10, devices=2, shard=shard, **cut)
    for life in lives:
        assert_same_run(tmp_path, life)
    assert sum(len(life["kills"]) for life in lives) >= 10


ROLES = {"actor": 1, "critic": 1, "reference": 1, "rollout": 1}
PPO = {"algorithm": "ppo", "critic": {"lr": 1e-2}, "staleness": 1}


def assert_counts_add_up(folder: Path, life: dict[str, Any]) -> None:
    """Law 9 over all of a life: each step once, and every sample of it trained on or dropped."""
    rows = [row for row in read_metrics(folder / life["name"]) if "run/samples" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    assert all(row["run/samples"] == 4 * 3 for row in rows), life
    dropped = [name for name in rows[0] if name.startswith("run/dropped")]
    assert all(
        row["run/samples_trained"] + sum(row.get(name, 0.0) for name in dropped) == row["run/samples"] for row in rows
    )


def test_a_kill_of_every_role(tmp_path: Path, model_folder: Path) -> None:
    """Rollout and learning go on side by side, the critic learns beside the policy."""
    plan = [("critic 0", 0.5), ("rollout 0", 0.35), (None, 0.3), ("reference 0", 0.15), (0, 0.15)]
    lives = kill(tmp_path, model_folder, 5, [plan], PPO, placement=ROLES)
    for life in lives:
        assert_same_run(tmp_path, life)
        assert_counts_add_up(tmp_path, life)
    victims = [place.partition(":")[0] for life in lives for place in life["kills"]]
    assert victims == ["critic 0", "rollout 0", "driver", "reference 0", "rank 0"]


@pytest.mark.slow
def test_thirty_kills_of_any_role(tmp_path: Path, model_folder: Path) -> None:
    roles = {"actor": 2, "critic": 1, "reference": "critic", "rollout": 2}
    lives = kill(tmp_path, model_folder, 30, None, PPO, placement=roles)
    for life in lives:
        assert_same_run(tmp_path, life, ("rollout/",))  # which of two engines drew what
        assert_counts_add_up(tmp_path, life)
    assert len({place.partition(":")[0] for life in lives for place in life["kills"]}) == 6
