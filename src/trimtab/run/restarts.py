"""A run whose ranks are lost goes on from its newest checkpoint with new ones.

Guarantees: everything of the attempt that lost them (reward workers, files, the folder's lock) is closed before the next opens.
An attempt is the run that `--resume` would have started, so weights and rows are those of a run that lost nothing; the user's
functions are called once a step. Ranks that are lost before they are ready, or too often, end the run; the error says how to
resume it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from trimtab.base.errors import TrimtabError
from trimtab.cluster.ranks import RankLost
from trimtab.config.load import AnyConfig
from trimtab.observe.observer import Callback
from trimtab.record.checkpoint import newest_checkpoint
from trimtab.record.layout import RANK_LOGS
from trimtab.run.inputs import Inputs
from trimtab.run.roles import TrainingRun

MAX_RANK_RESTARTS = 3
"""Ranks that are lost more often than this have a cause that starting again does not remove."""

AConfig = TypeVar("AConfig", bound=AnyConfig)
Attempt = Callable[[AConfig, Inputs, bool], dict[str, Any]]
"""Runs a config with what was handed over; True: resuming."""


class _StartAgain(Exception):
    """Ranks were lost in an attempt that has been told of."""

    def __init__(self, folder: Path, restarts: int, devices: int) -> None:
        super().__init__()
        self.folder, self.restarts, self.devices = folder, restarts, devices


def with_restarts(attempt: Attempt[AConfig], config: AConfig, inputs: Inputs, resume: bool) -> dict[str, Any]:
    """What the first attempt returns that keeps its ranks."""
    inputs = replace(inputs, callbacks=[_once_a_step(callback) for callback in inputs.callbacks])
    folder = Path()
    for restarts_left in range(MAX_RANK_RESTARTS, -1, -1):
        try:
            return attempt(config, replace(inputs, restarts_left=restarts_left), resume)
        except _StartAgain as again:
            folder, inputs.rank_restarts, inputs.lost = again.folder, again.restarts, ""
            inputs.devices_before = max(inputs.devices_before, again.devices)
        except (
            RankLost
        ) as lost:  # before it was opened: not told, and worth another attempt where an earlier one was opened
            if not inputs.rank_restarts:
                raise
            if not restarts_left:
                raise RankLost(f"{lost}\n{_given_up(inputs)}") from lost
            inputs.rank_restarts, inputs.lost = inputs.rank_restarts + 1, str(lost)
        # Outside the except block: the error would keep all of the attempt that it has left.
        resume = True
        config = cast(AConfig, config.with_values({"observe.dir": str(folder)}))
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def telling_how_it_ends(run: TrainingRun[Any, Any], steps: int, inputs: Inputs) -> Iterator[None]:
    """Around the steps of an attempt: a run that stops or fails says where it stands; one that lost its ranks, what it does."""
    try:
        yield
    except RankLost as lost:
        newest = newest_checkpoint(run.folder)
        place = "the beginning" if newest is None else newest.name
        if inputs.restarts_left:
            number = MAX_RANK_RESTARTS - inputs.restarts_left + 1
            run.observer.restarting(
                f"step {run.state.step + 1}: {lost}\nAll ranks start again from {place} "
                f"(restart {number} of at most {MAX_RANK_RESTARTS})"
            )
            raise _StartAgain(run.folder, run.state.rank_restarts + 1, run.config.run.devices) from None
        run.observer.stopped(run.state, steps)
        raise RankLost(f"{lost}\n{_given_up(inputs)}") from lost
    except (KeyboardInterrupt, TrimtabError):
        run.observer.stopped(run.state, steps)
        raise


def _given_up(inputs: Inputs) -> str:
    return (
        f"Ranks were started again {MAX_RANK_RESTARTS} times, and were lost each time. Their logs are in {RANK_LOGS} of the run "
        f"folder. Continue from the newest checkpoint with {inputs.resume_with}"
    )


def _once_a_step(callback: Callback) -> Callback:
    """Steps after the checkpoint are done again; whoever was told of them is not told again."""
    last = 0

    def call(step: int, metrics: Mapping[str, float]) -> None:
        nonlocal last
        if step > last:
            last = step
            callback(step, dict(metrics))

    return call
