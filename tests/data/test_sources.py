"""What `data.train` says decides where rows come from."""

from __future__ import annotations

import builtins
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.base.errors import DataError
from trimtab.config.schema import Data
from trimtab.data.sources import eval_rows, load_rows, train_rows

ROWS = [{"question": f"q{i}", "answer": f"#### {i}"} for i in range(5)]


def load(source: str, **keys: Any) -> list[dict[str, Any]]:
    return load_rows(source, **{"split": "train", "limit": None, "options": {}, "seed": 0, **keys})


def refused(source: str, **keys: Any) -> str:
    with pytest.raises(DataError) as error:
        load(source, **keys)
    return str(error.value)


def test_file_by_relative_and_home_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.JSONL").write_text('{"a": 1}\n{"a": 2}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("a.JSONL") == load("~/a.JSONL") == [{"a": 1}, {"a": 2}]
    assert load("a.JSONL", limit=1) == [{"a": 1}]


@pytest.mark.parametrize("source", ["trian.jsonl", "./somewhere", "/no/such/place", "a/b/c", "data/x.parquet", "x.tsv"])
def test_missing_file_names_the_absolute_path(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    monkeypatch.chdir(tmp_path)
    message = refused(source)
    assert str((tmp_path / source).absolute()) in message
    assert ("Did you mean 'train.jsonl'?" in message) == (source == "trian.jsonl")


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        (
            "sets/train",
            "Did you mean 'trains'?",
        ),  # `sets` is a folder here: no hub is asked for an organisation of that name
        ("stes/a/b.jsonl", "There is no folder {here}/stes. Did you mean 'sets'?"),
        ("runs/mine", "There is no folder {here}/runs."),
        ("my rows", "There is no file {here}/my rows."),
    ],
)
def test_what_no_hub_can_have_is_looked_for_here_alone(
    source: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sets" / "trains").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hint.format(here=tmp_path) in refused(source)


def test_options_on_a_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}')
    assert "no effect" in refused(str(path), options={"difficulty": 2})


def test_saved_data_set_folder(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": one, "test": one.select([4])}).save_to_disk(str(tmp_path / "both"))
    assert load(str(tmp_path / "one"), limit=2) == ROWS[:2]
    assert load(str(tmp_path / "both")) == ROWS
    assert load(str(tmp_path / "both"), split="test") == ROWS[4:]
    message = refused(str(tmp_path / "both"), split="tets")
    assert "no split 'tets'; it has train, test. Did you mean 'test'?" in message


def test_folder_that_is_no_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    assert f"folder {tmp_path} cannot be read" in refused(str(tmp_path))


def test_hub_name_with_and_without_config(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    calls = []

    def load_dataset(*args: Any, **keys: Any) -> Any:
        calls.append((*args, keys["split"]))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load("openai/gsm8k:main", limit=3) == ROWS[:3]
    assert load("org/name-1.5", split="validation") == ROWS
    assert calls == [("openai/gsm8k", "main", "train"), ("org/name-1.5", None, "validation")]


def test_hub_failure_says_both_places_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("no route to host\nmore")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    message = refused("data/train")
    assert str(tmp_path / "data/train") in message
    assert message.endswith("ConnectionError: no route to host")


def test_hub_without_datasets_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def fake(name: str, *rest: Any, **keys: Any) -> Any:
        if name == "datasets":
            raise ImportError(name)
        return real(name, *rest, **keys)

    monkeypatch.setattr(builtins, "__import__", fake)
    assert "trimtab[data]" in refused("openai/gsm8k")


def test_train_and_eval_rows_of_a_configuration(tmp_path: Path, data: Callable[..., Data]) -> None:
    held_out = tmp_path / "test.jsonl"
    held_out.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    config = data(train="task:arithmetic", eval=str(held_out), options={"size": 20, "difficulty": 1}, limit=7)
    assert len(train_rows(config, seed=0)) == 7
    assert len(eval_rows(config, seed=0)) == 3
    assert len(eval_rows(config, seed=0, limit=2)) == 2
    assert eval_rows(data(train="task:sort"), seed=0) == []
    with pytest.raises(DataError, match="no effect"):
        train_rows(data(train=str(held_out), options={"size": 20}), seed=0)


def test_default_splits_of_a_task_are_disjoint(data: Callable[..., Data]) -> None:
    config = data(train="task:arithmetic", eval="task:arithmetic")
    train, held_out = train_rows(config, seed=0), eval_rows(config, seed=0)
    assert (len(train), len(held_out)) == (4096, 256)
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in held_out}


def test_unknown_split_of_a_task() -> None:
    assert "It has train and eval" in refused("task:sort", split="dev2")


def test_importing_the_data_package_imports_no_heavy_library() -> None:
    heavy = "('torch', 'transformers', 'datasets', 'reasoning_gym', 'pyarrow')"
    modules = "trimtab.data.sources, trimtab.data.stream, trimtab.data.scoring"
    code = f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
