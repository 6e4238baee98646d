"""Settings of another framework, flag by flag, as a Trimtab config. Importable without torch.

Guarantees: each setting that is given appears once in `flags`, with what became of it; the config loads once what `fill_in`
marks as required is written. `learn` keeps what was asked to be learned, the other framework's defaults included; `run` is
left to Trimtab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.suggestions import nearest
from trimtab.config.reference import use_schema
from trimtab.convert import nanochat, openrlhf, script, trl, trl_offline, trl_ppo, trl_rloo, verl
from trimtab.convert.common import needs, other
from trimtab.convert.devices import say_pins
from trimtab.convert.read import EXAMPLE, read_file, read_text, read_words
from trimtab.convert.settings import Setting
from trimtab.convert.sheet import Framework, Line, Sheet
from trimtab.convert.stages import kind_of
from trimtab.convert.versions import chosen
from trimtab.convert.write import yaml_text

FRAMEWORKS: dict[str, Framework] = {
    framework.kind: framework
    for framework in (
        openrlhf.FRAMEWORK,
        verl.FRAMEWORK,
        trl.FRAMEWORK,
        trl_rloo.FRAMEWORK,
        trl_ppo.FRAMEWORK,
        trl_offline.SFT,
        trl_offline.REWARD,
        nanochat.FRAMEWORK,
        script.FRAMEWORK,
    )
}


@dataclass(frozen=True)
class Conversion:
    """A finished sheet."""

    framework: Framework
    sheet: Sheet

    @property
    def lines(self) -> list[Line]:
        """A line for each setting that was given."""
        return [line for line in self.sheet.lines if line.given]

    @property
    def assumed(self) -> list[Line]:
        """Defaults of the other framework that matter: in the config, or not possible here."""
        return [line for line in self.sheet.lines if not line.given and self._matters(line)]

    def _matters(self, line: Line) -> bool:
        kept = any(line in put.lines for put in self.sheet.keys.values())
        return kept or (line.outcome == "unsupported" and bool(line.notes))

    @property
    def name(self) -> str:
        """What was read, with the version whose defaults were taken."""
        return self.framework.named(self.sheet.version)

    @property
    def yaml(self) -> str:
        with use_schema(self.framework.schema):
            return yaml_text(self.sheet)

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "kind": self.framework.kind,
            "version": self.sheet.version or None,
            "command": self.framework.command,
            "config": self.sheet.tree(),
            "flags": [line.as_dict() for line in self.lines],
            "defaults": [line.as_dict() for line in self.assumed],
            "fill_in": [{"key": m.key, "what": m.what, "required": m.required} for m in self.sheet.missing],
        }


def convert(
    kind: str,
    words: Sequence[str] | None = None,
    text: str | None = None,
    file: Path | None = None,
    version: str | None = None,
) -> Conversion:
    """Convert settings given as the words of a command line, as a text, or in a file. `version` is the framework's, for its
    defaults; None: the newest that is known."""
    framework = FRAMEWORKS.get(kind)
    if framework is None:
        near = nearest(kind, list(FRAMEWORKS), 0.5)
        fix = f"Did you mean {near}?" if near else f"Write one of {', '.join(FRAMEWORKS)}"
        raise ConfigError([Problem(kind, "is not a framework that Trimtab converts", fix)])
    if sum(source is not None for source in (words or None, text, file)) != 1:
        what = "has settings from two places" if words else "has no settings"
        fix = f"Write trimtab convert {kind} -- FLAGS, or trimtab convert {kind} --file FILE"
        raise ConfigError([Problem(f"convert {kind}", what, fix)])
    settings = _read(words, text, file)
    framework = FRAMEWORKS[kind_of(kind, settings)]
    if all(item.origin == "program" for item in settings):
        raise ConfigError([Problem(settings[0].name, "has no settings", EXAMPLE)])
    return _converted(framework, settings, chosen(framework.kind, version, framework.oldest, framework.newest))


def _read(words: Sequence[str] | None, text: str | None, file: Path | None) -> list[Setting]:
    if file is not None:
        return read_file(file)
    return read_text(text, "the text given") if text is not None else read_words(words or [])


def _converted(framework: Framework, settings: list[Setting], version: str) -> Conversion:
    with use_schema(framework.schema):
        sheet = Sheet(framework, settings, other, version)
        if sheet.says_something:
            framework.settle(sheet)
            say_pins(sheet)
        sheet.finish(lambda: needs(sheet))
    return Conversion(framework, sheet)
