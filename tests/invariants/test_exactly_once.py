"""Law 9: every completion that is sampled is trained on or dropped with a reason, and the counts add up each step. Of what is
trained on, samples that add exactly 0 to the gradient are counted and not passed through the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trimtab
from tests.quick_rewards import deadly, moody
from trimtab.record.sinks import read_metrics
from trimtab.run import loop

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]
STEPS, PROMPTS, SAMPLES = 3, 4, 4


def run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **learn: Any):
    """A short run, and what the optimizer was given in each step: (prompt tokens, completion tokens) of every sample."""
    trained: list[list[tuple]] = []
    sampled: list[list[tuple]] = []
    original = loop.update

    def watched(session, groups):
        step = session.trainer.updater.accumulate
        trained.append([])
        sampled.append(
            [(tuple(t.prompt.tokens), tuple(t.tokens.tolist()), t.sample) for g in groups for t in g.trajectories]
        )

        def record(samples, kl_coef):
            trained[-1] += [(tuple(s.prompt_tokens), tuple(s.tokens.tolist())) for s in samples]
            return step(samples, kl_coef)

        session.trainer.updater.accumulate = record
        try:
            return original(session, groups)
        finally:
            session.trainer.updater.accumulate = step

    monkeypatch.setattr(loop, "update", watched)
    summary = trimtab.train(
        model=str(model_folder),
        data=ROWS,
        reward=moody,
        learn={
            "steps": STEPS,
            "prompts_per_step": PROMPTS,
            "samples_per_prompt": SAMPLES,
            "max_new_tokens": 6,
            **learn,
        },
        observe={"dir": str(tmp_path / "run"), "max_failed_rewards": 0.9, "tensorboard": False},
    )
    return [m for m in read_metrics(Path(summary["run_dir"])) if m["step"] > 0], sampled, trained


@pytest.mark.parametrize(
    "learn",
    [
        {},
        {"updates_per_step": 2, "epochs_per_step": 2, "staleness": 2},
        {"mask_truncated": True, "updates_per_step": 4},
    ],
    ids=str,
)
def test_sampled_equals_trained_plus_dropped(model_folder, tmp_path, monkeypatch, learn: dict) -> None:
    metrics, sampled, trained = run(model_folder, tmp_path, monkeypatch, **learn)
    passes = learn.get("epochs_per_step", 1)
    dropped_in_all = idle_in_all = 0
    for row, drawn, used in zip(metrics, sampled, trained):
        dropped = sum(value for key, value in row.items() if key.startswith("run/dropped_"))
        assert row["run/samples"] == PROMPTS * SAMPLES == len(drawn)
        assert row["run/samples_trained"] + dropped == row["run/samples"]
        idle = row.get("run/samples_without_gradient", 0)
        assert len(used) + idle == passes * row["run/samples_trained"]
        once = sorted(used)[::passes]  # each sample is there exactly once an epoch
        assert sorted(once * passes) == sorted(used)
        remaining = [(prompt, tokens) for prompt, tokens, _ in drawn]
        for sample in once:
            remaining.remove(sample)
        assert len(remaining) == dropped + idle / passes
        assert row["reward/failed"] == row.get("run/dropped_reward_failed", 0)
        assert (row.get("run/dropped_truncated", 0) > 0) == ("mask_truncated" in learn)
        dropped_in_all, idle_in_all = dropped_in_all + dropped, idle_in_all + idle
    assert dropped_in_all > 0, "the reward was meant to fail now and then"


def test_groups_without_signal_are_replaced_and_counted(model_folder, tmp_path, monkeypatch) -> None:
    metrics, sampled, _ = run(model_folder, tmp_path, monkeypatch, algorithm="dapo", samples_per_prompt=2)
    assert any(row["rollout/refills"] > 0 for row in metrics)
    for row, drawn in zip(metrics, sampled):
        assert row["run/samples"] == len(drawn) >= PROMPTS * 2
        dropped = sum(value for key, value in row.items() if key.startswith("run/dropped_"))
        assert row["run/samples_trained"] + dropped == row["run/samples"]
        assert row["run/samples_trained"] <= PROMPTS * 2


def test_a_prompt_that_comes_twice_in_a_step_is_sampled_differently(model_folder, tmp_path, monkeypatch) -> None:
    """Two rows, four prompts a step: each prompt comes twice and must not give the same completions twice."""
    monkeypatch.setattr(f"{__name__}.ROWS", ROWS[:2])
    _, sampled, _ = run(model_folder, tmp_path, monkeypatch)
    for drawn in sampled:
        by_prompt: dict[tuple, list[tuple]] = {}
        for prompt, tokens, _ in drawn:
            by_prompt.setdefault(prompt, []).append(tokens)
        for completions in by_prompt.values():
            assert len(completions) == 2 * SAMPLES
            assert completions[:SAMPLES] != completions[SAMPLES:]


def test_counts_add_up_where_reward_workers_are_killed(model_folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(f"{__name__}.moody", deadly)
    metrics, sampled, _ = run(model_folder, tmp_path, monkeypatch)
    lost = 0
    for row, drawn in zip(metrics, sampled, strict=True):
        killed = sum(sum(tokens) % 11 == 0 for _, tokens, _ in drawn)
        assert row["reward/failed"] == row.get("run/dropped_reward_failed", 0) == killed, "each cost itself alone"
        dropped = sum(value for key, value in row.items() if key.startswith("run/dropped_"))
        assert row["run/samples_trained"] + dropped == row["run/samples"] == PROMPTS * SAMPLES
        lost += killed
    assert lost > 0, "some completions were meant to kill their worker"
