"""What a run has learned outlives its end.

Whenever a run is stopped or fails and its weights are those of a whole step, that step is saved, due or not: with its row of
metrics, which is on disk before the checkpoint that follows it. An evaluation that was due and did not finish is repeated by the
run that resumes. A stop that comes while an update is applied, or a step is saved, waits until that is done. An update that fails
half-way cannot be kept; the run then resumes from the checkpoint before it.

Checkpoints are written behind the training (record/writer.py). However a run ends, it waits for the one under way; one that could
not be written ends the run at the end of a step.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trimtab.base.errors import DivergedError
from trimtab.base.signals import hold_stops, raise_waiting
from trimtab.record.checkpoint import checkpoints, newest_checkpoint, write_state
from trimtab.record.layout import CONFIG
from trimtab.run.finish_step import account, refuse_without_folder
from trimtab.run.roles import TrainingRun


@dataclass(frozen=True)
class _OpenStep:
    """A step whose weights are there and whose row is not written."""

    metrics: dict[str, float]
    tokens: float
    recovered: int


class StepSaver:
    """Knows at any moment what of a run is whole."""

    def __init__(self, run: TrainingRun[Any, Any], steps: int) -> None:
        self._run, self._steps = run, steps
        self._started = time.monotonic() - run.state.seconds
        self._open: _OpenStep | None = None
        self._save_failed = False
        self._mark()

    def _mark(self) -> None:
        """Weights and state belong together now."""
        self._whole = copy.deepcopy(self._run.state)
        self._files = self._run.snapshot()
        self._begun = self._run.trainer.begun

    @property
    def mid_update(self) -> bool:
        """The weights are between two steps."""
        return self._begun != self._run.trainer.begun

    def finish(
        self, metrics: dict[str, float], tokens: float, recovered: int, data_position: int, eval_due: bool
    ) -> None:
        """The update is done: from here on this step is the one that is kept. `recovered`: recoveries from lack of memory before
        it. What is added to `metrics` later is in its row."""
        state = self._run.state
        state.step += 1
        state.data_position = data_position
        state.seconds = time.monotonic() - self._started
        state.eval_due = eval_due
        self._open = _OpenStep(metrics, tokens, recovered)
        self._mark()
        refuse_without_folder(self._run)
        raise_waiting()

    def settle_written(self) -> None:
        """A checkpoint that was written meanwhile is complete now: with several ranks it is the driver that completes it."""
        with hold_stops():
            self._settle(wait=False)

    def evaluated(self) -> None:
        """The step's evaluation is in the state and in its metrics."""
        self._run.state.eval_due = False
        self._run.state.seconds = time.monotonic() - self._started
        self._mark()

    def evaluate_again(self, evaluate: Callable[[], dict[str, float]]) -> None:
        """Make up for the evaluation that the run resumed from did not finish."""
        run, state = self._run, self._run.state
        result = evaluate()
        run.observer.end_phases(state.step)
        with hold_stops():
            self.evaluated()
            if result:
                run.observer.write(state.step, result)
            newest = newest_checkpoint(run.folder)
            if newest is not None and newest.name == f"step-{state.step}":
                state.memory = run.trainer.memory()
                write_state(newest, state)

    def end_step(self) -> None:
        """Record the step, save a checkpoint if one is due, and call the callbacks."""
        run, state, observe = self._run, self._run.state, self._run.config.observe
        assert self._open is not None
        metrics = self._open.metrics
        state.seconds = time.monotonic() - self._started
        with hold_stops():
            self._close()
            due = observe.checkpoint_every and state.step % observe.checkpoint_every == 0
            if due or state.step in (self._steps, state.best_step):
                self._mark()
                self._write()
            self._settle(wait=False)
        run.observer.call_back(state.step, metrics)

    def end(self) -> None:
        """All steps are done, and saved."""
        with self._run.observer.phase("checkpoint"):
            self._settle()

    def keep(self, error: BaseException) -> None:
        """Save the last whole step, if the weights are still there and those of it. A failure to save is only a warning."""
        run, step = self._run, self._whole.step
        if run.trainer.lost:
            return
        try:
            self._settle()
        except Exception as failure:
            self._warn_not_saved(failure)
        if self.mid_update or self._save_failed or isinstance(error, DivergedError):
            return
        if not step or not (run.folder / CONFIG).exists():
            return
        try:
            if self._open is not None:
                self._close()
            if step not in checkpoints(run.folder):
                self._write()
                self._settle()
        except Exception as failure:
            self._warn_not_saved(failure)

    def _warn_not_saved(self, failure: Exception) -> None:
        why = (str(failure).strip().splitlines() or ["no message"])[0]
        self._run.observer.warn(f"cannot save step {self._whole.step} ({type(failure).__name__}: {why})")

    def _close(self) -> None:
        """Write the step's row. Before the checkpoint: a kill in between repeats the step and its row; the other order would lose
        the row."""
        step, run, state = self._open, self._run, self._run.state
        assert step is not None
        refuse_without_folder(run)
        account(run, step.metrics, step.tokens, self._steps - state.step, state.oom_recoveries != step.recovered)
        run.observer.write(state.step, step.metrics)
        self._open = None
        run.observer.show(state.step, step.metrics)

    def _write(self) -> None:
        run = self._run
        # A rollout that was given up has changed the state since; what running out of memory has taught stays known.
        state = replace(self._whole, memory=run.trainer.memory())
        try:
            with run.observer.phase("checkpoint"):
                run.observer.flush()
                run.trainer.save(run.folder, state, run.config.observe.keep_checkpoints, self._files())
        except Exception:
            self._save_failed = True
            raise

    def _settle(self, wait: bool = True) -> None:
        """What was begun to be saved is on disk; without `wait`, has not failed so far."""
        try:
            self._run.trainer.settle_saves(wait)
        except Exception:
            self._save_failed = True
            raise


@contextmanager
def save_on_stop(run: TrainingRun[Any, Any], steps: int) -> Iterator[StepSaver]:
    """However the block ends, the run's last whole step is saved."""
    saver = StepSaver(run, steps)
    try:
        with hold_stops(lambda: saver.mid_update):
            yield saver
            saver.end()
    except BaseException as error:
        with hold_stops(raises=False):
            saver.keep(error)
        raise
