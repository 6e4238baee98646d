"""Names of the files in a run folder. Imports nothing, so that a reader without torch knows them too."""

from __future__ import annotations

from pathlib import Path

CONFIG, PLAN, METRICS_FILE, FINAL, CHECKPOINTS = "config.yaml", "plan.json", "metrics.jsonl", "final", "checkpoints"
RUN_FILE, NOW_FILE, EVENTS_FILE = "run.json", "now.json", "events.jsonl"
"""Facts of the run and its state; what it does now; what happened."""
TRACE_FILE, DISTRIBUTIONS_FILE = "trace.json", "distributions.jsonl"
SAMPLE_INDEX = "samples/index.jsonl"
"""What files of samples there are, of training and of evaluation."""
RANK_LOGS = "ranks"
"""Folder with a log for each rank of a run on several devices."""
STACKS_FILE = "stacks.txt"
"""Where the threads of a run on one device were that made no progress."""


def samples_file(run: Path, step: int) -> Path:
    """Completions that a training step sampled."""
    return run / "samples" / f"step-{step}.jsonl"


def eval_samples_file(run: Path, step: int) -> Path:
    """Completions of the evaluation after a step."""
    return run / "eval" / "samples" / f"step-{step}.jsonl"


def eval_results_file(run: Path, step: int) -> Path:
    """The outcome of every prompt in the evaluation after a step."""
    return run / "eval" / "results" / f"step-{step}.jsonl"


def run_name(folder: Path) -> str:
    """What a run is called: its folder; the one around it where that is just `run`, as the demo's."""
    folder = folder.absolute()
    return folder.parent.name if folder.name == "run" and folder.parent.name else folder.name
