"""YAML as configs have it: version 1.2's idea of numbers and booleans, so that 1e-6 is a number and `off` is a word; None is
null.

A key written twice is a problem, and what cannot be read is told with its line. What `dump` writes, `parse` reads back.
Reading takes bounded time and memory: text is refused beyond `MAX_CHARACTERS` characters, and beyond `MAX_VALUES` values, those
that aliases repeat counted as often as they are repeated.
"""

from __future__ import annotations

import numbers
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from trimtab.base.errors import ConfigError, Problem

MAX_CHARACTERS = 1_000_000
"""Characters of a configuration, or of a script to convert."""
MAX_VALUES = 20_000
"""Keys and values of a YAML text."""


class Bounded(yaml.SafeLoader):
    """Safe: plain values only, and no more than `MAX_VALUES` of them."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_VALUES:
            raise _too_many(self.name)
        found: yaml.Node | None = super().compose_node(parent, index)
        return found


class _Loader(Bounded):
    """Numbers, booleans and null as below."""


class _Dumper(yaml.SafeDumper):
    """Quotes every text that either version of YAML, or this loader, would take for something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if text.isprintable() else '"')


_Dumper.add_representer(str, _Dumper.represent_text)


_DIGITS = r"[0-9][0-9_]*"
_FLOAT = rf"[-+]?(?:{_DIGITS}\.[0-9_]*|\.{_DIGITS}|{_DIGITS}(?=[eE]))(?:[eE][-+]?[0-9]+)?"
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", "true|True|TRUE|false|False|FALSE", "tTfF"),
    ("float", rf"{_FLOAT}|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+.0123456789"),
    ("int", "[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("null", "~|null|Null|NULL|None|", ["~", "n", "N", ""]),
    ("merge", "<<", "<"),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def read_text(path: Path, kind: str) -> str:
    """The text of a file, which is to be a `kind` of file. A pipe that nobody writes to would be waited for without end."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode) and not str(path).startswith(("/dev/", "/proc/")):
            fix = f"Write it to a file, and give the path of that {kind} file"
            raise ConfigError([Problem(str(path), "is a named pipe, not a file", fix)])
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        fix = f"Give the path of a {kind} file"
        raise ConfigError([Problem(str(path), f"cannot be read: {error.strerror}", fix)]) from None
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), f"is not UTF-8 text (byte {error.start})", "Save it as UTF-8")]) from None
    refuse_long(text, str(path))
    return text


def refuse_long(text: str, source: str) -> None:
    if len(text) > MAX_CHARACTERS:
        what = f"is longer than {MAX_CHARACTERS:,} characters"
        raise ConfigError([Problem(source, what, "Put data into a file, and name that file in data.train")])


def compose(text: str, source: str, kind: type[Bounded] = Bounded) -> tuple[Bounded, yaml.Node | None]:
    """The nodes of a YAML text, and what makes values of them. A ConfigError where there are too many."""
    refuse_long(text, source)
    loader = kind(text)
    loader.name = source
    try:
        node: yaml.Node | None = loader.get_single_node()
        size = _size(node, {}) if node is not None else 0
    except RecursionError:
        raise ConfigError([Problem(source, "a value contains itself, or values are nested too deeply")]) from None
    if size > MAX_VALUES:
        raise _too_many(source)
    return loader, node


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Nodes in this one, each as often as aliases repeat it."""
    if id(node) not in known:
        known[id(node)] = 0
        below = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            below = [each for pair in node.value for each in pair]
        known[id(node)] = 1 + sum(_size(each, known) for each in below)
    elif known[id(node)] == 0:  # it is being counted: it holds itself
        raise RecursionError
    return known[id(node)]


def _too_many(source: str) -> ConfigError:
    what = f"has more than {MAX_VALUES:,} keys and values, counting what aliases (*name) repeat"
    return ConfigError([Problem(source, what, "Write fewer, and no aliases of aliases")])


def parse(text: str, source: str, prefix: str = "") -> tuple[Any, list[Problem]]:
    """The value of a YAML text, no part shared with another, and a problem for each key written twice."""
    try:
        loader, node = compose(text, source, _Loader)
        if node is None:
            return None, []
        twice = list(_duplicates(node, source, prefix, set()))  # first: constructing writes merged keys into the nodes
        return plain(loader.construct_document(node)), twice
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError([Problem(source, f"YAML cannot be read: {str(error).partition(';')[0]}")]) from None
    except RecursionError:
        raise ConfigError([Problem(source, "a value contains itself, or values are nested too deeply")]) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        tab = "Indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        raise ConfigError([Problem(place, f"YAML cannot be read: {error.problem}", tab)]) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        where = f"{source}, line {line}, column {error.position - text.rfind(chr(10), 0, error.position)}"
        raise ConfigError(
            [Problem(where, f"YAML cannot hold the character {chr(error.character)!a}", "Remove it")]
        ) from None


def _duplicates(node: yaml.Node, source: str, prefix: str, seen: set[int]) -> Iterator[Problem]:
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for place, item in enumerate(node.value):
            yield from _duplicates(item, source, f"{prefix}{place}.", seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, list[int]] = {}
        for key, value in node.value:
            name = str(key.value)
            if key.tag != "tag:yaml.org,2002:merge":
                lines.setdefault(name, []).append(key.start_mark.line + 1)
            yield from _duplicates(value, source, f"{prefix}{name}.", seen)
        for name, found in lines.items():
            if len(found) > 1:
                places = " and ".join(f"line {line}" for line in dict.fromkeys(found))
                yield Problem(f"{prefix}{name}", f"appears more than once in {source}: on {places}", "Keep one")


def plain(value: Any) -> Any:
    """A deep copy out of dictionaries, lists and plain numbers, which is all that YAML has."""
    if isinstance(value, BaseModel):
        return plain(value.model_dump(exclude_unset=True))
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def dump(value: object) -> str:
    """A whole config, its keys in the order they have."""
    return yaml.dump(plain(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def one_line(value: object) -> str:
    """A value on one line of YAML, which loads back to an equal value."""
    text = yaml.dump(plain(value), Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")
