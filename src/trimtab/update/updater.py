"""One optimizer step: pack under the cap, run each micro-batch forward and backward, apply the sum.

Guarantee: the gradient is that of the whole step, whatever the token budget, chunk size or checkpointing. Every weight in the
loss was fixed before packing, micro-batches only add up, and no quantity is averaged over a micro-batch. A step that fails before
it is applied has changed nothing, neither weights nor samples, and can be repeated; guard.py does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch

from trimtab.config.known import ResolvedLearn
from trimtab.config.run import Recompute
from trimtab.learn.importance import importance_weights
from trimtab.learn.kl import ESTIMATORS, corrected
from trimtab.learn.losses import LOSSES
from trimtab.learn.segments import sum_by
from trimtab.model.head import TokenStats
from trimtab.model.keep import Keep
from trimtab.model.packed import take_rows
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.model.shelf import Shelf
from trimtab.update.batch import MicroBatch, Sample, row_tokens, same_prompt
from trimtab.update.launching import Launching
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.packing import pack


@dataclass
class UpdateStats:
    """Sums over the tokens of one optimizer step, and how it was cut into micro-batches."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    tokens: int = 0
    row_tokens: int = 0
    largest: int = 0
    microbatches: int = 0
    sizes: list[tuple[int, int, int, int, int]] = field(default_factory=list)
    """Sizes of each micro-batch, as `plan.activations.Row` takes them."""
    token_budget: int = 0
    """The cap they were packed under."""
    grad_norm: float = 0.0
    applied: bool = True
    behind: float | None = None
    """Micro-batches that the device had left to do when the last was launched; near 0, it waits for the host."""
    kl_ref_of: list[tuple[list[Sample], torch.Tensor]] = field(default_factory=list)
    """For each micro-batch its samples, and each one's KL to the reference, summed over its tokens. Stays on the device."""

    def add(self, **values_R: torch.Tensor) -> None:
        for name, values in values_R.items():
            total = values.detach().double().sum()
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def mean(self, name: str) -> float:
        return float(self.sums[name]) / max(1, self.tokens)


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
    """Turns samples with advantages and weights into weight changes."""

    def __init__(
        self,
        policy: Policy,
        learn: ResolvedLearn,
        *,
        token_budget: int,
        score_token_budget: int,
        logprob_chunk: int,
        checkpoint_activations: Recompute,
        offload_optimizer: bool = False,
        offload_activations: bool = False,
    ) -> None:
        self.policy = policy
        self.learn = learn
        self.token_budget = token_budget
        self.score_token_budget = score_token_budget
        self.logprob_chunk = logprob_chunk
        self.optimizer = MasterAdamW(policy.weights, learn, offload=offload_optimizer)
        policy.gradients = self.optimizer.gradients
        policy.shelf = Shelf(policy.device) if offload_activations else None
        self.checkpoint_activations: Recompute = False
        self.recompute(checkpoint_activations)
        self.metered: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered around each optimizer step, by whoever measures its memory."""
        self.progress = Progress()

    def recompute(self, activations: Recompute) -> None:
        """From the next pass on, make so much again in the backward pass instead of keeping it."""
        self.checkpoint_activations = activations
        self.policy.keep = KEEP[activations]
        if activations:
            self.policy.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
            )
        elif self.policy.model.is_gradient_checkpointing:
            self.policy.model.gradient_checkpointing_disable()

    def abandon(self) -> None:
        """Keep nothing of a step that failed half-way."""
        self.optimizer.zero_grad()
        if self.policy.shelf is not None:
            self.policy.shelf.clear()

    def rehearse(self, samples: Sequence[Sample]) -> None:
        """Forward and backward passes of one micro-batch that is not applied: what it takes is seen from outside. Gradients stay,
        as before the second micro-batch of a step, until `abandon`."""
        batch = MicroBatch.build(samples, self.policy.device)
        self._backward(self._loss(batch, 0.0, UpdateStats()))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], policy: AnyPolicy, field: str) -> None:
        """Write `policy`'s log-probs of the samples' tokens into one of their fields. No gradient, its own budget."""
        self.progress = Progress()
        with policy.present():
            batches = self._micro_batches(samples, self.score_token_budget)
            found = [(batch, self._token_stats(policy, batch).logprobs) for batch in batches]
        for batch, logprobs_R in found:  # the device is waited for once, after its last pass
            batch.scatter(logprobs_R, field)

    def step(self, samples: Sequence[Sample], lr: float, kl_coef: float) -> UpdateStats:
        """One optimizer step on all of `samples`."""
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
        self.progress.part = "optimizer step"
        with self.metered():
            outcome = self.optimizer.step(lr)
        stats.grad_norm, stats.applied = outcome.grad_norm, outcome.applied
        stats.behind = launching.behind(stats.microbatches)
        return stats

    def _micro_batches(self, samples: Sequence[Sample], budget: int) -> Iterator[MicroBatch]:
        parts = self._together(samples, cap(samples, budget))
        sizes = [row_tokens(part) for part in parts]
        packed = pack(sizes, max([budget, *sizes]))
        loads = [sum(sizes[i] for i in indices) for indices in packed]
        for number, (indices, load) in enumerate(zip(packed, loads), 1):
            self.progress = Progress("forward", number, len(packed), load, max(loads))
            yield MicroBatch.build([s for i in indices for s in parts[i]], self.policy.device)

    def _together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        """Samples that are in one micro-batch, whatever else is."""
        return list(same_prompt(samples, budget))

    def _backward(self, loss: torch.Tensor) -> None:
        """Runs in this thread: autograd's own would contend with it for the interpreter, and have a cuBLAS workspace besides."""
        self.progress.part = "backward"
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()

    def _token_stats(self, policy: AnyPolicy, batch: MicroBatch) -> TokenStats:
        hidden_TE = policy.hidden(batch.tokens_T, batch.plan.positions, batch.plan)
        temperature = self.learn.sampling.temperature
        return policy.head.token_stats(
            take_rows(hidden_TE, batch.predictors_R),
            batch.targets_R,
            temperature,
            self.logprob_chunk,
            self.policy.gradients,
        )

    def _loss(self, batch: MicroBatch, kl_coef: float, stats: UpdateStats) -> torch.Tensor:
        """This micro-batch's part of the step's loss."""
        learn = self.learn
        logp, entropy = self._token_stats(self.policy, batch)
        engine = batch.gather("engine_logprobs")
        old = logp.detach() if batch.samples[0].old_logprobs is None else batch.gather("old_logprobs")
        sequence, sequences = batch.sequence_R, len(batch.samples)
        policy = LOSSES[learn.loss](
            logp,
            old,
            batch.gather("advantages"),
            learn.clip.low,
            learn.clip.high,
            learn.clip.dual,
            sequence=sequence,
            sequences=sequences,
        )
        loss = policy.loss
        if learn.importance.level != "off":
            settings = learn.importance
            loss = loss * importance_weights(
                old, engine, settings.level, settings.cap, settings.mode, sequence=sequence, sequences=sequences
            )
        if batch.samples[0].ref_logprobs is not None:
            reference = batch.gather("ref_logprobs")
            kl_ref = ESTIMATORS[learn.kl.estimator](logp, reference)
            stats.add(kl_ref=kl_ref)
            stats.kl_ref_of.append((batch.samples, sum_by(kl_ref.detach().double(), sequence, sequences)))
            if learn.kl.where == "loss":
                penalty = kl_ref
                if learn.kl.corrected:
                    penalty = corrected(
                        learn.kl.estimator,
                        logp,
                        reference,
                        old,
                        by_sequence=learn.kl.corrected == "sequence",
                        sequence=sequence,
                        sequences=sequences,
                    )
                loss = loss + kl_coef * penalty
        if learn.entropy_coef:
            loss = loss - learn.entropy_coef * entropy
        weighted = batch.gather("weights") * loss
        stats.tokens += logp.shape[0]
        stats.add(
            loss=weighted,
            entropy=entropy,
            ratio=policy.ratio,
            clipped=policy.clipped,
            kl_old=ESTIMATORS["k3"](old, logp.detach()),  # KL(old || policy): the old policy drew the tokens
            logprob_gap=(logp.detach() - engine).abs(),
        )
        return weighted.sum()


def cap(samples: Sequence[Sample], budget: int) -> int:
    """A sequence is never cut. One that is longer than the budget, which a run is refused for at its start, comes only after the
    budget was lowered because memory ran out."""
    return max([budget, *(row_tokens([sample]) for sample in samples)])
