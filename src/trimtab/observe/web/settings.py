"""A run's config as a page shows it: every key, who chose its value, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from trimtab.observe.look import RunLook

SCHEMAS = {"rl": "schema:Config", "sft": "sft:SftConfig", "reward_model": "reward_model:RewardModelConfig"}


def flat(settings: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    """`learn.kl.coef` and its value, in the order of the file; items of lists of sections are `reward.0.fn`."""
    if isinstance(settings, Mapping) and settings:
        for key, value in settings.items():
            yield from flat(value, f"{above}{key}.")
    elif isinstance(settings, list) and settings and all(isinstance(item, Mapping) for item in settings):
        for number, item in enumerate(settings):
            yield from flat(item, f"{above}{number}.")
    else:
        yield above.removesuffix("."), settings


def config(look: RunLook) -> list[dict[str, Any]]:
    choices = {str(choice["key"]): choice for choice in choices_of(look)}
    said = look.run.get("set")
    given = [key for key in said if isinstance(key, str)] if isinstance(said, list) else None
    defaults = {} if given is not None else _defaults(look.stage)
    rows = []
    for key, value in flat(look.settings):
        choice = choices.get(key)
        if given is not None:
            mine = any(key == known or key.startswith(f"{known}.") for known in given)
        else:
            mine = key not in defaults or defaults[key] != value
        source = "you" if mine and choice is None else "chosen" if choice is not None else "default"
        why = None
        if choice is not None:
            why = f"{choice['why']}{' (measured)' if choice.get('measured') else ''}"
        rows.append({"key": key, "value": value, "source": source, "why": why})
    return rows


def choices_of(look: RunLook) -> list[dict[str, Any]]:
    """What Trimtab chose, each with its reason."""
    listed = look.plan.get("choices")
    found = listed if isinstance(listed, list) else []
    return [choice for choice in found if isinstance(choice, dict) and "key" in choice and "why" in choice]


@cache
def _defaults(stage: str) -> dict[str, Any]:
    """Defaults of the schema, as config.yaml writes them; what has none is missing here."""
    from importlib import import_module

    from pydantic import BaseModel
    from pydantic_core import PydanticUndefined

    module, name = SCHEMAS[stage].split(":")
    schema: type[BaseModel] = getattr(import_module(f"trimtab.config.{module}"), name)

    def walk(model: type[BaseModel]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, entry in model.model_fields.items():
            kind = entry.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                found[key] = walk(kind)
            elif entry.default is not PydanticUndefined:
                found[key] = entry.default.model_dump() if isinstance(entry.default, BaseModel) else entry.default
        return found

    return dict(flat(walk(schema)))
