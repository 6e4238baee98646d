"""Law 6: kill anywhere, resume, same weights. SIGKILL at random places and at every named point of saving."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from trimtab.record.sinks import read_metrics

pytestmark = pytest.mark.timeout(960)  # two dozen runs one after the other, beside whatever else the machine does
ROOT = Path(__file__).parents[2]
STEPS = 6
RANDOM_KILLS = 20
POINTS = [
    "trimtab.record.writer.refuse_diverged before",
    "trimtab.record.writer.refuse_diverged after",
    "trimtab.record.writer.copy_part before",
    "trimtab.record.writer.copy_part after",
    "trimtab.record.saving.write_part before",
    "trimtab.record.part.write_tensors before",
    "trimtab.record.part.write_tensors half",
    "trimtab.record.part.write_tensors after",
    "trimtab.record.saving.write_part after",
    "trimtab.record.saving.write_state before",
    "trimtab.record.saving.write_state after",
    "trimtab.base.files.flush_to_disk before",
    "trimtab.base.files.flush_to_disk after",
    "Path.rename before",
    "Path.rename after",  # from here on each of these costs the run a step
    "trimtab.record.saving.prune before",
    "trimtab.record.checkpoint.remove_whole before",
    "trimtab.record.checkpoint.remove_whole after",
    "trimtab.update.export.save_model after",
    "trimtab.update.export.put_in_place before",
    "trimtab.update.export.put_in_place after",
]
REWARD = """
def reward(completions, **_):  # differs within groups from the first step on, for a model that writes noise
    return [sum(character.isdigit() for character in text) / 8 for text in completions]
"""
NOT_LEARNING = (
    "time/",
    "run/start",
    "update/",
    "checkpoint/",
    "memory/",
    "throughput/",
    "rollout/tokens_per_s",
    "rollout/prefill_s",
    "rollout/decode_s",
    "rollout/tail_s",
    "reward/latency_max_s",
)


@pytest.fixture(scope="module")
def lives(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, warm_python: str
) -> tuple[Path, list[dict[str, Any]]]:
    """The uninterrupted run in `whole/`, and one folder for each run that was killed on its way."""
    folder = tmp_path_factory.mktemp("kills")
    (folder / "rewards.py").write_text(REWARD)
    config = {
        "model": {"path": str(model_folder)},
        "data": {"train": "task:arithmetic", "eval": "task:arithmetic", "options": {"size": 24, "eval_size": 4}},
        "reward": [{"fn": f"{folder}/rewards.py:reward"}],
        "learn": {
            "steps": STEPS,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "updates_per_step": 2,
            "max_new_tokens": 8,
            "lr": 1e-2,
            "schedule": {"kind": "linear", "warmup_steps": 2},
            "kl": {"coef": 0.05, "target": 0.01, "horizon": 100},
        },
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1},
        "eval": {"threshold": 0.1},
        "observe": {
            "checkpoint_every": 1,
            "keep_checkpoints": 1,
            "samples_every": 1,
            "eval_every": 2,
            "tensorboard": False,
        },
    }
    spec = {"config": config, "points": POINTS, "kills": RANDOM_KILLS, "seed": 0}
    (folder / "spec.json").write_text(json.dumps(spec))
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [warm_python, "-m", "tests.invariants.killing", folder / "spec.json"], env=environment, cwd=ROOT,
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    log = (folder / "log.txt").read_text()[-4000:] if (folder / "log.txt").exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{log}"
    report = json.loads(done.stdout.splitlines()[-1])
    print(f"{report['arrivals']} places; kills {[life['kills'] for life in report['lives']]}")
    return folder, report["lives"]


def learned(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics.jsonl without what depends on the clock and the machine."""
    return [{k: v for k, v in row.items() if not k.startswith(NOT_LEARNING)} for row in read_metrics(run)]


def test_killed_runs_end_with_the_weights_of_the_uninterrupted_one(lives) -> None:
    folder, found = lives
    start = (folder / "whole/final/model.safetensors").read_bytes()
    for life in found:
        assert (folder / life["name"] / "final/model.safetensors").read_bytes() == start, life
        for file in ("model.safetensors", "optimizer.safetensors"):
            ended, expected = (folder / run / f"checkpoints/step-{STEPS}" / file for run in (life["name"], "whole"))
            assert ended.read_bytes() == expected.read_bytes(), (life, file)


def test_killed_runs_record_every_step_once_and_the_same(lives) -> None:
    folder, found = lives
    expected = learned(folder / "whole")
    assert [row["step"] for row in expected] == list(range(STEPS + 1))
    assert {"reward/mean", "rollout/tokens", "policy/loss", "policy/kl_coef"} <= set(expected[1])
    for life in found:
        assert learned(folder / life["name"]) == expected, life
        for step in range(1, STEPS + 1):
            samples = [(folder / run / f"samples/step-{step}.jsonl").read_bytes() for run in (life["name"], "whole")]
            assert samples[0] == samples[1], (life, step)


def test_killed_runs_leave_nothing_half_written(lives) -> None:
    folder, found = lives
    for life in found:
        run = folder / life["name"]
        assert not [*run.rglob(".writing*"), *run.rglob(".deleting*")], life
        whole = {path.name for path in (folder / "whole/checkpoints").iterdir()}
        assert {path.name for path in (run / "checkpoints").iterdir()} == whole, life


def test_kills_fell_all_over_the_run(lives) -> None:
    """Or the law would be tested at a few places only."""
    _, found = lives
    kills = [place for life in found for place in life["kills"]]
    assert len(kills) >= RANDOM_KILLS + len(POINTS)
    assert len(set(kills) - set(POINTS)) >= 4, sorted(set(kills))
