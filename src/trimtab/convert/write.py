"""A worked-out sheet as YAML: in the schema's order, the flag beside each key, what is to be filled in as comments."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.load import one_line
from trimtab.config.reference import entries
from trimtab.convert.sheet import Missing, Put, Sheet


def yaml_text(sheet: Sheet) -> str:
    framework = sheet.framework
    lines = [f"# From settings of {framework.named(sheet.version)}. `run` is Trimtab's to choose."]
    lines += [f"# For {framework.command}."] * (framework.command != "trimtab train")
    lines += [f"# To fill in: {m.key}: {m.what}" for m in sheet.missing]
    tree = _annotated(sheet)
    if stage := sheet.tree().get("stage"):
        lines += ["", f"stage: {stage}"]
    for section in framework.schema.model_fields:
        missing = [m for m in sheet.missing if m.key.split(".")[0] == section and m.required]
        if section in tree or missing:
            lines += [
                "",
                f"{section}:",
                *(_hint(m) for m in missing),
                *_block(tree.get(section, {}), 1, framework.title),
            ]
    return "\n".join(lines) + "\n"


def _hint(missing: Missing) -> str:
    name = missing.key.partition(".")[2]
    return f"  # {name}: FILL IN" if name else '  # - {fn: "rewards.py:score"}  FILL IN'


def _annotated(sheet: Sheet) -> dict[str, Any]:
    """The config with the whole `Put` at its leaves, each mapping in the schema's order."""
    order = {name: place for place, name in enumerate(_schema_order())}
    tree: dict[str, Any] = {}
    for key in sorted(sheet.keys, key=lambda key: order.get(_without_indices(key), len(order))):
        node = tree
        *above, name = key.split(".")
        for part in above:
            node = node.setdefault(part, {})
        node[name] = sheet.keys[key]
    return tree


def _without_indices(key: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in key.split("."))


def _schema_order() -> Iterator[str]:
    return (entry.name for entry in entries())


def _block(node: dict[str, Any], depth: int, title: str) -> Iterator[str]:
    for name, below in node.items():
        indent = "  " * depth
        if isinstance(below, Put):
            yield f"{indent}{name}: {one_line(below.value)}{_source(below, title)}"
        elif name.isdecimal():
            first, *rest = _block(below, depth + 1, title)
            yield f"{indent}- {first.lstrip()}"
            yield from rest
        else:
            yield f"{indent}{name}:"
            yield from _block(below, depth + 1, title)


def _source(put: Put, title: str) -> str:
    if not put.lines:
        return f"  # what {title} does"
    names = ", ".join(dict.fromkeys(line.setting.name for line in put.lines if line.given or not put.given))
    return f"  # {names}" if put.given else f"  # {title}'s default of {names}"


def write_new(path: Path, text: str) -> None:
    """Write a file that does not exist yet: what is there may be a config that someone has worked on."""
    try:
        with path.expanduser().open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError([Problem(str(path), "already exists", "Remove it, or give --out another name")]) from None
    except OSError as error:
        raise ConfigError([Problem(str(path), f"cannot be written: {error.strerror}", "Give --out a file")]) from None
