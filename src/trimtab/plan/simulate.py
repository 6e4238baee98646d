"""Some steps of a run, simulated event by event: engines, one queue of requests, rewards, update and publishing.

The rules are the run's own. Groups lie in one queue; an engine takes one whenever it has free rows, and an engine with nothing to
do takes half of the samples that another has not started. The batch of step s is sampled by the policy after s - k steps
(`learn.staleness: k`), so it may begin when that version is there: k + 1 batches are under way at most. An engine has one version
at a time and changes it when its rows are empty, so engines change one by one. The update of step s begins when its batch is
whole and its rewards are there. Where all devices do everything (colocated), rollout and update take turns.

Time passes from event to event: between two of them an engine's batch does not change, so its decode steps are summed at once.
Nothing is drawn here, so that the same scenario always gives the same result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count


@dataclass(frozen=True)
class EngineSpeed:
    """What an engine can do."""

    rows: int
    """Sequences that it decodes at once."""
    step_s: Callable[[float, float], float]
    """Seconds of a decode step with so many sequences of so many tokens each, on average."""
    prefill_s: Callable[[float], float] = lambda tokens: 0.0
    """Seconds of the passes over so many tokens of prompts."""


@dataclass(frozen=True)
class Scenario:
    """A run to simulate."""

    engines: tuple[EngineSpeed, ...]
    lengths: tuple[tuple[int, ...], ...]
    """New tokens of every sequence of every step, the samples of a prompt one after the other."""
    samples: int = 1
    """Sequences of a prompt."""
    prompt_tokens: int = 1
    staleness: int = 0
    reward_s: float = 0.0
    """Seconds from a batch's last token to its last reward."""
    train_s: float = 0.0
    """Seconds of scoring and update on a batch."""
    publish_s: float = 0.0
    """Seconds in which an engine takes a new version."""
    colocated: bool = False
    """Engines and trainer are on the same devices, and take turns."""


@dataclass(frozen=True)
class SimulatedSpan:
    """What a track does from one second to another."""

    track: str
    name: str
    step: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class SimulatedStep:
    """When a step's parts began and ended, in seconds from the start."""

    step: int
    rollout_begin: float
    rollout_end: float
    rewarded: float
    train_begin: float
    train_end: float
    version: int
    """The policy that sampled it, as a number of optimizer steps."""


@dataclass(frozen=True)
class Simulated:
    """The result: all steps, and what each track did."""

    steps: tuple[SimulatedStep, ...]
    spans: tuple[SimulatedSpan, ...]
    sequences: tuple[int, ...]
    """Sequences that each engine has completed."""
    tokens: int
    stolen: int
    """Samples that were taken from another engine before they began."""

    @property
    def total(self) -> float:
        return self.steps[-1].train_end

    @property
    def step_s(self) -> float:
        """Seconds of a step once the run is under way: from the end of the last one that the first policy sampled, where there
        are more, for nobody waits for those."""
        early = [step for step in self.steps if step.version == 0]
        if len(early) == len(self.steps):
            return self.total / len(self.steps)
        return (self.total - early[-1].train_end) / (len(self.steps) - len(early))

    def busy(self, track: str) -> float:
        """Share of all the time in which a track works."""
        return sum(span.seconds for span in self.spans if span.track == track) / self.total

    @property
    def tracks(self) -> list[str]:
        return sorted(
            {span.track for span in self.spans}, key=lambda name: (not name.startswith("engine"), len(name), name)
        )


def simulate(scenario: Scenario) -> Simulated:
    """The whole of a scenario; every sequence is completed and every step is trained."""
    return _Simulation(scenario).run()


@dataclass
class _Engine:
    number: int
    speed: EngineSpeed
    version: int = 0
    decoded: int = 0
    """Decode steps so far."""
    running: list[tuple[int, int, int, float]] = field(default_factory=list)
    """A heap of rows: the decode step after which each ends, a number, its batch, and its context less `decoded` at its start."""
    context: float = 0.0
    """Sum of these contexts."""
    backlog: deque[tuple[int, int]] = field(default_factory=deque)
    """Samples that it has taken and not begun: batch and length."""
    to_prefill: float = 0.0
    at_work: bool = False
    """An event of its decode steps, or of a new version, is under way."""
    completed: int = 0

    @property
    def empty(self) -> bool:
        return not self.running and not self.backlog


