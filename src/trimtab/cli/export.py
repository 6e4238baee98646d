"""`trimtab export RUN FOLDER`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import AsJson
from trimtab.cli.output import console_file, loading, print_json, user_errors


def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    to: Annotated[
        Path | None,
        typer.Argument(metavar="FOLDER", help="Folder to write; it must not exist. With --to-hub it may be left out."),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="`best` by evaluation, `last`, or a step.")] = "last",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float64, or `same` as trained.")] = "same",
    card: Annotated[bool, typer.Option("--card", help="Write a model card (README.md) beside the weights.")] = False,
    to_hub: Annotated[
        str | None, typer.Option("--to-hub", metavar="USER/NAME", help="Upload to the Hugging Face Hub, with a card.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --to-hub: a new model can be seen by everybody.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, with a model card, and upload it if you like."""
    with user_errors(as_json):
        with loading(as_json):
            from trimtab.run.export_command import export_with_card

        with loading(as_json, "writing the model"):
            done = export_with_card(run, to, checkpoint, dtype, card, to_hub, public)
        out = console_file(as_json)
        print(f"{done.checkpoint.name} of {run} -> {done.folder}", file=out)
        if done.card is not None:
            print(f"model card: {done.card}", file=out)
        result = {"checkpoint": str(done.checkpoint), "folder": str(done.folder)}
        if to_hub is not None:
            from trimtab.run.hub import upload

            with loading(as_json, f"uploading to {to_hub}"):
                result["url"] = upload(done.folder, to_hub, public=public)
            print(result["url"], file=out)
        if as_json:
            print_json(result | ({} if done.card is None else {"card": str(done.card)}))
