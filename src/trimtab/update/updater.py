"""One optimizer step: pack under the cap, run each micro-batch forward and backward, apply the sum.

Guarantee: the gradient is that of the whole step, whatever the token budget, chunk size or checkpointing. Every weight in the
loss was fixed before packing, micro-batches only add up, and no quantity is averaged over a micro-batch. A step that fails before
it is applied has changed nothing, neither weights nor samples, and can be repeated; guard.py does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from trimtab.config.run import Recompute
from trimtab.model.keep import Keep
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.update.batch import MicroBatch, Sample, row_tokens
from trimtab.update.launching import Launching
from trimtab.update.objectives.objective import Objective
from trimtab.update.optimizer import AnyLearn, MasterAdamW
from trimtab.update.packing import pack
from trimtab.update.stats import Applied, UpdateStats

Part = Literal["forward", "backward", "optimizer step"]


@dataclass
class Progress:
    """Where a pass is; numbers only, so that it keeps nothing alive when the pass fails."""

    part: Part = "forward"
    microbatch: int = 0
    """Counted from one."""
    microbatches: int = 0
    tokens: int = 0
    """Tokens of this micro-batch."""
    largest: int = 0
    """Tokens of the largest micro-batch."""


KEEP = {False: Keep.ALL, "some": Keep.SOME, True: Keep.INPUT}


class Updater:
    """Turns samples into weight changes that make the objective smaller. A step has two halves: `accumulate` changes no weight,
    `apply` changes all."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        learn: AnyLearn,
        *,
        token_budget: int,
        score_token_budget: int,
        logprob_chunk: int,
        checkpoint_activations: Recompute,
        offload_optimizer: bool = False,
        offload_activations: bool = False,
        metered: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`learn`: the optimizer's settings. `metered` is entered around each `apply`, by whoever measures its memory."""
        self.policy = policy
        self.objective = objective
        self.token_budget = token_budget
        self.score_token_budget = score_token_budget
        self.logprob_chunk = logprob_chunk if objective.logits else 1
        self.optimizer = MasterAdamW(policy.weights, learn, offload=offload_optimizer)
        policy.add_gradients_to(self.optimizer.gradients)
        policy.offload_activations(offload_activations)
        self.checkpoint_activations: Recompute = False
        self.recompute(checkpoint_activations)
        self._metered = metered
        self._launching: Launching | None = None
        self.progress = Progress()

    def recompute(self, activations: Recompute) -> None:
        """From the next pass on, make so much again in the backward pass instead of keeping it."""
        self.checkpoint_activations = activations
        self.policy.keep_for_backward(KEEP[activations])

    def abandon(self) -> None:
        """Keep nothing of a step that failed half-way."""
        self.optimizer.zero_grad()
        if self.policy.activation_offload is not None:
            self.policy.activation_offload.clear()

    def rehearse(self, samples: Sequence[Sample]) -> None:
        """Forward and backward passes of one micro-batch that is not applied: what it takes is seen from outside. Gradients stay,
        as before the second micro-batch of a step, until `abandon`."""
        batch = MicroBatch.build(samples, self.policy.device)
        self._backward(self._loss(batch, 0.0, UpdateStats()))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], policy: AnyPolicy, field: str) -> None:
        """Write the objective's estimates by `policy` into one of the samples' fields. No gradient, its own budget."""
        self.progress = Progress()
        with policy.present():
            batches = self._micro_batches(samples, self.score_token_budget)
            found = [(batch, self.objective.estimate(policy, batch, self.logprob_chunk)) for batch in batches]
        for batch, estimates in found:  # the device is waited for once, after its last pass
            self.objective.write(estimates, batch, field)

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0) -> UpdateStats:
        """The gradient of a step on all of `samples`, beside the weights."""
        stats = UpdateStats()
        self.progress = Progress()
        self.abandon()
        stats.token_budget = cap(samples, self.token_budget)
        launching = Launching(self.policy.device)
        for batch in self._micro_batches(samples, self.token_budget):
            self._backward(self._loss(batch, kl_coef, stats))
            stats.microbatches += 1
            stats.row_tokens += batch.tokens_T.shape[0]
            stats.largest = max(stats.largest, batch.tokens_T.shape[0])
            stats.sizes.append(batch.sizes)
        launching.end()
        self._launching = launching
        return stats

    def apply(self, lr: float) -> Applied:
        """Change the weights by what was accumulated."""
        self.progress.part = "optimizer step"
        with self._metered():
            outcome = self.optimizer.step(lr)
        behind = None if self._launching is None else self._launching.behind(self.progress.microbatches)
        return Applied(outcome.grad_norm, outcome.applied, behind)

    def step(self, samples: Sequence[Sample], lr: float, kl_coef: float = 0.0) -> UpdateStats:
        """Both halves."""
        return self.accumulate(samples, kl_coef).complete(self.apply(lr))

    def _micro_batches(self, samples: Sequence[Sample], budget: int) -> Iterator[MicroBatch]:
        parts = self.objective.together(samples, cap(samples, budget))
        sizes = [row_tokens(part) for part in parts]
        packed = pack(sizes, max([budget, *sizes]))
        loads = [sum(sizes[i] for i in indices) for indices in packed]
        place_of = {id(sample): place for place, sample in enumerate(samples)}
        for number, (indices, load) in enumerate(zip(packed, loads), 1):
            self.progress = Progress("forward", number, len(packed), load, max(loads))
            yield MicroBatch.build([s for i in indices for s in parts[i]], self.policy.device, place_of)

    def _loss(self, batch: MicroBatch, kl_coef: float, stats: UpdateStats) -> torch.Tensor:
        return self.objective.loss(self.policy, batch, stats, chunk=self.logprob_chunk, kl_coef=kl_coef)

    def _backward(self, loss: torch.Tensor) -> None:
        """Runs in this thread: autograd's own would contend with it for the interpreter, and have a cuBLAS workspace besides."""
        self.progress.part = "backward"
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()


def cap(samples: Sequence[Sample], budget: int) -> int:
    """A sequence is never cut. One that is longer than the budget, which a run is refused for at its start, comes only after the
    budget was lowered because memory ran out."""
    return max([budget, *(row_tokens([sample]) for sample in samples)])
