"""Names of the files in a run folder. Imports nothing, so that a reader without torch knows them too."""

from __future__ import annotations

from pathlib import Path

CONFIG, PLAN, METRICS_FILE, FINAL, CHECKPOINTS = "config.yaml", "plan.json", "metrics.jsonl", "final", "checkpoints"
RANK_LOGS = "ranks"
"""Folder with a log for each rank of a run on several devices."""


def samples_file(run: Path, step: int) -> Path:
    """Completions that a training step sampled."""
    return run / "samples" / f"step-{step}.jsonl"


def eval_samples_file(run: Path, step: int) -> Path:
    """Completions of the evaluation after a step."""
    return run / "eval" / "samples" / f"step-{step}.jsonl"
