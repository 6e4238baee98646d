"""The schema as data, and docs/configuration.md written from it: `python -m trimtab.config.reference [--check]`.

Guarantees that the documentation and the error messages say the same about a key: both take its type in words, its
default and its description from here, and here they come from the pydantic models alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BeforeValidator
from pydantic.fields import FieldInfo

from trimtab.base.files import write_text
from trimtab.base.suggestions import nearest
from trimtab.config.base import Section
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.run import parse_bytes
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

STAGES: dict[str, type[Section]] = {"train": Config, "sft": SftConfig, "reward-model": RewardModelConfig}
"""The schema of each command that trains."""
_schema: ContextVar[type[Section]] = ContextVar("schema", default=Config)
PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


@contextmanager
def use_schema(schema: type[Section]) -> Iterator[None]:
    """Inside, dotted keys are those of this schema."""
    token = _schema.set(schema)
    try:
        yield
    finally:
        _schema.reset(token)


class Nested(NamedTuple):
    section: type[Section]
    form: Literal["section", "optional", "list"]


@dataclass(frozen=True)
class Slot:
    """What the schema has at a dotted key. `free` is a mapping whose keys are the user's, or anything inside one."""

    kind: Literal["section", "list", "free", "leaf"]
    section: type[Section] | None = None
    field: FieldInfo | None = None


@dataclass(frozen=True)
class KeyEntry:
    """One key for the documentation. List items are written N: reward.N.fn."""

    name: str
    field: FieldInfo
    default: object

    @property
    def nested(self) -> Nested | None:
        return nested(self.field.annotation)


def nested(annotation: Any) -> Nested | None:
    """The section inside a field's type, where there is one."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return Nested(annotation, "section")
    args = get_args(annotation)
    form: Literal["optional", "list"] = "list" if get_origin(annotation) is list else "optional"
    for arg in args:
        if isinstance(arg, type) and issubclass(arg, Section):
            return Nested(arg, form)
    return None


def slot(parts: Sequence[str]) -> Slot | None:
    """The schema at a dotted key split at its dots; None where the key does not exist."""
    here: Slot | None = Slot("section", _schema.get())
    for part in parts:
        here = _step(here, part) if here else None
    return here


def _step(here: Slot, part: str) -> Slot | None:
    if here.kind == "free":
        return Slot("free")
    if here.kind == "list":
        return Slot("section", here.section) if part.isdecimal() else None
    field = here.section.model_fields.get(part) if here.section else None
    if field is None:
        return None
    if inner := nested(field.annotation):
        return Slot("list" if inner.form == "list" else "section", inner.section, field)
    return Slot("free" if get_origin(field.annotation) is dict else "leaf", None, field)


def entries(section: type[Section] | None = None, prefix: str = "", defaults: object = None) -> Iterator[KeyEntry]:
    """Every key below a section, sections included, in schema order. `defaults`: what the parent starts from."""
    for name, field in (section or _schema.get()).model_fields.items():
        default = getattr(defaults, name) if defaults is not None else field.default
        entry = KeyEntry(f"{prefix}{name}", field, default)
        yield entry
        if inner := entry.nested:
            below = default if isinstance(default, Section) else None
            yield from entries(inner.section, f"{entry.name}{'.N.' if inner.form == 'list' else '.'}", below)


def words(annotation: Any, metadata: Sequence[object] = ()) -> str:
    """A type in human words: `a whole number of at least 1, or auto`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return words(args[0], args[1:])
    if origin in (Union, UnionType):
        return _union_words(args, metadata)
    if origin is Literal:
        return "one of " + ", ".join(args) if len(args) > 1 else str(args[0])
    if origin is list:
        return f"a list, each item {words(args[0])}"
    if origin is tuple:
        return f"a list of {len(args)}, each {words(args[0])}"
    if origin is dict and args[1] is not Any:
        return f"a mapping, each value {words(args[1])}"
    if nested(annotation):
        return "a section"
    if any(isinstance(rule, BeforeValidator) and rule.func is parse_bytes for rule in metadata):
        return "a size such as 512MiB or 2GiB"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return names.get(annotation, "a mapping") + _bounds(metadata)


def _union_words(args: Sequence[Any], metadata: Sequence[object]) -> str:
    literals = [choice for arg in args if get_origin(arg) is Literal for choice in get_args(arg)]
    parts = [words(arg, metadata) for arg in args if get_origin(arg) is not Literal and arg is not NoneType]
    if literals:
        parts.append(words(Literal[tuple(literals)]) if len(literals) > 1 else literals[0])
    return ", or ".join(parts + ["null"] * (NoneType in args))


def _bounds(metadata: Sequence[object]) -> str:
    rules = [rule for item in metadata for rule in (item.metadata if isinstance(item, FieldInfo) else [item])]
    said = []
    for rule in rules:
        if isinstance(rule, Gt):
            said.append(f"above {rule.gt}")
        elif isinstance(rule, Ge):
            said.append(f"of at least {rule.ge}")
        elif isinstance(rule, Lt):
            said.append(f"below {rule.lt}")
        elif isinstance(rule, Le):
            said.append(f"at most {rule.le}")
        elif isinstance(rule, MinLen):
            said.append("that is not empty")
    return " " + " and ".join(said) if said else ""


def default(where: str) -> object:
    """The default of a dotted key, as its section starts out; None for required keys and keys that are the user's."""
    name = re.sub(r"\.[0-9]+(?=\.|$)", ".N", where)
    return next((e.default for e in entries() if e.name == name and not e.field.is_required()), None)


