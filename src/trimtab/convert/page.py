"""The tables of docs/convert.md, written from the code's: `python -m trimtab.convert.page [--check]`.

Guarantees that the page says of a flag what the command says; the words around the tables are not touched.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trimtab.base.files import write_text
from trimtab.config.reference import written
from trimtab.convert import FRAMEWORKS
from trimtab.convert.common import ENVIRONMENT, PREFIXES
from trimtab.convert.rules import ConvertRule
from trimtab.convert.sheet import Framework
from trimtab.convert.versions import ABSENT

PAGE = Path(__file__).parents[3] / "docs" / "convert.md"
START, END = "<!-- tables:start -->\n", "<!-- tables:end -->"
TITLES = {
    "mapped": "Goes into the config",
    "automatic": "Trimtab decides now",
    "dead": "Had no effect, or not the documented one",
    "unsupported": "Not possible in Trimtab",
}


def tables() -> str:
    """Every framework's flags, and the environment's."""
    return "\n".join([*map(_framework, FRAMEWORKS.values()), _environment()])


def _framework(framework: Framework) -> str:
    """A framework's tables; rules that stand in its family's first table already are left out."""
    name = f"{framework.title[0].upper()}{framework.title[1:]}" + (f", {framework.reads}" if framework.reads else "")
    text = f"## {name}: `{framework.kind}`\n\n{framework.about}\n"
    first = FRAMEWORKS[framework.kind.split("-")[0]]
    shown = {id(rule) for rule in first.rules} if first is not framework else set()
    for outcome, title in TITLES.items():
        rules = [rule for rule in framework.rules if rule.outcome == outcome and id(rule) not in shown]
        if rules:
            text += f"\n### {title}\n\n| flag | key | note |\n|---|---|---|\n" + "".join(
                _row(rule, framework.dashes) for rule in rules
            )
    if framework.defaults:
        said = "; ".join(f"`{framework.dashes}{name}` {written(value)}" for name, value in framework.defaults.items())
        version = f" {framework.newest}" if framework.newest else ""
        text += f"\nTaken over from the defaults of {framework.title}{version} where no flag says otherwise: {said}.\n"
    if framework.newest:
        text += f"\nVersions from {framework.oldest} to {framework.newest} are known. {_changes(framework)}\n"
    return text


def _changes(framework: Framework) -> str:
    if not framework.was:
        return "None of these defaults has changed."
    said = (
        f"before {was.before} `{framework.dashes}{was.name}` was {'not there' if was.value is ABSENT else written(was.value)}"
        for was in framework.was
    )
    return f"Of older ones, {'; '.join(said)}."


def _row(rule: ConvertRule, dashes: str) -> str:
    names = f"`{dashes}{rule.name}`"
    if rule.old:
        names += " (" + ", ".join(f"`{dashes}{name}`" for name in rule.old) + ")"
    if rule.never:
        names += "; in guides " + ", ".join(f"`{dashes}{name}`" for name in rule.never)
    key = f"`{rule.key}`" if rule.key else ""
    return f"| {names} | {key} | {_cell(rule.note)} |\n"


def _environment() -> str:
    known = ENVIRONMENT | {f"{prefix}…": said for prefix, said in PREFIXES.items()}
    rows = "".join(f"| `{name}` | {outcome} | {_cell(note)} |\n" for name, (outcome, note) in known.items())
    return f"## Environment variables\n\n| variable | outcome | note |\n|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(text: str) -> str:
    """The page with its tables as they should be."""
    new = START + "\n" + tables() + "\n" + END
    return re.sub(re.escape(START) + r".*?" + re.escape(END), lambda _: new, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print("usage: python -m trimtab.convert.page [--check]", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    if arguments == ["--check"]:
        current = page(text) == text
        print(f"{PAGE} is {'current' if current else 'stale: run python -m trimtab.convert.page'}")
        return 0 if current else 1
    write_text(PAGE, page(text))
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
