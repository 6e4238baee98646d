"""`trimtab train CONFIG [key=value ...]`"""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.cli.options import AsJson, ConfigFile, ProfileRanks, ProfileSteps, Resume, Verbose
from trimtab.cli.output import console_file, loading, print_json, resume_command, user_errors
from trimtab.observe.profiling.request import parse_request


def train(
    config: ConfigFile,
    overrides: Annotated[list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.lr=1e-6.")] = None,
    resume: Resume = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check config, data and rewards, print the resolved config and the plan, and exit."
        ),
    ] = False,
    verbose: Verbose = False,
    profile_steps: ProfileSteps = None,
    profile_ranks: ProfileRanks = None,
    as_json: AsJson = False,
) -> None:
    """Train a model with reinforcement learning."""
    with user_errors(as_json):
        profiled = parse_request(profile_steps, profile_ranks)
        with loading(as_json, aside=dry_run):
            from trimtab.config.load import load_config

            checked = load_config(config, overrides or [])
            from trimtab.api import run_training
            from trimtab.run.inputs import Inputs

        inputs = Inputs(base_dir=config.absolute().parent, name=config.stem, verbose=verbose)
        inputs.resume_with, inputs.profile = resume_command("train", config, overrides), profiled
        if dry_run:
            from trimtab.run.dry_run import dry_run as look

            with loading(as_json, "checking the model, data and rewards", aside=True):
                result = look(checked, inputs, console_file(as_json), resume=resume)
        else:
            result = run_training(checked, inputs, resume=resume, console_file=console_file(as_json))
        if as_json:
            print_json(result)
