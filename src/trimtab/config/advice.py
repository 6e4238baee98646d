"""What to say of a value or a key that is wrong: what it takes, what was probably meant, what to write instead."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pydantic import ValidationError

from trimtab.base.errors import Problem
from trimtab.base.suggestions import nearest
from trimtab.config.base import Section
from trimtab.config.foreign_names import our_keys
from trimtab.config.reference import choices, default, slot, suggest, words, written
from trimtab.config.text import one_line

REWARD_EXAMPLE = 'Write a list: reward: [{fn: "rewards.py:function"}]'
SYNONYMS = {
    "gpu": "cuda",
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "half"), "float16"),
    "fp32": "float32",
    "fp64": "float64",
    "reinforce++": "reinforce_pp",
    "reinforce++_baseline": "reinforce_pp_baseline",
}
PAIR_ALGORITHMS = ("dpo", "ipo", "kto", "orpo", "simpo")
OFF_WORDS = ("none", "off", "no", "false", "")
NOT_BUILT = {
    "learn.in_flight": (
        "this version does not change weights within a completion: every token of a batch is of one policy, exactly "
        "learn.staleness steps old",
        "Leave it out; write learn.staleness: 1, so that sampling does not wait for the update",
    )
}
"""Keys that one may look for here, each with why there is none and what to write instead."""
MAX_KEY_CHARACTERS = 200
"""Characters of a dotted key, parts that are the user's included."""


def wrong_value(where: str, value: object) -> Problem:
    return Problem(where, f"got {shown(value)}, but it takes {what_it_takes(where)}", _fix(where, value))


def what_it_takes(where: str) -> str:
    here = slot(where.split("."))
    assert here
    if here.kind == "list":
        return "a list of at least one section"
    if here.section:
        return "a section with the keys " + ", ".join(here.section.model_fields)
    assert here.field
    return words(here.field.annotation, here.field.metadata)


def _near(value: str, options: Sequence[str]) -> str:
    """An option that is a slip away, or that the value begins; a name that is merely the least unlike is no advice."""
    begun = [option for option in options if len(value) > 2 and option.startswith(value.lower())]
    return nearest(value, options, 0.7) or next(iter(begun), "")


def _fix(where: str, value: object) -> str:
    here = slot(where.split("."))
    assert here
    if here.kind == "list":
        return REWARD_EXAMPLE
    field, takes = here.field, what_it_takes(where)
    if where == "learn.algorithm" and isinstance(value, str) and value.lower() in PAIR_ALGORITHMS:
        return 'Train a reward model from the pairs (trimtab reward-model), then use it as reward: [{fn: "model:RUN/final"}]'
    options = choices(field.annotation) if field else []
    if isinstance(value, str) and (near := _near(SYNONYMS.get(value.lower(), value), options)):
        return f"Did you mean {near}?"
    if takes.startswith("text"):
        if isinstance(value, list | dict):
            return "Write a single text" if isinstance(value, list) else "Write it in quotes"
        return 'For empty text write ""' if value is None else f"Write it in quotes: {where}: {quoted(value)}"
    if takes.startswith("a list, each item text") and isinstance(value, str | int | float):
        return f"Write it as a list: [{quoted(value)}]"
    if here.section and field and not field.is_required() and field.default is None:
        return _fix_optional(here.section, value)
    if here.section and (first := _first_takes(here.section, value)):
        return f"Write {one_line({first: value})}"
    if field is None or field.is_required():
        return ""
    if takes.endswith("or null") and (not value or (isinstance(value, str) and value.lower() in OFF_WORDS)):
        return "Write null to leave it unset"
    return "Leave it out to use the default" + ("s" if here.section else f", {written(default(where))}")


