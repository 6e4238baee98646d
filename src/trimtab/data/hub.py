"""Rows from a Hugging Face data set: a saved or plain data set folder, or a name on the hub.

The `datasets` library is imported here and nowhere else, and only when such a source is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.data.files import Row


def load_folder(folder: Path, *, split: str, limit: int | None) -> list[Row]:
    """A folder written by `save_to_disk`, or one with data files in a layout that `datasets` knows."""
    datasets = _library(str(folder))
    saved = (folder / "dataset_dict.json").exists() or (folder / "state.json").exists()
    try:
        found = datasets.load_from_disk(str(folder)) if saved else datasets.load_dataset(str(folder), split=split)
    except Exception as error:
        raise DataError(f"The data set folder {folder} cannot be read: {_first_line(error)}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise DataError(
                f"{folder} has no split {split!r}; it has {', '.join(found)}.{did_you_mean(split, found)} "
                "Set data.train_split or data.eval_split."
            )
        found = found[split]
    return _rows(found, str(folder), limit)


def load_hub(source: str, *, split: str, limit: int | None) -> list[Row]:
    """`org/name` or `org/name:config` from the Hugging Face hub (or its cache)."""
    datasets = _library(source)
    name, _, config = source.partition(":")
    try:
        found = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the library raises a score of types: no such set, split, config, network, token
        raise DataError(
            f"{source!r} is not a file or folder here ({Path(source).absolute()} does not exist), and loading it as a "
            f"Hugging Face data set, split {split!r}, failed: {_first_line(error)}"
        ) from error
    return _rows(found, source, limit)


def _library(source: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"Loading the data set {source!r} needs datasets: pip install 'trimtab[data]'.") from error
    return datasets


def _rows(dataset: Any, name: str, limit: int | None) -> list[Row]:
    if len(dataset) == 0:
        raise DataError(f"{name} holds no rows. A data set needs at least one row.")
    if limit is not None and limit < len(dataset):
        dataset = dataset.select(range(limit))
    rows: list[Row] = dataset.to_list()
    return rows


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
