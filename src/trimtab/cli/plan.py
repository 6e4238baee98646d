"""`trimtab plan CONFIG [key=value ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.options import AsJson, ConfigFile
from trimtab.cli.output import console_file, loading, print_json, user_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trimtab.run.plan_command import PlanResult


def plan(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.max_new_tokens=1024.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="A known device: h200, a100-40, rtx4090, cpu ...")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1024, help="Devices of the machine; 8 make a host.")
    ] = None,
    device_memory: Annotated[
        str | None,
        typer.Option("--device-memory", help="Memory of each device, such as 40GiB; the same as run.memory=40GiB."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option("--host-memory", help="Memory of each machine, such as 256GiB.")
    ] = None,
    like: Annotated[
        Path | None, typer.Option("--like", help="Run folder: assume completions as long as the ones there.")
    ] = None,
    profile: Annotated[str | None, typer.Option("--profile", help="safe, balanced or max.")] = None,
    compare: Annotated[
        list[Path] | None, typer.Option("--compare", help="Another config to compare with; repeat it for more.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict memory and time of a run, phase by phase, and what Trimtab would choose. Needs no GPU and loads no weights."""
    with user_errors(as_json):
        with loading(as_json):
            from rich.console import Console

            from trimtab.run.plan_command import PlanOptions, look

        asked = PlanOptions(device, devices, device_memory, host_memory, profile, like)
        with loading(as_json, "planning"):
            looks = [look(file, overrides or [], asked) for file in [config, *(compare or [])]]
        console = Console(file=console_file(as_json), highlight=False)
        for found in looks:
            console.print(_view(found))
        if compare:
            from trimtab.observe.plan_view import comparison

            console.print(comparison([(file.name, found.plan) for file, found in zip([config, *compare], looks)]))
        if as_json:
            results: list[dict[str, Any]] = [found.as_dict() for found in looks]
            print_json(results[0] if not compare else {"plans": results})
        if not all(found.plan.fits for found in looks):
            raise typer.Exit(1)


def _view(found: PlanResult) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from trimtab.observe.plan_view import plan_view
    from trimtab.plan.report import offers

    shown = plan_view(found.plan, offers(found.plan, found.config.run, found.profile), found.profile)
    parts: list[RenderableType] = [shown]
    parts += [Text(note, style="dim") for note in found.notes]
    if not found.plan.fits:
        parts.append(Text(str(found.refusal()), style="red"))
    return Group(*parts)
