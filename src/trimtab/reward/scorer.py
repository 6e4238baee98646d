"""Scores groups while others are still being sampled.

Guarantees:
- Every submitted group comes back from one `collect`, in the order of submission, its trajectories filled in.
- A sample has a reward, or a failure with its reason, or neither because no part applied. A failure is never a zero.
- A failed call costs only the samples that are to blame: the group's samples are then called one by one. Where a function
  returned another number of values than there are samples, and none of them is to blame (one value for all would pass for right
  with each alone), all have failed.
- A sample whose environment failed is not scored; it keeps its reason.
- Built-in rewards that compare an answer read what the model said last, never what an environment said.

The unit of a call is one part for one group. A part whose value depends on the other samples of the group sees only the
one sample in such a repeated call.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.base.errors import RewardError
from trimtab.base.spans import log
from trimtab.base.suggestions import near_or_all
from trimtab.reward.async_worker import AsyncWorker
from trimtab.reward.load import CALL_ARGUMENTS, ENVIRONMENT_ARGUMENTS, locate
from trimtab.reward.pool import RewardPool, RewardRequest
from trimtab.reward.worker import checked_entry
from trimtab.workers.messages import Cell, Failure, Tally
from trimtab.workers.places import WorkerPlaces
from trimtab.workers.pool import Reply
from trimtab.workers.process import POLL_S

if TYPE_CHECKING:
    from trimtab.config.schema import RewardPart
    from trimtab.reward.models import ModelBackend
    from trimtab.rollout.trajectory import Group, Trajectory


RESERVED_NAMES = frozenset(("mean", "std", "zero_std_groups", "failed", "latency_max_s", "repeated"))
"""Names under reward/ that Trimtab's own metrics have: a part of that name would take their place."""


