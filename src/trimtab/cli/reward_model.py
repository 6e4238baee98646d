"""`trimtab reward-model CONFIG [key=value ...]`"""

from __future__ import annotations

from trimtab.cli.offline import (
    AsJson,
    ConfigFile,
    DryRun,
    Overrides,
    ProfileRanks,
    ProfileSteps,
    Resume,
    Verbose,
    run_stage,
)


def reward_model(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    profile_steps: ProfileSteps = None,
    profile_ranks: ProfileRanks = None,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on pairs of a better and a worse answer."""
    run_stage("reward-model", config, overrides, resume, dry_run, verbose, as_json, (profile_steps, profile_ranks))
