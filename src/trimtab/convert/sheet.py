"""The sheet on which a conversion is worked out: a line for each setting, and the keys of the config as they are found.

Guarantees: each setting has exactly one line with one outcome; a key in the config says which flags it comes from; once
`finish` has run, the config loads when what `missing` lists is filled in. A value that the loader refuses does not stay in the
config: its line says why, in the loader's words. Defaults of the other framework are lines of their own, marked so.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.check import clashes
from trimtab.config.load import load_as
from trimtab.config.reference import default
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig
from trimtab.convert.names import FAMILY, Names
from trimtab.convert.rules import NULL, ConvertRule, OutcomeName
from trimtab.convert.settings import Setting
from trimtab.convert.versions import OldDefault, defaults_of, earlier

MASK = "***"
REFERENCE = re.compile(r"\$\{(oc\.|\.|\w+\.)")
"""A value of Hydra's that stands for another key's: ${oc.select:a.b,1}, ${.c}, ${a.b}."""
NAMES = ("trimtab", "verl", "nanochat", "gspo", "gae", "false", "true")
"""Words that are not written with a capital even when a sentence begins with them."""


ALGORITHM_KEYS = ("learn.algorithm", "learn.loss", "learn.advantage")
"""Keys that are never left out: without them another algorithm would be trained."""
KEEP_ALGORITHM = "Change it, or a setting that belongs to it: without it, this would be another algorithm"


@dataclass
class Line:
    """A setting and what becomes of it."""

    setting: Setting
    rule: ConvertRule | None
    given: bool = True
    """False: the framework's own default."""
    outcome: OutcomeName = "unsupported"
    key: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def value(self) -> Any:
        return MASK if self.rule and self.rule.secret and self.setting.value not in (None, True) else self.setting.value

    def as_dict(self) -> dict[str, Any]:
        note = " ".join(map(_sentence, self.notes))
        found = {"flag": self.setting.name, "value": self.value, "outcome": self.outcome, "key": self.key or None}
        return found | {"note": note}


@dataclass(frozen=True)
class Put:
    """A key's value and the lines it comes from."""

    value: Any
    lines: tuple[Line, ...]

    @property
    def given(self) -> bool:
        return any(line.given for line in self.lines) or not self.lines


@dataclass(frozen=True)
class Missing:
    """A key that no flag says, and what to write. Without a required one the config does not load."""

    key: str
    what: str
    required: bool


@dataclass(frozen=True)
class Framework:
    """A kind of settings that can be converted."""

    kind: str
    title: str
    about: str
    rules: tuple[ConvertRule, ...]
    defaults: Mapping[str, Any]
    """The framework's own, by today's name, where they differ from Trimtab's and change what is learned."""
    settle: Callable[[Sheet], None]
    """Works out what takes several flags."""
    spelling: Callable[[str], str]
    """A name as the table has it."""
    dashes: str = "--"
    alias: str = "the same as {}"
    """What is said of a name that is not the first of its rule."""
    abbreviations: Mapping[str, str] = field(default_factory=dict)
    """First parts of names that the table writes in another way."""
    reads: str = ""
    """The class or program whose settings these are, where the framework has several."""
    schema: type[Config] | type[SftConfig] | type[RewardModelConfig] = Config
    """What they are converted to."""
    newest: str = ""
    """The version that `defaults` are of; empty: there are no versions."""
    oldest: str = ""
    """The oldest version whose defaults are known."""
    was: tuple[OldDefault, ...] = ()
    """Defaults that older versions had."""

    @property
    def command(self) -> str:
        """The command that the config is for."""
        stage = self.schema.model_fields.get("stage")
        return f"trimtab {stage.default if stage else 'train'}"

    def named(self, version: str) -> str:
        """The framework with its version and the class that was read."""
        return " ".join([self.title, *[version] * bool(version)]) + (f", {self.reads}" if self.reads else "")

    def in_full(self, name: str) -> str:
        """A name of the table as a user writes it."""
        head, dot, rest = name.partition(".")
        whole = next((whole for whole, short in self.abbreviations.items() if short == head), head)
        return f"{whole}{dot}{rest}"

    def shown(self, name: str) -> str:
        return f"{self.dashes}{self.in_full(name)}"

    @property
    def by_name(self) -> dict[str, ConvertRule]:
        return {self.spelling(name): rule for rule in self.rules for name in rule.names}