def _fix_optional(section: type[Section], value: object) -> str:
    """A section that is off unless it is given: {r: 16} where 16 was written, {} where true was."""
    if not value or value == "none":
        return "Leave the key out to switch it off"
    first, field = next(iter(section.model_fields.items()))
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return f"Write {one_line({first: value})}"
    by_itself = not field.is_required() and field.default is not None
    return (
        "Write {} to use its defaults, or leave the key out to switch it off" if by_itself else f"Write {{{first}: …}}"
    )


def _first_takes(section: type[Section], value: object) -> str:
    """The section's first key, where the value would do for it: {path: …} for a name, {kind: cosine} for a schedule."""
    name = next(iter(section.model_fields))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    try:
        section.model_validate({name: value})
    except ValidationError as error:
        return "" if any(item["loc"][0] == name for item in error.errors()) else name
    return name


def no_stage(value: object) -> Problem:
    """The one key that other stages have at the top and `trimtab train` has not."""
    return Problem(
        "stage", f"got {shown(value)}, but it takes sft or reward-model", "Leave it out to use trimtab train"
    )


def unknown_key(where: str) -> Problem:
    if len(where) > MAX_KEY_CHARACTERS:
        return Problem(f"{where[:57]}...", f"unknown key, of {len(where):,} characters", "Remove it")
    parts = where.split(".")
    depth = next((depth for depth in range(len(parts)) if slot(parts[: depth + 1]) is None), None)
    if depth is None:  # a key of a file with dots in it
        return Problem(
            where,
            "a file takes no dotted keys; they are for the command line",
            f"In a file write {': {'.join(parts)}: …" + "}" * (len(parts) - 1),
        )
    above, whole = slot(parts[:depth]), ".".join(parts[:depth])
    if above and above.kind == "leaf":
        return Problem(
            where, f"{whole} is not a section: it takes {what_it_takes(whole)}", f"Write {whole}={example_of(whole)}"
        )
    if above and above.kind == "list":
        rest = ".".join(parts[depth + bool(re.fullmatch(r"-?\d+", parts[depth])) :])
        return Problem(
            where, f"{whole} is a list, and {parts[depth]} is not an index into it", f"Write {whole}.0.{rest}"
        )
    if where in NOT_BUILT:
        return Problem(where, *NOT_BUILT[where])
    if elsewhere := _elsewhere(parts[-1]):
        return Problem(where, "unknown key", elsewhere[1])
    if meant := meant_key(where):
        return Problem(where, "unknown key", f"Did you mean {meant}?")
    return Problem(
        where,
        "unknown key",
        f"The keys here are {', '.join(above.section.model_fields)}" if above and above.section else "",
    )


def meant_key(where: str) -> str:
    """The valid key that was probably meant, part by part (`leran.lrr` is learn.lr); empty where nothing is alike."""
    if len(where) > MAX_KEY_CHARACTERS:
        return ""
    if elsewhere := _elsewhere(where.split(".")[-1]):
        return elsewhere[0]
    meant = ""
    for part in re.sub(r"\[(\d+)\]", r".\1", where).split("."):
        longer = f"{meant}.{part}".lstrip(".")
        meant = longer if slot(longer.split(".")) else suggest(f"{meant}." if meant else "", part)
        if not meant:
            return ""
    return meant


def _elsewhere(name: str) -> tuple[str, str] | None:
    """The key for what other frameworks and scripts call by this name, and how to say so."""
    for key, automatic in our_keys(name):
        if slot(key.split(".")):
            return key, f"Trimtab chooses it; to fix it, write {key}" if automatic else f"Trimtab calls it {key}"
    return None


def example_of(where: str) -> str:
    usual = default(where)
    return written(usual) if isinstance(usual, str | int | float | list) and usual != "" else "VALUE"


def quoted(value: object) -> str:
    text = value if isinstance(value, str) else written(value)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shown(value: object) -> str:
    try:
        text = quoted(value) if isinstance(value, str) else written(value)
    except (ValueError, RecursionError):  # a number of thousands of digits (0xfff…), a list that holds itself
        text = "a value too long to show"
    return text if len(text) <= 60 else text[:57] + "..."
