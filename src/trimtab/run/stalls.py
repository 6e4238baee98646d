"""How long a run on one device may stand still, and how its progress is seen (observe/stall_watch.py)."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trimtab.base.spans import log
from trimtab.config.load import AnyConfig
from trimtab.config.resolved import ResolvedConfig
from trimtab.observe.console import Console
from trimtab.observe.journal import Journal
from trimtab.observe.stall_watch import MIN_STALL_S, STALL_STEPS, StallWatch
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.run.assemble import BuiltRun
from trimtab.update.trainer import LocalTrainer

CALLS = 2
"""Calls of the user's code, each as long as it may take, that are waited for before a run stands still."""


def watch_for_stalls(
    config: AnyConfig, folder: Path, parts: BuiltRun, journal: Journal, console: Console, stack: ExitStack
) -> StallWatch:
    """Closed by `stack`."""
    trainer = parts.trainer
    assert isinstance(trainer, LocalTrainer)
    updaters = [trainer.updater, *([] if trainer.critic is None else [trainer.critic])]
    engine = parts.engine

    def progress() -> Any:
        stats, waits = engine.stats, engine.waits if isinstance(engine, ExternalEngine) else 0
        of_engine = stats.decode_steps, stats.prefill_tokens, stats.generated_tokens, waits
        at = [(each.progress.part, each.progress.microbatch, each.begun) for each in updaters]
        return of_engine, at, log.progress, log.logged

    kind = trainer.updater.device.type
    least = max(MIN_STALL_S.get(kind, MIN_STALL_S["cuda"]), CALLS * _slowest_call(config))
    stall_s = max(least, STALL_STEPS * parts.plan.times.total)
    watch = StallWatch(folder, stall_s, lambda: journal.doing, progress, lambda text: console.warn(text, "stall"))
    stack.callback(watch.close)
    return watch


def _slowest_call(config: AnyConfig) -> float:
    """Seconds that a call of the user's code may take."""
    if not isinstance(config, ResolvedConfig):
        return 0.0
    environment = [] if config.environment is None else [config.environment.timeout_s]
    return max([part.timeout_s for part in config.reward] + environment)
