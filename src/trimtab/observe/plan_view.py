"""A plan for people: a bar for each phase against the memory there is, where the bytes go, what was chosen and why."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.observe.card import choices_table, shown
from trimtab.observe.format import MISSING, count, gib
from trimtab.plan.ledger import GIB, Phase
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import limit_words
from trimtab.plan.report import Offer
from trimtab.plan.times import PHASES

WIDTH = 40
COLOURS = {
    "weights": "blue", "reference": "bright_blue", "rollout weights": "blue", "masters": "cyan", "optimizer state": "cyan",
    "gradients": "magenta", "activations": "green", "backward work": "green",
    "embedding gradient": "green", "log-prob head": "yellow", "KV cache": "yellow",
    "staging": "yellow", "gathered layers": "green", "gradient buffers": "magenta", "NCCL": "bright_black",
}  # fmt: skip


def plan_view(
    plan: Plan, offers: Sequence[Offer] = (), profile: str = "balanced", of: str | None = None
) -> RenderableType:
    """`of`: whose plan it is, where it is that of some devices only."""
    parts: list[RenderableType] = [_facts(plan, profile), Text(), _bars(plan), Text(), _components(plan), Text()]
    if not plan.fits:
        parts.append(Text("The run does not fit, even with these minimum memory settings:", style="red"))
    parts.append(choices_table([(c.key, c.value, c.why) for c in plan.choices if _concerns(c.key, plan)]))
    parts += [Text(), _times(plan, offers)] if plan.fits else []
    title = f"Plan of {of}" if of else "Plan"
    title += "" if plan.fits else ": does not fit"
    return Panel(
        Group(*parts),
        title=title,
        title_align="left",
        box=box.ROUNDED,
        border_style="cyan" if plan.fits else "red",
        expand=False,
    )


def _concerns(key: str, plan: Plan) -> bool:
    """Devices that only generate have no update to decide for."""
    return plan.job.training or key.startswith(("run.rollout.", "run.engine", "run.kernels", "run.threads"))


def _facts(plan: Plan, profile: str) -> Table:
    job, machine = plan.job, plan.machine
    table = Table.grid(padding=(0, 2))
    trained = "" if job.trained == job.shape.parameters else f", {_parameters(job.trained)} trained"
    where = (
        "CPU" if machine.cpu else f"{machine.devices} × {machine.device.name}, {gib(machine.device.memory / GIB)} each"
    )
    if machine.cpu and machine.devices > 1:
        where += f", {machine.devices} processes"
    table.add_row(Text("model", style="dim"), Text(f"{job.shape.kind}, {_parameters(job.shape.parameters)}{trained}"))
    table.add_row(Text("machine", style="dim"), Text(where))
    if machine.devices > 1:
        table.add_row(Text("each rank", style="dim"), Text(_held(plan)))
    limit = plan.limits.host if machine.cpu else plan.limits.device
    words = f"up to {gib(limit / GIB)}: {limit_words(plan, plan.run, profile, machine.cpu)}"
    table.add_row(Text("limit", style="dim"), Text(words))
    batch = f"{job.prompts} prompts × {job.samples} samples, prompts up to {job.longest_prompt:,} tokens, {job.completion:,} new"
    table.add_row(Text("step", style="dim"), Text(batch))
    stored = f"{job.kv_token_bytes:,} bytes per token"
    carried = job.shape.state_bytes(job.itemsize)
    stored += f", and {carried:,} bytes per sequence of what other layers carry" if carried else ""
    table.add_row(Text("KV cache", style="dim"), Text(stored))
    return table


def _held(plan: Plan) -> str:
    """What a rank holds whole and what it holds a part of."""
    place, parts = plan.place, f"{plan.place.shard_devices} parts"
    whole = {
        "none": "holds everything whole",
        "optimizer": f"holds weights and gradients whole; masters and optimizer state in {parts}",
        "gradients": f"holds weights whole; gradients, masters and optimizer state in {parts}",
        "full": f"holds everything in {parts}; layers are gathered as they are used",
    }[place.shard]
    copies = f", {place.copies} times" if place.shard != "none" and place.copies > 1 else ""
    engines = f"; engines cut over {place.tensor} devices each" if place.tensor > 1 else ""
    return whole + copies + engines


def _parameters(number: int) -> str:
    return f"{count(number).replace('G', 'B')} parameters"


def _bars(plan: Plan) -> Table:
    cpu = plan.machine.cpu
    total = plan.machine.host_memory if cpu else plan.machine.device.memory
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), show_header=False)
    for phase in plan.ledger.phases:
        used = phase.host_bytes if cpu else phase.device_bytes
        over = phase in _too_full(plan)
        words = f"{used / GIB:.1f} GiB" + ("  does not fit" if over else "")
        table.add_row(
            Text(phase.name), _bar(phase.host if cpu else phase.device, total), Text(f"{used / total:4.0%}"),
            Text(words, style="red" if over else ""),
        )  # fmt: skip
    return table


def _bar(parts: dict[str, int], total: int) -> Text:
    """Each component in its colour, the rest of the memory in dots; what exceeds it is cut."""
    bar, filled, cells = Text(), 0, 0
    for name, size in sorted(
        parts.items(), key=lambda part: list(COLOURS).index(part[0]) if part[0] in COLOURS else 99
    ):
        filled += size
        end = min(WIDTH, round(filled / total * WIDTH))
        bar.append("█" * (end - cells), style=COLOURS.get(name, "bright_black"))
        cells = max(cells, end)
    return bar.append("·" * (WIDTH - cells), style="dim")


def _too_full(plan: Plan) -> list[Phase]:
    """Phases that exceed a limit, of the device or of the host."""
    limits = plan.limits
    return [p for p in plan.ledger.phases if p.required_bytes > limits.device or p.host_bytes > limits.host]


def _components(plan: Plan) -> Table:
    """Gigabytes by component, of the phases that differ and of those that decide."""
    shown = _distinct(plan)
    names: dict[str, None] = {}
    for phase in shown:
        names |= dict.fromkeys(phase.host if plan.machine.cpu else phase.device)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("GiB", style="dim")
    for phase in shown:
        table.add_column(phase.name, justify="right", no_wrap=True)
    for name in names:
        sizes = [(phase.host if plan.machine.cpu else phase.device).get(name, 0) / GIB for phase in shown]
        if max(sizes) >= 0.005:
            table.add_row(Text(name), *(Text(f"{size:.2f}" if size >= 0.005 else "") for size in sizes))
    if not plan.machine.cpu:
        table.add_row(Text("host"), *(Text(f"{phase.host_bytes / GIB:.1f}", style="dim") for phase in shown))
    return table


def _distinct(plan: Plan) -> list[Phase]:
    """Five phases at most: the fullest is one of them, and one that is too full of host memory."""
    decisive = [
        plan.ledger.fullest,
        *([plan.ledger.fullest_host] if plan.ledger.fullest_host in _too_full(plan) else []),
    ]
    usual = ["rollout", "score", "update", "optimizer", "checkpoint"]
    if any(phase.name not in usual for phase in decisive):
        usual.remove("checkpoint")
    return [phase for phase in plan.ledger.phases if phase.name in usual or phase in decisive]


def _times(plan: Plan, offers: Sequence[Offer]) -> Text:
    times = plan.times
    phases = ", ".join(f"{name} {getattr(times, name):.2f}" for name in PHASES if getattr(times, name) > 0.005)
    text = Text(f"a step takes about {times.total:.2f} s ({phases}); bottleneck: {times.longest}")
    text.append(f"\n{plan.run.engine} takes about {times.start:.0f} s to start" if times.start else "")
    text.append(
        f"\nmemory bottleneck: {plan.ledger.binding} in {plan.ledger.fullest.name}" if not plan.machine.cpu else ""
    )
    for offer in offers:
        gain = times.total / offer.seconds - 1
        text.append(f"\n{offer.words}: {offer.seconds:.2f} s per step ({gain:+.0%} speed)", style="dim")
    return text


def comparison(plans: Sequence[tuple[str, Plan]]) -> Table:
    """Plans side by side, and the choices in which they differ."""
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_edge=False,
        title="compared",
        title_justify="left",
    )
    table.add_column("")
    for name, _ in plans:
        table.add_column(name, justify="right")
    found = [plan for _, plan in plans]
    table.add_row("fits", *("yes" if plan.fits else "no" for plan in found))
    table.add_row("seconds per step", *(f"{plan.times.total:.2f}" if plan.fits else MISSING for plan in found))
    for phase in ("rollout", "update"):
        table.add_row(f"{phase}, GiB", *(f"{_size(plan, phase):.1f}" for plan in found))
    values = [{choice.key: choice.value for choice in plan.choices} for plan in found]
    for key in dict.fromkeys(key for each in values for key in each):
        both = [shown(key, each[key]) if key in each else "pinned" for each in values]
        if len(set(both)) > 1:
            table.add_row(key, *both)
    return table


def _size(plan: Plan, phase: str) -> float:
    found = plan.ledger[phase]
    return (found.host_bytes if plan.machine.cpu else found.device_bytes) / GIB
