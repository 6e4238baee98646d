"""Checkpoints are whole or not there, and hold everything that a run needs to go on."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from tiny import tiny_model

from tests import running
from tests.record.format1 import write_as_format_1
from trimtab.base.errors import DivergedError, TrainingError
from trimtab.base.files import clear
from trimtab.config.learn import Learn
from trimtab.model.weights import WeightStore
from trimtab.record import checkpoint, part, saving
from trimtab.record.checkpoint import (
    RunState,
    checkpoints,
    load_optimizer,
    load_state,
    newest_checkpoint,
    remove_whole,
)
from trimtab.record.saving import save_checkpoint
from trimtab.rollout.native.engine import NativeEngine
from trimtab.run.export import export_run
from trimtab.update.optimizer import MasterAdamW


def made(dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, MasterAdamW]:
    model = tiny_model(dtype=dtype)
    return model, MasterAdamW(WeightStore(model.named_parameters()), Learn(lr=1e-2))


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
    again = MasterAdamW(WeightStore(restored.named_parameters()), Learn(lr=1e-2))
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

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(part, "write_tensors", broken)
    words = r"cannot save step 2 in .*Input/output error.*the newest complete checkpoint is step-1.*--resume"
    with pytest.raises(TrainingError, match=words):
        save(tmp_path, 2, tokenizer, keep=1, model=model)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
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

    monkeypatch.setattr(part, "write_tensors", full)
    kept = "the newest complete checkpoint is step-1" if earlier else "there is no earlier checkpoint"
    with pytest.raises(TrainingError, match=f"no space left for the checkpoint of step 2.*{kept}.*--resume") as told:
        save(tmp_path, 2, tokenizer)
    assert ("keep_checkpoints" in str(told.value)) == earlier  # keeping fewer helps where there are some
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == (["step-1"] if earlier else [])


def test_a_checkpoint_from_before_a_field_existed_is_resumed_without_it(tmp_path: Path, tokenizer) -> None:
    saved = save(tmp_path, 4, tokenizer)
    write_as_format_1(saved)
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
    monkeypatch.setattr(shutil, "rmtree", lambda _: None)  # a kill before anything is deleted
    remove_whole(tmp_path / "step-1")
    assert [path.name for path in tmp_path.iterdir()] == [".deleting-step-1"]


DAMAGES: dict[str, Callable[[Path], object]] = {
    "an empty state": lambda folder: (folder / "state.json").write_text(""),
    "a state that is a list": lambda folder: (folder / "state.json").write_text("[]"),
    "a step that is no number": lambda folder: edit(folder, step="two"),
    "another step": lambda folder: edit(folder, step=99),
    "a position before the first row": lambda folder: edit(folder, data_position=-5),
    "no optimizer": lambda folder: (folder / "optimizer.safetensors").unlink(),
    "half an optimizer": lambda folder: cut(folder / "optimizer.safetensors"),
    "half a model": lambda folder: cut(folder / "model.safetensors"),
    "no model": lambda folder: (folder / "model.safetensors").unlink(),
    "a position that is no row's": lambda folder: edit(folder, data_position=1e30),
    "a position beyond all counting": lambda folder: edit(folder, data_position=10**30),
    "a coefficient that is no number": lambda folder: edit(folder, kl_coef=float("nan")),
    "moments that are no numbers": lambda folder: spoil(folder / "optimizer.safetensors", "exp_avg/"),
    "infinite moments": lambda folder: spoil(folder / "optimizer.safetensors", "exp_avg_sq/", float("inf")),
    "weights that are no numbers": lambda folder: spoil(folder / "model.safetensors", "model.layers.1"),
    "the optimizer of another step": lambda folder: take_from_step_1(folder, "optimizer.safetensors"),
    "the weights of another step": lambda folder: take_from_step_1(folder, "model.safetensors"),
    "the state of another step": lambda folder: take_from_step_1(folder, "state.json"),
    "no config of the model": lambda folder: (folder / "config.json").unlink(),
    "half a config of the model": lambda folder: cut(folder / "config.json"),
    "a config that is no YAML": lambda folder: (folder / "config.yaml").write_text("learn: {"),
    "half a config": lambda folder: (folder / "config.yaml").write_text("model: {path: m}"),
    "a config that is no text": lambda folder: (folder / "config.yaml").write_bytes(b"\xff\xfe\x00"),
    "an empty config": lambda folder: (folder / "config.yaml").write_text(""),
}


def edit(folder: Path, **changes: object) -> None:
    saved = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(saved | changes))


def spoil(file: Path, prefix: str, value: float = float("nan")) -> None:
    with safe_open(file, "pt") as opened:
        facts = opened.metadata()
    tensors = load_file(file)
    name = next(name for name in tensors if name.startswith(prefix))
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, facts)


def take_from_step_1(folder: Path, name: str) -> None:
    shutil.copy(folder.parent / "step-1" / name, folder / name)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("two") / "run"
    train(model_folder, folder, {"steps": 2})
    return folder


def train(model_folder: Path | dict[str, Any], folder: Path, learn: dict[str, Any], **more: Any) -> dict[str, Any]:
    usual = {
        "data": [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)],
        "reward": lambda completions, **_: [float(len(set(text))) for text in completions],
        "learn": {"prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        "observe": {"checkpoint_every": 1},
    }
    return running.train(model_folder, folder, usual, {"learn": learn, **more}).summary


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_told_with_the_one_to_go_on_from(
    two_checkpoints: Path, model_folder: Path, tmp_path: Path, damage: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    DAMAGES[damage](folder / "checkpoints/step-2")
    words = r"step-2 cannot be read \(.+\)\. If it is damaged, move it away.*: the run then continues from step-1\."
    with pytest.raises(TrainingError, match=words):
        train(model_folder, folder, {"steps": 3}, resume=True)
    shutil.rmtree(folder / "checkpoints/step-2")
    assert train(model_folder, folder, {"steps": 3}, resume=True)["steps"] == 3


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)


def swap_files(folder: Path, one: str, two: str) -> None:
    (folder / one).rename(folder / "aside")
    (folder / two).rename(folder / one)
    (folder / "aside").rename(folder / two)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: flip_a_bit(f / "model.safetensors"), r"model\.safetensors was changed or damaged"),
        (lambda f: flip_a_bit(f / "optimizer.safetensors"), r"optimizer\.safetensors was changed or damaged"),
        (
            lambda f: cut(f / "optimizer.safetensors"),
            r"optimizer\.safetensors has [\d,]+ bytes, but was written with [\d,]+",
        ),
        (lambda f: (f / "model.safetensors").unlink(), r"model\.safetensors is missing"),
        (
            lambda f: take_from_step_1(f, "model.safetensors"),
            r"model\.safetensors has the contents of step-1/model\.safetensors",
        ),
        (
            lambda f: swap_files(f, "model.safetensors", "optimizer.safetensors"),
            r"model\.safetensors has the contents of optimizer\.safetensors; optimizer\.safetensors has",
        ),
        (lambda f: edit(f, version=7), r"state\.json was changed or damaged"),
    ],
)
def test_a_file_that_is_not_what_was_written_is_named(
    two_checkpoints: Path, tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    shutil.copytree(two_checkpoints / "checkpoints", tmp_path / "checkpoints")
    damage(tmp_path / "checkpoints/step-2")
    with pytest.raises(TrainingError, match=rf"step-2 cannot be read \(ValueError: {told}.*continues from step-1\."):
        load_state(tmp_path / "checkpoints/step-2")
    assert load_state(tmp_path / "checkpoints/step-1").step == 1


def test_the_table_says_where_each_parameter_lies(two_checkpoints: Path) -> None:
    """Whoever reads it needs no model: unit, name, shape, type and offset."""
    folder = two_checkpoints / "checkpoints/step-2"
    state, tensors = json.loads((folder / "state.json").read_text()), load_file(folder / "optimizer.safetensors")
    weights, table = load_file(folder / "model.safetensors"), state["tables"]["optimizer.safetensors"]
    assert state["format"] == 3 and {row["name"] for row in table} == set(weights)
    assert set(state["files"]) == {p.name for p in folder.iterdir()} - {"state.json"}
    for row in table:
        assert row["shape"] == list(weights[row["name"]].shape) and row["dtype"] == "float32"
        assert row["offset"] % 256 == 0
        assert row["offset"] + math.prod(row["shape"]) <= tensors[f"exp_avg/{row['unit']}"].numel()


def test_a_state_that_is_written_again_keeps_what_it_says_of_the_files(two_checkpoints: Path, tmp_path: Path) -> None:
    """An evaluation that is made up for changes the state of a checkpoint that is on disk."""
    for as_it_was in (lambda _: None, write_as_format_1):
        folder = tmp_path / as_it_was.__name__.strip("<>") / "checkpoints"
        shutil.copytree(two_checkpoints / "checkpoints", folder)
        as_it_was(folder / "step-2")
        before = json.loads((folder / "step-2/state.json").read_text())
        state = load_state(folder / "step-2")
        state.accuracy_last = 0.5
        checkpoint.write_state(folder / "step-2", state)
        assert load_state(folder / "step-2") == state
        after = json.loads((folder / "step-2/state.json").read_text())
        assert {key: after.get(key) for key in ("format", "files", "tables", "shards")} == {
            key: before.get(key) for key in ("format", "files", "tables", "shards")
        }


@pytest.mark.parametrize("settings", [{}, {"algorithm": "ppo"}, {"optimizer": {"states": "8bit"}}])
def test_a_checkpoint_of_format_1_goes_on_bit_for_bit(
    model_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    train(model_folder, tmp_path / "new", {"steps": 1, **settings})
    shutil.copytree(tmp_path / "new", tmp_path / "old")
    write_as_format_1(tmp_path / "old/checkpoints/step-1")
    for run in ("new", "old"):
        train(model_folder, tmp_path / run, {"steps": 2, **settings}, resume=True)
    files = {p.name for p in (tmp_path / "new/checkpoints/step-2").glob("*.safetensors")}
    assert len(files) == (4 if "algorithm" in settings else 2)
    for name in files:
        new, old = (load_file(tmp_path / run / "checkpoints/step-2" / name) for run in ("new", "old"))
        assert new.keys() == old.keys() and all(torch.equal(new[key], old[key]) for key in new), name


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: cut(f / "optimizer.safetensors"), "SafetensorError"),
        (lambda f: spoil(f / "optimizer.safetensors", "exp_avg/"), "exp_avg/.* holds values that are not finite"),
        (lambda f: take_from_step_1(f, "optimizer.safetensors"), "optimizer.safetensors belongs to step 1"),
        (
            lambda f: take_from_step_1(f, "model.safetensors"),
            "its weights do not belong to optimizer.safetensors",
        ),
    ],
)
def test_damage_to_format_1_is_told_as_far_as_it_can_be(
    two_checkpoints: Path, model_folder: Path, tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    for step in (1, 2):
        write_as_format_1(tmp_path / f"run/checkpoints/step-{step}")
    damage(tmp_path / "run/checkpoints/step-2")
    with pytest.raises(TrainingError, match=rf"step-2 cannot be read \(.*{told}.*continues from step-1\."):
        train(model_folder, tmp_path / "run", {"steps": 3}, resume=True)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_every_part_of_a_checkpoint_is_of_its_step(model_folder: Path, tmp_path: Path, algorithm: str) -> None:
    """Whichever is another step's; PPO has two more."""
    train(model_folder, tmp_path / "run", {"steps": 2, "algorithm": algorithm})
    one, two = (tmp_path / f"run/checkpoints/step-{step}" for step in (1, 2))
    parts = [path.name for path in two.glob("*.safetensors")]
    assert len(parts) == (4 if algorithm == "ppo" else 2)
    for name in parts:
        kept = (two / name).read_bytes()
        shutil.copy(one / name, two / name)
        with pytest.raises(TrainingError, match=r"step-2 cannot be read \(ValueError: .*step.*continues from step-1"):
            train(model_folder, tmp_path / "run", {"steps": 3, "algorithm": algorithm}, resume=True)
        (two / name).write_bytes(kept)
    assert train(model_folder, tmp_path / "run", {"steps": 3, "algorithm": algorithm}, resume=True)["steps"] == 3


