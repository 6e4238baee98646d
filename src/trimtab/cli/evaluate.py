"""`trimtab eval CONFIG [key=value ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import AsJson
from trimtab.cli.output import console_file, loading, print_json, user_errors


def evaluate(
    config: Annotated[Path, typer.Argument(help="YAML file; its eval section sets how to evaluate.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Overrides of its keys, such as model.path=RUN/final.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure held-out accuracy (pass@1, pass@k) of a model, without training it."""
    with user_errors(as_json):
        with loading(as_json):
            from trimtab.config.load import load_config

            checked = load_config(config, overrides or [])
            from trimtab.api import run_evaluation
            from trimtab.run.inputs import Inputs

        inputs = Inputs(base_dir=config.absolute().parent, name=config.stem)
        result = run_evaluation(checked, inputs, console_file=console_file(as_json))
        if as_json:
            print_json(result)
