"""Options of generated data sets: known, of the right type, or a DataError that says what to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.config.advice import shown

Split = Literal["train", "eval"]
MAX_ROWS = 10_000_000
"""Rows that a generated data set may have: they are all made, and held, before the first step."""


def check_options(source: str, options: Mapping[str, Any], valid: list[str]) -> None:
    """An option that a source does not know is an error, not something to ignore."""
    for key in options:
        if key not in valid:
            raise DataError(f"{source} has no option {key!r}.{did_you_mean(key, valid)} Options: {', '.join(valid)}.")


def split_size(source: str, split: Split, options: Mapping[str, Any], train: int, eval_: int) -> int:
    """How many rows a split is to have: option `size` for train, `eval_size` for eval."""
    key, default = ("size", train) if split == "train" else ("eval_size", eval_)
    return whole_number(source, key, options.get(key, default), at_least=1, at_most=MAX_ROWS)


def whole_number(source: str, key: str, value: Any, *, at_least: int, at_most: int = 2**64 - 1) -> int:
    """The option's value, if it is a whole number of at least and at most these."""
    if type(value) is not int or value < at_least:
        raise DataError(f"{source}: option {key} must be a whole number of at least {at_least}, not {shown(value)}.")
    if value > at_most:
        raise DataError(f"{source}: option {key} must be at most {at_most:,}, not {shown(value)}.")
    return value
