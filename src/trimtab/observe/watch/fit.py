"""How parts of the screen share the lines of a column: all get their least, the unimportant ones go first, the rest is shared.

So nothing scrolls off a small terminal and nothing is left empty on a large one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.text import Text

Lines = list[Text]


@dataclass(frozen=True)
class ScreenPart:
    """A part of the screen under a title."""

    title: str
    build: Callable[[int, int], Lines]
    """From (width, lines), at most so many lines of at most that width."""
    least: int
    most: int
    """Lines that it can use; 0: it has nothing to show."""
    rank: int
    """1 stays longest."""

    @property
    def head(self) -> int:
        return 1 if self.title else 0


def share_lines(parts: Sequence[ScreenPart], height: int) -> list[tuple[ScreenPart, int]]:
    """The parts that are shown, in their order, with the lines of each (its title not counted)."""
    kept = [part for part in parts if part.most]
    while kept and sum(part.least + part.head for part in kept) > height:
        kept.remove(max(kept, key=lambda part: part.rank))
    given = {id(part): part.least for part in kept}
    left = height - sum(part.least + part.head for part in kept)
    while left > 0:
        growing = [part for part in kept if given[id(part)] < part.most]
        if not growing:
            break
        for part in sorted(growing, key=lambda part: part.rank)[:left]:
            given[id(part)] += 1
            left -= 1
    return [(part, given[id(part)]) for part in kept]


def column(parts: Sequence[ScreenPart], width: int, height: int) -> Lines:
    """The parts below each other, cut to the column."""
    lines: Lines = []
    for part, count in share_lines(parts, height):
        if part.title:
            lines.append(rule(part.title, width))
        lines += part.build(width, count)[:count]
    return [cut(line, width) for line in lines[:height]]


def rule(title: str, width: int) -> Text:
    """`── reward ─────`"""
    head = f"── {title} "
    return Text.assemble(("── ", "dim"), (title, "bold"), (" " + "─" * max(0, width - len(head)), "dim"))


def cut(line: Text, width: int) -> Text:
    """A line that is no wider; what is left out is marked."""
    if line.cell_len <= width:
        return line
    line = line.copy()
    line.truncate(width, overflow="ellipsis")
    return line


def beside(columns: Sequence[Lines], widths: Sequence[int], gap: int = 2) -> Lines:
    """Columns next to each other."""
    lines = []
    for row in range(max(map(len, columns), default=0)):
        line = Text()
        for number, (found, width) in enumerate(zip(columns, widths)):
            cell = cut(found[row], width) if row < len(found) else Text()
            line.append_text(cell)
            if number < len(columns) - 1:
                line.append(" " * (width - cell.cell_len + gap))
        lines.append(line)
    return lines


def wrap(text: str, width: int, most: int, style: str = "") -> Lines:
    """Words on lines of a width; where they do not fit in `most` lines the last one ends in `…`."""
    lines: list[str] = [""]
    for word in text.split(" "):
        while len(word) > width:  # one that fits on no line
            room = width - len(lines[-1]) - bool(lines[-1])
            if room < 1:
                lines.append("")
                continue
            lines[-1] += (" " if lines[-1] else "") + word[:room]
            word = word[room:]
        if word:
            joined = f"{lines[-1]} {word}" if lines[-1] else word
            lines = [*lines[:-1], joined] if Text(joined).cell_len <= width else [*lines, word]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1][: width - 1] + "…"] if most > 0 else []
    return [Text(line, style=style) for line in lines]