class Sheet:
    def __init__(
        self,
        framework: Framework,
        settings: Sequence[Setting],
        other: Callable[[Setting], Line | None],
        version: str = "",
    ) -> None:
        """`other` knows settings that are not the framework's: variables, launchers, whole commands. `version` is the
        framework's, whose defaults are taken."""
        self.framework, self.known = framework, framework.by_name
        self.programs = frozenset(setting.name for setting in settings if setting.origin == "program")
        self.version = version or framework.newest
        self.defaults = defaults_of(self.version, framework.defaults, framework.was)
        self.names = Names(self.known, framework.abbreviations)
        self.lines: list[Line] = []
        self.keys: dict[str, Put] = {}
        self.missing: list[Missing] = []
        self._last: dict[str, Line] = {}
        for setting in settings:
            if setting.origin != "program":
                self._add(setting, other)
        for name, value in self.defaults.items() if self.says_something else ():
            if name not in self._last:
                rule = self.known[framework.spelling(name)]
                self._last[name] = Line(Setting(framework.in_full(name), value), rule, False, rule.outcome)
                self.lines.append(self._last[name])
        for line in self._last.values():
            self._apply(line)

    @property
    def says_something(self) -> bool:
        """Whether any setting is about training; a command that looks at a GPU is not."""
        return any(line.setting.origin not in ("command", "stray") for line in self.lines)

    def _add(self, setting: Setting, other: Callable[[Setting], Line | None]) -> None:
        spelt = self.framework.spelling(setting.name)
        rule = self.names.rule(spelt)
        if rule is None and setting.value is True and spelt.startswith("no_") and spelt[3:] in self.known:
            rule, setting = self.known[spelt[3:]], Setting(setting.name, False)
        if rule is None or setting.origin in ("command", "stray", "launcher"):
            self.lines.append(other(setting) or self._unknown(setting, spelt))
            return
        line = Line(setting, rule, True, rule.outcome, "" if rule.outcome == "mapped" else rule.key)
        if isinstance(setting.value, str) and REFERENCE.match(setting.value):
            self._refuse(line, "takes its value from another key, which is converted by itself", "dead")
            self.lines.append(line)
            return
        if spelt in map(self.framework.spelling, rule.never):
            line.notes.append(
                f"{self.framework.title} has no {setting.name}; {self.framework.shown(rule.name)} is meant"
            )
        elif spelt in map(self.framework.spelling, rule.old):
            line.notes.append(self.framework.alias.format(self.framework.shown(rule.name)))
        name = spelt if rule.name.endswith(FAMILY) else rule.name
        if earlier := self._last.get(name):
            earlier.outcome, earlier.key, earlier.notes = "dead", "", ["set again later; the last one counts"]
        self._last[name] = line
        self.lines.append(line)
        if "$" in str(setting.value):
            line.notes.append("only the shell knows its value: write the value out")

    def _unknown(self, setting: Setting, spelt: str) -> Line:
        note = f"not a {self.framework.title} setting that Trimtab knows"
        meant = self.names.meant(spelt)
        if not meant:
            return Line(setting, None, notes=[f"{note}. Trimtab does not know what it means"])
        line = Line(setting, None, notes=[f"{note}. Did you mean {self.framework.shown(meant)}?"])
        today = self.known[meant].name
        if today != meant:
            line.notes.append(self.framework.alias.format(self.framework.shown(today)))
        return line

    def _apply(self, line: Line) -> None:
        rule = line.rule
        assert rule
        if rule.outcome == "unsupported" and line.setting.value in (None, False, ""):
            self._refuse(line, "off or empty, so it has no effect", "dead")
            return
        if rule.note:
            line.notes.append(rule.note)
        if rule.outcome == "mapped" and rule.take:
            try:
                value = rule.take(line.setting.value)
            except ValueError as error:
                self._refuse(line, f"{error}, not {line.setting.value!r}")
                return
            if value is not None:
                self.put(rule.key, None if value is NULL else value, rule.name)
            elif line.given:
                line.notes.append("has no effect: the key is left out")

    # --- for `settle`

    def before(self, version: str) -> bool:
        """Whether the settings are of an older version than this."""
        return bool(self.version) and earlier(self.version, version)

    def fail(self, name: str, what: str, fix: str) -> NoReturn:
        """Refuse the whole conversion: nothing that is here is what this flag asks for."""
        line = self._last[name]
        raise ConfigError([Problem(f"{line.setting.name}={line.setting.value}", what, fix)])

    def line(self, name: str) -> Line | None:
        """The line that counts for a flag; given or the framework's default."""
        return self._last.get(name)

    def counting(self, rules: Sequence[ConvertRule]) -> list[Line]:
        """The lines that count for some rules, families included; given or the framework's defaults."""
        return [line for line in self._last.values() if line.rule in rules]

    def given(self, *names: str) -> bool:
        return any(line.given for name in names if (line := self._last.get(name)))

    def read(self, name: str, take: Callable[[Any], Any], otherwise: Any = None) -> Any:
        """A flag's value, or `otherwise` where it is not given, is null, or cannot be taken (its line says so then)."""
        line = self._last.get(name)
        if line is None or line.setting.value is None:
            return otherwise
        try:
            return take(line.setting.value)
        except ValueError as error:
            self._refuse(line, f"{error}, not {line.setting.value!r}")
            return otherwise

    def put(self, key: str, value: Any, *names: str, note: str = "") -> None:
        """Set a key from flags. `note` goes to the first of them."""
        lines = tuple(line for name in names if (line := self._last.get(name)) and line.outcome == "mapped")
        if names and not lines:
            return
        for line in lines:
            line.key = f"{line.key}, {key}" if line.key and key not in line.key.split(", ") else key
        if note and lines:
            lines[0].notes.append(note)
        self.keys[key] = Put(value, lines)

    def say(self, name: str, note: str) -> None:
        if line := self._last.get(name):
            line.notes.append(note)

    def refuse(self, name: str, note: str, outcome: OutcomeName = "unsupported") -> None:
        """Take a flag out of the config."""
        if (line := self._last.get(name)) and line.outcome == "mapped":
            self._refuse(line, note, outcome)

    def without(self, rules: Sequence[ConvertRule], why: str) -> None:
        """Nothing that these rules say of a flag holds here: it does nothing."""
        for line in self.counting(rules):
            if line.outcome != "dead" and line.rule:
                line.notes = [note for note in line.notes if note != line.rule.note]
                self._refuse(line, why, "dead")

    def _refuse(self, line: Line, note: str, outcome: OutcomeName = "unsupported") -> None:
        line.outcome, line.key = outcome, ""
        line.notes += [note] * (note not in line.notes)

    def need(self, key: str, what: str, required: bool = True) -> None:
        if key not in self.keys and key not in {missing.key for missing in self.missing}:
            self.missing.append(Missing(key, what, required))

    # --- the end

    def finish(self, needs: Callable[[], None]) -> None:
        """Leave in the config only what the loader takes, and of the framework's defaults only those that are not Trimtab's.

        `needs` says what is missing, and is asked again after each key that is taken out.
        """
        needs()
        for key, put in list(self.keys.items()):
            if not put.given and put.value == default(key):
                self._take_out(key)
        for line in self.lines:
            if line.given and line.outcome == "mapped" and not line.key:
                self._refuse(line, "has no effect by itself", "dead")
        while problem := self._problem():
            key, what = problem
            if key in ALGORITHM_KEYS and self.keys[key].lines:
                raise ConfigError([Problem(self.keys[key].lines[0].setting.name, f"{key} {what}", KEEP_ALGORITHM)])
            for line in self._take_out(key):
                line.outcome = line.outcome if line.key else "unsupported"
                line.notes.append(f"{key} {what}. It is left out")
            if key.startswith("reward.") and key.endswith(".fn"):  # a part without a function is none
                for part in [part for part in self.keys if part.startswith("reward.")]:
                    self._take_out(part)
            needs()

        for line in self.lines:
            if line.given and line.outcome == "mapped" and not line.key:
                self._refuse(line, "belongs to a setting that is left out")

    def _take_out(self, key: str) -> tuple[Line, ...]:
        lines = self.keys.pop(key).lines
        for line in lines:
            line.key = ", ".join(name for name in line.key.split(", ") if name != key)
        return lines

    def _problem(self) -> tuple[str, str] | None:
        """A key that the loader refuses, and why."""
        try:
            _load(self.framework.schema, self.filled_in())
        except ConfigError as error:
            for problem in error.problems:
                blamed = problem.where if problem.where in self.keys else self._other(problem.where)
                if blamed:
                    return blamed, f"{problem.what}. {problem.fix}".rstrip(". ")
            raise
        return None

    def _other(self, where: str) -> str | None:
        """The key to blame for a contradiction that is reported at one which no flag set."""
        found = clashes(self.framework.schema.model_validate(self.filled_in()))
        return next((key for clash in found if clash.keys[0] == where for key in clash.keys if key in self.keys), None)

    def tree(self) -> dict[str, Any]:
        """The config as a nested mapping."""
        stage = self.framework.schema.model_fields.get("stage")
        tree: dict[str, Any] = {"stage": stage.default} if stage else {}
        for key, put in self.keys.items():
            node: Any = tree
            *above, name = key.split(".")
            for part, below in zip(above, [*above[1:], name]):
                node = _inside(node, part, [] if below.isdecimal() else {})
            node[name] = put.value
        return tree

    def filled_in(self) -> dict[str, Any]:
        """The config with stand-ins for what is missing."""
        tree = self.tree()
        stand_ins = {
            "model.path": "MODEL",
            "data.train": "train.jsonl",
            "data.eval": "test.jsonl",
            "reward": [{"fn": "task"}],
        }
        for missing in self.missing:
            if missing.required:
                section, _, name = missing.key.partition(".")
                if name:
                    tree.setdefault(section, {})[name] = stand_ins[missing.key]
                else:
                    tree[section] = stand_ins[missing.key]
        return tree


def _load(schema: type[Config] | type[SftConfig] | type[RewardModelConfig], tree: dict[str, Any]) -> None:
    """Raise what is wrong with a tree as a config of this schema."""
    if schema is SftConfig:
        load_as(SftConfig, None, base=tree)
    elif schema is RewardModelConfig:
        load_as(RewardModelConfig, None, base=tree)
    else:
        load_as(Config, None, base=tree)


def _sentence(note: str) -> str:
    """With a capital, unless it begins with a name; and a full stop."""
    first = note.split(" ", 1)[0]
    if re.fullmatch(r"[a-z]+('s)?[,:;]?", first) and first not in NAMES:
        note = note[0].upper() + note[1:]
    return note if note.endswith((".", "?")) else f"{note}."


def _inside(node: Any, part: str, empty: Any) -> Any:
    if isinstance(node, list):
        node.extend({} for _ in range(int(part) + 1 - len(node)))
        return node[int(part)]
    return node.setdefault(part, empty)
