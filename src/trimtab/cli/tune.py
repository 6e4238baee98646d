"""`trimtab tune CONFIG [key=value ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import AsJson, ConfigFile
from trimtab.cli.output import console_file, loading, print_json, user_errors


def tune(
    config: ConfigFile,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.max_new_tokens=1024.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write the config to, with its `run` section filled in; it must not exist."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure batch sizes on this machine, with sequences of the maximum length, and keep the fastest for later runs."""
    with user_errors(as_json):
        with loading(as_json):
            from trimtab.config.load import load_config
            from trimtab.convert.write import write_new
            from trimtab.run.inputs import Inputs
            from trimtab.run.tune import run_tuning

        checked = load_config(config, overrides or [])
        if out is not None:
            _refuse_taken(out.expanduser())
        result = run_tuning(checked, Inputs(base_dir=config.absolute().parent, name=config.stem), console_file(as_json))
        if out is not None:
            write_new(out, result["config"])
        if as_json:
            print_json(result)


def _refuse_taken(out: Path) -> None:
    """Measuring takes minutes, so an output file that cannot be written is refused before it."""
    from trimtab.base.errors import ConfigError, Problem

    if not out.absolute().parent.is_dir():
        raise ConfigError([Problem("--out", f"{out.parent} is not a folder", "Write a path in a folder that exists")])
    if out.exists():
        raise ConfigError([Problem(str(out), "already exists", "Remove it, or give --out another name")])
