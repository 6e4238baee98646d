"""Critic, reference and reward models on ranks of their own: tokens and weights are those of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests import running
from tests.running import left, wait_for
from trimtab.base.errors import ConfigError, Problem
from trimtab.record.checkpoint import checkpoints, load_part
from trimtab.run import assemble_split
from trimtab.run.rank import Rank
from trimtab.run.role_rank import RoleRank
from trimtab.update.critic import CRITIC
from trimtab.update.objectives.values import Values
from trimtab.update.updater import Updater

EXACT = {"rtol": 0.0, "atol": 0.0}
SUMMED = {"rtol": 1e-4, "atol": 1e-5}
"""Where ranks add up what one process adds in another order."""
PPO = {"algorithm": "ppo", "critic": {"lr": 1e-2}, "kl": {"coef": 0.05}}
KL = {"kl": {"coef": 0.05}}


@pytest.fixture(scope="module")
def judge(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, tokenizer) -> str:
    """A reward model."""
    folder = tmp_path_factory.mktemp("judge")
    config = AutoModelForCausalLM.from_pretrained(model_folder).config
    config.num_labels = 1
    torch.manual_seed(7)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"model:{folder}"


@pytest.fixture(scope="module")
def alone(forked_ranks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., running.Trained]:
    """A run of one process for each kind of learning, made once."""
    from tests.cluster.conftest import USUAL

    known: dict[str, running.Trained] = {}

    def of(learn: dict[str, Any], **more: Any) -> running.Trained:
        if (key := f"{learn} {more}") not in known:
            changes = {"learn": learn, "run": {"devices": 1, "shard": "auto"}, **more}
            known[key] = running.train(model_folder, tmp_path_factory.mktemp("alone") / "run", USUAL, changes)
        return known[key]

    return of


def placed(**roles: int | str) -> dict[str, Any]:
    return {"devices": "auto", "placement": roles, "shard": "auto"}


def check_same(ours: running.Trained, theirs: running.Trained, **tolerance: float) -> None:
    """Weights of the policy and of the critic, where there is one; and what was sampled."""
    mine, other = (load_file(run.folder / "final" / "model.safetensors") for run in (ours, theirs))
    assert mine.keys() == other.keys()
    for name, weight in other.items():
        torch.testing.assert_close(mine[name], weight, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    newest = [checkpoints(run.folder)[3] for run in (ours, theirs)]
    if (newest[1] / CRITIC).exists():
        valued, expected = (load_part(folder / CRITIC) for folder in newest)
        assert valued.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(valued[name], weight, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("reward/mean", "response/length_mean", "run/samples"):
        assert [row.get(name) for row in ours.metrics] == [row.get(name) for row in theirs.metrics]


@pytest.mark.parametrize(
    ("learn", "roles", "tolerance"),
    [
        pytest.param(PPO, {"actor": 1, "critic": 1, "reference": "critic"}, EXACT, id="critic and reference"),
        pytest.param(PPO, {"actor": 1, "critic": 2, "reference": 1, "rollout": 1}, SUMMED, id="all apart"),
        pytest.param(
            {**KL, "staleness": 1},
            {"actor": 1, "reference": 1, "rollout": 1},
            EXACT,
            id="reference",
            marks=pytest.mark.slow,
        ),
        pytest.param(PPO, {"actor": 2, "critic": 2}, SUMMED, id="two and two", marks=pytest.mark.slow),
        pytest.param(KL, {"actor": 2, "reference": 2}, SUMMED, id="two that compare", marks=pytest.mark.slow),
    ],
)
def test_roles_apart_give_the_weights_of_one_process(
    run, alone, learn: dict[str, Any], roles: dict[str, Any], tolerance: dict[str, float]
) -> None:
    check_same(run(learn=learn, run=placed(**roles)), alone(learn), **tolerance)


def test_a_critic_apart_saves_without_a_copy_in_host_memory(run, alone) -> None:
    """Nothing is saved on the way, so the plan has no copy: what is written is what the ranks hold."""
    seldom = {"checkpoint_every": 0}
    ours = run(learn=PPO, run=placed(actor=1, critic=1), observe=seldom)
    check_same(ours, alone(PPO), **EXACT)


def test_roles_apart_share_their_own_micro_batches(run, alone) -> None:
    """Two devices have each micro-batch of the critic, and the reference beside it has whole ones."""
    asked = placed(actor=1, critic=2, reference="critic", rollout=1)
    rows = {"policy": 1, "critic": 2, "reference": 1}
    check_same(run(learn=PPO, run=asked | {"sequence_parallel": rows}), alone(PPO), **SUMMED)


@pytest.mark.parametrize(
    "roles", [{"actor": 1, "reward": 2}, pytest.param({"actor": 2, "reward": 1}, marks=pytest.mark.slow)]
)
def test_a_reward_model_of_its_own_gives_the_same_rewards(run, alone, judge: str, roles: dict[str, Any]) -> None:
    learn = {"steps": 3}
    check_same(
        run(learn=learn, reward=judge, run=placed(**roles)),
        alone(learn, reward=judge),
        **(EXACT if roles["actor"] == 1 else SUMMED),
    )


@pytest.mark.parametrize(
    ("learn", "kept"),
    [
        pytest.param(PPO, {"actor": 1, "critic": 2}, id="by ranks", marks=pytest.mark.slow),
        pytest.param(PPO, None, id="by one"),
    ],
)
def test_checkpoints_are_resumed_by_any_number(run, alone, learn: dict[str, Any], kept: dict[str, Any] | None) -> None:
    """What the critic's own ranks have saved, one process takes up, and the other way round."""

    def stop(number: int, metrics: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt

    one: dict[str, Any] = {"devices": 1, "shard": "auto"}
    first, second = (placed(**kept), one) if kept else (one, placed(actor=1, critic=2))
    with pytest.raises(KeyboardInterrupt):
        run("stopped", learn=learn, run=first, callbacks=[stop])
    check_same(run("stopped", learn=learn, run=second, resume=True), alone(learn), **SUMMED)


def die_once(mark: Path) -> None:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), 9)


