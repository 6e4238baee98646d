"""Checkpoints are whole or not there, and hold everything that a run needs to go on."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from tiny import tiny_model

from trimtab import checkpoint
from trimtab.checkpoint import (
    RunState,
    checkpoints,
    clear,
    load_optimizer,
    load_state,
    newest_checkpoint,
    remove_whole,
    save_checkpoint,
)
from trimtab.config.learn import Learn
from trimtab.errors import TrainingError
from trimtab.update.optimizer import MasterAdamW


def made(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, MasterAdamW]:
    model = tiny_model(dtype=dtype)
    return model, MasterAdamW(model.named_parameters(), Learn(lr=1e-2))


def stepped(model: torch.nn.Module, optimizer: MasterAdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        (parameter * gradient.to(parameter.dtype)).sum().backward()
    optimizer.step(1e-2)


def save(run: Path, step: int, tokenizer, best: int = -1, keep: int = 2, model=None) -> Path:
    model, optimizer = model or made()
    return save_checkpoint(run, RunState(step=step, best_step=best), model, tokenizer, optimizer, keep)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_bit_for_bit(tmp_path: Path, tokenizer, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    model, optimizer = made(dtype)
    stepped(model, optimizer, 1)
    saved = save(tmp_path, 1, tokenizer, model=(model, optimizer))
    restored = AutoModelForCausalLM.from_pretrained(saved, dtype=dtype)
    again = MasterAdamW(restored.named_parameters(), Learn(lr=1e-2))
    load_optimizer(saved, again)
    for seed in (2, 3):
        stepped(model, optimizer, seed)
        stepped(restored, again, seed)
    for (name, expected), got in zip(model.named_parameters(), restored.parameters()):
        assert torch.equal(expected, got), name
    expected, got = optimizer.state_tensors(), again.state_tensors()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_state_comes_back_as_it_was(tmp_path: Path, tokenizer) -> None:
    model, optimizer = made()
    state = RunState(
        step=3, version=5, data_position=17, kl_coef=0.1 + 0.2, best_step=2, best_score=0.7, reward_last=-1.5
    )
    assert load_state(save_checkpoint(tmp_path, state, model, tokenizer, optimizer, 2)) == state


def test_a_run_without_evaluation_has_no_best_score_in_json(tmp_path: Path, tokenizer) -> None:
    saved = save(tmp_path, 1, tokenizer)
    text = (saved / checkpoint.STATE).read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(name))["best_score"] is None
    assert load_state(saved).best_score == -math.inf


def test_the_newest_and_the_best_are_kept(tmp_path: Path, tokenizer) -> None:
    model = made()
    for step in range(1, 13):
        save(tmp_path, step, tokenizer, best=3 if step >= 3 else -1, model=model)
    assert list(checkpoints(tmp_path)) == [3, 11, 12], "by number, not by name"
    newest = newest_checkpoint(tmp_path)
    assert newest is not None and newest.name == "step-12"


def test_only_whole_checkpoints_are_seen(tmp_path: Path, tokenizer) -> None:
    assert newest_checkpoint(tmp_path) is None
    save(tmp_path, 1, tokenizer)
    folder = tmp_path / "checkpoints"
    (folder / ".writing-step-2").mkdir()
    (folder / ".deleting-step-0").mkdir()
    (folder / "step-9").mkdir()  # a copy that somebody broke off
    (folder / "step-x").mkdir()
    assert list(checkpoints(tmp_path)) == [1]
    clear(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-1", "step-9", "step-x"]


def test_a_save_that_fails_leaves_the_old_checkpoint(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made()
    save(tmp_path, 1, tokenizer, keep=1, model=model)

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path, 2, tokenizer, keep=1, model=model)
    assert list(checkpoints(tmp_path)) == [1]
    monkeypatch.undo()
    save(tmp_path, 2, tokenizer, keep=1, model=model)
    assert list(checkpoints(tmp_path)) == [2]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
)
@pytest.mark.parametrize("earlier", [True, False])
def test_a_full_disk_is_told_and_nothing_half_written_stays(
    tmp_path: Path, tokenizer, monkeypatch: pytest.MonkeyPatch, error: Exception, earlier: bool
) -> None:
    if earlier:
        save(tmp_path, 1, tokenizer)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "save_file", full)
    kept = "the newest that is whole is step-1" if earlier else "there is no earlier one"
    with pytest.raises(TrainingError, match=f"no space left for the checkpoint of step 2.*{kept}.*--resume"):
        save(tmp_path, 2, tokenizer)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == (["step-1"] if earlier else [])


def test_a_checkpoint_from_before_a_field_existed_is_resumed_without_it(tmp_path: Path, tokenizer) -> None:
    saved = save(tmp_path, 4, tokenizer)
    state = json.loads((saved / checkpoint.STATE).read_text())
    del state["oom_recoveries"], state["memory"]
    (saved / checkpoint.STATE).write_text(json.dumps(state))
    assert load_state(saved) == RunState(step=4)


def test_another_format_is_refused(tmp_path: Path, tokenizer) -> None:
    saved = save(tmp_path, 1, tokenizer)
    state = json.loads((saved / checkpoint.STATE).read_text())
    (saved / checkpoint.STATE).write_text(json.dumps(state | {"format": 99}))
    with pytest.raises(TrainingError, match="another version of Trimtab"):
        load_state(saved)


def test_remove_whole_never_shows_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step-1").mkdir()
    monkeypatch.setattr(checkpoint.shutil, "rmtree", lambda _: None)  # a kill before anything is deleted
    remove_whole(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == [".deleting-step-1"]
