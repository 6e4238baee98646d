"""From YAML text, dictionaries and `key=value` overrides to a valid Config, and back to YAML.

Guarantees: a Config that is returned is valid and free of contradictions; otherwise one ConfigError holds every problem
found, in words for the person who wrote the file. What `resolved_yaml` writes loads back to the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.suggestions import nearest
from trimtab.config.advice import (
    MAX_KEY_CHARACTERS,
    REWARD_EXAMPLE,
    example_of,
    meant_key,
    no_stage,
    quoted,
    shown,
    unknown_key,
    what_it_takes,
    wrong_value,
)
from trimtab.config.base import Section
from trimtab.config.check import contradictions
from trimtab.config.reference import (
    STAGES,
    description,
    nested,
    slot,
    use_schema,
    written,
)
from trimtab.config.resolved import resolve_config
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig
from trimtab.config.text import dump, parse, plain, read_text
from trimtab.config.text import one_line as one_line

Tree = dict[str, Any]
Offline = SftConfig | RewardModelConfig
"""Configs of stages that learn from a given data set."""
AnyConfig = Config | Offline
Finding = tuple[str, Callable[[], Problem]]
"""A key with something wrong about it, and what works out the words: that takes milliseconds, and keys may be thousands."""
MAX_PROBLEMS = 20
"""Problems that are reported; the others are only counted."""
Schema = TypeVar("Schema", Config, SftConfig, RewardModelConfig)
MINIMAL_CONFIG: dict[type[Section], str] = {
    Config: 'Write at least model: {path: …}, data: {train: …} and reward: [{fn: "rewards.py:function"}]',
    SftConfig: "Write at least model: {path: …} and data: {train: …}",
    RewardModelConfig: "Write at least model: {path: …} and data: {train: …}",
}


def load_config(
    path: Path | str | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    above: Mapping[str, Any] | None = None,
) -> Config:
    """A Config from a file over `base` and under `above`, with overrides such as `learn.lr=1e-6` applied in order."""
    return load_as(Config, path, overrides, base, above)


def load_as(
    schema: type[Schema],
    path: Path | str | None,
    overrides: Sequence[str] = (),
    base: Mapping[str, Any] | None = None,
    above: Mapping[str, Any] | None = None,
) -> Schema:
    """The same for the configuration of any stage."""
    tree: Tree = plain(base or {})
    problems: list[Problem] = []
    if path is not None:
        data, problems = _read(Path(path), schema)
        tree = _merge(tree, data)
    return _build(schema, _merge(tree, plain(above or {})), overrides, problems)


def load_any(path: Path, overrides: Sequence[str] = ()) -> AnyConfig:
    """The configuration of a run of whichever stage it says that it is; without a word, of `trimtab train`."""
    said = [
        _read(path, Config)[0].get("stage"),
        *(o.removeprefix("stage=") for o in overrides if o.startswith("stage=")),
    ][-1]
    if said == "sft":
        return load_as(SftConfig, path, overrides)
    return load_as(RewardModelConfig, path, overrides) if said == "reward-model" else load_as(Config, path, overrides)


def config_from_dict(data: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
    """A Config from a dictionary; sections may be dictionaries or section objects. The dictionary is not changed."""
    return _build(Config, plain(data), overrides, [])


def resolved(config: AnyConfig) -> AnyConfig:
    """The config with every choice written out that follows from other keys."""
    return resolve_config(config) if isinstance(config, Config) else config


def resolved_yaml(config: AnyConfig) -> str:
    """The whole config with every key and every algorithm choice written out. Loading it gives the resolved config."""
    return dump(resolved(config).model_dump())


# --- building: overrides, unknown keys, wrong values, contradictions; nothing stops before all of them have spoken


def _build(schema: type[Schema], tree: Tree, overrides: Sequence[str], problems: list[Problem]) -> Schema:
    overrides = _lines(overrides)
    _refuse_other_stage(schema, tree, overrides)
    with use_schema(schema):
        findings = [_found(problem) for problem in problems]
        for override in overrides:
            if len(findings) < MAX_PROBLEMS:
                findings += [_found(problem) for problem in _override(tree, override)]
        findings += list(_sweep(schema, tree, ""))
        suspects = {key for where, _ in findings[:MAX_PROBLEMS] for key in (where, meant_key(where))}
        try:
            config = schema.model_validate(tree)
        except ValidationError as error:
            wrong = _explain(error, tree)
            for where, _ in wrong:
                _drop(tree, where)
            findings += wrong
            suspects |= {where for where, _ in wrong}
            config = schema.model_validate(tree)
        findings += [_found(problem) for problem in contradictions(config, ignore=suspects - {""})]
        if findings:
            raise ConfigError([explain() for _, explain in findings[:MAX_PROBLEMS]], len(findings[MAX_PROBLEMS:]))
    return config


def _found(problem: Problem) -> Finding:
    return problem.where, lambda: problem


def _refuse_other_stage(schema: type[Section], tree: Tree, overrides: Sequence[str]) -> None:
    for stage in (tree.get("stage"), *(text for key, _, text in map(_parted, overrides) if key == "stage")):
        if isinstance(stage, str) and STAGES.get(stage.strip(), schema) is not schema:
            command = f"trimtab {stage.strip()}"
            raise ConfigError([Problem("stage", f"this config is for {command}", f"Run {command}")])


def _sweep(section: type[Section], data: Tree, prefix: str) -> Iterator[Finding]:
    """Take out of the tree what pydantic would accept or could not explain, and fill in what may be left out."""
    for name in [name for name in data if name not in section.model_fields]:
        value, where = data.pop(name), f"{prefix}{name}"
        yield where, partial(no_stage, value) if where == "stage" else partial(unknown_key, where)
    for name, field in section.model_fields.items():
        inner, where, value = nested(field.annotation), f"{prefix}{name}", data.get(name)
        if inner and inner.form == "section":
            if value is None and (name in data or field.is_required()):
                value = data[name] = {}  # `run:` with nothing below it is an empty section
            if isinstance(value, dict):
                if isinstance(field.default, Section):  # a section given in part keeps the rest of its parent's default
                    value = data[name] = field.default.model_dump(exclude_unset=True) | value
                yield from _sweep(inner.section, value, f"{where}.")
        elif inner and isinstance(value, dict) and inner.form == "optional":
            yield from _sweep(inner.section, value, f"{where}.")
        elif inner and isinstance(value, list):
            for place, item in enumerate(value):
                if isinstance(item, dict):
                    yield from _sweep(inner.section, item, f"{where}.{place}.")
        elif not inner and name in data and (finding := _unfit(where, field, value)):
            data[name] = _stand_in(field)
            yield finding


def _unfit(where: str, field: FieldInfo, value: object) -> Finding | None:
    """Values that pydantic would take but that cannot be meant: true for a number, and what config.yaml cannot hold."""
    if get_origin(field.annotation) is dict:
        odd = next((key for key in value if not isinstance(key, str)), None) if isinstance(value, dict) else None
        if odd is not None:
            return _found(
                Problem(where, f"has the key {written(odd)}, but a key must be text", f'Write it in quotes: "{odd}"')
            )
        if kind := _unwritable(value):
            what = f"holds {kind}, which YAML cannot store"
            return _found(Problem(where, what, "Write text, numbers, lists and mappings only"))
        return None
    if isinstance(value, int | float) and int in (field.annotation, *get_args(field.annotation)) and value >= 2**64:
        return _found(Problem(where, f"got {shown(value)}, which is more than {2**64 - 1:,}", "Write a smaller number"))
    holds_bool = any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value]))
    takes_bool = bool in (field.annotation, *get_args(field.annotation))
    return (where, partial(wrong_value, where, value)) if holds_bool and not takes_bool else None


def _unwritable(value: object) -> str | None:
    if isinstance(value, dict):
        return next((odd for item in (*value, *value.values()) if (odd := _unwritable(item))), None)
    if isinstance(value, list):
        return next((odd for item in value if (odd := _unwritable(item))), None)
    return None if type(value) in (type(None), bool, int, float, str) else f"a Python {type(value).__name__}"


def _explain(error: ValidationError, tree: Tree) -> list[Finding]:
    """Pydantic's errors, one problem a key, in the words of the reference."""
    found: dict[str, Finding] = {}
    for item in error.errors(include_url=False, include_context=False):
        parts = [str(part) for part in item["loc"]]
        while (here := slot(parts)) is None or (here.kind == "free" and here.field is None):
            parts.pop()  # pydantic goes on into unions, lists and mappings; a user knows the key
        where = ".".join(parts)
        if item["type"] == "missing" and len(parts) == len(item["loc"]) and here.field:
            add = REWARD_EXAMPLE if where == "reward" else f"Add it: {description(here.field).rstrip('.')}"
            found.setdefault(where, _found(Problem(where, "is required but missing", add)))
        else:
            found.setdefault(where, (where, partial(wrong_value, where, _lookup(tree, parts))))
    return list(found.values())


