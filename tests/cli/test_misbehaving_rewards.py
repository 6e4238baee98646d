"""A reward that misbehaves costs its own samples, counted by reason; too many of them stop the run with the first traceback."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.record.sinks import read_metrics

Trimtab = Callable[..., Any]
FAILING = {
    "raises": ["raised ValueError: cannot parse this", 'rewards.py", line', "in raises"],
    "hangs": ["took longer than 0.3 s and was stopped", "in hangs"],
    "wrong_length": ["returned 2 values for 1 completions; return one for each"],
    "nan": ["returned nan as a reward"],
    "text": ["returned str 'good' as a reward; return a number or None"],
}


def use(config: dict[str, Any], name: str, tolerated: float) -> None:
    config["reward"] = [{"fn": f"rewards.py:{name}", "timeout_s": 0.3 if name == "hangs" else 10.0}]
    config["observe"] |= {"max_failed_rewards": tolerated, "samples_every": 1}
    if name == "hangs":
        config["learn"] |= {"prompts_per_step": 2, "samples_per_prompt": 4}  # each bad sample costs its deadline


@pytest.mark.parametrize("name", FAILING)
def test_failures_within_bounds_are_dropped_and_counted(
    trimtab: Trimtab, config: dict[str, Any], here: Path, name: str
) -> None:
    use(config, name, tolerated=0.99)
    outcome = trimtab("train")
    assert outcome.code == 0, outcome.err
    (row,) = read_metrics(here / "runs/it")
    samples = [json.loads(line) for line in (here / "runs/it/samples/step-1.jsonl").read_text().splitlines()]
    failed = [sample for sample in samples if sample["failure"]]
    assert 0 < len(failed) < len(samples) == row["run/samples"]
    assert row["reward/failed"] == row["run/dropped_reward_failed"] == len(failed)
    assert row["run/samples_trained"] == len(samples) - len(failed)
    assert all(sample["reward"] is None and FAILING[name][0] in sample["failure"] for sample in failed)
    scored = [sample["reward"] for sample in samples if not sample["failure"]]
    assert row["reward/mean"] == pytest.approx(sum(scored) / len(scored)), "a failure is never a zero"


@pytest.mark.parametrize("name", FAILING)
def test_too_many_failures_stop_the_run(trimtab: Trimtab, config: dict[str, Any], here: Path, name: str) -> None:
    use(config, name, tolerated=0.01)
    outcome = trimtab("train", "--json")
    assert outcome.code == 2
    assert outcome.exception is None
    message = outcome.json["error"]
    assert outcome.json["kind"] == "RewardError"
    assert (
        "samples have no reward because reward calls failed; observe.max_failed_rewards allows a share of 0.01"
        in message
    )
    for part in FAILING[name]:
        assert part in message
    assert "it has no checkpoint yet" in " ".join(outcome.err.split())
    assert not (here / "runs/it/final").exists()


def test_none_means_not_applicable(trimtab: Trimtab, config: dict[str, Any], here: Path) -> None:
    use(config, "none", tolerated=0.0)
    assert trimtab("train").code == 0
    (row,) = read_metrics(here / "runs/it")
    assert row["reward/failed"] == 0.0
    assert 0 < row["run/dropped_not_applicable"] < row["run/samples"]
    assert row["run/samples_trained"] == row["run/samples"] - row["run/dropped_not_applicable"]


def test_failures_in_an_evaluation_are_not_misses(trimtab: Trimtab, config: dict[str, Any]) -> None:
    use(config, "nan", tolerated=0.99)
    outcome = trimtab(
        "eval", "data.eval=rows.jsonl", "eval.samples_per_prompt=4", "eval.sampling.temperature=1.0", "--json"
    )
    assert outcome.code == 0, outcome.err
    assert 0 < outcome.json["eval/failed"] < 48
    assert outcome.json["eval/pass@1"] == 1.0, "every sample that has a score scored 1"
