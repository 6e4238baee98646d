"""`trimtab plan CONFIG [key=value ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.output import console_file, loading, print_json, user_errors

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trimtab.run.plan_command import PlanResult


def plan(
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.max_new_tokens=1024.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="A known device: h200, a100-40, rtx4090, cpu ...")
    ] = None,
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, max=1024, help="Devices of the machine, or of the cluster.")
    ] = None,
    devices_per_host: Annotated[
        int | None, typer.Option("--devices-per-host", min=1, max=64, help="Devices of each host. Default: 8.")
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
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also simulate some steps, event by event, and draw a timeline.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths", help="Completion lengths: a run folder, or quantiles such as p50=300,p90=900,max=4096."
        ),
    ] = None,
    times: Annotated[
        Path | None,
        typer.Option("--times", help="Run folder: simulate with times measured there instead of predicted ones."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, max=100, help="Steps to simulate.")] = 4,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the lengths that are drawn.")] = 0,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the simulated timeline to this file, as a page.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Predict memory and time of a run, phase by phase, and what Trimtab would choose. Needs no GPU and loads no weights."""
    with user_errors(as_json):
        with loading(as_json):
            from rich.console import Console

            from trimtab.run.plan_command import PlanOptions, look

        asked = PlanOptions(
            device, devices, devices_per_host, device_memory, host_memory, profile, like, simulate or html is not None,
            lengths, times, steps, seed,
        )  # fmt: skip
        with loading(as_json, "planning"):
            looks = [look(file, overrides or [], asked) for file in [config, *(compare or [])]]
        console = Console(file=console_file(as_json), highlight=False)
        for found in looks:
            console.print(_view(found))
        if compare:
            from trimtab.observe.plan_view import comparison

            console.print(comparison([(file.name, found.plan) for file, found in zip([config, *compare], looks)]))
        if html is not None:
            _write_html(html, config.name, looks[0])
        if as_json:
            results: list[dict[str, Any]] = [_as_dict(found) for found in looks]
            print_json(results[0] if not compare else {"plans": results})
        if not all(found.fits for found in looks):
            raise typer.Exit(1)


def _as_dict(found: PlanResult) -> dict[str, Any]:
    from trimtab.observe.simulation_view import simulation_dict

    simulated = {} if found.simulated is None else {"simulation": simulation_dict(*found.simulated)}
    return found.as_dict() | simulated


def _write_html(file: Path, name: str, found: PlanResult) -> None:
    from trimtab.base.errors import ConfigError, Problem
    from trimtab.observe.simulation_view import simulation_html

    if found.simulated is None:
        return
    title = f"{name}: {found.arranged.chosen.words()}"
    try:
        file.write_text(simulation_html(title, *found.simulated))
    except OSError as error:
        raise ConfigError([Problem("--html", f"cannot write {file}: {error.strerror}", "Name another file.")]) from None


def _view(found: PlanResult) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from trimtab.observe.placement_view import placement_view
    from trimtab.observe.plan_view import plan_view
    from trimtab.observe.simulation_view import simulation_view
    from trimtab.plan.report import offers

    chosen = found.arranged.chosen
    if found.split:
        parts: list[RenderableType] = [
            plan_view(group.plan, (), found.profile, f"{group.devices} devices: {', '.join(group.roles)}")
            for group in chosen.groups
        ]
    else:
        parts = [plan_view(found.plan, offers(found.plan, found.config.run, found.profile), found.profile)]
    if found.split or found.arranged.runners_up:
        parts.append(placement_view(found.arranged))
    if found.simulated is not None:
        parts.append(simulation_view(*found.simulated))
    parts += [Text(note, style="dim") for note in found.notes]
    if not found.fits:
        parts.append(Text(str(found.refusal()), style="red"))
    return Group(*parts)
