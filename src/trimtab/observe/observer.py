"""The Observer of a run in this process: all that sees a step go by, in one place. See run/roles.py."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.data.prompt import Prompt
from trimtab.observe.console import Console
from trimtab.observe.cost import OwnCost
from trimtab.observe.device_watch import DeviceWatch
from trimtab.observe.format import scores as in_words
from trimtab.observe.host import HostWatch
from trimtab.observe.journal import Journal
from trimtab.observe.look_back import look_back, where_it_stands
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.profiling.profiler import ProfileWindow
from trimtab.observe.rank_meter import RankMeter
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Move
from trimtab.plan.watch import PlanWatch
from trimtab.record.checkpoint import RunState, checkpoints
from trimtab.record.record_writer import RecordWriter
from trimtab.record.samples import Kind, sample_rows
from trimtab.record.sinks import Sinks
from trimtab.rollout.trajectory import Group
from trimtab.update.stats import PassSettings, UpdateStats

Callback = Callable[[int, Mapping[str, float]], object]
"""Called after every step with its number and its metrics; what it raises ends the run, as an error of the run would."""


@dataclass(frozen=True)
class Writers:
    """What writes into the run folder."""

    journal: Journal
    timeline: Timeline
    sinks: Sinks
    records: RecordWriter


@dataclass(frozen=True)
class Meters:
    """What measures a step. `devices`: None without GPUs; `profile`: None where nothing is profiled."""

    memory: MemoryMeter | RankMeter
    plan: PlanWatch
    recoveries: Recoveries
    devices: DeviceWatch | None = None
    profile: ProfileWindow | None = None


@dataclass(frozen=True)
class SampleChoice:
    """Which completions of a step are kept: how many rows, drawn by which seed, of which tasks."""

    rows: int
    seed: int
    task_of: Callable[[Prompt], str] | None = None


class LocalObserver:
    """Console, trace, metrics, samples, meters and the user's callbacks."""

    def __init__(
        self,
        folder: Path,
        state: RunState,
        console: Console,
        writers: Writers,
        meters: Meters,
        kept: SampleChoice,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self._folder, self._state, self._console, self._callbacks = folder, state, console, callbacks
        self._journal, self._timeline = writers.journal, writers.timeline
        self._sinks, self._records = writers.sinks, writers.records
        self._meter, self._watch, self._recoveries = meters.memory, meters.plan, meters.recoveries
        self._devices, self._profile = meters.devices, meters.profile
        self._sample_rows = partial(sample_rows, max_rows=kept.rows, seed=kept.seed, task_of=kept.task_of)
        self._begun = False
        self._cost = OwnCost()
        self._host = HostWatch(console.warn)

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

    def moved(self, before: Move, after: Move) -> None:
        """The micro-batches of the next step have another size."""
        changed = [f"token budget {before.budget:,} -> {after.budget:,}"] if before.budget != after.budget else []
        if before.recompute != after.recompute:
            changed.append(f"checkpoint_activations {before.recompute} -> {after.recompute}")
        data = {"token_budget": after.budget, "before": before.budget, "checkpoint_activations": after.recompute}
        self._journal.event("info", "budget", ", ".join(changed), data)

    def wrote_checkpoint(self, begin: float, end: float) -> None:
        """A checkpoint was written, in seconds of `time.perf_counter`."""
        step = max(checkpoints(self._folder), default=None)
        self._timeline.wrote_checkpoint(begin, end, checkpoint=step)
        text = f"checkpoint of step {step} is on disk ({end - begin:.1f} s)"
        self._journal.events.add("info", "checkpoint", text, {"seconds": round(end - begin, 3)}, step)

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        self._write_samples("train", step, groups)

    def evaluated(
        self,
        step: int,
        scores: Mapping[str, float],
        groups: Sequence[Group] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._console.eval(step, scores)
        self._journal.events.add("info", "evaluation", in_words(scores), {}, step)
        if groups is not None:
            self._write_samples("eval", step, groups)
        if results:
            self._records.results(step, results)

    def _write_samples(self, kind: Kind, step: int, groups: Sequence[Group]) -> None:
        with self._cost:
            self._records.samples(kind, step, self._sample_rows(step, groups))

    def distributed(self, row: Mapping[str, Any]) -> None:
        with self._cost:
            self._records.distributions(row)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._cost:
            self._sinks.write(step, {**self._stamp(), **metrics})

    def end_phases(self, step: int) -> dict[str, float]:
        with self._cost:
            self._trace_recoveries()
            self._journal.step(step + 1)
            seconds = self._timeline.end_step(step)
        if self._profile is not None:
            self._profile.step_ended(step)
        return seconds

    def measure(self, metrics: dict[str, float], steps_to_go: int) -> None:
        with self._cost:
            metrics |= self._meter.end_step() | self._host.end_step(steps_to_go)
            metrics |= self._watch.end_step(metrics)

    def account(self, step: int, metrics: dict[str, float], tokens: float) -> None:
        """What no plan and no governor is to see of a CPU's memory is added here, after them."""
        self._records.raise_if_failed()
        self._journal.settle()
        with self._cost:
            if self._meter.host_peaks is not None:
                metrics |= {f"memory/{name}_peak_gib": peak for name, peak in self._meter.host_peaks.take().items()}
            if self._devices is not None:
                metrics |= self._devices.end_step()
        spent = self._cost.take_s() + self._journal.take_cost_s() + self._records.take_cost_s()
        metrics |= self.end_phases(step) | self._recoveries.counts() | self._stamp()
        metrics["time/observe"] = spent
        metrics["throughput/tokens_per_s"] = tokens / metrics["time/total"]
        metrics |= self._watch.used(metrics["time/update"])

    def _stamp(self) -> dict[str, float]:
        """What every row has: when it was written, by which start, and how many tokens the run has come to."""
        return {
            "time/at": round(time.time(), 3),
            "run/start": float(self._journal.start),
            "run/tokens_total": float(self._state.completion_tokens),
        }

    def show(self, step: int, metrics: dict[str, float]) -> None:
        with self._cost:
            self._console.step(step, metrics)

    def call_back(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._callbacks:
            with torch.enable_grad():  # whatever it leaves behind
                callback(step, dict(metrics))

    def flush(self) -> None:
        self._records.wait()
        self._sinks.flush()

    @property
    def peak_gib(self) -> float:
        return self._meter.peak_gib

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._console.finish(summary)
        waited = self._timeline.since_step("checkpoint")
        if waited:  # it belongs to no step, so no row has it
            text = f"waited {waited:.1f} s for the last checkpoint, after the last step"
            self._journal.event("info", "checkpoint", text, {"waited_s": round(waited, 3)})
        self._journal.finished(f"finished after step {summary.get('steps')}")
        self._attach(look_back(self._folder, self._console))

    def _attach(self, report: Path | None) -> None:
        """W&B and trackio get the report of a run that is finished. That they do not ends no run."""
        if report is None or not self._sinks.wants_report:
            return
        try:
            self._sinks.attach(report)
        except Exception as error:  # trackers raise errors of their own; the model is exported already
            self._console.warn(f"cannot attach the report: {error}")

    def stopped(self, state: RunState, steps: int) -> None:
        self._console.close()
        self._console.warn(where_it_stands(self._folder, state, steps))

    def restarting(self, text: str) -> None:
        self._journal.restarting()
        self._console.warn(text, "rank")

    def close(self) -> None:
        """Nothing more will be seen."""
        if self._profile is not None:
            self._profile.close()
        self._trace_recoveries()
        self._timeline.close()
        self._meter.close()
        try:
            self._records.close()
        except OSError as error:  # whatever ends the run is told first; samples are not worth more than that
            self._console.warn(f"cannot write samples: {error}")

    def _trace_recoveries(self) -> None:
        for name, at, what in self._recoveries.take():
            self._timeline.event(name, at, at, what=what)
