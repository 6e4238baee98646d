"""Text to settings, whatever it is: a command line, a shell script, YAML, or Python with constants or a trainer's arguments.

Guarantees that each setting in the text is returned once, in order, one written twice included. Nothing is run or imported.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.text import compose, refuse_long
from trimtab.config.text import read_text as file_text
from trimtab.convert.command_line import settings_of
from trimtab.convert.settings import Setting, literal
from trimtab.convert.shell import Script
from trimtab.convert.stages import CLASSES

EXAMPLE = "Write the flags after --, or give a script or YAML file with --file"
MAX_SETTINGS = 2_000
"""The largest configuration of another framework (verl's) has about 550."""
PLUMBING = ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "callbacks")
"""Arguments of a trainer that name objects made elsewhere in the script; those are read where they are made."""
CALLS = {
    "LoraConfig": {"r": "lora_r", "target_modules": "lora_target_modules", "bias": "lora_bias"},
    **{name: {"model": "model_name_or_path"} for name in CLASSES if name.endswith("Trainer")},
    "load_dataset": {"name": "dataset_config", "split": "dataset_train_split"},
}
"""Calls whose arguments go by another name as a flag."""
READ_CALLS = (*CLASSES, "TrainingArguments", "ModelConfig", "ScriptArguments", *CALLS)


def read_words(words: Sequence[str]) -> list[Setting]:
    """Settings from the words of a command line; one long word is a whole text."""
    if len(words) == 1 and (re.search(r"\s", words[0].strip()) or not words[0].strip()):
        return read_text(words[0], "the text given")
    return _some(settings_of(words), "the command line")


def read_file(path: Path) -> list[Setting]:
    try:
        text = file_text(path.expanduser(), "script, YAML or Python")
    except FileNotFoundError:
        raise ConfigError([Problem(str(path), "there is no such file", EXAMPLE)]) from None
    return read_text(text, str(path))


def read_text(text: str, source: str) -> list[Setting]:
    """Settings from a text; its kind is seen from its ending, else from its form."""
    refuse_long(text, source)
    if not text.strip():
        raise ConfigError([Problem(source, "is empty", EXAMPLE)])
    try:
        return _settings(text, source)
    except RecursionError:
        what = "an expression is nested too deeply, or has too many terms"
        raise ConfigError([Problem(source, what, "Write its value instead")]) from None


def _settings(text: str, source: str) -> list[Setting]:
    ending = Path(source).suffix.lower()
    if ending in (".yaml", ".yml"):
        return _some(_yaml(text, source), source)
    if ending == ".py" and not _python_tree(text):
        raise ConfigError([Problem(source, "is not valid Python", "Correct it, or write the flags after --")])
    tree = None if ending == ".sh" else _python_tree(text)
    found = list(_python(tree, text)) if tree else []
    if found or ending == ".py":
        return _some(found, source)
    if (
        ending not in (".sh", ".py")
        and re.search(r"(?m)^\s*[\w.-]+:(\s|$)", text)
        and not re.search(r"(?m)^\s*--", text)
    ):
        return _some(_yaml(text, source), source)
    return _some(_shell(text, source), source)


def _some(found: list[Setting], source: str) -> list[Setting]:
    if not found:
        raise ConfigError([Problem(source, "holds no settings", EXAMPLE)])
    if len(found) > MAX_SETTINGS:
        what = f"holds {len(found):,} settings; Trimtab converts {MAX_SETTINGS:,} at most"
        raise ConfigError([Problem(source, what, "Give the settings of one training run")])
    return found


def _shell(text: str, source: str) -> list[Setting]:
    script = Script(text, source)
    found = [setting for command in list(script.commands()) for setting in settings_of(command)]
    return [item for item in found if item.name not in script.used]


def _yaml(text: str, source: str) -> list[Setting]:
    try:
        _, node = compose(text, source)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        raise ConfigError([Problem(place, f"YAML cannot be read: {error.problem}")]) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem(source, f"YAML cannot be read: {error}")]) from None
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError([Problem(source, "holds no keys with values", EXAMPLE)])
    return list(_leaves(node, "", set()))


def _leaves(node: yaml.MappingNode, prefix: str, above: set[int]) -> Iterator[Setting]:
    if id(node) in above:
        raise ConfigError([Problem(prefix.rstrip("."), "contains itself", "Write the values out")])
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if isinstance(value, yaml.MappingNode) and value.value:
            yield from _leaves(value, f"{name}.", above | {id(node)})
        else:
            yield Setting(name, _constructed(value))


def _constructed(node: yaml.Node) -> Any:
    if isinstance(node, yaml.ScalarNode):
        return node.value if node.style else literal(node.value) if node.value else None
    if isinstance(node, yaml.SequenceNode):
        return [_constructed(item) for item in node.value]
    return {str(key.value): _constructed(value) for key, value in node.value}


def _python_tree(text: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # shell text that happens to be Python, oddly spelt
            return ast.parse(text)
    except (SyntaxError, ValueError):
        return None
    except MemoryError:  # what Python's parser says of brackets nested too deeply
        raise RecursionError from None


def _python(tree: ast.Module, text: str) -> Iterator[Setting]:
    """Constants at the top level that nothing in the text uses, and the arguments of a trainer's classes."""
    constants: dict[str, Any] = {}
    for statement in tree.body:
        for name, value in _assigned(statement):
            if not isinstance(value, ast.Call):
                constants[name] = _written(value, text, constants)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    for statement in tree.body:
        for name, value in _assigned(statement):
            if name not in used and not isinstance(value, ast.Call):
                yield Setting(name, _written(value, text, constants))
        for call in (node for node in ast.walk(statement) if isinstance(node, ast.Call)):
            yield from _arguments(call, text, constants)


def _assigned(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    if isinstance(statement, ast.AnnAssign) and statement.value:
        targets = [statement.target]
    for target in targets:
        if isinstance(target, ast.Name | ast.Attribute):
            yield ast.unparse(target), statement.value  # type: ignore[attr-defined]


def _arguments(call: ast.Call, text: str, constants: dict[str, Any]) -> Iterator[Setting]:
    name = ast.unparse(call.func).rsplit(".", 1)[-1]
    if name not in READ_CALLS:
        return
    if name in CLASSES or name == "LoraConfig":
        yield Setting(name, None, "program")
    if name == "load_dataset" and call.args:
        yield Setting("dataset_name", _written(call.args[0], text, constants))
        if len(call.args) > 1:
            yield Setting("dataset_config", _written(call.args[1], text, constants))
    for keyword in call.keywords:
        if keyword.arg is None or (keyword.arg in PLUMBING and not isinstance(keyword.value, ast.Constant)):
            continue
        yield Setting(CALLS.get(name, {}).get(keyword.arg, keyword.arg), _written(keyword.value, text, constants))


def _written(node: ast.expr, text: str, constants: dict[str, Any]) -> Any:
    """A literal's value, a constant's, or the source of anything else."""
    if isinstance(node, ast.Name) and node.id in constants:
        return constants[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_written(item, text, constants) for item in node.elts]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ast.get_source_segment(text, node) or ast.unparse(node)
