"""A placement for people: which devices hold which roles, how full they are and how long they work, and the runners-up."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trimtab.observe.format import gib
from trimtab.plan.arrange import Arranged, Arrangement
from trimtab.plan.ledger import GIB
from trimtab.plan.placed_report import role_bytes
from trimtab.plan.roles import RoleGroup


def placement_view(arranged: Arranged) -> RenderableType:
    chosen = arranged.chosen
    parts: list[RenderableType] = [Text(f"{chosen.words()}; {arranged.why}"), Text(), _groups(chosen)]
    if chosen.fits:
        parts += [Text(), Text(_step(chosen))]
    if arranged.runners_up:
        parts += [Text(), _runners_up(chosen, arranged.runners_up)]
    return Panel(
        Group(*parts), title="Placement", title_align="left", box=box.ROUNDED, border_style="cyan", expand=False
    )


def _groups(chosen: Arrangement) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for name in ("role", "devices", "in parts", "GiB of the role", "fullest phase", "GiB of the device", "busy"):
        table.add_column(name, justify="left" if name in ("role", "in parts", "fullest phase") else "right")
    for group in chosen.groups:
        fullest, times = group.plan.ledger.fullest, chosen.times
        for place, role in enumerate(group.roles):
            mine = Text(f"{role_bytes(group, role) / GIB:.1f}")
            if place:
                table.add_row(Text(role), Text(""), Text(""), mine, Text(""), Text(""), Text(""))
                continue
            used = f"{fullest.device_bytes / GIB:.1f} of {gib(group.plan.machine.device.memory / GIB)}"
            busy = f"{group.busy_s / times.total:.0%}".replace("%", " %") if chosen.fits else ""
            style = "" if group.plan.fits else "red"
            table.add_row(
                Text(role), Text(f"{group.devices}"), Text(_parts(group)), mine, Text(fullest.name),
                Text(used, style=style), Text(busy),
            )  # fmt: skip
    return table


def _parts(group: RoleGroup) -> str:
    place = group.plan.place
    held = "whole" if place.shard == "none" else f"{place.shard} over {place.shard_devices}"
    return held + (f", engines over {place.tensor}" if place.tensor > 1 else "")


def _step(chosen: Arrangement) -> str:
    times = chosen.times
    parts = {"rollout": times.rollout, "publish": times.publish, "score": times.score, "update": times.update}
    told = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items() if seconds >= 0.005)
    beside = "; rollout runs beside the rest" if chosen.staleness and chosen.kind == "split" else ""
    return f"a step takes about {times.total:.2f} s ({told}{beside}): {chosen.tokens_per_device_s:,.0f} tokens/s per device"


def _runners_up(chosen: Arrangement, others: tuple[Arrangement, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    table.add_column("runner-up")
    table.add_column("seconds a step", justify="right")
    table.add_column("tokens/s per device", justify="right")
    table.add_column("")
    for other in others:
        notes = [] if other.built else ["predicted only: this version cannot run it"]
        notes += ["changes what is learned"] if other.staleness != chosen.staleness else []
        cells = other.words(), f"{other.times.total:.2f}", f"{other.tokens_per_device_s:,.0f}", "; ".join(notes)
        table.add_row(*(Text(cell) for cell in cells))
    return table
