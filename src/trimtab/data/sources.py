"""From what `data.train` or `data.eval` says to rows: files, built-in tasks, reasoning_gym, Hugging Face data sets.

Always at least one row, each a dict; anything else is a DataError that says where it looked. Optional libraries are
imported only by the source that needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean, is_local, near_paths
from trimtab.config.schema import Data
from trimtab.data.files import READERS, Row, read_rows
from trimtab.data.gym import load_reasoning_gym
from trimtab.data.hub import load_folder, load_hub
from trimtab.data.options import Split
from trimtab.data.tasks import load_task

_GENERATORS = {"task": load_task, "reasoning_gym": load_reasoning_gym}

_SPLITS: dict[str, Split] = {"train": "train", "eval": "eval", "test": "eval", "validation": "eval"}

_FOREIGN = {".txt", ".tsv", ".gz", ".zst", ".zip", ".xlsx", ".yaml", ".yml", ".arrow", ".py", ".md"}
"""Endings that files have and data set names have not: naming one means a file."""


def train_rows(data: Data, *, seed: int) -> list[Row]:
    """The training set of a configuration."""
    options = _options_for(data.train, data)
    return load_rows(data.train, split=data.train_split, limit=data.limit, options=options, seed=seed)


def eval_rows(data: Data, *, seed: int, limit: int | None = None) -> list[Row]:
    """The evaluation set of a configuration; empty when it names none."""
    if data.eval is None:
        return []
    options = _options_for(data.eval, data)
    return load_rows(data.eval, split=data.eval_split, limit=limit, options=options, seed=seed)


def load_rows(source: str, *, split: str, limit: int | None, options: Mapping[str, Any], seed: int) -> list[Row]:
    """The first `limit` rows (None: all) of one source. Files have no splits and use neither `split` nor `seed`."""
    kind, colon, name = source.partition(":")
    if colon and kind in _GENERATORS:
        if split not in _SPLITS:
            raise DataError(f"{source} has no split {split!r}.{did_you_mean(split, _SPLITS)} It has train and eval.")
        return _GENERATORS[kind](name, split=_SPLITS[split], limit=limit, options=options, seed=seed)
    if options:
        raise DataError(
            f"data.options has no effect on {source!r}; only task:NAME and reasoning_gym:NAME take options."
        )
    path = Path(source).expanduser()
    if path.is_dir():
        return load_folder(path.absolute(), split=split, limit=limit)
    if path.exists():
        return read_rows(path, limit)
    if _means_a_file(source):
        raise DataError(f"There is no file {path.absolute()}.{near_paths(path)}")
    return load_hub(source, split=split, limit=limit)


def takes_options(source: str) -> bool:
    """Whether a source is generated, and so has a use for data.options."""
    kind, colon, _ = source.partition(":")
    return bool(colon) and kind in _GENERATORS


def _options_for(source: str, data: Data) -> Mapping[str, Any]:
    """Both sources share data.options: the one that takes them gets them; when none does, load_rows refuses them."""
    used_elsewhere = takes_options(data.train) or (data.eval is not None and takes_options(data.eval))
    return {} if used_elsewhere and not takes_options(source) else data.options


def _means_a_file(source: str) -> bool:
    """A known ending, or what no hub can have."""
    suffix = Path(source).suffix.lower()
    return suffix in READERS or suffix in _FOREIGN or is_local(source)
