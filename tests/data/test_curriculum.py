"""Prompts by difficulty: which are kept, that it does not depend on timing, and that a run which resumes draws the same ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from running import train
from safetensors.torch import load_file

from trimtab.base.errors import ConfigError
from trimtab.config.load import config_from_dict
from trimtab.data.curriculum import LEAST, keeps, note_rate, probability
from trimtab.record.checkpoint import checkpoints
from trimtab.record.sinks import read_metrics

ROWS = [{"prompt": f"{number}+{number}="} for number in range(8)]


def solved(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The first half of the rows is always solved, the others by some samples."""
    return [1.0 if int(p[0]) < 4 else float(len(c) % 2) for p, c in zip(prompts, completions)]


def test_what_is_half_solved_is_kept_and_what_is_always_solved_rarely() -> None:
    rates: dict[str, list[list[float]]] = {}
    for row, rate in enumerate((0.0, 1.0, 0.5, 0.25)):
        note_rate(rates, row, 0, rate, 0)
    keep = keeps(rates, seed=3, step=1, staleness=0)
    share = [sum(keep(row, position) for position in range(2000)) / 2000 for row in range(5)]
    assert share[2] == share[4] == 1.0, "half solved, and never seen"
    for row, rate in ((0, 0.0), (1, 1.0), (3, 0.25)):
        assert share[row] == pytest.approx(probability(rate), abs=0.03)
    assert probability(0.0) == probability(1.0) == LEAST > 0


def test_only_rates_of_steps_before_those_that_may_still_run_count() -> None:
    """With staleness 2 the batch of step 5 is drawn while steps 3 and 4 may or may not have been learned from."""
    rates: dict[str, list[list[float]]] = {}
    drawn = []
    for step, rate in ((1, 0.5), (3, 1.0), (4, 1.0)):
        note_rate(rates, 0, step, rate, 2)
        drawn.append([keeps(rates, 0, 5, 2)(0, position) for position in range(200)])
    assert drawn[0] == drawn[1] == drawn[2] and all(drawn[0])
    assert not all(keeps(rates, 0, 6, 2)(0, position) for position in range(200))
    for step in range(5, 40):
        note_rate(rates, 0, step, 1.0, 2)
    assert len(rates["0"]) <= 4, "what nobody asks for is forgotten"


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_in_two_sittings_draws_the_prompts_of_one(model_folder: Path, tmp_path: Path, staleness: int) -> None:
    usual = {
        "reward": solved,
        "learn": {"prompts_per_step": 4, "samples_per_prompt": 3, "max_new_tokens": 4, "lr": 1e-2, "staleness": staleness},
        "run": {"device": "cpu"}, "observe": {"checkpoint_every": 1, "keep_checkpoints": 9},
    }  # fmt: skip
    usual["data"] = {"train": write(tmp_path), "curriculum": "pass_rate"}
    whole = train(model_folder, tmp_path / "whole", usual, {"learn": {"steps": 6}})
    shutil.copytree(whole.folder, tmp_path / "halves")
    for step, folder in checkpoints(tmp_path / "halves").items():
        if step > 3:
            shutil.rmtree(folder)
    halves = train(model_folder, tmp_path / "halves", usual, {"learn": {"steps": 6}, "resume": True})
    one, two = (load_file(run.folder / "final" / "model.safetensors") for run in (whole, halves))
    assert all(torch.equal(one[name], two[name]) for name in one)
    passed = [row["rollout/passed_over"] for row in read_metrics(whole.folder) if "rollout/passed_over" in row]
    assert sum(passed) > 0 and passed[0] == 0
    plain = train(model_folder, tmp_path / "plain", usual, {"learn": {"steps": 6}, "data": {"train": write(tmp_path)}})
    other = load_file(plain.folder / "final" / "model.safetensors")
    assert any(not torch.equal(one[name], other[name]) for name in one), "a curriculum changes what is learned"


def write(folder: Path) -> str:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(file)


def test_a_reward_model_needs_a_threshold() -> None:
    tree = {
        "model": {"path": "x"},
        "data": {"train": "x.jsonl", "curriculum": "pass_rate"},
        "reward": [{"fn": "model:y"}],
    }
    with pytest.raises(ConfigError, match=r"data\.curriculum.*Write eval\.threshold"):
        config_from_dict(tree)
    config_from_dict(tree | {"eval": {"threshold": 0.5}})
