"""What a browser asks of the plan explorer, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.config.run import parse_bytes
from trimtab.plan.planner import PROFILES

MAX_DEVICES = 1024
MAX_OVERRIDES = 64
OPEN_KEYS = ("run.", "learn.", "eval.", "model.lora", "model.dtype", "data.max_prompt_tokens", "data.limit")
"""Keys that may be tried. Others, such as paths, do not change what a run takes, or would have the server read other files."""


@dataclass(frozen=True)
class Question:
    """What is asked."""

    overrides: tuple[str, ...] = ()
    device: str | None = None
    """A device of the catalogue, or cpu; None: the run's own."""
    devices: int | None = None
    device_memory: str | None = None
    host_memory: str | None = None
    profile: str | None = None


def parse_question(body: Any) -> Question:
    """A question as a browser sends it; a ConfigError says what is wrong with it."""
    if not isinstance(body, Mapping):
        raise ConfigError([Problem("", "the body is not a JSON object")])
    overrides = body.get("overrides") or []
    if isinstance(overrides, Mapping):
        overrides = [
            f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in overrides.items()
        ]
    if not isinstance(overrides, list) or not all(isinstance(item, str) for item in overrides):
        raise ConfigError([Problem("overrides", "is not a list of texts", 'Write ["learn.max_new_tokens=1024"]')])
    if len(overrides) > MAX_OVERRIDES:
        raise ConfigError([Problem("overrides", f"more than {MAX_OVERRIDES} are not tried at once")])
    for override in overrides:
        if not override.strip().startswith(OPEN_KEYS):
            key = override.partition("=")[0].strip()[:80]
            raise ConfigError(
                [Problem(key, "cannot be tried here", f"Change keys that begin with {', '.join(OPEN_KEYS)}")]
            )
    devices = body.get("devices")
    if devices is not None and (type(devices) is not int or not 1 <= devices <= MAX_DEVICES):
        raise ConfigError([Problem("devices", f"is not a number from 1 to {MAX_DEVICES}")])
    texts = {name: body.get(name) or None for name in ("device", "device_memory", "host_memory", "profile")}
    for name, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError([Problem(name, "is not a text")])
    if texts["profile"] not in (None, *PROFILES):
        raise ConfigError([Problem("profile", "is not a profile", f"Write one of {', '.join(PROFILES)}")])
    return Question(tuple(overrides), devices=devices, **texts)


def bytes_of(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    try:
        found = parse_bytes(value)
    except ValueError as error:
        raise ConfigError([Problem(name, str(error))]) from None
    if not isinstance(found, int) or found < GIB // 4:
        raise ConfigError([Problem(name, f"{value[:40]!r} is too little memory", "Write a unit, such as 40GiB")])
    return found
