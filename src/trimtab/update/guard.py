"""A step that runs out of memory is done again with less of it, and has the gradient of one that did not.

Nothing of a step is applied before all of it is there (updater.py, optimizer.py), so a step that fails can be forgotten and
repeated whole. Between the two, outside any `except` block, everything the failed attempt held is given back, and one thing is
lowered (ladder.py) that changes no gradient. A step is never applied twice: an error after the first weight has changed ends the
run instead. When there is nothing left to lower, the error says what binds and which keys of `learn` and `model` would help.

An allocator that has to give memory back and ask again, step after step, is about to run out and slow already; that lowers the
budget too. What was lowered stays so for the run, and for those that resume it on the same machine. `ceiling` has the micro-batch
sizes that did not fit: whoever raises a budget later stays below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from trimtab.base.errors import MemoryExhausted
from trimtab.model.memory import Shortage, attempt, host_memory
from trimtab.rollout.engine import Engine
from trimtab.update.batch import Sample
from trimtab.update.ladder import GIB, Ladder, Rung, Tried
from trimtab.update.stats import Applied, UpdateStats
from trimtab.update.updater import AnyUpdater

Result = TypeVar("Result")
THRASHING_STEPS = 2
"""Steps in a row in which the allocator had to ask again."""


@dataclass(frozen=True)
class Recovery:
    """What ran out of memory, where, and what was lowered for it."""

    where: str
    change: str
    replayed: bool = True
    """False where nothing failed: the allocator only had a hard time."""

    def __str__(self) -> str:
        return (
            f"out of memory in {self.where}; {self.change}, replayed"
            if self.replayed
            else f"{self.where}; {self.change}"
        )


class Guard:
    """Stands between the loop and whatever may run out of memory."""

    def __init__(
        self,
        updater: AnyUpdater,
        engine: Engine,
        *,
        least_kv_tokens: int,
        shorter: str = "lower learn.max_new_tokens",
        report: Callable[[Recovery], None] = lambda recovery: None,
        alloc_retries: Callable[[], int | None] | None = None,
    ) -> None:
        """`least_kv_tokens`: of the longest sequence that will be generated. `shorter`: what to write for shorter sequences.
        `alloc_retries`: how many there were so far."""
        self.updater = updater
        self.ladder = Ladder(updater, engine, least_kv_tokens)
        self.report = report
        self.before_recovery: Callable[[], None] = lambda: None
        """Called before anything is given back or lowered: somebody may be reading it."""
        self.ceiling: dict[str, int] = {}
        """By the budget's name, the smallest micro-batch that ran out of memory under it."""
        self._device = updater.device
        self._alloc_retries = alloc_retries or updater.alloc_retries
        self._retries_seen = self._alloc_retries() or 0
        self._thrashing = 0
        self._recovered = False
        self._learned = False
        """Something was lowered in this session."""
        self._told: dict[str, Any] = {}
        self._lowered_before = dict(engine.lowered)
        """What was lower in the engine when the session began."""
        self._done = Tried()
        self._shorter = shorter
        self._accumulated: tuple[Sequence[Sample], float] = ((), 0.0)
        """What `apply` is about to apply: it has to be accumulated once more where memory runs out before that."""

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0) -> UpdateStats:
        """`Updater.accumulate`, for as long as it takes."""
        while isinstance(outcome := attempt(lambda: self.updater.accumulate(samples, kl_coef)), Shortage):
            at = self.updater.progress
            self._lower_ceiling("token_budget", at.tokens)
            self._recover(
                outcome, self._place(at.part), Tried(self.updater.longest(samples), at.largest), self.ladder.update
            )
        self._accumulated = samples, kl_coef
        return outcome

    def apply(self, lr: float) -> Applied:
        """`Updater.apply`, likewise. An attempt that failed has used up the gradient, which is then accumulated again."""
        freed = [_freed]
        samples, kl_coef = self._accumulated
        while isinstance(outcome := attempt(lambda: self.updater.apply(lr)), Shortage):
            self._refuse_half_applied(outcome)
            self._recover(outcome, "the optimizer step", Tried(), [*freed, *self.ladder.weights])
            freed = []
            self.accumulate(samples, kl_coef)
        self._done = Tried(self.updater.longest(samples), self.updater.progress.largest)
        self._accumulated = (), 0.0
        return outcome

    def step(self, samples: Sequence[Sample], lr: float, kl_coef: float = 0.0) -> UpdateStats:
        """Both halves."""
        return self.accumulate(samples, kl_coef).complete(self.apply(lr))

    def score(self, samples: Sequence[Sample], policy: Any, field: str) -> None:
        """`Updater.score`, likewise. What an attempt that failed has written is written again."""
        while isinstance(outcome := attempt(lambda: self.updater.score(samples, policy, field)), Shortage):
            at = self.updater.progress
            self._lower_ceiling("score_token_budget", at.tokens)
            tried = Tried(self.updater.longest(samples, policy), at.largest)
            self._recover(outcome, self._place(f"scoring {field}"), tried, self.ladder.score)

    def run(self, where: str, work: Callable[[], Result]) -> Result:
        """Work in one piece that may be repeated (publishing, a checkpoint): once just with what is free, then with less."""
        freed = [_freed]
        while isinstance(outcome := attempt(work), Shortage):
            self._recover(outcome, where, Tried(), [*freed, *self.ladder.weights])
            freed = []
        return outcome

    def end_step(self) -> dict[str, float]:
        """Look how hard the allocator had it since the last call; retries that came with a recovery do not count."""
        retries = self._alloc_retries()
        if retries is None:
            return {}
        before, self._retries_seen = self._retries_seen, retries
        grown = self._retries_seen - before
        self._thrashing = self._thrashing + 1 if grown and not self._recovered else 0
        self._recovered = False
        if self._thrashing == THRASHING_STEPS:
            self._thrashing = 0
            self._lower_ceiling("token_budget", self._done.largest)
            change = self.ladder.budget_to_longest(self._done)
            if change is not None:
                self._learned = True
                where = f"the allocator ran short and retried in {THRASHING_STEPS} steps in a row"
                self.report(Recovery(where, change, replayed=False))
        return {"run/alloc_retries": float(grown)}

    def memory(self) -> dict[str, Any]:
        """What a resumed run starts with, in JSON: what this session has found, or where it has not, what it was told."""
        rollout = self.ladder.engine.lowered
        if not self._learned and rollout == self._lowered_before:
            return self._told
        return {
            "machine": machine(self._device),
            "ceiling": dict(self.ceiling),
            "update": dict(self.ladder.lowered),
            "rollout": rollout,
        }

    def restore(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take over what an earlier session found, if it was on such a machine. Returns what is lower for it."""
        self._told = state
        if state.get("machine") == machine(self._device):
            self.ceiling = dict(state.get("ceiling", {}))
            self.ladder.restore(state.get("update", {}), state.get("rollout", {}))
        self._lowered_before = dict(self.ladder.engine.lowered)
        return self.ladder.lowered | self._lowered_before

    def _recover(self, short: Shortage, where: str, tried: Tried, rungs: Sequence[Rung]) -> None:
        """Give back what the attempt held, then lower one thing."""
        self._recovered = self._learned = True
        self.before_recovery()
        self.updater.abandon()
        change = next((change for rung in rungs if (change := rung(tried))), None)
        if change is None:
            raise MemoryExhausted(self._exhausted(short, where, tried))
        self.report(Recovery(where, change))

    def _place(self, part: str) -> str:
        at = self.updater.progress
        if not at.microbatches:  # the policy itself did not fit
            return part
        return f"{part} at micro-batch {at.microbatch} of {at.microbatches} ({at.tokens:,} tokens)"

    def _lower_ceiling(self, name: str, tokens: int) -> None:
        if tokens:
            self.ceiling[name] = min(tokens, self.ceiling.get(name, tokens))

    def _refuse_half_applied(self, short: Shortage) -> None:
        if self.updater.applying:
            raise MemoryExhausted(
                f"out of memory while applying the optimizer step ({short.message}). Some weights may have changed already, so "
                "Trimtab does not repeat the step. Resume from the last checkpoint."
            )

    def _exhausted(self, short: Shortage, where: str, tried: Tried) -> str:
        updater = self.updater
        trained = updater.trained
        adapted = trained < updater.parameters // 2
        state_gib = (updater.state_bytes / updater.ranks + 4 * trained) / GIB
        lora = f"train adapters, model.lora: {{}} (gradients and optimizer state take {state_gib:.1f} GiB)"
        fixes = [*([self._shorter] if tried.longest else []), *([] if adapted else [lora]), "use a smaller model"]
        binds = f"one sequence of {tried.longest:,} tokens has to fit" if tried.longest else "the weights have to fit"
        kept = (
            ", ".join(f"{name} {value}" for name, value in self.ladder.lowered.items()) or "as they were from the start"
        )
        return (
            f"out of memory in {where}, even at minimum memory settings ({kept}). Bottleneck: {binds}. "
            f"To continue, make one of these changes, the smallest first: {'; '.join(fixes)}. The error was: {short.message}"
        )


def machine(device: torch.device) -> str:
    """What a ceiling holds for: other memory, other ceilings."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"{properties.name}, {properties.total_memory / GIB:.0f} GiB"
    return f"{device.type}, {host_memory()[0] / GIB:.0f} GiB"


def _freed(tried: Tried) -> str:
    """A rung for what leaves no garbage and has no size: the cache alone may have been in its way."""
    return "freed cached memory"
