"""A conversion for people: each flag with what became of it, defaults that came along, and what is left to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import IO

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.config.reference import written
from trimtab.convert import Conversion
from trimtab.convert.sheet import Line
from trimtab.observe.doctor.report import print_report

STYLE = {"mapped": "green", "automatic": "cyan", "dead": "yellow", "unsupported": "red"}
OUTCOME_WORDS = {
    "mapped": "went into the config",
    "automatic": "Trimtab decides now",
    "dead": "had no effect, or not the documented one",
    "unsupported": "not possible in Trimtab",
}


def print_conversion(found: Conversion, file: IO[str]) -> None:
    title = found.framework.title
    parts: list[RenderableType] = [_table(found.lines, f"Flags of {found.name}")]
    if found.assumed:
        parts += [Text(), _table(found.assumed, f"Defaults of {title} that differ from Trimtab's")]
    parts += [Text(), _counts(found.lines), *_versions(found)]
    for missing in found.sheet.missing:
        style = "bold red" if missing.required else "bold yellow"
        parts.append(Text.assemble(("fill in ", style), (missing.key, "bold"), f": {missing.what}"))
    print_report(file, [*parts, Text()])


def _versions(found: Conversion) -> list[Text]:
    """Whose defaults were taken, and for which command the config is."""
    version, command = found.sheet.version, found.framework.command
    said = f"Defaults are those of {found.framework.title} {version}; for another version give --version."
    return [Text(said)] * bool(version) + [Text(f"Run it with {command} CONFIG.")] * (command != "trimtab train")


def _table(lines: Sequence[Line], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting", overflow="fold", ratio=4)
    table.add_column("outcome", no_wrap=True)
    table.add_column("key", overflow="fold", ratio=3)
    table.add_column("note", overflow="fold", ratio=6)
    for line in lines:
        row = line.as_dict()
        alone = row["value"] is None if line.setting.origin in ("command", "stray") else row["value"] is True
        setting = Text(row["flag"]).append("" if alone else f" {written(row['value'])}", style="bold")
        outcome = Text(line.outcome, style=STYLE[line.outcome])
        table.add_row(setting, outcome, Text((row["key"] or "").replace(", ", "\n")), Text(row["note"], style="dim"))
    return table


def _counts(lines: Sequence[Line]) -> Text:
    counts = Counter[str](line.outcome for line in lines)
    text = Text(f"{len(lines)} settings: ")
    parts = [(f"{counts[name]} {OUTCOME_WORDS[name]}", style) for name, style in STYLE.items() if counts[name]]
    for place, (words, style) in enumerate(parts):
        text.append(words, style=style).append(", " if place + 1 < len(parts) else ".")
    return text
