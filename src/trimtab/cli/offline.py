"""What `trimtab sft` and `trimtab reward-model` share: both learn from a given data set."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from trimtab.cli.options import AsJson, ConfigFile, ProfileRanks, ProfileSteps, Resume, Verbose
from trimtab.cli.output import console_file, loading, print_json, resume_command, user_errors
from trimtab.observe.profiling.request import ProfileRequest, parse_request

OfflineStage = Literal["sft", "reward-model"]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides of its keys, such as learn.lr=1e-5.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check config and data, print the resolved config and the plan, and exit.")
]


def stage_command(stage: OfflineStage, help_text: str) -> Callable[..., None]:
    """The command of a stage."""

    def command(
        config: ConfigFile,
        overrides: Overrides = None,
        resume: Resume = False,
        dry_run: DryRun = False,
        verbose: Verbose = False,
        profile_steps: ProfileSteps = None,
        profile_ranks: ProfileRanks = None,
        as_json: AsJson = False,
    ) -> None:
        with user_errors(as_json):
            profiled = parse_request(profile_steps, profile_ranks)
            _run_stage(stage, config, overrides or [], resume, dry_run, verbose, as_json, profiled)

    command.__doc__ = help_text
    return command


def _run_stage(
    stage: OfflineStage,
    file: Path,
    overrides: list[str],
    resume: bool,
    dry_run: bool,
    verbose: bool,
    as_json: bool,
    profiled: ProfileRequest | None,
) -> None:
    with loading(as_json, aside=dry_run):
        from trimtab.config.load import Offline, load_as
        from trimtab.config.reward_model import RewardModelConfig
        from trimtab.config.sft import SftConfig

        config: Offline
        if stage == "sft":
            config = load_as(SftConfig, file, overrides)
        else:
            config = load_as(RewardModelConfig, file, overrides)
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
