"""A setting of another framework as it was written, and what its text says as a value."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from trimtab.config.text import compose

Origin = Literal["flag", "variable", "launcher", "command", "program", "stray"]

NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?")
WORDS: dict[str, bool | None] = {
    "true": True,
    "True": True,
    "TRUE": True,
    "false": False,
    "False": False,
    "FALSE": False,
}
WORDS |= {"null": None, "Null": None, "NULL": None, "None": None, "~": None}


@dataclass(frozen=True)
class Setting:
    """One setting. A flag without a value is true; one with several values has a list."""

    name: str
    """As written, dashes and plus signs included: --eps_clip, +data.seed, GRPO_BATCH_SIZE."""
    value: Any
    origin: Origin = "flag"
    """variable: a shell assignment. launcher: an option of what starts the program. command: a whole command that is no
    training run. program: what is started, or a class that is made; it says what is trained. stray: a word
    that belongs to no flag."""


def literal(text: str) -> Any:
    """The value that a text stands for: a number, true or false, nothing, a list, or the text itself."""
    word = text.strip()
    if word in WORDS:
        return WORDS[word]
    if NUMBER.fullmatch(word):
        number = float(word.replace("_", ""))
        return number if re.search(r"[.eE]", word) else int(word.replace("_", ""))
    if word[:1] in "[(" and word[-1:] in "])" and len(word) > 1:
        return _sequence(word)
    return text


def _sequence(word: str) -> Any:
    try:
        loader, node = compose("[" + word[1:-1] + "]", "a list")
        found = loader.construct_document(node)
    except (yaml.YAMLError, ValueError):
        return word
    return [literal(item) if isinstance(item, str) else item for item in found]
