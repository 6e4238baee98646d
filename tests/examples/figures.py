"""Published figures and the records that they come from.

A results block stands between `<!-- results:start -->` and `<!-- results:end -->`. Every number in it is a figure with a unit,
and is looked for only in the records that its own table row or paragraph links: dated files in bench/results.

- A table row names its peer, rates and peaks of both sides, and their ratio. All figures of a side have to come from one run of
  that side in the JSON record, of the workload that the link's text names; the ratio is computed from the two runs. Where the
  record has every step, a rate is all tokens over all seconds of the steps after the first.
- A number that says what the work is has to be in bench/README.md, outside its results block, with the same unit.
- A number in a paragraph has to be in a linked record with the same unit: in a sentence of its page, as a rate of its tables, as
  the smallest or largest of another column, or as a count or an extreme of the random runs.

What is not found is returned in words. Nothing is skipped but names (H200, GSM8K, SmolLM2-135M, the 7B shape) and dates, which
have to be those of the records.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

START, END = "<!-- results:start -->", "<!-- results:end -->"
LINK = re.compile(r"\[([^\]]*)\]\(([^)]*)\)")
DATE = re.compile(r"\d{4}-\d\d-\d\d")
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z0-9]-)[+-]?(\d[\d,]*\d|\d)((?:\.\d+)*)")
PEAKS = {"peak_allocated_gib": "GiB allocated", "peak_used_gib": "in use"}
RATE, TIMES = "tokens/s", "×"


@dataclass(frozen=True)
class Figure:
    """A number with what it counts."""

    text: str
    unit: str

    @property
    def value(self) -> float:
        return abs(float(self.text.replace(",", "")))

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])

    def is_of(self, recorded: float) -> bool:
        """Whether the recorded number, rounded as the figure is, is the figure."""
        return f"{abs(recorded):.{self.decimals}f}" == f"{self.value:.{self.decimals}f}"

    def __str__(self) -> str:
        return f"{self.text} {self.unit}".strip()


@dataclass(frozen=True)
class Run:
    """One side of a comparison in a JSON record."""

    words: frozenset[str]
    """Of the keys that lead to it."""
    values: Mapping[str, float]
    """By unit."""

    @property
    def is_trimtab(self) -> bool:
        return "trimtab" in self.words


def block(page: Path) -> str:
    """The results of a page."""
    text = page.read_text()
    assert text.count(START) == text.count(END) == 1, f"{page.name} has not one results block"
    return text.partition(START)[2].partition(END)[0]


def figures(text: str, header: str = "") -> list[Figure]:
    """Every number of a text with its unit: what the table's header says, or what follows it. Names and dates are left out."""
    text = DATE.sub(" ", LINK.sub(r"\1", text)).replace("**", "").replace("`", "")
    found: list[tuple[str, str]] = []
    for match in NUMBER.finditer(text):
        behind = text[match.end() :]
        found.append((match[0].lstrip("+-"), _unit(text[: match.start()], behind, header)))
    for place in reversed(range(len(found) - 1)):  # in "4.0 to 6.4 %" the first number has the unit of the second
        if found[place][1] == "to":
            found[place] = (found[place][0], found[place + 1][1])
    return [Figure(*each) for each in found]


def _unit(before: str, behind: str, header: str) -> str:
    if header:
        bracketed = before.count("(") > before.count(")")
        return header.partition("(")[2].rstrip(") ") if bracketed else header.partition(" (")[0]
    if behind.startswith(TIMES) or re.match(r"x\b", behind):
        return TIMES
    if suffix := re.match(r"[A-Za-z]\b", behind):
        return suffix[0].lower()  # 1.5B and 4M parameters
    version = re.search(r"(TRL|vLLM|SGLang|torch|transformers) $", before)
    if version:
        return version[1]
    word = re.match(r"\s*(tokens/s|[%×]|[\w-]+)", behind)
    unit = word[1] if word else ""
    return {"and": "to", "times": TIMES, "x": TIMES, "questions": "held-out"}.get(unit, unit)


def problems(page: Path, settings: Path) -> list[str]:
    """What in a page's results has no record, in words."""
    described = _described(settings)
    found: list[str] = []
    for part in re.split(r"\n\s*\n", block(page).strip()):
        if part.startswith("|"):
            header, _, *rows = (_cells(line) for line in part.splitlines())
            for row in rows:
                found += [f"{row[0]}: {problem}" for problem in _row(page, header, row, described)]
        else:
            found += [f"{part[:60]}…: {problem}" for problem in _paragraph(page, part)]
    return found