class _Simulation:
    def __init__(self, scenario: Scenario) -> None:
        steps = len(scenario.lengths)
        self.given = scenario
        self.engines = [_Engine(number, speed) for number, speed in enumerate(scenario.engines)]
        self.groups = [deque(_groups(lengths, scenario.samples)) for lengths in scenario.lengths]
        self.left = [len(lengths) for lengths in scenario.lengths]
        self.begun: list[float | None] = [None] * steps
        self.ended, self.rewarded = [0.0] * steps, [None] * steps  # type: tuple[list[float], list[float | None]]
        self.trained: list[tuple[float, float]] = []
        self.training = False
        self.open: int | None = None
        """Colocated: the batch whose rollout has the devices."""
        self.spans: list[SimulatedSpan] = []
        self.tokens = self.stolen = 0
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()

    def run(self) -> Simulated:
        for engine in self.engines:
            self._at(0.0, self._filler(engine))
        while self.events:
            now, _, act = heappop(self.events)
            act(now)
        given = self.given
        steps = tuple(
            SimulatedStep(s, begun or 0.0, self.ended[s], rewarded or 0.0, *self.trained[s], version=self._needs(s))
            for s, (begun, rewarded) in enumerate(zip(self.begun, self.rewarded, strict=True))
        )
        done = tuple(engine.completed for engine in self.engines)
        assert sum(done) == sum(map(len, given.lengths)) and len(self.trained) == len(given.lengths)
        return Simulated(steps, tuple(self.spans), done, self.tokens, self.stolen)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heappush(self.events, (when, next(self.order), act))

    def _needs(self, batch: int) -> int:
        """The version that a batch is sampled by."""
        return max(0, batch - self.given.staleness)

    # --- engines

    def _filler(self, engine: _Engine) -> Callable[[float], None]:
        """Takes one group; engines that ask at the same moment take turns. Then it decodes."""

        def fill(now: float) -> None:
            if engine.at_work:
                return
            if len(engine.running) < engine.speed.rows and self._take(engine, now):
                if not engine.at_work:
                    self._at(now, fill)
            elif engine.running:
                self._decode(engine, now)

        return fill

    def _take(self, engine: _Engine, now: float) -> bool:
        """One more piece of work for an engine with free rows: of its own backlog, of the queue, or of another's backlog."""
        if not engine.backlog:
            batch = self._next_batch(now)
            need = None if batch is None else self._needs(batch)
            if batch is None or (need != engine.version and not engine.empty):
                return self._steal(engine)
            if need != engine.version:
                assert need is not None
                return self._change_version(engine, need, now)
            engine.backlog.extend((batch, length) for length in self.groups[batch].popleft())
            engine.to_prefill += self.given.prompt_tokens
        while engine.backlog and len(engine.running) < engine.speed.rows:
            batch, length = engine.backlog.popleft()
            if self.begun[batch] is None:
                self.begun[batch] = now
            start = float(self.given.prompt_tokens - engine.decoded)
            # The pass over the prompt gives the first token.
            heappush(engine.running, (engine.decoded + length - 1, next(self.order), batch, start))
            self.tokens += length
            engine.context += start
        return True

    def _next_batch(self, now: float) -> int | None:
        """The first batch with groups that nobody has taken, if it may begin."""
        batch = next((s for s, groups in enumerate(self.groups) if groups), None)
        if batch is None or self._needs(batch) > len(self.trained):
            return None
        if not self.given.colocated:
            return batch
        if self.open is None and not self.training and not self._due():
            self.open = batch
        return batch if batch == self.open else None

    def _steal(self, thief: _Engine) -> bool:
        """Half of the unstarted samples of the engine that has the most, for an engine that has none."""
        if not thief.empty:
            return False
        rich = [e for e in self.engines if e.backlog and self._needs(e.backlog[0][0]) == thief.version]
        owner = max(rich, key=lambda engine: len(engine.backlog), default=None)
        if owner is None:
            return False
        share = -(-len(owner.backlog) // 2)
        thief.backlog.extend(reversed([owner.backlog.pop() for _ in range(share)]))
        thief.to_prefill += self.given.prompt_tokens * -(-share // self.given.samples)
        self.stolen += share
        return True

    def _change_version(self, engine: _Engine, version: int, now: float) -> bool:
        engine.version, engine.at_work = version, True
        self._span(
            f"engine {engine.number}", "publish", version + self.given.staleness, now, now + self.given.publish_s
        )

        def done(then: float) -> None:
            engine.at_work = False
            self._filler(engine)(then)

        self._at(now + self.given.publish_s, done)
        return True

    def _decode(self, engine: _Engine, now: float) -> None:
        """Decode steps until the first row ends."""
        engine.at_work = True
        begin = now
        if engine.to_prefill:
            now += engine.speed.prefill_s(engine.to_prefill)
            engine.to_prefill = 0.0
        batch, ends = len(engine.running), engine.running[0][0]
        steps = ends - engine.decoded
        mean = engine.context / batch + engine.decoded + (steps - 1) / 2
        then = now + steps * engine.speed.step_s(batch, mean)
        step = engine.running[0][2]

        def done(at: float) -> None:
            engine.at_work, engine.decoded = False, ends
            self._span(f"engine {engine.number}", "rollout", step, begin, at)
            while engine.running and engine.running[0][0] == ends:
                _, _, mine, start = heappop(engine.running)
                engine.context -= start
                engine.completed += 1
                self._complete(mine, at)
            self._filler(engine)(at)

        self._at(then, done)

    def _complete(self, batch: int, now: float) -> None:
        self.left[batch] -= 1
        if self.left[batch]:
            return
        self.ended[batch] = now
        if self.open == batch:
            self.open = None

        def rewarded(then: float) -> None:
            self.rewarded[batch] = then
            self._train(then)

        if self.given.reward_s:
            self._span("rewards", "reward", batch, now, now + self.given.reward_s)
            self._at(now + self.given.reward_s, rewarded)
            self._at(now, self._wake)
        else:
            rewarded(now)

    # --- the trainer

    def _due(self) -> bool:
        """The next batch to train on has all its rewards."""
        step = len(self.trained)
        return step < len(self.rewarded) and self.rewarded[step] is not None

    def _train(self, now: float) -> None:
        if self.training or not self._due() or (self.given.colocated and self.open is not None):
            return
        step, self.training = len(self.trained), True
        end = now + self.given.train_s
        self._span("trainer", "update", step, now, end)

        def done(then: float) -> None:
            self.trained.append((now, then))
            self.training = False
            self._train(then)
            self._wake(then)

        self._at(end, done)

    def _wake(self, now: float) -> None:
        """Whoever waited for a version, or for its turn, looks again."""
        for engine in self.engines:
            if not engine.at_work:
                self._at(now, self._filler(engine))
        if self.given.colocated:
            self._train(now)

    def _span(self, track: str, name: str, step: int, begin: float, end: float) -> None:
        """Spans of the same track and name that follow each other are one."""
        last = next((span for span in reversed(self.spans[-len(self.engines) - 2 :]) if span.track == track), None)
        if last and last.name == name and last.step == step and abs(last.end - begin) < 1e-12:
            self.spans[self.spans.index(last, max(0, len(self.spans) - len(self.engines) - 2))] = SimulatedSpan(
                track, name, step, last.begin, end
            )
        elif end > begin:
            self.spans.append(SimulatedSpan(track, name, step, begin, end))


def _groups(lengths: Sequence[int], samples: int) -> list[list[int]]:
    return [list(lengths[at : at + samples]) for at in range(0, len(lengths), samples)]
