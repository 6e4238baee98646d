"""Some ranks train, others generate: the weights are those of one process, whatever overlaps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.running import left, wait_for
from trimtab.record.checkpoint import checkpoints
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run import loop
from trimtab.run.rank import Rank

EXACT = {"rtol": 0.0, "atol": 0.0}
SUMMED = {"rtol": 1e-4, "atol": 1e-5}
"""Where ranks add up what one process adds in another order, or engines run smaller batches."""


def placed(trainers: int, samplers: int, **more: Any) -> dict[str, Any]:
    return {
        "devices": trainers + samplers,
        "placement": {"actor": trainers, "rollout": samplers},
        "shard": "auto",
        **more,
    }


def check_same(ours: running.Trained, theirs: running.Trained, **tolerance: float) -> None:
    mine, other = (load_file(run.folder / "final" / "model.safetensors") for run in (ours, theirs))
    assert mine.keys() == other.keys()
    for name, weight in other.items():
        torch.testing.assert_close(mine[name], weight, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    for name in ("reward/mean", "response/length_mean", "run/samples"):
        assert [row.get(name) for row in ours.metrics] == [row.get(name) for row in theirs.metrics]


@pytest.fixture(scope="module")
def alone(forked_ranks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """A run of one process for each staleness, made once."""
    from tests.cluster.conftest import USUAL

    known: dict[str, running.Trained] = {}

    def of(**learn: Any) -> running.Trained:
        if (key := str(learn)) not in known:
            changes = {"learn": learn, "run": {"devices": 1, "shard": "auto"}}
            known[key] = running.train(model_folder, tmp_path_factory.mktemp("alone") / "run", USUAL, changes)
        return known[key]

    return of


@pytest.mark.parametrize(("trainers", "samplers", "k"), [(1, 1, 0), (1, 2, 1)])
def test_one_that_trains_gives_the_weights_of_one_process(run, alone, trainers: int, samplers: int, k: int) -> None:
    split = run(learn={"staleness": k}, run=placed(trainers, samplers))
    check_same(split, alone(staleness=k), **(EXACT if samplers == 1 else SUMMED))
    assert all(row["publish/bytes"] > 0 and row["publish/seconds"] > 0 for row in split.metrics)


@pytest.mark.parametrize(
    ("shard", "k"),
    [
        ("full", 2),
        *(
            pytest.param(shard, k, marks=pytest.mark.slow)
            for shard in ("none", "optimizer", "gradients")
            for k in (0, 1)
        ),
    ],
)
def test_several_that_train_however_they_share(run, alone, shard: str, k: int) -> None:
    check_same(run(learn={"staleness": k}, run=placed(2, 1, shard=shard)), alone(staleness=k), **SUMMED)


def test_rollout_goes_on_while_the_policy_learns(run, alone, monkeypatch, tmp_path) -> None:
    """Every rollout but the first waits in the engine until an update has begun that comes before it ends: one after the other,
    that would never be."""
    generate, update, calls = NativeEngine.generate, loop.update, [0]

    def waits(self: NativeEngine, requests: Any, feed: Any = None) -> Any:
        step = requests[0].step if requests else 0
        assert step == 0 or wait_for(lambda: (tmp_path / f"update-{step - 1}").exists(), 60)
        return generate(self, requests, feed)

    def marked(session: Any, groups: Any) -> Any:
        (tmp_path / f"update-{session.state.step}").touch()
        calls[0] += 1
        return update(session, groups)

    monkeypatch.setattr(NativeEngine, "generate", waits)
    monkeypatch.setattr(loop, "update", marked)
    split = run(learn={"staleness": 1}, run=placed(1, 1))
    assert calls == [3]
    monkeypatch.undo()
    check_same(split, alone(staleness=1), **EXACT)


@pytest.mark.parametrize("victim", ["sampler", "trainer"])
def test_a_rank_that_is_killed_is_named_and_the_run_goes_on(
    run, alone, monkeypatch, tmp_path, capfd, victim: str
) -> None:
    """While sampling and learning go on side by side, once."""
    mark = tmp_path / "killed"

    def die_once() -> None:
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), 9)

    generate, accumulate = NativeEngine.generate, Rank.accumulate

    def generates(self: NativeEngine, requests: Any, feed: Any = None) -> Any:
        if victim == "sampler" and requests and requests[0].step == 2:
            die_once()
        return generate(self, requests, feed)

    def accumulates(self: Rank, *args: Any) -> Any:
        if victim == "trainer" and self._trainer.begun == 1:
            die_once()
        return accumulate(self, *args)

    monkeypatch.setattr(NativeEngine, "generate", generates)
    monkeypatch.setattr(Rank, "accumulate", accumulates)
    split = run(learn={"staleness": 1}, run=placed(1, 1))
    assert mark.exists()
    shown = " ".join("".join(capfd.readouterr()).split())
    assert "rank 0 is lost" in shown and "All ranks start again" in shown
    monkeypatch.undo()
    check_same(split, alone(staleness=1), **EXACT)


@pytest.mark.parametrize("short", ["receiver", "sender"])
def test_memory_that_runs_out_while_weights_are_sent_leaves_nobody_with_old_ones(
    run, alone, monkeypatch, tmp_path, short: str
) -> None:
    """Once, at the first version: what a receiver lacks is sent again; a sender that fails has receivers waiting, and all start
    again."""
    mark = tmp_path / "short"
    publish, send = NativeEngine.publish, Rank.send_weights

    def fail_once(version: int) -> None:
        if version == 1 and not mark.exists():
            mark.touch()
            raise MemoryError("as a test wants it")

    def publishes(self: NativeEngine, version: int) -> None:
        if short == "receiver":
            fail_once(version)
        publish(self, version)

    def sends(self: Rank, version: int) -> Any:
        if short == "sender":
            fail_once(version)
        return send(self, version)

    monkeypatch.setattr(NativeEngine, "publish", publishes)
    monkeypatch.setattr(Rank, "send_weights", sends)
    split = run(learn={"staleness": 1}, run=placed(1, 1))
    assert mark.exists()
    monkeypatch.undo()
    check_same(split, alone(staleness=1), **EXACT)


def test_a_stop_leaves_a_checkpoint_and_nothing_running(run, alone, monkeypatch) -> None:
    before = set(psutil.Process().children(recursive=True))

    def stop(number: int, metrics: Any) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", learn={"staleness": 1}, run=placed(1, 1), callbacks=[stop])
    assert not left(set(psutil.Process().children(recursive=True)) - before)
    resumed = run("stopped", learn={"staleness": 1}, run=placed(1, 1), resume=True)
    assert list(checkpoints(resumed.folder))
    check_same(resumed, alone(staleness=1), **EXACT)


def test_what_began_on_split_devices_goes_on_with_one(run, alone) -> None:
    def stop(number: int, metrics: Any) -> None:
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("stopped", learn={"staleness": 2}, run=placed(1, 1), callbacks=[stop])
    resumed = run("stopped", learn={"staleness": 2}, run={"devices": 1, "shard": "auto"}, resume=True)
    check_same(resumed, alone(staleness=2), **EXACT)
