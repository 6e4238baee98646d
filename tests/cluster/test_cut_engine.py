"""Native engines that are cut over ranks (`run.rollout.tensor_parallel`): the run learns what one process learns."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from trimtab.rollout.native.cut import CutEngine

SUMMED = {"rtol": 1e-4, "atol": 1e-5}
"""Where ranks add up what one process adds in another order."""


def cut(parts: int, devices: int = 2, shard: str = "none", **more: Any) -> dict[str, Any]:
    rollout = {"tensor_parallel": parts, **more.pop("rollout", {})}
    return {"devices": devices, "shard": shard, "engine": "native", "rollout": rollout, **more}


def check_same(ours: running.Trained, theirs: running.Trained) -> None:
    mine, other = (load_file(run.folder / "final" / "model.safetensors") for run in (ours, theirs))
    assert mine.keys() == other.keys()
    for name, weight in other.items():
        torch.testing.assert_close(mine[name], weight, **SUMMED, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("reward/mean", "response/length_mean", "run/samples"):
        assert [row.get(name) for row in ours.metrics] == [row.get(name) for row in theirs.metrics]


@pytest.fixture(scope="module")
def alone(forked_ranks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> running.Trained:
    from tests.cluster.conftest import USUAL

    changes = {"run": {"devices": 1, "shard": "auto"}}
    return running.train(model_folder, tmp_path_factory.mktemp("alone") / "run", USUAL, changes)


@pytest.mark.parametrize(
    "how",
    [
        cut(2, shard="none"),
        cut(2, shard="full"),
        pytest.param(cut(2, devices=4, shard="gradients"), marks=pytest.mark.slow),
    ],
    ids=lambda how: f"{how['devices']}-{how['shard']}",
)
def test_a_run_learns_what_one_process_learns(run, alone, how: dict[str, Any]) -> None:
    check_same(run(run=how), alone)


def test_adapters_reach_the_slices(run, model_folder: Path) -> None:
    model = {"path": str(model_folder), "lora": {"r": 4}}
    one = run("one", model=model, run={"devices": 1, "shard": "auto"})
    two = run("two", model=model, run=cut(2, shard="none"))
    for name in ("reward/mean", "response/length_mean", "loss/policy"):
        assert [row.get(name) for row in two.metrics] == pytest.approx([row.get(name) for row in one.metrics], abs=1e-5)


PAIRS = [(shard, parts) for shard in ("none", "optimizer", "gradients", "full") for parts in (1, 2)]
IN_EVERY_TEST = {("gradients", 2)}


@pytest.mark.parametrize(
    ("shard", "parts"),
    [pytest.param(*pair, marks=[] if pair in IN_EVERY_TEST else pytest.mark.slow) for pair in PAIRS],
)
def test_weights_reach_engines_of_any_size_from_any_sharding(run, alone, shard: str, parts: int) -> None:
    """Two ranks train and two generate, each with an engine or both with one."""
    split = run(run=cut(parts, devices=4, shard=shard, placement={"actor": 2, "rollout": 2}))
    check_same(split, alone)
    assert all(row["publish/bytes"] > 0 for row in split.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_adapters_reach_slices_on_devices_of_their_own(run, model_folder: Path, shard: str) -> None:
    model = {"path": str(model_folder), "lora": {"r": 4}}
    one = run("one", model=model, run={"devices": 1, "shard": "auto"})
    two = run("two", model=model, run=cut(2, devices=4, shard=shard, placement={"actor": 2, "rollout": 2}))
    for name in ("reward/mean", "response/length_mean", "loss/policy"):
        assert [row.get(name) for row in two.metrics] == pytest.approx([row.get(name) for row in one.metrics], abs=1e-5)


def test_a_rank_of_an_engine_that_is_killed_is_named_and_the_run_goes_on(
    run, alone, monkeypatch, tmp_path, capsys
) -> None:
    original, mark = CutEngine.follow, tmp_path / "killed"

    def follow(self: CutEngine, *given: Any) -> None:
        if self.version == 1 and not mark.exists():
            mark.touch()
            self._decoder.run = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        original(self, *given)

    monkeypatch.setattr(CutEngine, "follow", follow)
    found = run(run=cut(2))
    check_same(found, alone)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "rank 1 is lost: its process ended: killed by SIGKILL" in said


def test_an_evaluation_scores_as_one_engine_does(forked_ranks, model_folder: Path) -> None:
    import trimtab
    from tests.cluster.conftest import USUAL

    given = {"model": str(model_folder), "data": USUAL["data"], "reward": USUAL["reward"]}
    learn = {"max_new_tokens": 8, "seed": 3}
    one, two = (
        trimtab.evaluate(**given, learn=learn, run=run)
        for run in (
            {"device": "cpu", "threads": 1, "reward_workers": 1},
            {"device": "cpu", "reward_workers": 1} | cut(2),
        )
    )
    assert one == two
