"""`trimtab reward-model CONFIG [key=value ...]`"""

from __future__ import annotations

from trimtab.cli.offline import AsJson, ConfigFile, DryRun, Overrides, Resume, Verbose, run_stage


def reward_model(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Resume = False,
    dry_run: DryRun = False,
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> None:
    """Train a reward model on pairs of a better and a worse answer."""
    run_stage("reward-model", config, overrides, resume, dry_run, verbose, as_json)
