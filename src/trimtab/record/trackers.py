"""W&B and trackio: the same names as metrics.jsonl, the run's config, and the report at the end.

Steps are logged as a metric of their own to W&B: its counter only rises and would discard what a resumed run repeats.
"""

from __future__ import annotations

import importlib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.files import write_file
from trimtab.config.schema import Observe
from trimtab.record.layout import CONFIG

WANDB_ID_FILE = "wandb-id.txt"
REPORT = "report"
"""Under which name the report is attached."""


class Trackers:
    """The trackers that are configured; none is fine, too."""

    def __init__(self, run_dir: Path, observe: Observe, resume_step: int | None) -> None:
        """`resume_step`: the last step that is kept from earlier sessions. None: a new run."""
        self._wandb = _wandb_run(run_dir, observe.wandb, resume_step) if observe.wandb else None
        self._trackio = _trackio_run(run_dir, observe.trackio, resume_step) if observe.trackio else None
        self._step = resume_step or 0

    @property
    def any(self) -> bool:
        return bool(self._wandb or self._trackio)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._step = step
        if self._wandb:
            self._wandb.log({"step": step, **scalars})
        if self._trackio:
            self._trackio.log(dict(scalars), step=step)

    def attach(self, report: Path) -> None:
        """Give them the report of the run, one HTML file."""
        if self._wandb:
            page = importlib.import_module("wandb").Html(str(report), inject=False)
            self._wandb.log({"step": self._step, REPORT: page})
        if self._trackio:
            page = importlib.import_module("trackio").Html(str(report), inject=False)
            self._trackio.log({REPORT: page}, step=self._step)

    def close(self) -> None:
        for run in filter(None, (self._wandb, self._trackio)):
            run.finish()


def _wandb_run(run_dir: Path, project: str, resume_step: int | None) -> Any:
    """Start or continue the W&B run whose id lies in the run folder."""
    wandb = _package("wandb")
    id_file = run_dir / WANDB_ID_FILE
    if resume_step is None or not id_file.exists():
        write_file(id_file, [uuid.uuid4().hex.encode()])
    run = wandb.init(
        project=project,
        name=run_dir.name,
        dir=str(run_dir),
        id=id_file.read_text(),
        resume="allow",
        config=_config(run_dir),
    )
    run.define_metric("*", step_metric="step")
    return run


def _trackio_run(run_dir: Path, project: str, resume_step: int | None) -> Any:
    """Start or continue the trackio run that has the run folder's name. It stays on this machine."""
    trackio = _package("trackio")
    resume = "never" if resume_step is None else "allow"
    return trackio.init(
        project=project,
        name=run_dir.name,
        config=_config(run_dir),
        resume=resume,
        embed=False,
        auto_log_gpu=False,
        auto_log_cpu=False,
    )


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        fix = f"Install it with: pip install 'trimtab[{name}]', or remove the key"
        raise ConfigError([Problem(f"observe.{name}", f"the {name} package is not installed", fix)]) from error


def _config(run_dir: Path) -> dict[str, Any]:
    """config.yaml, which the run has written before; empty where there is none."""
    try:
        found = yaml.safe_load((run_dir / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}