def choices(annotation: Any) -> list[str]:
    """The words that a field accepts, `auto` included; empty where any text or number will do."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    if get_origin(annotation) in (Union, UnionType):
        return [choice for arg in get_args(annotation) for choice in choices(arg)]
    return []


def written(value: object) -> str:
    """A value on one line as a user would write it in YAML."""
    if isinstance(value, float):
        return repr(value).replace("e-0", "e-")
    return value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)


def description(field: FieldInfo) -> str:
    text = field.description
    if text is None and (inner := nested(field.annotation)):
        text = inner.section.__doc__
    return " ".join((text or "").split())


def suggest(prefix: str, name: str) -> str:
    """The valid key most likely meant: a slip in a sibling's name, the same name elsewhere, then anything alike."""
    everything = [entry.name.replace(".N.", ".0.") for entry in entries()]
    top = prefix.split(".")[0]
    everything.sort(key=lambda key: key.split(".")[0] != top)
    here = slot([part for part in prefix.split(".") if part])
    siblings = [f"{prefix}{field}" for field in here.section.model_fields] if here and here.section else []
    for pool, cutoff in ((siblings, 0.75), (everything, 1.0), (siblings, 0.6), (everything, 0.6)):
        names = [key.rsplit(".", 1)[-1] for key in pool]
        if near := nearest(name, names, cutoff):
            return pool[names.index(near)]
    return ""


HEAD = """\
# Configuration

<!-- Written by `python -m trimtab.config.reference` from src/trimtab/config. Change the schema, not this page. -->

**`learn` changes what is learned. `run` never does.** The keys of `learn` are yours: Trimtab never changes one by
itself. The keys of `run` are Trimtab's to choose unless you pin them, and for each of them the gradient of a step is
the same for every value, up to the order in which floats are added. When every `run` lever is used up, Trimtab stops
and tells you which `learn` changes would help and what each would save.

A configuration is a YAML file. The smallest one:

```yaml
model:  {path: Qwen/Qwen2.5-0.5B-Instruct}
data:   {train: train.jsonl}
reward: [{fn: "rewards.py:correct"}]
```

Any key can be set on the command line by its dotted name, with a YAML value; the last one given wins:

```
trimtab train config.yaml learn.lr=1e-6 reward.0.weight=2 run.rollout.kv_memory=2GiB 'learn.sampling.stop=["\\n"]'
```

`1e-6` is a number; `off`, `on`, `yes` and `no` are words; `null`, `None` or nothing at all is "no value". An unknown
key, a key written twice, a value out of range and a setting that would have no effect are errors, all reported at once
before any model loads.
"""


SFT = """
# Configuration of `trimtab sft`

```yaml
stage:  sft
model:  {path: Qwen/Qwen2.5-0.5B}
data:   {train: chats.jsonl, eval: held_out.jsonl}
learn:  {epochs: 2, lr: 1e-5}
```

`model`, `run` and `observe` are as above. `data` and `learn` are these:
"""


REWARD_MODEL = """
# Configuration of `trimtab reward-model`

```yaml
stage:  reward-model
model:  {path: Qwen/Qwen2.5-0.5B-Instruct}
data:   {train: pairs.jsonl, eval: held_out.jsonl}
learn:  {epochs: 1, lr: 1e-5}
```

`model`, `run` and `observe` are as above. `data` and `learn` are these:
"""


def page() -> str:
    """The whole of docs/configuration.md."""
    found = list(entries(Config))
    text = HEAD + "".join(_group(entry, found) for entry in found if entry.nested)
    return text + SFT + _stage(SftConfig, "sft ") + REWARD_MODEL + _stage(RewardModelConfig, "reward-model ")


def _stage(schema: type[Section], name: str) -> str:
    found = [entry for entry in entries(schema) if entry.name.split(".")[0] in ("data", "learn")]
    return "".join(_group(entry, found, name) for entry in found if entry.nested)


def _group(group: KeyEntry, found: list[KeyEntry], stage: str = "") -> str:
    assert group.nested
    form = group.nested.form
    prefix = group.name + (".N." if form == "list" else ".")
    about = {"list": " A list; N is the place of an item, from 0.", "optional": " Off (`null`) unless you set it."}
    text = f"\n##{'#' * group.name.count('.')} {stage}`{group.name}`\n\n{description(group.field)}{about.get(form, '')}\n\n"
    text += "| key | takes | default | meaning |\n|---|---|---|---|\n"
    for entry in found:
        if entry.name.startswith(prefix) and "." not in entry.name.removeprefix(prefix):
            text += _row(entry, stage.strip())
    return text


def _row(entry: KeyEntry, stage: str) -> str:
    if entry.nested:
        place = f"{stage}-{entry.name}".lstrip("-")
        link = f"[`{entry.name}`](#{place.replace('.', '').lower()})"
        cells = [link, "a section", "", description(entry.field)]
    else:
        default = "**required**" if entry.field.is_required() else f"`{written(entry.default)}`"
        takes = words(entry.field.annotation, entry.field.metadata)
        cells = [f"`{entry.name}`", takes, default, description(entry.field)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python -m trimtab.config.reference [--check]", file=sys.stderr)
        return 2
    if arguments == ["--check"]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print(f"{PAGE} is {'current' if current else 'stale: run python -m trimtab.config.reference'}")
        return 0 if current else 1
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    write_text(PAGE, page())
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
