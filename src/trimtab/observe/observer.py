"""The Observer of a run in this process: all that sees a step go by, in one place. See run/roles.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from trimtab.observe.console import Console
from trimtab.observe.host import HostWatch
from trimtab.observe.journal import Journal
from trimtab.observe.look_back import look_back, where_it_stands
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.profiling.profiler import ProfileWindow
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.timeline import Timeline
from trimtab.plan.watch import PlanWatch
from trimtab.record.checkpoint import RunState
from trimtab.record.samples import write_samples
from trimtab.record.sinks import Sinks
from trimtab.rollout.trajectory import Group
from trimtab.update.stats import PassSettings, UpdateStats

Callback = Callable[[int, Mapping[str, float]], object]
"""Called after every step with its number and its metrics; what it raises ends the run, as an error of the run would."""


class LocalObserver:
    """Console, trace, metrics, samples, meters and the user's callbacks."""

    def __init__(
        self,
        folder: Path,
        console: Console,
        timeline: Timeline,
        sinks: Sinks,
        meter: MemoryMeter | RankMeter,
        watch: PlanWatch,
        recoveries: Recoveries,
        journal: Journal,
        callbacks: Sequence[Callback] = (),
        profile: ProfileWindow | None = None,
    ) -> None:
        self._folder, self._console, self._timeline, self._sinks = folder, console, timeline, sinks
        self._meter, self._watch, self._recoveries, self._callbacks = meter, watch, recoveries, callbacks
        self._journal = journal
        self._begun = False
        self._host = HostWatch(console.warn)
        self._profile = profile

    def waiting(self, what: str) -> None:
        self._journal.phase(None, what)
        self._console.waiting(what)

    def note(self, text: str) -> None:
        self._console.note(text)

    def warn(self, text: str) -> None:
        self._console.warn(text)

    @contextmanager
    def phase(self, name: str, memory: str | None = None) -> Iterator[None]:
        if not self._begun:
            self._begun = True
            self._journal.running()
        self._journal.phase(name)
        profiled = nullcontext() if self._profile is None else self._profile.phase(name)
        try:
            with self._timeline.phase(name), nullcontext() if memory is None else self._meter.phase(memory), profiled:
                yield
        finally:
            self._journal.phase(None)

    def saw(self, stats: UpdateStats, settings: PassSettings) -> None:
        self._watch.saw(stats.sizes, settings.recompute, settings.logprob_chunk, settings.offload_activations)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        write_samples(self._folder, step, groups)

    def evaluated(self, step: int, scores: Mapping[str, float], groups: Sequence[Group] | None = None) -> None:
        self._console.eval(step, scores)
        if groups is not None:
            write_samples(self._folder / "eval", step, groups)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._sinks.write(step, metrics)

    def end_phases(self, step: int) -> dict[str, float]:
        self._trace_recoveries()
        self._journal.step(step + 1)
        seconds = self._timeline.end_step(step)
        if self._profile is not None:
            self._profile.step_ended(step)
        return seconds

    def measure(self, metrics: dict[str, float], steps_to_go: int) -> None:
        metrics |= self._meter.end_step() | self._host.end_step(steps_to_go)
        metrics |= self._watch.end_step(metrics)

    def account(self, step: int, metrics: dict[str, float], tokens: float) -> None:
        metrics |= self.end_phases(step) | self._recoveries.counts()
        metrics["throughput/tokens_per_s"] = tokens / metrics["time/total"]
        metrics |= self._watch.used(metrics["time/update"])

    def show(self, step: int, metrics: dict[str, float]) -> None:
        self._console.step(step, metrics)

    def call_back(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            with torch.enable_grad():  # whatever it leaves behind
                callback(step, dict(metrics))

    def flush(self) -> None:
        self._sinks.flush()

    @property
    def peak_gib(self) -> float:
        return self._meter.peak_gib

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._console.finish(summary)
        self._journal.finished(f"finished after step {summary.get('steps')}")
        look_back(self._folder, self._console)

    def stopped(self, state: RunState, steps: int) -> None:
        self._console.close()
        self._console.warn(where_it_stands(self._folder, state, steps))

    def restarting(self) -> None:
        self._journal.restarting()

    def close(self) -> None:
        """Nothing more will be seen."""
        if self._profile is not None:
            self._profile.close()
        self._trace_recoveries()
        self._timeline.close()

    def _trace_recoveries(self) -> None:
        for name, at, what in self._recoveries.take():
            self._timeline.event(name, at, at, what=what)