def test_adapters_of_another_step_are_told(model_folder: Path, tmp_path: Path) -> None:
    model = {"path": str(model_folder), "lora": {"r": 2}}
    train(model, tmp_path / "run", {"steps": 2})
    take_from_step_1(tmp_path / "run/checkpoints/step-2", "adapter_model.safetensors")
    with pytest.raises(
        TrainingError,
        match=r"\(ValueError: adapter_model\.safetensors has the contents of step-1/adapter_model\.safetensors\)",
    ):
        train(model, tmp_path / "run", {"steps": 3}, resume=True)
    shutil.rmtree(tmp_path / "run/checkpoints/step-2")
    assert train(model, tmp_path / "run", {"steps": 3}, resume=True)["steps"] == 3


def test_equal_checkpoints_are_equal_byte_for_byte(tmp_path: Path, tokenizer) -> None:
    model = made()
    saved = (save(tmp_path, 1, tokenizer, model=model) / "optimizer.safetensors" for _ in range(8))
    assert len({file.read_bytes() for file in saved}) == 1


def test_a_checkpoint_from_before_parts_named_their_step_is_resumed(
    two_checkpoints: Path, model_folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(two_checkpoints, tmp_path / "run")
    write_as_format_1(tmp_path / "run/checkpoints/step-2", step_in_files=False)
    assert train(model_folder, tmp_path / "run", {"steps": 3}, resume=True)["steps"] == 3


def test_moments_that_are_not_finite_are_not_saved(tmp_path: Path, tokenizer) -> None:
    model, optimizer = made()
    save(tmp_path, 1, tokenizer, model=(model, optimizer))
    next(t for name, t in optimizer.state_tensors().items() if name.startswith("exp_avg_sq/")).view(-1)[0] = math.inf
    with pytest.raises(
        DivergedError, match=r"step 2 is not saved: exp_avg_sq/.* not finite.*step-1 is intact.*learn\.lr"
    ):
        save(tmp_path, 2, tokenizer, model=(model, optimizer))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]


