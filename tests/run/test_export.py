"""From a run to a model folder: the right checkpoint, in the right type, whole or not at all."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tiny import tiny_model

from trimtab.base.errors import ConfigError
from trimtab.config.learn import Learn
from trimtab.config.load import config_from_dict
from trimtab.config.schema import Lora
from trimtab.model.adapters import add_adapters
from trimtab.model.weights import WeightStore
from trimtab.record.checkpoint import RunState
from trimtab.record.folder import begin
from trimtab.record.saving import save_checkpoint
from trimtab.run import export
from trimtab.run.export import export_run, find_checkpoint
from trimtab.update.optimizer import MasterAdamW

CONFIG = config_from_dict({"model": {"path": "m"}, "data": {"train": "t.jsonl"}, "reward": [{"fn": "exact_match"}]})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Checkpoints 2 (the best), 9 and 10, each with its own weights."""
    folder = tmp_path_factory.mktemp("export") / "run"
    folder.mkdir()
    begin(folder, CONFIG, [])
    for step in (2, 9, 10):
        model = tiny_model(seed=step)
        state = RunState(step=step, best_step=2, best_score=0.9)
        save_checkpoint(folder, state, model, tokenizer, MasterAdamW(WeightStore(model.named_parameters()), Learn()), 2)
    return folder