class Backend(Protocol):
    """Who answers calls: worker processes, a judge's process, or reward models."""

    @property
    def needs(self) -> list[frozenset[str]]: ...

    def call(self, request: RewardRequest) -> None: ...

    def raise_if_broken(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class PartStats:
    """One part over the samples that it applied to."""

    mean: float
    std: float
    count: int


@dataclass(frozen=True)
class Stats:
    """What one `collect` saw."""

    parts: dict[str, PartStats] = field(default_factory=dict)
    """By name; a part that applied nowhere is left out."""
    failed: int = 0
    """Samples without a reward because a call failed."""
    not_applicable: int = 0
    """Samples without a reward because every part returned None."""
    calls: int = 0
    repeated: int = 0
    """Calls of a whole group that failed and were repeated sample by sample."""
    latency_max_s: float = 0.0
    wait_s: float = 0.0
    """Time for which `collect` kept its caller waiting."""
    judges: dict[str, Tally] = field(default_factory=dict)
    """By name of the part, for parts that are judges."""


class Scorer:
    """Reward functions in worker processes. Once made, every function has loaded; otherwise a RewardError."""

    def __init__(
        self,
        parts: Sequence[RewardPart],
        *,
        workers: int,
        base_dir: Path,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        run_dir: Path | None = None,
        places: WorkerPlaces | None = None,
    ) -> None:
        """`run_dir`: where a judge's cache on disk goes, once the folder is there. `places`: where workers are, if not here."""
        assert parts
        assert workers >= 1
        sources = [locate(part.fn, base_dir, functions or {}) for part in parts]
        self.names = [part.name or source.name for part, source in zip(parts, sources)]
        """Names of the parts, in their order."""
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise RewardError(f"reward: two parts are called {twice[0]!r}. Give each part its own `name`")
        for name in RESERVED_NAMES.intersection(self.names):
            raise RewardError(
                f"reward: a part cannot be called {name!r}, because reward/{name} is a metric of all parts. "
                "Give it another `name`"
            )
        self.stats = Stats()
        """What the last `collect` came to."""
        self.failures: Counter[str] = Counter()
        """Samples dropped since the start: timeout, raised, crashed, invalid."""
        self._parts = list(parts)
        self._scored: list[_GroupScores] = []
        judges = [place for place, source in enumerate(sources) if source.kind == "builtin" and source.name == "judge"]
        models = [place for place, source in enumerate(sources) if source.kind == "model"]
        given = [place for place, source in enumerate(sources) if source.kind == "environment"]
        others = [place for place in range(len(parts)) if place not in (*judges, *models, *given)]
        self._last_only = {p for p in (*others, *models) if sources[p].kind in ("builtin", "model")}
        """Parts that read the model's last turn instead of the whole conversation."""
        self.models: ModelBackend | None = None
        """Reward models: to be loaded before anything is collected."""
        self._backends: list[Backend] = []
        self._routes: dict[int, Route] = {}
        self._finalizer = weakref.finalize(self, _close, self._backends)  # also at interpreter exit
        try:
            if others:
                called = [(sources[p], parts[p].args) for p in others]
                self._open(others, RewardPool(called, workers, base_dir, places))
            if judges:
                asked = [(sources[p], parts[p].args, parts[p].timeout_s) for p in judges]
                self._open(judges, AsyncWorker(asked, base_dir, run_dir))
            if given:
                self._open(given, EnvironmentRewards(len(given)))
            if models:
                from trimtab.reward.models import ModelBackend, refuse_other_models

                for place in models:
                    refuse_other_models(sources[place].place)
                self.models = ModelBackend([sources[place].place for place in models])
                self._open(models, self.models)
        except BaseException:
            self.close()
            raise

    def _open(self, places: list[int], backend: Backend) -> None:
        self._backends.append(backend)
        self._routes |= {place: Route(backend, number) for number, place in enumerate(places)}

    def check(self, columns: Iterable[str], played: bool = False) -> None:
        """Raise where a part needs a column that the rows do not have. For before training, with a row's columns. `played`: there
        is an environment."""
        known = {*columns, *(ENVIRONMENT_ARGUMENTS if played else ())}
        for place, name in enumerate(self.names):
            for column in sorted(self._routes[place].needs - known):
                raise RewardError(
                    f"reward {name!r} needs a column {column!r}, which not every row of the data has. "
                    f"{near_or_all(column, known)} Besides the columns, a reward function can take "
                    f"{', '.join(CALL_ARGUMENTS)}; with an environment also {', '.join(ENVIRONMENT_ARGUMENTS)}"
                )

    def submit(self, group: Group) -> None:
        """Start scoring a group. Does not block; the group must not be touched until it is collected."""
        scores = _GroupScores(group, self._routes, self._parts, self.names, self._last_only)
        self._scored.append(scores)
        scores.start()

    def collect(self, groups: Collection[Group] | None = None) -> list[Group]:
        """Wait for these of the groups that were submitted, and fill in their trajectories. None: for all that were not
        collected. Another thread may go on to submit others."""
        start = time.monotonic()
        wanted = None if groups is None else {id(group) for group in groups}
        scored = [each for each in self._scored if wanted is None or id(each.group) in wanted]
        if self.models is not None:
            self.models.work()
        for scores in scored:
            while not scores.done.wait(POLL_S):
                for backend in self._backends:
                    backend.raise_if_broken()
        wait_s = time.monotonic() - start
        for scores in scored:
            self._scored.remove(scores)
        for scores in scored:
            self.failures.update(scores.fill_in())
        self.stats = _stats(scored, self.names, start, wait_s)
        return [scores.group for scores in scored]

    def close(self) -> None:
        """Kill the workers. Harmless when repeated."""
        self._finalizer()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Route:
    """Who scores a part, and what the part's number is there."""

    backend: Backend
    number: int

    @property
    def needs(self) -> frozenset[str]:
        return self.backend.needs[self.number]


def _close(backends: list[Backend]) -> None:
    for backend in backends:
        backend.close()


class EnvironmentRewards:
    """Answers for the parts that are what the environment gave."""

    def __init__(self, parts: int) -> None:
        self.needs: list[frozenset[str]] = [frozenset()] * parts

    def call(self, request: RewardRequest) -> None:
        given = request.arguments()["environment_reward"]
        request.reply(Reply([checked_entry(value) for value in given], 0.0))  # the sum may be more than float32 holds

    def raise_if_broken(self) -> None:
        pass

    def close(self) -> None:
        pass


class _GroupScores:
    """The scores of one group: a cell for every part and sample, filled in by the driving threads."""

    def __init__(
        self,
        group: Group,
        routes: Mapping[int, Route],
        parts: list[RewardPart],
        names: list[str],
        last_only: Collection[int] = (),
    ) -> None:
        self.group = group
        self.done = threading.Event()
        self.seconds: list[float] = []
        self.repeated = 0
        self.tallies: dict[str, Tally] = {}
        self.judged_at: dict[str, float] = {}
        """When each of its judges was done."""
        self._routes, self._parts, self._names, self._last_only = routes, parts, names, last_only
        self._whole = [sample for sample, t in enumerate(group.trajectories) if t.failure is None]
        """Samples that there is something to say about: those that no environment lost."""
        self._cells: list[dict[int, Cell]] = [{} for _ in parts]
        self._wrong: dict[int, Failure] = {}
        """Parts that returned something else than a value a sample."""
        self._lock = threading.Lock()
        self._missing = len(parts) * len(self._whole)

    def start(self) -> None:
        if not self._missing:
            self.done.set()
            return
        for part in range(len(self._parts)):
            self._call(part, self._whole)

    def _call(self, part: int, samples: Sequence[int], again: bool = False) -> None:
        arguments = partial(self._arguments, samples, part in self._last_only)
        receive = partial(self._receive, part, samples)
        route, timeout_s = self._routes[part], self._parts[part].timeout_s
        route.backend.call(RewardRequest(route.number, len(samples), timeout_s, arguments, receive, again))

    def _arguments(self, samples: Sequence[int], last_only: bool) -> dict[str, Any]:
        """The field's convention: a list for every argument, one entry a sample."""
        prompt, count = self.group.prompt, len(samples)
        chosen = [self.group.trajectories[sample] for sample in samples]
        offered = {
            **{name: [value] * count for name, value in prompt.columns.items()},
            "prompts": [prompt.prompt] * count,
            "completions": [_completion(trajectory, prompt.conversational, last_only) for trajectory in chosen],
            "completion_ids": [_drawn(trajectory) for trajectory in chosen],
        }
        if any(trajectory.conversation is not None for trajectory in chosen):
            played = [trajectory.conversation for trajectory in chosen if trajectory.conversation is not None]
            offered["turns"] = [each.turns for each in played]
            offered["environment_reward"] = [each.earned for each in played]
        return offered

    def _receive(self, part: int, samples: Sequence[int], reply: Reply) -> None:
        failure = reply.result if isinstance(reply.result, Failure) else None
        now, facts = time.perf_counter(), {"samples": len(samples)} | ({} if failure is None else {"failed": True})
        log.add("rewards", self._names[part], now - reply.seconds, now, **facts)
        again = failure is not None and len(samples) > 1
        with self._lock:
            self.seconds.append(reply.seconds)
            if reply.tally is not None:
                self.tallies.setdefault(self._names[part], Tally()).add(reply.tally)
                self.judged_at[self._names[part]] = time.monotonic()
            if failure is not None and again:
                self.repeated += 1
                if failure.kind == "invalid":
                    self._wrong[part] = failure
            else:
                cells = [reply.result] if isinstance(reply.result, Failure) else reply.result
                self._cells[part].update(zip(samples, cells))
                self._missing -= len(samples)
            finished = not self._missing
        if again:
            for sample in samples:
                self._call(part, [sample], again=True)
        if finished:
            self.done.set()

    def fill_in(self) -> list[str]:
        """Write rewards into the trajectories; the kinds of failure, one a dropped sample."""
        kinds: list[str] = []
        for part, wrong in self._wrong.items():
            if not any(isinstance(cell, Failure) for cell in self._cells[part].values()):
                self._cells[part] = dict.fromkeys(self._whole, wrong)
        for sample in self._whole:
            failure = self._fill_in_one(sample, self.group.trajectories[sample])
            if failure is not None:
                kinds.append(failure.kind)
        return kinds

    def _fill_in_one(self, sample: int, trajectory: Trajectory) -> Failure | None:
        first: Failure | None = None
        trajectory.rewards, trajectory.reward, trajectory.failure = {}, None, None
        total = 0.0
        for part, name, cells in zip(self._parts, self._names, self._cells):
            cell = cells[sample]
            if isinstance(cell, Failure):
                if first is None:
                    first, trajectory.failure = cell, f"reward {name!r} {cell}"
            elif cell is not None:
                trajectory.rewards[name] = cell
                total += part.weight * cell
        if first is None and trajectory.rewards:
            trajectory.reward = total
        return first


def _completion(trajectory: Trajectory, conversational: bool, last_only: bool) -> Any:
    """As rewards see it: text, or messages where the prompt is messages; of a conversation all, or what the model said last."""
    played = trajectory.conversation
    if conversational and played is not None and not last_only:
        return played.turns
    text = played.answers[-1] if played is not None and last_only else trajectory.text
    return [{"role": "assistant", "content": text}] if conversational else text


def _drawn(trajectory: Trajectory) -> list[int]:
    """The tokens that the model drew."""
    tokens = trajectory.tokens if trajectory.policy_mask is None else trajectory.tokens[trajectory.policy_mask]
    return tokens.tolist()


def check_failures(groups: Iterable[Group], max_fraction: float) -> None:
    """Raise when more than this fraction (observe.max_failed_rewards) of the samples has no reward by failed calls."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    failures = [trajectory.failure for trajectory in trajectories if trajectory.failure is not None]
    if len(failures) > max_fraction * len(trajectories):
        raise RewardError(
            f"{len(failures)} of {len(trajectories)} samples have no reward because {_blamed(trajectories)} calls failed; "
            f"observe.max_failed_rewards allows a share of {max_fraction:g}. First failure:\n{failures[0]}"
        )


def _blamed(trajectories: Iterable[Trajectory]) -> str:
    return " and ".join(sorted({t.failed_in for t in trajectories if t.failure is not None}))


def _stats(scored: list[_GroupScores], names: list[str], start: float, wait_s: float) -> Stats:
    trajectories = [trajectory for scores in scored for trajectory in scores.group.trajectories]
    seconds = [second for scores in scored for second in scores.seconds]
    values = {name: [t.rewards[name] for t in trajectories if name in t.rewards] for name in names}
    return Stats(
        parts={name: _part_stats(part) for name, part in values.items() if part},
        failed=sum(t.failure is not None for t in trajectories),
        not_applicable=sum(t.failure is None and t.reward is None for t in trajectories),
        calls=len(seconds),
        repeated=sum(scores.repeated for scores in scored),
        latency_max_s=max(seconds, default=0.0),
        wait_s=wait_s,
        judges=_judges(scored, start),
    )


def _judges(scored: list[_GroupScores], start: float) -> dict[str, Tally]:
    """What each judge counted for all groups, and how long after `start` it was done with the last."""
    judges: dict[str, Tally] = {}
    for scores in scored:
        for name, tally in scores.tallies.items():
            judges.setdefault(name, Tally()).add(tally)
            judges[name].wait_s = max(judges[name].wait_s, scores.judged_at[name] - start)
    return judges


def _part_stats(values: list[float]) -> PartStats:
    mean = statistics.fmean(values)
    return PartStats(mean, math.sqrt(statistics.fmean((value - mean) ** 2 for value in values)), len(values))