@pytest.mark.parametrize(
    ("method", "roles", "name"),
    [
        ("apply", {"actor": 1, "critic": 1, "reference": 1}, "critic rank 0 is lost"),
        pytest.param("score", {"actor": 1, "reference": 1}, "reference rank 0 is lost", marks=pytest.mark.slow),
        pytest.param("begin_write", {"actor": 1, "critic": 2}, "critic rank", marks=pytest.mark.slow),
    ],
)
def test_a_rank_of_any_role_that_is_killed_is_named_and_the_run_goes_on(
    run, alone, monkeypatch, tmp_path: Path, capfd, method: str, roles: dict[str, Any], name: str
) -> None:
    mark, original, calls = tmp_path / "killed", getattr(RoleRank, method), [0]

    def acts(self: RoleRank, *args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:  # there is a checkpoint by then
            die_once(mark)
        return original(self, *args)

    monkeypatch.setattr(RoleRank, method, acts)
    found = run(learn=PPO, run=placed(**roles))
    assert mark.exists()
    shown = " ".join("".join(capfd.readouterr()).split())
    assert name in shown and "All ranks start again" in shown
    monkeypatch.undo()
    check_same(found, alone(PPO), **SUMMED)


def test_the_critic_learns_while_the_policy_does(run, alone, monkeypatch, tmp_path: Path) -> None:
    """Neither applies its update before the other has begun its own: one after the other, that would never be."""
    accumulate, roles_accumulate = Rank.accumulate, RoleRank.accumulate

    def meet(mine: str, other: str) -> None:
        (tmp_path / mine).touch()
        assert wait_for(lambda: (tmp_path / other).exists(), 60)

    def of_policy(self: Rank, model: Any, *args: Any) -> Any:
        meet("policy", "critic")
        return accumulate(self, model, *args)

    def of_critic(self: RoleRank, model: Any, *args: Any) -> Any:
        meet("critic", "policy")
        return roles_accumulate(self, model, *args)

    monkeypatch.setattr(RoleRank, "accumulate", of_critic)
    monkeypatch.setattr(Rank, "accumulate", of_policy)
    found = run(learn=PPO, run=placed(actor=1, critic=1))
    monkeypatch.undo()
    check_same(found, alone(PPO), **EXACT)


def test_an_error_for_the_user_leaves_nothing_running(run, monkeypatch) -> None:
    """`run` looks for processes that are left."""
    before = set(psutil.Process().children(recursive=True))

    def fails(self: RoleRank, *args: Any) -> Any:
        raise ConfigError([Problem("learn.critic", "as a test wants it")])

    monkeypatch.setattr(RoleRank, "accumulate", fails)
    with pytest.raises(ConfigError, match="as a test wants it"):
        run(learn=PPO, run=placed(actor=1, critic=1))
    assert not left(set(psutil.Process().children(recursive=True)) - before)


def test_memory_that_runs_out_on_the_critics_rank_is_survived(run, alone, monkeypatch, tmp_path: Path, capfd) -> None:
    mark, original = tmp_path / "short", Updater.accumulate_share

    def short_once(self: Updater, *args: Any) -> Any:
        if isinstance(self.objective, Values) and not mark.exists():
            mark.touch()
            raise MemoryError("as a test wants it")
        return original(self, *args)

    monkeypatch.setattr(Updater, "accumulate_share", short_once)
    found = run(learn=PPO, run=placed(actor=1, critic=1))
    assert mark.exists() and "out of memory" in " ".join("".join(capfd.readouterr()).split())
    monkeypatch.undo()
    check_same(found, alone(PPO), **SUMMED)


@pytest.mark.parametrize(
    "shard", ["full", *(pytest.param(shard, marks=pytest.mark.slow) for shard in ("none", "optimizer", "gradients"))]
)
def test_ranks_of_a_role_share_their_models_in_every_way(run, alone, monkeypatch, shard: str) -> None:
    """As the planner does where a model is large."""
    planned = assemble_split.plan_devices

    def pins(asked: Any, *args: Any) -> Any:
        return planned(asked.with_values({"shard": shard}) if asked.devices == 2 else asked, *args)

    monkeypatch.setattr(assemble_split, "plan_devices", pins)
    found = run(learn=PPO, run=placed(actor=1, critic=2, reference="critic"))
    check_same(found, alone(PPO), **SUMMED)
