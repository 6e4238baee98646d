"""`trimtab sft CONFIG [key=value ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import console_file, print_json, user_errors


def sft(
    config: Annotated[Path, typer.Argument(help="YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to it, such as learn.lr=1e-5.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint, or start if there is none.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check config and data, print the resolved config, and stop.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The last line is one JSON object.")] = False,
) -> None:
    """Train a model on worked answers."""
    with user_errors(as_json):
        from trimtab.config.load import load_as
        from trimtab.config.sft import SftConfig

        checked = load_as(SftConfig, config, overrides or [])
        from trimtab.supervised import dry_run as look
        from trimtab.supervised import run_sft
        from trimtab.work import Inputs

        inputs = Inputs(base_dir=config.absolute().parent, name=config.stem)
        if dry_run:
            result = look(checked, inputs, console_file(as_json), resume=resume)
        else:
            result = run_sft(checked, inputs, resume=resume, console_file=console_file(as_json))
        if as_json:
            print_json(result)
