"""What a person sees of a run: a start card, the steps, a closing summary. Live on a terminal, else a line a step.

Everything goes to one `file`, so with `--json` the text is sent to stderr and stdout stays machine-readable. Missing or
non-finite metrics are shown as '-'. Text from outside is printed as it is: brackets are never taken for markup.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from trimtab.base.streams import outlet
from trimtab.observe.card import StartCard
from trimtab.observe.format import MISSING, count, duration, finite, gib, number, percent, scores
from trimtab.observe.history import History
from trimtab.observe.notebook import NotebookView, notebook_display
from trimtab.observe.panel import LivePanel, phase_table, step_line
from trimtab.observe.signal import SignalWatch
from trimtab.observe.waiting import Waiting
from trimtab.record.events import Level

PLAIN_WIDTH = 120
REFRESHES_A_SECOND = 1
PHASE_WORDS = {
    "rollout": "sampling completions",
    "reward": "waiting for rewards",
    "score": "computing log-probs",
    "update": "updating the policy",
    "publish": "sending the weights to the engine",
    "checkpoint": "writing a checkpoint",
    "eval": "evaluating",
}


class Console:
    """Use as a context manager (or call `close`), so that an error leaves the terminal as it was."""

    def __init__(
        self,
        total_steps: int,
        live: bool | None = None,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`live`: redraw in place; None: when `file` is a terminal. `file`: None is stdout."""
        display = notebook_display(sys.stdout if file is None else file)
        file = outlet(sys.stdout if file is None else file)
        terminal = file.isatty()
        width = None if terminal else PLAIN_WIDTH
        # In a notebook Rich would display every print as an output of its own, with escape sequences in its plain text.
        self._rich = RichConsole(
            file=file, width=width, markup=False, emoji=False, highlight=False, soft_wrap=False, force_jupyter=False,
            force_terminal=None if display is None else False,
        )  # fmt: skip
        self.history = History(total_steps)
        self._panel = LivePanel(self.history, clock)
        notebook = display is not None and live is None
        self._notebook = NotebookView(display, self.history, self._panel) if notebook else None
        self._signal = SignalWatch()
        self._wants_live = terminal if live is None else live
        self._live: Live | None = None
        self._waiting = Waiting(file, terminal)
        self.on_event: Callable[[Level, str, str], object] = lambda level, kind, text: None
        """Told of every note and warning: its level, its kind and its text."""

    def card(self, card: StartCard, verbose: bool = False) -> None:
        """`verbose`: with every choice, those that are usual too."""
        if self._notebook:
            self._notebook.name = Path(card.run_dir).name
        self._waiting.done()
        self._print(card.view(verbose))

    def working(self, phase: str) -> None:
        """The phase that runs now, for the live view; `Timeline(on_phase=console.working)` calls it."""
        self._now(phase)
        self._show_live()
        # In a log, the first line takes longest; after it the steps themselves are the sign of life.
        if self._live is None and (phase == "eval" or not self.history.step):
            self._waiting.on(f"step {self.history.step + 1}: {PHASE_WORDS[phase]}" if phase != "eval" else "evaluating")

    def waiting(self, what: str) -> None:
        """What is being waited for from now on, until something else is shown."""
        self._now(what)
        if self._live is None:
            self._waiting.on(what)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._waiting.done()
        self.history.add(step, metrics)
        if self._notebook:
            self._notebook.step(step, metrics)
        elif self._wants_live:
            self._show_live()
        else:
            self._print(Text(step_line(self.history)))
        if warning := self._signal.saw(metrics):
            self.warn(warning)

    def eval(self, step: int, scores_: Mapping[str, Any]) -> None:
        """Scores by name, with or without the `eval/` prefix."""
        self._waiting.done()
        self.history.last_eval = (step, dict(scores_))
        self._print(Text(f"eval at step {step} | {scores(scores_)}"))

    def note(self, text: str, kind: str = "note") -> None:
        self.on_event("info", kind, text)
        self._print(Text(text))

    def warn(self, text: str, kind: str = "warning") -> None:
        """`kind`: of the event that it is in events.jsonl."""
        self.on_event("warn", kind, text)
        with self._waiting.free_line():
            self._rich.print(Text(f"warning: {text}", style="yellow"), soft_wrap=True)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Where the whole session's time went, then the summary (the fields of `trimtab train --json`)."""
        self.close()
        steps = len(self.history.rewards)
        if steps:
            self._print(Text(f"\nWhere the time went ({steps} step{'s' * (steps > 1)}):"))
            self._print(phase_table(self.history.phase_seconds, steps, self.history.rollout_parts))
        grid = Table.grid(padding=(0, 2))
        for label, value in summary_facts(summary):
            grid.add_row(Text(label, style="dim"), Text(value, overflow="fold"))
        self._print(Text())
        self._print(grid)

    def close(self) -> None:
        if self._notebook:
            self._notebook.close()
        if self._live:
            self._live.stop()
            self._live = None
        self._waiting.close()

    def __enter__(self) -> Console:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _now(self, phase: str) -> None:
        self._panel.working(phase)
        if self._notebook:
            self._notebook.working(phase)

    def _print(self, thing: Any) -> None:
        with self._waiting.free_line():
            self._rich.print(thing, soft_wrap=isinstance(thing, Text))

    def _show_live(self) -> None:
        """Start the panel once; from then on its own thread redraws it, so a step never waits for the terminal."""
        if self._live is None and self._wants_live:
            self._waiting.done()
            self._live = Live(self._panel, console=self._rich, refresh_per_second=REFRESHES_A_SECOND, transient=True)
            self._live.start()


def summary_facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The summary's lines, with units. Fields not known here are shown as they are; none is left out."""
    rest = dict(summary)
    first, last = rest.pop("reward_first", None), rest.pop("reward_last", None)
    lines = [("reward", f"{number(first)} → {number(last)}")] if {"reward_first", "reward_last"} & set(summary) else []
    if {"loss_first", "loss_last"} & set(summary):
        lines.append(("loss", f"{number(rest.pop('loss_first', None))} → {number(rest.pop('loss_last', None))}"))
    for key in ("accuracy", "score_mean", "score_std"):  # of a reward model, told before the run's costs
        if key in rest:
            lines.append((key.replace("_", " "), number(rest.pop(key))))
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "eval": ("eval", _eval),
        "steps": ("steps", str),
        "tokens_per_s": ("throughput", lambda value: f"{count(value)} tok/s"),
        "peak_gib": ("peak memory", gib),
        "seconds": ("time", duration),
        "run_dir": ("run folder", str),
    }
    if isinstance(rest.get("eval"), Mapping):
        measured = [value for name, value in rest["eval"].items() if name != "measure"]
        if all(finite(value) is None for value in measured):
            del rest["eval"]  # without an evaluation set there is nothing to show
    for key, (label, show) in shown.items():
        if key in rest:
            lines.append((label, show(rest.pop(key))))
    return lines + [(key, MISSING if value is None else str(value)) for key, value in rest.items()]


def _eval(value: Any) -> str:
    """Scores by name, or a single accuracy. Before and after are shares of prompts solved, or of what `measure` names."""
    if isinstance(value, Mapping) and "measure" in value:
        return f"{value['measure']} {number(value.get('before'))} → {number(value.get('after'))}"
    if isinstance(value, Mapping) and set(value) == {"before", "after"}:
        return f"pass@1 {percent(value['before'], 1)} → {percent(value['after'], 1)}"
    return (
        scores(value)
        if isinstance(value, Mapping)
        else scores({"pass@1": value})
        if finite(value) is not None
        else MISSING
    )
