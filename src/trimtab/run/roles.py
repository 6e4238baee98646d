"""The four that a run talks to. On one device they are objects of this process; on several the same calls are answered by ranks.

So they take and give plain data: samples, groups, numbers, names. Nobody reaches through them to what they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from trimtab.config.load import AnyConfig
from trimtab.config.resolved import PlannedConfig
from trimtab.data.prompt import Prompt
from trimtab.data.stream import Stream
from trimtab.observe.tasks import Tasks
from trimtab.record.batches import SampledBatch
from trimtab.record.checkpoint import RunState
from trimtab.reward.scorer import Stats
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.update.batch import Sample
from trimtab.update.stats import Applied, PassSettings, Scored, Trained, UpdateStats


class Trainer(Protocol):
    """Has the policy, and where the run has them a reference and a critic, with their optimizers. Survives a lack of memory."""

    def score(self, samples: Sequence[Sample], field: str, by: Scored = "policy") -> None:
        """Write what a model says of the samples (log-probs, values, scores) into one of their fields. No gradient."""
        ...

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0, model: Trained = "policy") -> UpdateStats:
        """First half of an optimizer step: the gradient of all of `samples`. Changes no weight."""
        ...

    def apply(self, lr: float, model: Trained = "policy") -> Applied:
        """Second half: change the weights by what was accumulated, all of them or none."""
        ...

    def place_of(self, model: Scored) -> int:
        """Where a model is: those of one place take turns, others can be asked at the same time, from other threads."""
        ...

    @property
    def begun(self) -> int:
        """Optimizer steps so far that have begun to change weights."""
        ...

    @property
    def lost(self) -> bool:
        """The weights are gone, with the processes that had them: nothing can be saved, and there is nothing to wait for."""
        ...

    @property
    def settings(self) -> PassSettings: ...

    def end_step(self) -> dict[str, float]:
        """Numbers of the step that has ended, for its metrics."""
        ...

    def adapt(self, metrics: Mapping[str, float]) -> None:
        """Choose the size of the next step's micro-batches by what was measured of this one. Changes no gradient."""
        ...

    def memory(self) -> dict[str, Any]:
        """What running out of memory has taught, in JSON: a resumed run begins with it."""
        ...

    def save(self, folder: Path, state: RunState, keep: int, files: Mapping[str, bytes]) -> None:
        """Begin to write the checkpoint of the state's step into a run's folder, with these files, and keep so many besides the
        best. Weights and state are those of now; the checkpoint before it is on disk when this returns."""
        ...

    def settle_saves(self, wait: bool = True) -> None:
        """Every checkpoint that was begun is on disk, or what kept it from that is raised. Without `wait`: as far as is known."""
        ...

    def export(self, folder: Path, scores: Mapping[str, Any] | None = None) -> None:
        """Write RUN/final, whole or not at all. `scores`: mean and standard deviation by which a reward model is normalised."""
        ...


class Generator(Protocol):
    """Turns prompts into groups of completions, talking with an environment where the run has one."""

    @property
    def stats(self) -> RolloutStats:
        """What the latest `generate` did."""
        ...

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        """Yield every request's group once, in the order they finish."""
        ...

    @property
    def apart(self) -> bool:
        """It has weights of its own: it may generate, in another thread, while the trainer changes its own."""
        ...

    def lend(self) -> None:
        """Rollout is over for now: give up memory that the update can use."""
        ...

    def publish(self, version: int) -> Mapping[str, float]:
        """From now on generate with the trainer's current weights, known as `version`. Returns what that came to, as metrics."""
        ...

    def close(self) -> None: ...


class Rewarder(Protocol):
    """Scores groups while others are being sampled."""

    names: list[str]
    """Of the reward's parts."""
    stats: Stats
    """What the latest `collect` came to."""

    def submit(self, group: Group) -> None: ...

    def collect(self, groups: Collection[Group] | None = None) -> list[Group]:
        """These of the groups that were submitted, or all of them, their rewards filled in. Another thread may submit others."""
        ...

    def close(self) -> None: ...


class Observer(Protocol):
    """Sees all of a run, measures it, writes it down and tells the user."""

    def waiting(self, what: str) -> None:
        """What is waited for from now on."""
        ...

    def note(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...

    def phase(self, name: str, memory: str | None = None) -> AbstractContextManager[None]:
        """The block's time is of phase `name`, and its peak of device memory of phase `memory`."""
        ...

    def saw(self, stats: UpdateStats, settings: PassSettings) -> None:
        """An optimizer step of the policy, and what it ran with."""
        ...

    def samples(self, step: int, groups: Sequence[Group]) -> None:
        """Keep some completions of a step for the user to read."""
        ...

    def evaluated(
        self,
        step: int,
        scores: Mapping[str, float],
        groups: Sequence[Group] | None = None,
        results: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Scores on held-out data, the completions they come from, and what each prompt came to."""
        ...

    def distributed(self, row: Mapping[str, Any]) -> None:
        """How lengths, rewards and advantages of a step are spread (record/distributions.py)."""
        ...

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """A row of metrics is in the record."""
        ...

    def end_phases(self, step: int) -> dict[str, float]:
        """Seconds of each phase since the last call."""
        ...

    def measure(self, metrics: dict[str, float], steps_to_go: int) -> None:
        """Add peaks of memory to a step's metrics, and what was predicted of them."""
        ...

    def account(self, step: int, metrics: dict[str, float], tokens: float) -> None:
        """Add the seconds of a step to its metrics, and what they say of throughput. Ends the step's phases."""
        ...

    def show(self, step: int, metrics: dict[str, float]) -> None:
        """A step is done: show it."""
        ...

    def call_back(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the user's functions."""
        ...

    def flush(self) -> None:
        """All rows are on disk."""
        ...

    @property
    def peak_gib(self) -> float: ...

    def finish(self, summary: Mapping[str, Any]) -> None:
        """The run has ended well."""
        ...

    def stopped(self, state: RunState, steps: int) -> None:
        """It was stopped, or has failed: say where it stands."""
        ...

    def restarting(self, text: str) -> None:
        """It ends only to begin again: say why."""
        ...


class Batches(Protocol):
    """Has what is sampled and not learned from yet (buffer.py)."""

    def next(self, run: Session) -> SampledBatch:
        """The batch of this step, scored. What is due by now is sampled first, or while the policy learns from this batch."""
        ...

    def settle(self, run: Session) -> None:
        """All that is due is sampled: the generator may have other weights."""
        ...

    def snapshot(self) -> Callable[[], Mapping[str, bytes]]:
        """The files that hold what waits now, once they are asked for."""
        ...


AConfig = TypeVar("AConfig", bound=AnyConfig)
AData = TypeVar("AData")


@dataclass
class TrainingRun(Generic[AConfig, AData]):
    """A run of any stage with everything in place."""

    config: AConfig
    folder: Path
    state: RunState
    data: AData
    trainer: Trainer
    observer: Observer

    def snapshot(self) -> Callable[[], Mapping[str, bytes]]:
        """What a checkpoint of now has to hold beside the trainer's weights and the state: files, by name, once they are asked
        for."""
        return dict


@dataclass
class Prompts:
    """What is sampled from: prompts to learn from, held-out ones, and what tasks they belong to."""

    stream: Stream[Prompt]
    held_out: list[Prompt]
    tasks: Tasks | None


@dataclass
class Session(TrainingRun[PlannedConfig, Prompts]):
    """A run that learns from what it samples."""

    generator: Generator
    rewarder: Rewarder
    buffer: Batches

    def snapshot(self) -> Callable[[], Mapping[str, bytes]]:
        return self.buffer.snapshot()
