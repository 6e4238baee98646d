"""The policy's loss: the algorithm's own, with importance weights, the distance to the reference and entropy where asked for."""

from __future__ import annotations

import torch

from trimtab.config.known import ResolvedLearn
from trimtab.learn.importance import importance_weights
from trimtab.learn.kl import ESTIMATORS, corrected
from trimtab.learn.losses import LOSSES
from trimtab.learn.segments import sum_by
from trimtab.model.policy import Policy
from trimtab.update.batch import MicroBatch
from trimtab.update.objectives.tokens import OverTokens, token_stats
from trimtab.update.stats import UpdateStats


class PolicyGradient(OverTokens):
    """See objective.py."""

    def __init__(self, learn: ResolvedLearn) -> None:
        super().__init__(learn.sampling.temperature)
        self.learn = learn

    def loss(
        self, policy: Policy, batch: MicroBatch, stats: UpdateStats, *, chunk: int, kl_coef: float
    ) -> torch.Tensor:
        learn = self.learn
        logp, entropy = token_stats(policy, batch, self.temperature, chunk, policy.gradients)
        engine = batch.gather("engine_logprobs")
        old = logp.detach() if batch.samples[0].old_logprobs is None else batch.gather("old_logprobs")
        sequence, sequences = batch.sequence_R, len(batch.samples)
        found = LOSSES[learn.loss](
            logp,
            old,
            batch.gather("advantages"),
            learn.clip.low,
            learn.clip.high,
            learn.clip.dual,
            sequence=sequence,
            sequences=sequences,
        )
        loss = found.loss
        if learn.importance.level != "off":
            settings = learn.importance
            loss = loss * importance_weights(
                old, engine, settings.level, settings.cap, settings.mode, sequence=sequence, sequences=sequences
            )
        if batch.samples[0].ref_logprobs is not None:
            penalty = self._distance(batch, logp, old, stats)
            if learn.kl.where == "loss":
                loss = loss + kl_coef * penalty
        if learn.entropy_coef:
            loss = loss - learn.entropy_coef * entropy
        weighted = batch.gather("weights") * loss
        stats.tokens += logp.shape[0]
        stats.add(
            loss=weighted,
            entropy=entropy,
            ratio=found.ratio,
            clipped=found.clipped,
            kl_old=ESTIMATORS["k3"](old, logp.detach()),  # KL(old || policy): the old policy drew the tokens
            logprob_gap=(logp.detach() - engine).abs(),
        )
        return weighted.sum()

    def _distance(self, batch: MicroBatch, logp: torch.Tensor, old: torch.Tensor, stats: UpdateStats) -> torch.Tensor:
        """KL to the reference of each token, as the loss has it; `stats` learns what it is without a correction."""
        kl, sequence, sequences = self.learn.kl, batch.sequence_R, len(batch.samples)
        reference = batch.gather("ref_logprobs")
        found = ESTIMATORS[kl.estimator](logp, reference)
        stats.add(kl_ref=found)
        stats.kl_ref_of.append((batch.places, sum_by(found.detach().double(), sequence, sequences)))
        if kl.where != "loss" or not kl.corrected:
            return found
        return corrected(
            kl.estimator,
            logp,
            reference,
            old,
            by_sequence=kl.corrected == "sequence",
            sequence=sequence,
            sequences=sequences,
        )