def _lookup(tree: Any, parts: Sequence[str]) -> Any:
    for part in parts:
        tree = tree[int(part)] if isinstance(tree, list) else tree.get(part)
    return tree


def _drop(tree: Tree, where: str) -> None:
    """Take a wrong value out, or put a stand-in where one is required, so that the rest can still be checked."""
    *above, name = where.split(".")
    here, holder = slot([*above, name]), _lookup(tree, above)
    assert here
    if here.field is None:
        assert here.section
        holder[int(name)] = _least(here.section)
    elif here.field.is_required():
        holder[name] = _stand_in(here.field)
    else:
        holder.pop(name, None)


def _stand_in(field: FieldInfo) -> Any:
    if not field.is_required():
        return field.default
    if inner := nested(field.annotation):
        return [_least(inner.section)] if inner.form == "list" else _least(inner.section)
    return "?" if field.annotation is str else 1


def _least(section: type[Section]) -> Tree:
    return {name: _stand_in(field) for name, field in section.model_fields.items() if field.is_required()}


# --- overrides


def _override(tree: Tree, override: str) -> list[Problem]:
    """Set one `dotted.key=value` in the tree. Nothing is set where there is a problem."""
    key, equals, text = _parted(override)
    if key == "stage" and slot([key]) is None:
        return [no_stage(text)]
    if not key:
        return [Problem(override, "has no key", "Write key=value, such as learn.lr=1e-6")]
    if len(key) > MAX_KEY_CHARACTERS:
        return [unknown_key(key)]
    if slot(key.split(".")) is None:
        return [unknown_key(key) if equals or meant_key(key) else _no_equals(override)]
    if not equals:
        return [Problem(key, "has no value", f"Write key=value, such as {key}={example_of(key)}")]
    try:
        value, problems = parse(text, "the override", f"{key}.")
    except ConfigError as error:
        return [Problem(key, f"{shown(text)}: {error.problems[0].what}", "Write a YAML value; quote text")]
    return problems or _lost(key, text, value) or _set(tree, key.split("."), value)