def test_a_loss_that_was_no_number_does_not_keep_a_run_from_being_resumed(tmp_path: Path, tokenizer) -> None:
    model, optimizer = made()
    state = RunState(step=1, loss_first=math.nan, loss_last=1.0)
    loaded = load_state(save_checkpoint(tmp_path, state, model, tokenizer, optimizer, 2))
    assert (loaded.loss_first, loaded.loss_last) == (None, 1.0)


class Disk:
    """Which files and folders were flushed, by inode, and how many had been when a folder was renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flushed: list[int] = []
        self.renamed: dict[str, int] = {}
        self.sizes: list[int] = []
        fsync, rename = os.fsync, Path.rename

        def flush(handle: int) -> None:
            fsync(handle)
            found = os.fstat(handle)
            self.flushed.append(found.st_ino)
            self.sizes.append(found.st_size)

        def renamed(path: Path, target: Path) -> Path:
            self.renamed[Path(target).name] = len(self.flushed)
            return rename(path, target)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(Path, "rename", renamed)

    def assert_flushed_then_renamed(self, folder: Path) -> None:
        """A copy would have other inodes; a kill would leave half of one, and a loss of power an empty file."""
        before = self.flushed[: self.renamed[folder.name]]
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_ino in before, path
        assert folder.parent.stat().st_ino in self.flushed[self.renamed[folder.name] :]


@pytest.mark.parametrize("lora", [None, {"r": 2}])
def test_what_is_saved_is_on_disk_before_it_has_its_name(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, int] | None
) -> None:
    disk = Disk(monkeypatch)
    run = tmp_path / "run"
    train({"path": str(model_folder), "lora": lora}, run, {"steps": 1})
    for folder in (run / "checkpoints/step-1", run / "final"):
        disk.assert_flushed_then_renamed(folder)
    metrics, saved = (run / "metrics.jsonl").stat(), disk.flushed.index((run / "checkpoints/step-1").stat().st_ino)
    sizes = [size for inode, size in zip(disk.flushed[:saved], disk.sizes) if inode == metrics.st_ino]
    assert max(sizes) == metrics.st_size, "the checkpoint was on disk before its row"
    monkeypatch.undo()
    disk = Disk(monkeypatch)
    export_run(run, tmp_path / "out", "last", "same")
    disk.assert_flushed_then_renamed(tmp_path / "out")


MOMENTS = {
    "write_part": saving,
    "write_tensors": part,
    "write_state": saving,
    "put_in_place": saving,
    "remove_whole": checkpoint,
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_folder_that_is_deleted_while_a_checkpoint_is_written_is_told(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    original = getattr(MOMENTS[moment], moment)

    def deleted(*args: Any, **rest: Any) -> Any:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return original(*args, **rest)

    monkeypatch.setattr(MOMENTS[moment], moment, deleted)
    step = 3 if moment == "remove_whole" else 1
    with pytest.raises(TrainingError, match=rf"run was moved or deleted during the run, so step {step} is not saved"):
        train(model_folder, tmp_path / "run", {"steps": 3})
    assert not (tmp_path / "run").exists()


def test_weights_that_are_not_finite_are_not_saved(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        TrainingError, match=r"step 1 is not saved: .* holds values that are not finite(.|\n)*learn\.lr"
    ):
        train(model_folder, tmp_path / "run", {"steps": 2, "lr": 1e300})
    assert not (tmp_path / "run/final").exists() and not [*(tmp_path / "run").rglob("step-*.safetensors")]
    assert newest_checkpoint(tmp_path / "run") is None


def test_log_probs_that_are_no_numbers_end_the_run_in_words(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = NativeEngine.generate

    def spoiled(self: NativeEngine, requests: Any) -> Iterator[Any]:
        for group in whole(self, requests):
            group.trajectories[-1].logprobs[-1] = float("nan")
            yield group

    monkeypatch.setattr(NativeEngine, "generate", spoiled)
    with pytest.raises(TrainingError, match=r"step 1: the policy's log-probs are not finite"):
        train(model_folder, tmp_path / "run", {"steps": 2})


@pytest.mark.parametrize("change", ["fewer", "reversed", "the same"])
def test_rows_that_are_not_those_of_the_run_are_told(
    two_checkpoints: Path, model_folder: Path, tmp_path: Path, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(two_checkpoints, folder)
    rows = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
    data = {"fewer": rows[:10], "reversed": rows[::-1], "the same": rows}[change]
    capsys.readouterr()
    train(model_folder, folder, {"steps": 3}, resume=True, data=data)
    told = " ".join(capsys.readouterr().out.split())
    assert ("data.train changed since the checkpoint" in told) is (change != "the same")


def test_a_folder_that_is_taken_away_ends_the_run_at_its_next_step(model_folder: Path, tmp_path: Path) -> None:
    """Step 1 may be on its way to disk, and then is not saved either."""

    def take_away(step: int, metrics: dict[str, float]) -> None:
        (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(TrainingError, match=r"run was moved or deleted during the run, so step [12] is not saved"):
        train(model_folder, tmp_path / "run", {"steps": 3}, callbacks=[take_away])
    assert train(model_folder, tmp_path / "moved", {"steps": 3}, resume=True)["steps"] == 3


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)]
)
def test_what_is_learned_does_not_depend_on_the_callers_modes(
    two_checkpoints: Path, model_folder: Path, tmp_path: Path, mode: Callable[[], Any]
) -> None:
    with mode():
        train(model_folder, tmp_path / "run", {"steps": 2}, callbacks=[lambda *_: torch.set_grad_enabled(False)])
    torch.set_grad_enabled(True)
    learned, expected = (load_file(run / "final/model.safetensors") for run in (tmp_path / "run", two_checkpoints))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in learned.items())
