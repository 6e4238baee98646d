"""Words of a command line to settings: what starts the program is told from what the program is told.

Guarantees that every word ends up in exactly one setting, or is one that starts something (`python3 -m NAME`) or parts (`--`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from trimtab.convert.settings import Origin, Setting, literal
from trimtab.convert.shell import ASSIGNMENT, CLOSES, DECLARES, OPENS

FLAG = re.compile(r"--?[A-Za-z_][^=\s]*")
PAIR = re.compile(r"((?:\+{1,2}|~)?[A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
DELETION = re.compile(r"~[A-Za-z_][\w.@/-]*")
REDIRECTION = re.compile(r"\d*[<>].*")
LAUNCHERS = (
    "accelerate", "bash", "deepspeed", "exec", "nohup", "nsys", "poetry", "python", "python3", "ray", "sh", "srun", "sudo",
    "time", "torchrun", "trl", "uv",
)  # fmt: skip
PROGRAMS = re.compile(r".*\.py|openrlhf\.\S+|verl\.\S+|scripts\.\S+|trl\.\S+")
NOT_TRAINING = ("env", "vllm-serve", "skills")
"""What `trl` can be told to do besides training."""
HOUSEKEEPING = (
    ":", "[", "[[", "cat", "cd", "chmod", "cp", "do", "echo", "elif", "else", "exit", "function", "local", "ls", "mkdir", "mv",
    "printf", "pwd", "rm", "set", "shift", "sleep", "source", "tee", "then", "trap", "true", "ulimit", "unset", "wait", "{", "}",
    *OPENS, *CLOSES,
)  # fmt: skip
"""Commands of a script that say nothing about training; they are passed over."""


def settings_of(words: Sequence[str]) -> list[Setting]:
    """The settings of one command."""
    rest = _joined(_without_redirections(words))
    found: list[Setting] = []
    if all(word in DECLARES or ASSIGNMENT.fullmatch(word) for word in rest):
        return [Setting(name[1], literal(name[2]), "variable") for word in rest if (name := ASSIGNMENT.fullmatch(word))]
    while rest and (rest[0] in DECLARES or _is_variable(rest[0])):
        if name := ASSIGNMENT.fullmatch(rest.pop(0)):
            found.append(Setting(name[1], literal(name[2]), "variable"))
    if _is_setting(rest[0]):
        return found + _flags(rest, "flag")
    if rest[0].rsplit("/", 1)[-1] in LAUNCHERS or rest[0].endswith(".py"):
        start = _program(rest)
        if start in (None, len(rest)):  # nothing that could train, or a program that is told nothing
            return [*found, Setting(" ".join(rest), None, "command")]
        found += _flags(rest[:start], "launcher")
        found.append(Setting(_started(rest[:start]), None, "program"))
        return found + _flags(rest[start:], "flag")
    if rest[0] in HOUSEKEEPING or rest[0].endswith(")") or rest[0].startswith("("):
        return found
    return [*found, Setting(" ".join(rest), None, "command")]


def _without_redirections(words: Sequence[str]) -> list[str]:
    """`> file`, `2>&1` and the like left out."""
    before = ["", *words]
    return [
        word
        for word, last in zip(words, before)
        if not REDIRECTION.fullmatch(word) and not (REDIRECTION.fullmatch(last) and last[-1] in "<>")
    ]


def _is_variable(word: str) -> bool:
    """An assignment of the shell. Dotted names and names in small letters are settings of a framework."""
    found = ASSIGNMENT.fullmatch(word)
    return bool(found) and found[1].upper() == found[1]  # type: ignore[index]


def _is_setting(word: str) -> bool:
    return bool(FLAG.match(word) or PAIR.fullmatch(word) or DELETION.fullmatch(word)) or word == "--"


def _joined(words: Sequence[str]) -> list[str]:
    """`key = value`, which documents write, as one word; commas between arguments of Python left out."""
    found: list[str] = []
    for word in words:
        if (
            found
            and not _is_setting(word)
            and (word.startswith("=") or (PAIR.fullmatch(found[-1]) and found[-1][-1] == "="))
        ):
            found[-1] += word
        else:
            found.append(word)
    return [word.rstrip(",") if PAIR.fullmatch(word) else word for word in found]


def _program(words: Sequence[str]) -> int | None:
    """Where the program's own words begin; None where nothing is started that could train."""
    for place, word in enumerate(words):
        if _is_setting(word):
            continue
        module = place > 0 and words[place - 1] in ("-m", "--module")
        if module or PROGRAMS.fullmatch(word):
            return place + 1
        if word.rsplit("/", 1)[-1] == "trl" and place + 1 < len(words):
            told = words[place + 1]
            return None if _is_setting(told) or told in NOT_TRAINING else place + 2
    return None


def _started(words: Sequence[str]) -> str:
    """The program that is started, as it was written: `trl sft`, a module, a script."""
    return " ".join(words[-2:]) if words[-2:][0].rsplit("/", 1)[-1] == "trl" else words[-1]


def _flags(words: Sequence[str], origin: Origin) -> list[Setting]:
    found: list[Setting] = []
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if pair := PAIR.fullmatch(word):
            found.append(Setting(pair[1], literal(pair[2]), origin))
        elif DELETION.fullmatch(word):
            found.append(Setting(word, None, origin))
        elif FLAG.match(word) and word not in ("-m", "--module"):
            name, equals, text = word.partition("=")
            values = [text] if equals else []
            while not equals and place < len(words) and not _is_setting(words[place]):
                values.append(words[place])
                place += 1
            if origin == "launcher":
                values = values[:1]  # what follows is what it starts
            found.append(Setting(name, _value(values), origin))
        elif origin == "flag" and word != "--":
            found.append(Setting(word, None, "stray"))
    return found


def _value(values: Sequence[str]) -> Any:
    found = [literal(value) for value in values]
    return True if not found else found[0] if len(found) == 1 else found
