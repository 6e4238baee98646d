"""The start card: what will be learned, on what, and how Trimtab chose to run it, before the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.base.units import GIB
from trimtab.observe.format import MISSING, count, gib

GIVE_UP_SPEED = (
    "run.checkpoint_activations",
    "run.offload.optimizer",
    "run.offload.reference",
    "run.offload.activations",
)
"""True here saves memory and takes time."""
DECIDED_BY_MEMORY = ("run.token_budget", "run.rollout.kv_memory", "run.rollout.max_sequences", "run.kernels")
"""On a device these differ from run to run."""


@dataclass(frozen=True)
class StartCard:
    """The facts of a run. None: not known, or there is none."""

    run_dir: Path | str
    model: str
    parameters: int
    dtype: str
    device: str
    algorithm: str
    batch: Sequence[tuple[str, str]]
    """What a step takes: (label, words)."""
    data_rows: int
    prompt: Sequence[tuple[str, str]] = ()
    """One row as the model reads it, and what ends its answers: (label, words)."""
    eval_rows: int | None = None
    evaluation: str | None = None
    """How evaluation samples and where that differs from training, in words."""
    trainable_parameters: int | None = None
    """Where it is not all of them (LoRA)."""
    device_peak_gib: float | None = None
    """Predicted."""
    device_total_gib: float | None = None
    host_peak_gib: float | None = None
    """Predicted."""
    host_total_gib: float | None = None
    engine: str | None = None
    """How rollout runs, in words."""
    update: str | None = None
    """How forward and backward passes run, in words."""
    choices: Sequence[tuple[str, Any, str]] = ()
    """What was decided: (key, value, why)."""
    resumed_from: int | None = None

    def facts(self) -> list[tuple[str, str]]:
        """The card's lines: (label, value with its unit)."""
        lines = [
            ("model", f"{self.model}, {self._parameters()}, {self.dtype}"),
            ("device", self.device),
            *([("rollout", self.engine)] if self.engine else []),
            *([("update", self.update)] if self.update else []),
            ("algorithm", self.algorithm),
            *self.batch,
            ("data", f"{self.data_rows:,} training rows, {_rows(self.eval_rows)}"),
            *([("evaluation", self.evaluation)] if self.evaluation else []),
            *self.prompt,
            *self._memory(),
            ("run folder", str(self.run_dir)),
        ]
        resumed = [] if self.resumed_from is None else [("resumed", f"after step {self.resumed_from}")]
        return lines + resumed

    def _memory(self) -> list[tuple[str, str]]:
        host = f"host {_of(self.host_peak_gib, self.host_total_gib)}"
        if self.on_cpu:
            return [("memory", host)]
        return [("memory", f"device {_of(self.device_peak_gib, self.device_total_gib)}"), ("", host)]

    @property
    def on_cpu(self) -> bool:
        return self.device_peak_gib is None and self.device_total_gib is None

    def _parameters(self) -> str:
        total = f"{count(self.parameters).replace('G', 'B')} parameters"
        if self.trainable_parameters in (None, self.parameters):
            return total
        return f"{total} ({count(self.trainable_parameters).replace('G', 'B')} trained)"

    def __rich__(self) -> RenderableType:
        return self.view()

    def view(self, verbose: bool = False) -> RenderableType:
        """`verbose`: with every choice; else those that are not usual, and how many others there are."""
        facts = Table.grid(padding=(0, 2))
        for label, value in self.facts():
            facts.add_row(Text(label, style="dim"), Text(value))
        parts: list[RenderableType] = [facts]
        made = Counter(key for key, _, _ in self.choices)  # one that was made twice: the first could not be had
        told = [c for c in self.choices if verbose or made[c[0]] > 1 or is_unusual(c[0], c[1], self.on_cpu)]
        if told:
            parts += [Text(), choices_table(told)]
        if usual := len(self.choices) - len(told):
            line = Text(
                f"{usual}{' other' * bool(told)} run choices have their usual values; --verbose shows them", style="dim"
            )
            parts += [line] if told else [Text(), line]
        return Panel(
            Group(*parts), title="Trimtab", title_align="left", box=box.ROUNDED, border_style="cyan", expand=False
        )


def is_unusual(key: str, value: Any, on_cpu: bool) -> bool:
    """Whether a choice is worth a look: it costs speed to save memory, or it could be another on the same machine.

    On a CPU there is one memory for all and little to choose: only another engine, and what was given up, are told."""
    if isinstance(value, bool):
        return value and key in GIVE_UP_SPEED
    if key == "run.engine":
        return bool(value != "native")
    return not on_cpu and key in DECIDED_BY_MEMORY


def rollout_batch(prompts: int, samples: int, new_tokens: int, updates: int) -> list[tuple[str, str]]:
    """The batch of a step that generates what it learns from."""
    sequences = prompts * samples
    return [
        ("batch", f"{prompts} prompts × {samples} samples = {sequences:,} sequences per step"),
        ("tokens", f"up to {sequences * new_tokens:,} new tokens per step ({new_tokens:,} per sequence)"),
        ("updates", f"{updates} per batch{' (on-policy)' if updates == 1 else ''}"),
    ]


def choices_table(choices: Sequence[tuple[str, Any, str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("run choice", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("why", style="dim")
    for key, value, why in choices:
        table.add_row(Text(key), Text(shown(key, value), style="bold"), Text(why))
    return table


def shown(key: str, value: Any) -> str:
    """A value of `run`: bytes as gibibytes, numbers with their thousands apart."""
    if not isinstance(value, int) or isinstance(value, bool):
        return str(value)
    return gib(value / GIB) if key.endswith("_memory") else f"{value:,}"


def _rows(rows: int | None) -> str:
    return "no evaluation set" if rows is None else f"{rows:,} evaluation rows"


def _of(peak: float | None, total: float | None) -> str:
    if peak is None:
        return MISSING if total is None else f"{gib(total)} total"
    return f"{gib(peak)} predicted peak" + ("" if total is None else f" of {gib(total)}")
