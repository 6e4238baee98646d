"""The views of a running step: one plain line, or a live panel that redraws in place; and the phase table."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.observe.format import count, duration, get, gib, number, percent, scores, sparkline
from trimtab.observe.history import History, offline_loss
from trimtab.observe.signal import signal_share

PART = "  "
SPARK_WIDTH = 24
BAR_WIDTH = 12


def step_line(history: History) -> str:
    """`step 12/200 | reward 0.431 ±0.49 | signal 75% | len 213 | 18.2k tok/s | 3.1 s (rollout 61% ...) | ETA 9m 40s`

    Memory, where there is a meter: the update's measured peak, and what was predicted for its micro-batches."""
    metrics = history.metrics
    parts = [
        f"step {history.step}/{history.total_steps}",
        *_learned(metrics),
        f"{count(get(metrics, 'throughput/tokens_per_s'))} tok/s",
        f"{duration(get(metrics, 'time/total'))}{_phase_shares(history)}",
        f"ETA {duration(history.eta_s)}",
    ]
    peak, predicted = get(metrics, "memory/update_peak_gib"), get(metrics, "memory/update_predicted_gib")
    if peak is not None and predicted is not None:
        parts.insert(-1, f"update peak {gib(peak)}, predicted {gib(predicted)}")
    return " | ".join(parts)


def _learned(metrics: Mapping[str, float]) -> list[str]:
    """What a step is about: its rewards, or the loss of a supervised one."""
    name = offline_loss(metrics)
    if name:
        held_out = get(metrics, "eval/loss")
        shown = [f"loss {number(get(metrics, name))} nats"]
        if name == "rm/loss":
            shown.append(f"right {percent(get(metrics, 'rm/accuracy'))}")
        return shown if held_out is None else [*shown, f"held-out {number(held_out)}"]
    turns, signal = get(metrics, "environment/turns_mean"), signal_share(metrics)
    return [
        f"reward {number(get(metrics, 'reward/mean'))} ±{number(get(metrics, 'reward/std'), 2)}",
        *([f"signal {percent(signal)}"] if signal is not None else []),
        f"len {count(get(metrics, 'response/length_mean'))}",
        *([f"turns {number(turns, 1)}"] if turns is not None else []),
    ]


def _phase_shares(history: History) -> str:
    """Phases that round to at least 1% of the step."""
    total = get(history.metrics, "time/total")
    if not total:
        return ""
    shares = {name: seconds / total for name, seconds in history.step_phases.items()}
    shown = [f"{name} {percent(share)}" for name, share in shares.items() if share >= 0.005]
    return f" ({' '.join(shown)})" if shown else ""


def phase_table(
    phase_seconds: Mapping[str, float], steps: int = 1, rollout_parts: Mapping[str, float] | None = None
) -> Table:
    """Seconds and share of each phase; with more than one step, the mean too. Phases that never ran are left out.

    `rollout_parts` are shown under rollout, of which they are parts.
    """
    total = sum(phase_seconds.values())
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("phase")
    table.add_column("time", justify="right")
    if steps > 1:
        table.add_column("per step", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True)
    rows = list(phase_seconds.items())
    if rollout_parts:
        at = list(phase_seconds).index("rollout") + 1
        rows[at:at] = [(PART + name, seconds) for name, seconds in rollout_parts.items()]
    for name, seconds in [*rows, ("total", total)]:
        if not seconds:
            continue
        share = seconds / total
        mean = [duration(seconds / steps)] if steps > 1 else []
        bar = "" if name == "total" or name.startswith(PART) else "█" * round(BAR_WIDTH * share)
        table.add_row(name, duration(seconds), *mean, percent(share), Text(bar, style="cyan"), style=_style(name))
    return table


def _style(phase: str) -> str:
    return "dim" if phase == "idle" or phase.startswith(PART) else "bold" if phase == "total" else ""