@pytest.mark.parametrize(("which", "step"), [("last", 10), ("best", 2), ("9", 9)])
def test_the_chosen_checkpoint_is_written(run: Path, tmp_path: Path, which: str, step: int) -> None:
    source = export_run(run, tmp_path / "deep/out", which, "same")
    assert source.name == f"step-{step}"
    assert (tmp_path / "deep/out/model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert {path.name for path in (tmp_path / "deep/out").iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoModelForCausalLM.from_pretrained(tmp_path / "deep/out").dtype == torch.float32
    assert AutoTokenizer.from_pretrained(tmp_path / "deep/out")("1").input_ids


def test_the_type_can_be_chosen(run: Path, tmp_path: Path) -> None:
    source = export_run(run, tmp_path / "out", "last", "bfloat16")
    exact, rounded = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "out"))
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_adapters_are_merged_into_the_type_they_were_trained_in(tmp_path: Path, tokenizer) -> None:
    """bfloat16 on a CUDA device, although this one has none."""
    model = tiny_model()
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    settings = CONFIG.model_dump() | {
        "model": {"path": str(tmp_path / "m"), "lora": {"r": 2}},
        "run": {"device": "cuda"},
    }
    run = tmp_path / "run"
    run.mkdir()
    begin(run, config_from_dict(settings), [])
    adapted = add_adapters(model, Lora(r=2), seed=0)
    optimizer = MasterAdamW(WeightStore(adapted.named_parameters()), Learn())
    save_checkpoint(run, RunState(step=1), adapted, tokenizer, optimizer, 2)
    for dtype, expected in (("same", torch.bfloat16), ("float32", torch.float32)):
        export_run(run, tmp_path / dtype, "last", dtype)
        weights = load_file(tmp_path / dtype / "model.safetensors")
        assert {w.dtype for w in weights.values()} == {expected}


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("7", r"--checkpoint: .* has no checkpoint of step 7\. Its checkpoints: 2, 9, 10\."),
        ("newest", r"--checkpoint: 'newest' is not a checkpoint\. Write best, last or a step\."),
    ],
)
def test_a_checkpoint_that_is_not_there_is_told(run: Path, which: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_checkpoint(run, which)


def test_wrong_places_are_told(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RUN: .* is not the folder of a run"):
        export_run(tmp_path, tmp_path / "out", "last", "same")
    begin(tmp_path, CONFIG, [])
    with pytest.raises(ConfigError, match=r"RUN: .* has no checkpoint yet"):
        export_run(tmp_path, tmp_path / "out", "last", "same")
    with pytest.raises(ConfigError, match=r"FOLDER: .* already exists and is not empty"):
        export_run(run, tmp_path, "last", "same")
    with pytest.raises(ConfigError, match=r"FOLDER: .* already exists and is not empty"):
        export_run(run, tmp_path / "config.yaml", "last", "same")
    with pytest.raises(ConfigError, match="--dtype: 'int4' is not a dtype"):
        export_run(run, tmp_path / "out", "last", "int4")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["file/x", "file/x/y", "/proc/x/y", "a" * 300])
def test_a_place_where_nothing_can_be_made_is_told(run: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"FOLDER: cannot write to .*: .*\. Choose another folder\."):
        export_run(run, tmp_path / place, "last", "same")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_checkpoint_is_no_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"step-9 is a checkpoint, not a run\. Give the run's folder: trimtab export {run} FOLDER --checkpoint 9"
    with pytest.raises(ConfigError, match=message):
        export_run(run / "checkpoints/step-9", tmp_path / "out", "last", "same")
    monkeypatch.chdir(run / "checkpoints")
    with pytest.raises(ConfigError, match=message):
        export_run(Path("step-9"), tmp_path / "out", "last", "same")


def test_no_evaluation_means_no_best(tmp_path: Path, tokenizer) -> None:
    begin(tmp_path, CONFIG, [])
    model = tiny_model()
    save_checkpoint(
        tmp_path, RunState(step=1), model, tokenizer, MasterAdamW(WeightStore(model.named_parameters()), Learn()), 1
    )
    with pytest.raises(ConfigError, match=r"has no evaluation, so no best checkpoint\. Write last\."):
        find_checkpoint(tmp_path, "best")


FAILURES: dict[str, tuple[BaseException, type[BaseException], str]] = {
    "full": (
        OSError(28, "No space left on device"),
        ConfigError,
        r"FOLDER: the disk has no space left for the model in .*out",
    ),
    "full, in safetensors' words": (
        SafetensorError("I/O error: No space left on device (os error 28)"),
        ConfigError,
        r"FOLDER: the disk has no space left",
    ),
    "read-only": (
        OSError(30, "Read-only file system"),
        ConfigError,
        r"FOLDER: cannot write to .*: Read-only file system",
    ),
    "stopped": (KeyboardInterrupt("stop"), KeyboardInterrupt, "stop"),
}


@pytest.mark.parametrize("dtype", ["same", "bfloat16"])
@pytest.mark.parametrize("failure", FAILURES)
def test_an_export_that_fails_leaves_all_as_it_was(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, dtype: str
) -> None:
    error, told, words = FAILURES[failure]

    def fail(_: object, to: Path, *__: object, **___: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(shutil, "copy2", fail)
        failing.setattr(export, "save_model", lambda model, tokenizer, folder: fail(model, folder))
        with pytest.raises(told, match=words):
            export_run(run, tmp_path / "deep/out", "last", dtype)
        assert [*tmp_path.iterdir()] == []
    (tmp_path / ".writing-out").mkdir()  # as a kill leaves it
    export_run(run, tmp_path / "out", "last", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(run: Path, tmp_path: Path, there: bool) -> None:
    real, link = tmp_path / "disk/real", tmp_path / "link"
    (real if there else real.parent).mkdir(parents=True)
    link.symlink_to(real)
    export_run(run, link, "last", "same")
    assert link.is_symlink() and (real / "model.safetensors").is_file()
    assert [path.name for path in real.parent.iterdir()] == ["real"]


def test_places_that_cannot_be_replaced_are_told(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ConfigError, match=r"FOLDER: "):
        export_run(run, tmp_path / "loop", "last", "same")
    for inside in (run / "checkpoints/step-10/out", run / "checkpoints/out"):
        with pytest.raises(
            ConfigError, match=r"FOLDER: .* is inside the checkpoints folder of the run\. Choose a folder outside"
        ):
            export_run(run, inside, "last", "same")
        assert not inside.exists()
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "volume")
    with pytest.raises(ConfigError, match=r"volume is a mount point.*Choose a folder inside it: .*volume/model"):
        export_run(run, tmp_path / "volume", "last", "same")
