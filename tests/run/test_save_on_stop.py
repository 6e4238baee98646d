"""A run that is stopped or fails, wherever it is, loses no whole step, and ends after a resume as one that was not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.running import letters
from trimtab.base.errors import EnvError, RewardError, TrainingError
from trimtab.base.signals import STOP_SIGNALS
from trimtab.observe import observer
from trimtab.record import part, writer
from trimtab.record.checkpoint import checkpoints
from trimtab.record.sinks import read_metrics
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run import loop, offline, rollout_step
from trimtab.run.sft import Supervised
from trimtab.update import optimizer, trainer
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.updater import Updater

ROWS = [
    {"prompt": f"{a}+{b}=", "completion": str(a + b), "chosen": str(a + b), "rejected": "no"}
    for a in range(4)
    for b in range(5)
]
STEPS, EVAL_EVERY = 4, 2
Train = Callable[..., Path]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a shell starts a program in the foreground, whoever started this."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def train(model: Path, folder: Path, stage: str = "train", **changes: Any) -> Path:
    """Evaluates after the second step and the last; no checkpoint is due before the last."""
    learn: dict[str, Any] = {
        "train": {"prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 6, "updates_per_step": 2},
        "sft": {"sequences_per_step": 4},
        "reward_model": {"pairs_per_step": 2},
    }[stage]
    usual = {
        "data": ROWS[:16],
        "eval_data": ROWS[16:],
        "learn": {"steps": STEPS, "lr": 1e-3, **learn},
        "run": {"device": "cpu", "threads": 1},
        "observe": {"eval_every": EVAL_EVERY},
        **({"reward": letters} if stage == "train" else {}),
    }
    return running.train(model, folder, usual, changes, stage).folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("whole")
    return {stage: train(model_folder, folder / stage, stage) for stage in ("train", "sft", "reward_model")}


def send(signum: int, times: int = 2) -> None:
    for _ in range(times):
        os.kill(os.getpid(), signum)


def state_of(folder: Path, step: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"checkpoints/step-{step}/state.json").read_text())
    found["files"].pop("config.yaml")  # which has the run's folder in it
    return {name: value for name, value in found.items() if name not in ("seconds", "sha256")}


def assert_the_same(folder: Path, expected: Path) -> None:
    """Weights, the whole state, and in every step the same metrics."""
    for file in ("final/model.safetensors", f"checkpoints/step-{STEPS}/optimizer.safetensors"):
        ours, theirs = load_file(folder / file), load_file(expected / file)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), file
    assert state_of(folder, STEPS) == state_of(expected, STEPS)
    rows: list[dict[int, dict[str, Any]]] = []
    for run in (folder, expected):
        rows.append({})
        for row in read_metrics(run):
            known = ("reward/mean", "policy/loss", "sft/loss", "rm/loss", "eval/pass@1", "eval/loss")
            rows[-1].setdefault(row["step"], {}).update({name: row[name] for name in known if name in row})
    assert rows[0] == rows[1] and list(rows[0]) == list(range(STEPS + 1))


def at_step(step: int, original: Callable[..., Any], act: Callable[[], object], *, after: bool = False) -> Any:
    """`original`, which acts once when it is called for the step-th time."""
    calls = {"left": step}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls["left"] -= 1
        if calls["left"] == 0 and not after:
            act()
        result = original(*args, **kwargs)
        if calls["left"] == 0 and after:
            act()
        return result

    return wrapped


def fail(error: BaseException) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


# Where, and in which call of it; two updates a step. The steps that are kept.
PLACES: dict[str, tuple[object, str, int, int]] = {
    "rollout": (rollout_step, "sample", 4, 3),
    "update, before anything is applied": (Updater, "accumulate", 2 * 3 + 1, 3),
    "publish": (NativeEngine, "publish", 1 + 3, 3),
    "evaluation": (loop, "measure", 2, 2),
    "last evaluation": (loop, "measure", 3, 4),
    "samples": (observer, "sample_rows", 3 + 2, 4),  # of three evaluations, of the first step, and of the last
    "export": (trainer, "export_model", 1, 4),
}
ERRORS: dict[str, Callable[[], object]] = {
    "Ctrl-C": lambda: send(signal.SIGINT),
    "SIGTERM": lambda: send(signal.SIGTERM),
    "rewards": fail(RewardError("all failed")),
    "environment": fail(EnvError("the environment is lost")),
    "bug": fail(AssertionError("a bug")),
}


@pytest.mark.parametrize(
    ("place", "error"), [*((place, "SIGTERM") for place in PLACES), ("rollout", "environment"), ("publish", "bug")]
)
def test_every_whole_step_is_kept(
    whole: dict[str, Path], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: str
) -> None:
    owner, name, call, kept = PLACES[place]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, at_step(call, getattr(owner, name), ERRORS[error]))
        with pytest.raises((KeyboardInterrupt, EnvError, AssertionError)):
            train(model_folder, tmp_path / "run")
    assert max(checkpoints(tmp_path / "run")) == kept
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(kept + 1))
    assert state_of(tmp_path / "run", kept)["eval_due"] == ("evaluation" in place)
    assert_the_same(train(model_folder, tmp_path / "run", resume=True), whole["train"])


@pytest.mark.parametrize("error", ["Ctrl-C", "rewards", "environment", "bug"])
def test_whatever_ends_an_evaluation(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str
) -> None:
    monkeypatch.setattr(loop, "measure", at_step(2, loop.measure, ERRORS[error]))
    with pytest.raises((KeyboardInterrupt, RewardError, EnvError, AssertionError)):
        train(model_folder, tmp_path / "run")
    assert list(checkpoints(tmp_path / "run")) == [2]


@pytest.mark.parametrize(("signum", "update"), [(signal.SIGTERM, 1), (signal.SIGINT, 2)])
def test_a_stop_while_an_update_is_applied_waits_for_the_end_of_the_step(
    whole: dict[str, Path],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signum: int,
    update: int,
) -> None:
    """After the first or the second of the step's two updates has begun."""
    clip = optimizer._clip_factor
    step_whole = MasterAdamW._step_whole
    updates = {"begun": 0}

    def counted(*args: Any) -> Any:
        updates["begun"] += 1
        return clip(*args)

    def interrupted(*args: Any) -> None:
        step_whole(*args)
        if updates["begun"] == 2 * 2 + update:
            send(signum)

    with monkeypatch.context() as patched:
        patched.setattr(optimizer, "_clip_factor", counted)
        patched.setattr(MasterAdamW, "_step_whole", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(model_folder, tmp_path / "run")
    assert max(checkpoints(tmp_path / "run")) == 3
    name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
    assert f"{name} received: stopping after the updates of step 3" in " ".join(capsys.readouterr().out.split())
    assert_the_same(train(model_folder, tmp_path / "run", resume=True), whole["train"])


@pytest.mark.parametrize(("signum", "begun"), [*((signum, True) for signum in STOP_SIGNALS), (signal.SIGTERM, False)])
def test_a_save_is_finished_whatever_signals_come(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, begun: bool
) -> None:
    """One that was due when the first signal came, and one that the first signal has begun."""
    monkeypatch.setattr(part, "write_tensors", at_step(1, part.write_tensors, lambda: send(signum)))
    monkeypatch.setattr(
        writer, "write_checkpoint", at_step(2, writer.write_checkpoint, fail(AssertionError("begun again")))
    )
    if begun:
        monkeypatch.setattr(rollout_step, "sample", at_step(3, rollout_step.sample, lambda: send(signum, 1)))
    with pytest.raises(KeyboardInterrupt):
        train(model_folder, tmp_path / "run", observe={"checkpoint_every": 0 if begun else 2, "eval_every": 0})
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-2"]
    monkeypatch.undo()
    assert max(checkpoints(train(model_folder, tmp_path / "run", resume=True))) == STEPS


def test_an_update_that_fails_half_way_is_not_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of the third step's two updates: the weights are those of no step."""
    monkeypatch.setattr(
        Updater, "accumulate", at_step(2 * 2 + 2, Updater.accumulate, fail(TrainingError("out of memory")))
    )
    with pytest.raises(TrainingError, match="out of memory"):
        train(model_folder, tmp_path / "run", observe={"eval_every": 0})
    assert list(checkpoints(tmp_path / "run")) == []


def test_weights_that_are_of_no_use_are_not_kept(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = NativeEngine.generate

    def spoiled(self: NativeEngine, requests: Any) -> Iterator[Any]:
        for group in whole(self, requests):
            group.trajectories[-1].logprobs[-1] = float("nan") if requests[0].step == 3 else 0.0
            yield group

    monkeypatch.setattr(NativeEngine, "generate", spoiled)
    with pytest.raises(TrainingError, match="log-probs are not finite"):
        train(model_folder, tmp_path / "run", observe={"checkpoint_every": 2, "keep_checkpoints": 1, "eval_every": 0})
    assert list(checkpoints(tmp_path / "run")) == [2], "which is the last that was due"


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")])
def test_what_a_callback_raises_costs_no_step(model_folder: Path, tmp_path: Path, error: BaseException) -> None:
    def raising(step: int, metrics: Any) -> None:
        if step == 3:
            raise error

    with pytest.raises(type(error), match="mine"):
        train(model_folder, tmp_path / "run", callbacks=[raising])
    assert max(checkpoints(tmp_path / "run")) == 3


def test_a_save_that_fails_on_the_way_out_is_told_and_hides_nothing(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rollout_step, "sample", at_step(3, rollout_step.sample, fail(RewardError("all failed"))))
    monkeypatch.setattr(part, "write_tensors", lambda *_: fail(OSError(28, "No space left on device"))())
    with pytest.raises(RewardError, match="all failed"):
        train(model_folder, tmp_path / "run", observe={"eval_every": 0})
    told = " ".join(capsys.readouterr().out.split())
    assert "warning: cannot save step 2 (TrainingError: the disk has no space left for the checkpoint" in told
    assert "has no checkpoint yet" in told


OFFLINE: dict[str, tuple[object, str, int, int]] = {
    "update, before anything is applied": (Updater, "accumulate", 4, 3),
    "evaluation": (offline, "evaluate", 2, 2),
    "last evaluation": (offline, "evaluate", 3, 4),
}


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
@pytest.mark.parametrize("place", OFFLINE)
def test_stages_that_learn_from_given_data_keep_every_step_too(
    whole: dict[str, Path], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, place: str
) -> None:
    owner, name, call, kept = OFFLINE[place]
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, at_step(call, getattr(owner, name), lambda: send(signal.SIGTERM)))
        with pytest.raises(KeyboardInterrupt):
            train(model_folder, tmp_path / "run", stage)
    assert max(checkpoints(tmp_path / "run")) == kept
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == list(range(kept + 1))
    assert_the_same(train(model_folder, tmp_path / "run", stage, resume=True), whole[stage])


def test_an_evaluation_that_fails_in_sft(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervised, "evaluate", at_step(2, Supervised.evaluate, fail(RuntimeError("broken"))))
    with pytest.raises(RuntimeError, match="broken"):
        train(model_folder, tmp_path / "run", "sft")
    assert list(checkpoints(tmp_path / "run")) == [2]
