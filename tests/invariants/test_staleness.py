"""`learn.staleness: k` is exact: every token of step s's batch comes from the policy after s - k steps, and a run that was
stopped anywhere learns what one that was not learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import running
from tests.quick_rewards import waits_for_the_update
from tests.running import letters
from trimtab.base.errors import ConfigError
from trimtab.config.load import load_any
from trimtab.record.batches import FACTS
from trimtab.record.checkpoint import checkpoints
from trimtab.rollout.trajectory import Trajectory
from trimtab.run import buffer, loop, rollout_step

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]
STEPS = 5


def train(model: Path, folder: Path, **changes: Any) -> running.Trained:
    usual = {
        "data": ROWS,
        "reward": letters,
        "learn": {"steps": STEPS, "prompts_per_step": 3, "samples_per_prompt": 4, "max_new_tokens": 6, "lr": 1e-2},
        "observe": {"checkpoint_every": 1, "keep_checkpoints": STEPS},
    }
    return running.train(model, folder, usual, changes)


def weights(run: running.Trained) -> dict[str, torch.Tensor]:
    return load_file(run.folder / "final" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[list[Trajectory]]:
    """What each step learned from."""
    seen: list[list[Trajectory]] = []
    update = loop.update

    def watched(session: Any, groups: Any) -> dict[str, float]:
        seen.append([trajectory for group in groups for trajectory in group.trajectories])
        return update(session, groups)

    monkeypatch.setattr(loop, "update", watched)
    return seen


@torch.no_grad()
def logprobs(model: Any, trajectory: Trajectory) -> torch.Tensor:
    """What a model says of a completion, by transformers alone."""
    prompt, tokens = torch.tensor(trajectory.prompt.tokens), trajectory.tokens
    logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("k", [1, 2])
def test_every_token_comes_from_the_policy_of_k_steps_before(model_folder, tmp_path, learned, k: int) -> None:
    run = train(model_folder, tmp_path / "run", learn={"staleness": k})
    after = [model_folder, *checkpoints(run.folder).values()]
    assert len(after) == STEPS + 1 and len(learned) == STEPS
    for step, trajectories in enumerate(learned):
        sampler = max(0, step - k)
        assert {version for t in trajectories for version in t.versions.tolist()} == {sampler}
        whose, others = (AutoModelForCausalLM.from_pretrained(after[number]) for number in (sampler, step))
        for trajectory in trajectories[::4]:
            assert torch.allclose(logprobs(whose, trajectory), trajectory.logprobs, atol=1e-5)
            assert step == sampler or not torch.allclose(logprobs(others, trajectory), trajectory.logprobs, atol=1e-4)
    assert [row["rollout/version_lag"] for row in run.metrics] == [min(step, k) for step in range(STEPS)]
    assert [row["buffer/batches"] for row in run.metrics] == [min(k + 1, STEPS - step) for step in range(STEPS)]
    assert load_any(run.folder / "config.yaml").learn.importance.level == "token"
    assert ["rollout/logprob_gap" in row for row in run.metrics] == [True] + [False] * (STEPS - 1)
    assert all(row["rollout/stale_gap"] > 1e-3 for row in run.metrics[1:])


def test_batches_have_the_prompts_and_random_numbers_of_a_synchronous_run(model_folder, tmp_path, learned) -> None:
    """The first policy samples the first batch in both, and later batches start from the same prompts."""
    train(model_folder, tmp_path / "now", learn={"staleness": 0})
    train(model_folder, tmp_path / "later", learn={"staleness": 2})
    now, later = learned[:STEPS], learned[STEPS:]
    assert all(torch.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(now[0], later[0], strict=True))
    assert [[t.prompt.id for t in batch] for batch in now] == [[t.prompt.id for t in batch] for batch in later]
    assert any(not torch.equal(ours.tokens, theirs.tokens) for ours, theirs in zip(now[1], later[1], strict=True))


@pytest.mark.parametrize("place", ["sample", "update", "collect"])
@pytest.mark.parametrize("k", [1, 3])
def test_a_run_that_is_stopped_learns_what_it_would_have(
    model_folder, tmp_path, monkeypatch, place: str, k: int
) -> None:
    """No checkpoint is due: what waits is saved because the run is stopped, with rewards or without."""
    learn = {"staleness": k, "updates_per_step": 2, "steps": 6}
    observe = {"checkpoint_every": 100}
    whole = train(model_folder, tmp_path / "whole", learn=learn, observe=observe)
    module = {"sample": rollout_step, "update": loop, "collect": buffer}[place]
    name = {"sample": "sample", "update": "update", "collect": "score_batch"}[place]
    original = getattr(module, name)

    def stopped(session: Any, *rest: Any) -> Any:
        if session.state.step == 2:
            raise KeyboardInterrupt
        return original(session, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, stopped)
        with pytest.raises(KeyboardInterrupt):
            train(model_folder, tmp_path / "stopped", learn=learn, observe=observe)
    (saved,) = checkpoints(tmp_path / "stopped").values()
    assert saved.name == "step-2" and (saved / FACTS).is_file()
    resumed = train(model_folder, tmp_path / "stopped", learn=learn, observe=observe, resume=True)
    assert same(weights(resumed), weights(whole))
    compared = ("reward/mean", "policy/loss", "rollout/version_lag", "buffer/batches", "rollout/tokens", "run/samples")
    for ours, theirs in zip(resumed.metrics, whole.metrics, strict=True):
        assert {name: ours[name] for name in compared} == {name: theirs[name] for name in compared}


def test_another_staleness_after_a_stop_loses_no_batch(model_folder, tmp_path, learned) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(model_folder, tmp_path / "run", learn={"steps": 6, "staleness": 2}, callbacks=[stop_after(3)])
    assert len(learned) == 3
    run = train(model_folder, tmp_path / "run", learn={"steps": 6, "staleness": 0}, resume=True)
    assert [row["run/samples"] for row in run.metrics] == [12] * 6
    lags = [row.get("rollout/version_lag", 0) for row in run.metrics]
    assert lags == [0, 1, 2, 0, 0, 0]  # told of while it is asked for
    assert [int(batch[0].versions[0]) for batch in learned] == [0, 0, 0, 1, 2, 5]


def stop_after(step: int) -> Any:
    def stop(number: int, metrics: Any) -> None:
        if number == step:
            raise KeyboardInterrupt

    return stop


def test_rewards_are_computed_while_the_policy_learns(model_folder, tmp_path, monkeypatch) -> None:
    """The rewards of every batch but the first wait until an update has begun that comes before them: with staleness 0 that would
    never be."""
    marks = tmp_path / "marks"
    marks.mkdir()
    monkeypatch.setenv("TRIMTAB_TEST_MARKS", str(marks))
    update = loop.update

    def marked(session: Any, groups: Any) -> dict[str, float]:
        (marks / str(session.state.step)).touch()
        return update(session, groups)

    monkeypatch.setattr(loop, "update", marked)
    rows = [{"prompt": f"{number}=", "batch": number // 3} for number in range(12)]
    run = train(
        model_folder, tmp_path / "run", data=rows, reward=waits_for_the_update, overrides=["data.shuffle=false"],
        learn={"staleness": 1, "steps": 4},
    )  # fmt: skip
    assert [row["reward/failed"] for row in run.metrics] == [0] * 4


def test_a_staleness_that_the_run_is_too_short_for(model_folder, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"learn\.staleness: is 5, but the run has 5 steps: the first policy would sample"
    ):
        train(model_folder, tmp_path / "run", learn={"staleness": 5})


def test_no_correction_is_accepted_with_a_warning(model_folder, tmp_path, capfd) -> None:
    run = train(model_folder, tmp_path / "run", learn={"staleness": 1, "importance": {"level": "off"}})
    assert load_any(run.folder / "config.yaml").learn.importance.level == "off"
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "warning: learn.staleness is 1 and learn.importance.level is off" in shown