def _no_equals(override: str) -> Problem:
    """`learn.lr 1e-6` and `learn.lr: 1e-6` name a key and a value, too."""
    key, _, value = re.sub(r"[:\s]\s*", "=", override.strip(), count=1).partition("=")
    meant = f"{key}={value}" if value and slot(key.split(".")) else "key=value, such as learn.lr=1e-6"
    return Problem(override, "has no =", f"Write {meant}")


def _lost(key: str, text: str, value: object) -> list[Problem]:
    """YAML would drop spaces around a text and what follows a #, and take `a: b` for a mapping: none of it is meant here."""
    here = slot(key.split("."))
    takes_text = here and here.kind == "leaf" and what_it_takes(key).startswith("text")
    if not takes_text or not text.strip() or text.strip()[0] in "\"'|>" or value == text:
        return []
    if isinstance(value, str) or "#" in text or isinstance(value, dict | list):
        return [
            Problem(
                key,
                f"YAML changes the text {shown(text)}",
                f"Quote it for YAML and for the shell: {key}='{quoted(text)}'",
            )
        ]
    return []


def _lines(overrides: object) -> list[str]:
    """Text is a sequence of letters, too, and none of them is an override."""
    if isinstance(overrides, Iterable) and not isinstance(overrides, str | bytes):
        found = list(overrides)
        odd = next((line for line in found if not isinstance(line, str)), None)
        if odd is None:
            return found
        what = f"holds {shown(odd)}, a {type(odd).__name__}"
    else:
        what = f"got {shown(overrides)}"
    raise ConfigError([Problem("overrides", what, 'Give a list of texts, such as ["learn.lr=1e-6"]')])


def _parted(override: str) -> tuple[str, str, str]:
    key, equals, text = override.partition("=")
    return key.strip(), equals, text


def _set(tree: Tree, parts: list[str], value: object) -> list[Problem]:
    node: Any = tree
    for depth, part in enumerate(parts):
        key: str | int = part
        if isinstance(node, list):
            if not part.isdecimal() or int(part) > len(node):
                place = ".".join([*parts[:depth], str(len(node)), *parts[depth + 1 :]])
                return [
                    Problem(
                        ".".join(parts),
                        f"the list has {len(node)} item{'s' * (len(node) != 1)}",
                        f"To add one, write {place}",
                    )
                ]
            key = int(part)
            node.extend([{}] * (key == len(node)))
        elif not isinstance(node, dict):
            return []  # what holds the key is itself of the wrong type, and is reported for that
        if depth == len(parts) - 1:
            node[key] = value
            return []
        if isinstance(node, dict) and node.get(part) is None:
            here = slot(parts[: depth + 1])
            node[part] = [] if here and here.kind == "list" else {}
        node = node[key]
    return []


# --- files


def _read(path: Path, schema: type[Section]) -> tuple[Tree, list[Problem]]:
    path = path.expanduser().absolute()
    try:
        text = read_text(path, "YAML")
    except FileNotFoundError:
        near = nearest(path.name, [other.name for other in path.parent.glob("*.y*ml")], 0.6)
        raise ConfigError(
            [Problem(str(path), "there is no such file", f"Did you mean {near}?" if near else "")]
        ) from None
    data, problems = parse(text, str(path))
    if data is None:
        raise ConfigError([Problem(str(path), "is empty", MINIMAL_CONFIG[schema])])
    if not isinstance(data, dict):
        raise ConfigError(
            [Problem(str(path), f"holds {shown(data)} instead of sections with keys", MINIMAL_CONFIG[schema])]
        )
    return data, problems


def _merge(below: Tree, above: Tree) -> Tree:
    """`above` laid over `below`: mappings key by key, anything else whole."""
    both = {
        key: _merge(below[key], above[key])
        for key in above
        if isinstance(above[key], dict) and isinstance(below.get(key), dict)
    }
    return below | above | both
