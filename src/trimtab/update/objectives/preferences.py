"""A reward model's loss, by Bradley and Terry: an answer's score is read after its last token, and both answers of a pair are in
one micro-batch.

Two samples make a pair, the better one first. A sample ends with a token that is not read: what predicts it is the hidden state
after the answer's last token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.data.pairs import Pair
from trimtab.learn.preferences import preference_loss
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.stats import UpdateStats

UNREAD = 0
"""The token after the end: any will do."""


@dataclass(eq=False)
class PairSample(Sample):
    """One of a pair."""

    mate: PairSample | None = None
    """Set for the better answer of a pair: the worse one."""
    margin: float = 0.0
    score: torch.Tensor | None = None


def to_samples(pairs: Sequence[Pair]) -> list[Sample]:
    """The better and the worse answer of each pair, in turn, with the pair's share of a step that consumes exactly these."""
    share, none = torch.tensor([1 / max(1, len(pairs))]), torch.empty(0)
    samples: list[Sample] = []
    for pair in pairs:
        worse = PairSample(pair.prompt, torch.tensor([*pair.worse, UNREAD]), none, share, none)
        better = PairSample(
            pair.prompt, torch.tensor([*pair.better, UNREAD]), none, share, none, mate=worse, margin=pair.margin
        )
        samples += [better, worse]
    return samples


def pairs_of(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Both answers of a pair are in one micro-batch."""
    return [list(samples[at : at + 2]) for at in range(0, len(samples), 2)]


class BradleyTerry:
    """See objective.py. `head` is the model's value head (critic.py); `center`: weight of a term that keeps scores around 0."""

    logits = False

    def __init__(self, head: torch.nn.Linear, center: float) -> None:
        self.head, self.center = head, center

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return pairs_of(samples, budget)

    def estimate(self, policy: AnyPolicy, batch: MicroBatch, chunk: int) -> torch.Tensor:
        """[N]: the score of each sample of the micro-batch."""
        counts = torch.tensor([s.learned for s in batch.samples])
        run = batch.run(policy, counts.cumsum(0) - 1)
        scores: torch.Tensor = self.head(run.hidden_RE.to(self.head.weight.dtype)).squeeze(-1)
        return run.whole(scores)

    def write(self, estimates: torch.Tensor, batch: MicroBatch, field: str) -> None:
        for sample, score in zip(batch.samples, estimates.double().cpu()):
            setattr(sample, field, score)

    def loss(
        self, policy: Policy, batch: MicroBatch, stats: UpdateStats, *, chunk: int, kl_coef: float
    ) -> torch.Tensor:
        scores = self.estimate(policy, batch, chunk)
        place = {id(sample): at for at, sample in enumerate(batch.samples)}
        better = [s for s in batch.samples if isinstance(s, PairSample) and s.mate is not None]
        first, second = (
            torch.tensor([place[id(s)] for s in side], device=scores.device)
            for side in (better, [s.mate for s in better])
        )
        margins = torch.tensor([s.margin for s in better], dtype=scores.dtype, device=scores.device)
        weights = torch.cat([s.weights for s in better]).to(scores)
        losses = preference_loss(scores[first], scores[second], margins, self.center)
        stats.tokens += len(better)
        stats.add(
            loss=weights * losses,
            right=scores[first] > scores[second],
            apart=scores[first] - scores[second],
            scores=scores / 2,
        )
        return (weights * losses).sum()
