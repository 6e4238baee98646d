"""The other pages: samples as the model wrote them, the log, and the keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from trimtab.observe.format import get, number
from trimtab.observe.visible import visible, visible_lines
from trimtab.observe.watch.fit import Lines, cut, rule, wrap
from trimtab.observe.watch.sections import event_line
from trimtab.observe.watch.view import RunView

PAGES = ("overview", "samples", "log", "help")
KEYS = (
    ("1 2 3 4", "overview, samples, log, help"),
    ("j k", "next and previous sample; in the log, later and earlier"),
    ("h l", "earlier and later step (samples)"),
    ("space b", "further and back in a long sample"),
    ("q", "quit; so does Ctrl-C. The run goes on"),
)
MARKED = "✓ healthy or running, ▲ a warning, ✗ bad, ○ not known, ┃ what the plan predicted"
MAX_CHARACTERS = 100_000


def footer(page: int, width: int) -> Text:
    line = Text()
    for number_, name in enumerate(PAGES, start=1):
        line.append(f" {number_} {name} ", style="reverse" if number_ == page else "dim")
    line.append("  q quit", style="dim")
    return cut(line, width)


def help_lines(width: int, height: int) -> Lines:
    lines = [rule("keys", width)]
    lines += [Text.assemble((keys.ljust(9), "bold"), words) for keys, words in KEYS]
    lines += [rule("marks", width), *wrap(MARKED, width, 5), rule("more", width)]
    lines += wrap(
        "trimtab doctor RUN says what is wrong and what to change; docs/watch.md explains this screen.", width, 5
    )
    return [cut(line, width) for line in lines[:height]]


def log_lines(view: RunView, back: int, width: int, height: int) -> Lines:
    """Events up to the newest but `back`."""
    events = view.rows("events")
    if not events:
        return wrap("This run has no events.jsonl: an earlier version of Trimtab wrote it.", width, height, "dim")
    end = max(min(height, len(events)), len(events) - back)
    return [cut(event_line(row), width) for row in events[max(0, end - height) : end]]


def sample_lines(
    steps: Sequence[int],
    step: int | None,
    rows: Sequence[Mapping[str, Any]],
    at: int,
    skip: int,
    width: int,
    height: int,
) -> Lines:
    """One sample: what it was asked, what it wrote, and what it got for it. `skip`: lines that are left out at the top."""
    if step is None or not rows:
        words = "No samples yet." if not steps else f"Step {step} has no samples that can be read."
        return wrap(f"{words} observe.samples_every says how often they are written.", width, height, "dim")
    row = rows[at]
    place = f"step {step} ({list(steps).index(step) + 1} of {len(steps)}), sample {at + 1} of {len(rows)}"
    lines = [Text.assemble((place, "bold"), ("   j k sample, h l step, space b text", "dim")), _facts(row)]
    body = _body(row, width)
    room = max(1, height - len(lines) - 1)
    skip = max(0, min(skip, len(body) - room))
    shown = body[skip : skip + room]
    rest = len(body) - skip - len(shown)
    lines += shown
    if rest > 0:
        lines.append(Text(f"… {rest} more lines", style="dim"))
    return [cut(line, width) for line in lines[:height]]


def _facts(row: Mapping[str, Any]) -> Text:
    """`reward 1.000 (exact_match 1.000), advantage 0.5, 213 tokens, stop, best`"""
    rewards = row.get("rewards")
    parts = ""
    if isinstance(rewards, Mapping):
        parts = " (" + ", ".join(f"{visible(str(name))} {_number(value)}" for name, value in rewards.items()) + ")"
    found = [f"reward {_number(row.get('reward'))}{parts}"]
    if get_number(row, "advantage") is not None:
        found.append(f"advantage {number(get_number(row, 'advantage'))}")
    if get_number(row, "tokens") is not None:
        found.append(f"{get_number(row, 'tokens'):.0f} tokens")
    found += [visible(str(row[key])) for key in ("finish", "chosen", "task", "failure") if row.get(key)]
    if row.get("answer") is not None:
        found.append(f"expected {visible(str(row['answer']))[:80]}")
    return Text(", ".join(found), style="cyan")


def _body(row: Mapping[str, Any], width: int) -> Lines:
    lines = [rule("prompt", width), *_text(row.get("prompt"), width)]
    return [*lines, rule("completion", width), *_text(row.get("completion"), width)]


def _text(value: Any, width: int) -> Lines:
    """Text as it is, line by line, folded at the width."""
    found: Lines = []
    text = value if isinstance(value, str) else "" if value is None else str(value)
    for line in visible_lines(text[:MAX_CHARACTERS]):
        found += [Text(line[start : start + width]) for start in range(0, max(1, len(line)), width)]
    if len(text) > MAX_CHARACTERS:
        found.append(Text(f"… {len(text) - MAX_CHARACTERS:,} more characters are in the file", style="dim"))
    return found


def get_number(row: Mapping[str, Any], key: str) -> float | None:
    value = row.get(key)
    return get(row, key) if isinstance(value, int | float) else None


def _number(value: Any) -> str:
    return number(value if isinstance(value, int | float) else None)
