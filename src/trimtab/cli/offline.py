"""What `trimtab sft` and `trimtab reward-model` share: both learn from a given data set."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.output import console_file, loading, print_json, resume_command, user_errors
from trimtab.observe.profiling.request import parse_request

ConfigFile = Annotated[Path, typer.Argument(help="YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.lr=1e-5.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest complete checkpoint; start anew if there is none.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check config and data, print the resolved config and exit.")]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show every choice that Trimtab made, also the usual ones.")]
ProfileSteps = Annotated[
    str | None, typer.Option("--profile-steps", help="Steps to profile, such as 3:5; writes RUN/profile.")
]
ProfileRanks = Annotated[
    str | None, typer.Option("--profile-ranks", help="With several devices: ranks to profile, such as 0,1. Default: 0.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


def run_stage(
    stage: Literal["sft", "reward-model"],
    file: Path,
    overrides: list[str] | None,
    resume: bool,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
    profile: tuple[str | None, str | None] = (None, None),
) -> None:
    """`profile`: --profile-steps and --profile-ranks."""
    with user_errors(as_json):
        profiled = parse_request(*profile)
        with loading(as_json, aside=dry_run):
            from trimtab.config.load import Offline, load_as
            from trimtab.config.reward_model import RewardModelConfig
            from trimtab.config.sft import SftConfig

            config: Offline
            if stage == "sft":
                config = load_as(SftConfig, file, overrides or [])
            else:
                config = load_as(RewardModelConfig, file, overrides or [])
            from trimtab.run import offline
            from trimtab.run.inputs import Inputs
            from trimtab.run.reward_model import Preferences
            from trimtab.run.sft import Supervised

        kind = Supervised() if stage == "sft" else Preferences()
        inputs = Inputs(base_dir=file.absolute().parent, name=file.stem, verbose=verbose)
        inputs.resume_with, inputs.profile = resume_command(stage, file, overrides), profiled
        if dry_run:
            with loading(as_json, "checking the model and the data", aside=True):
                result = offline.dry_run(kind, config, inputs, console_file(as_json), resume=resume)
        else:
            result = offline.run_offline(kind, config, inputs, resume=resume, console_file=console_file(as_json))
        if as_json:
            print_json(result)