@cache
def _described(settings: Path) -> list[Figure]:
    text = settings.read_text()
    return figures(text.partition(START)[0] + text.partition(END)[2])


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def _row(page: Path, header: Sequence[str], row: Sequence[str], described: Sequence[Figure]) -> Iterator[str]:
    columns = dict(zip(header, row, strict=True))
    yield from (f"{each} is not in bench/README.md" for each in figures(columns["work"]) if each not in described)
    link = LINK.search(columns["record"])
    if link is None:
        yield "there is no link to a record"
        return
    label, files = link[1], list(_records(page, columns["record"]))
    yield from _dates(columns["record"], files)
    written = "\n".join(file.read_text() for file in files if file.suffix == ".md")
    for version in figures(columns["peer"]):
        if f"{version.unit} {version.text}".lower() not in written.lower():
            yield f"{version.unit} {version.text} is not in the record"
    words = {word.strip(",") for word in DATE.sub("", label).split()}
    runs = [run for file in files if file.suffix == ".json" for run in _runs_in(file)]
    runs = [run for run in runs if words <= run.words]
    rates = {}
    for side in ("peer", "Trimtab"):
        claimed = [
            each for name, cell in columns.items() if name.startswith(f"{side}: ")
            for each in figures(cell, name.partition(": ")[2])
        ]  # fmt: skip
        yield from () if any(each.unit == RATE for each in claimed) else (f"{side} has no rate",)
        mine = [run for run in runs if run.is_trimtab == (side == "Trimtab")]
        fitting = [
            run
            for run in mine
            if all(each.unit in run.values and each.is_of(run.values[each.unit]) for each in claimed)
        ]
        if not fitting:
            yield f"no run of {label} has {side}'s {', '.join(map(str, claimed))}"
            continue
        rates[side] = fitting[0].values[RATE]
    ratios = figures(columns[""])
    if [each.unit for each in ratios] != [TIMES]:
        yield "there is no ratio"
    elif len(rates) == 2 and not ratios[0].is_of(rates["Trimtab"] / rates["peer"]):
        yield f"{ratios[0]} is {rates['Trimtab'] / rates['peer']:.3f}"


def _paragraph(page: Path, text: str) -> Iterator[str]:
    claimed = [each for each in figures(text) if each.unit != "b"]  # the 7B shape is a name here
    files = list(_records(page, text))
    if claimed and not files:
        yield f"{', '.join(map(str, claimed))} without a link to a record"
        return
    yield from _dates(text, files)
    written = [each for file in files if file.suffix == ".md" for each in _page_of(file)]
    for file in files:
        if file.name.startswith("tuning_random-"):
            written += _random_in(file)
    for each in claimed:
        if not any(each.unit == there.unit and each.is_of(there.value) for there in written):
            yield f"{each} is not in {', '.join(file.name for file in files)}"


def _records(page: Path, text: str) -> Iterator[Path]:
    """The linked files of bench/results, and the JSON beside a page of them."""
    for _, target in LINK.findall(text):
        file = (page.parent / target).resolve()
        if file.parent.name != "results":
            continue
        assert file.is_file(), f"{target} is not there"
        assert DATE.search(file.name), f"{target} has no date"
        yield file
        if file.suffix == ".md" and file.with_suffix(".json").exists():
            yield file.with_suffix(".json")


def _dates(text: str, files: Sequence[Path]) -> Iterator[str]:
    there = {day for file in files for day in DATE.findall(file.name)}
    yield from (f"{day} is no record's date" for day in DATE.findall(LINK.sub(r"\1", text)) if day not in there)


def recorded(page: str) -> list[Figure]:
    """What a record's page says in its sentences; of its tables all rates, and of other columns the smallest and the largest."""
    found: list[Figure] = []
    columns: list[list[str]] = []
    for line in [*page.splitlines(), ""]:
        if line.startswith("|"):
            columns = columns or [[] for _ in _cells(line)]
            for column, cell in zip(columns, _cells(line), strict=True):
                column.append(cell)
            continue
        found += figures(line)
        for header, *cells in columns:
            is_rate = header.endswith(RATE)
            numbers = sorted((each for cell in cells for each in figures(cell, RATE if is_rate else "")), key=_size)
            found += numbers if is_rate else [*numbers[:1], *numbers[-1:]]
        columns = []
    return found


def _size(figure: Figure) -> float:
    return figure.value


@cache
def _page_of(file: Path) -> list[Figure]:
    return recorded(file.read_text())


@cache
def _runs_in(file: Path) -> list[Run]:
    return list(runs_of(json.loads(file.read_text())))


@cache
def _random_in(file: Path) -> list[Figure]:
    return random_runs(json.loads(file.read_text()))


def runs_of(found: Any, words: frozenset[str] = frozenset()) -> Iterator[Run]:
    """Every run of a side in a JSON record. Runs that a median was taken of are not runs to be cited."""
    if not isinstance(found, dict):
        return
    values = {unit: found[key] for key, unit in PEAKS.items() if key in found}
    tokens, seconds = found.get("tokens"), found.get("seconds")
    if isinstance(tokens, list) and isinstance(seconds, list):
        values[RATE] = sum(tokens[1:]) / sum(seconds[1:])
    elif "tokens_per_s" in found:
        values[RATE] = found["tokens_per_s"]
    if RATE in values:
        yield Run(words, values)
    for key, inner in found.items():
        if key != "runs":
            yield from runs_of(inner, words | {word.strip(",") for word in key.split()})


def random_runs(runs: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """What the random runs of bench/tuning.py come to."""
    ratios = [ratio for run in runs for ratio in run["predicted_over_measured"]]
    finished = [run for run in runs if run["outcome"] == "finished"]
    recovered = [run for run in finished if run["recoveries"]]
    return [
        *(Figure(repr(ratio), TIMES) for ratio in (min(ratios), max(ratios))),
        *(Figure(str(len(some)), "runs") for some in (runs, finished)),
        Figure(str(len(recovered)), "run"),
    ]
