"""`trimtab convert KIND -- FLAGS` or `trimtab convert KIND --file FILE`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import AsJson
from trimtab.cli.output import print_json, user_errors


def convert(
    kind: Annotated[
        str,
        typer.Argument(
            help="openrlhf, verl, trl (also trl-rloo, trl-ppo, trl-sft, trl-reward), nanochat, or script (constants of your "
            "own script)."
        ),
    ],
    flags: Annotated[list[str] | None, typer.Argument(help="The flags, or the whole command, after --.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="A shell script, YAML or Python file with the settings.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version",
            help="The framework's version, which sets its defaults. Default: the newest that Trimtab knows.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write the config to; it must not exist.")] = None,
    as_json: AsJson = False,
) -> None:
    """Turn another framework's settings into a config, flag by flag: what goes where, what Trimtab decides, what is left."""
    with user_errors(as_json):
        import sys

        from trimtab.convert import convert as converted
        from trimtab.convert.view import print_conversion
        from trimtab.convert.write import write_new

        found = converted(kind, words=flags, file=file, version=version)
        if out is not None:
            write_new(out, found.yaml)
        print_conversion(found, sys.stderr)
        if as_json:
            print_json(found.as_dict())
        elif out is None:
            print(found.yaml, end="")
        else:
            print(f"wrote {out}")
