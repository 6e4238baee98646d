"""`trimtab export RUN FOLDER`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import console_file, loading, print_json, user_errors


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    to: Annotated[Path, typer.Argument(help="Folder to write; it must not exist.")],
    checkpoint: Annotated[str, typer.Option(help="`best` by evaluation, `last`, or a step.")] = "last",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float64, or `same` as trained.")] = "same",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder."""
    with user_errors(as_json):
        with loading(as_json):
            from trimtab.run.export import export_run

        with loading(as_json, f"writing {to}"):
            source = export_run(run, to, checkpoint, dtype)
        print(f"{source.name} of {run} -> {to}", file=console_file(as_json))
        if as_json:
            print_json({"checkpoint": str(source), "folder": str(to)})