class LivePanel:
    """A renderable over a history that goes on changing; also says which phase runs now and for how long."""

    def __init__(self, history: History, clock: Callable[[], float] = time.monotonic) -> None:
        self._history = history
        self._clock = clock
        self._phase = "starting"
        self._phase_start = clock()

    def working(self, phase: str) -> None:
        self._phase, self._phase_start = phase, self._clock()

    def __rich__(self) -> RenderableType:
        body = Table.grid(padding=(0, 4))
        body.add_row(self._numbers(), phase_table(self._history.step_phases, 1, self._history.step_rollout_parts))
        title = f"Trimtab · step {self._history.step}/{self._history.total_steps}"
        return Panel(
            Group(self._bar(), Text(), body), title=title, title_align="left", box=box.ROUNDED, border_style="cyan"
        )

    def _bar(self) -> RenderableType:
        history = self._history
        now = f"{self._phase} {duration(self._clock() - self._phase_start)}"
        row = Table.grid(padding=(0, 2), expand=True)
        row.add_column(ratio=1)
        row.add_row(
            ProgressBar(total=history.total_steps, completed=history.step),
            Text(percent(history.step / history.total_steps), style="bold"),
            Text(f"{duration(history.elapsed_s)} elapsed"),
            Text(f"ETA {duration(history.eta_s)}", style="bold"),
            Text(f"now: {now}", style="dim"),
        )
        return row

    def _numbers(self) -> Table:
        grid = Table.grid(padding=(0, 2))
        for label, value in panel_facts(self._history):
            grid.add_row(Text(label, style="dim"), Text(value))
        return grid


def panel_facts(history: History) -> list[tuple[str, str]]:
    """The panel's lines: (label, value with its unit). KL to a reference and evaluation appear once there is one."""
    metrics = history.metrics
    spark = sparkline(history.rewards, SPARK_WIDTH)
    if name := offline_loss(metrics):
        of = "token" if name == "sft/loss" else "pair"
        lines = [
            ("loss", f"{number(get(metrics, name))} nats per {of}  {spark}".rstrip()),
            *([("right", percent(get(metrics, "rm/accuracy")))] if name == "rm/loss" else []),
            ("throughput", f"{count(get(metrics, 'throughput/tokens_per_s'))} tok/s"),
            ("memory", _memory(metrics)),
        ]
        if history.last_eval:
            step, values = history.last_eval
            lines.append(("eval", f"{scores(values)} (step {step})"))
        return lines
    signal = signal_share(metrics)
    lines = [
        ("reward", f"{number(get(metrics, 'reward/mean'))} ±{number(get(metrics, 'reward/std'), 2)}  {spark}".rstrip()),
        *([("signal", f"{percent(signal)} of groups")] if signal is not None else []),
        ("response", f"{count(get(metrics, 'response/length_mean'))} tokens"),
        ("truncated", f"{percent(get(metrics, 'response/truncated'), 1)} of responses"),
        ("throughput", f"{count(get(metrics, 'throughput/tokens_per_s'))} tok/s"),
        ("entropy", f"{number(get(metrics, 'policy/entropy'))} nats per token"),
    ]
    if get(metrics, "policy/kl_ref") is not None:
        lines.append(("KL to ref.", f"{number(get(metrics, 'policy/kl_ref'), 4)} nats per token"))
    if get(metrics, "policy/kl_old") is not None:
        lines.append(("KL of step", f"{number(get(metrics, 'policy/kl_old'), 4)} nats per token"))
    lines.append(("memory", _memory(metrics)))
    if history.last_eval:
        step, values = history.last_eval
        lines.append(("eval", f"{scores(values)} (step {step})"))
    return lines


def _memory(metrics: Mapping[str, float]) -> str:
    """Where there is no device, peaks are the host's, which is told already."""
    own = [
        name for name in metrics if name.startswith("memory/") and name.endswith("_peak_gib") and "reserved" not in name
    ]
    peaks = [get(metrics, name) for name in own if "memory/device_total_gib" in metrics]
    device = max((peak for peak in peaks if peak is not None), default=None)
    predicted = get(metrics, "memory/update_predicted_gib")
    beside = (
        ""
        if predicted is None
        else f" (update {gib(get(metrics, 'memory/update_peak_gib'))}, predicted {gib(predicted)})"
    )
    return f"device peak {gib(device)}{beside}, host {gib(get(metrics, 'memory/host_gib'))}"
