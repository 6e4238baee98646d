"""Learning from worked answers (`trimtab sft`).

The loss is the mean of -log p over the tokens that are learned, in nats; what a token weighs is counted over the step before
anything is split, so no key of `run` changes it. In the updater's terms an example is a sample whose prompt ends where the first
answer begins, and what is not learned after that (other turns) weighs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trimtab.config.sft import SftConfig
from trimtab.data.examples import Example, ExampleEncoder
from trimtab.model.policy import Policy
from trimtab.run.offline import run_offline
from trimtab.run.offline_data import Examples, OfflineStage
from trimtab.run.roles import Trainer
from trimtab.update.batch import Sample
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.objectives.objective import Objective
from trimtab.update.stats import UpdateStats


class Supervised(OfflineStage):
    """See offline_data.py."""

    unit = "example"
    rehearses = True

    def per_step(self, config: SftConfig) -> int:
        return config.learn.sequences_per_step

    def words(self, config: SftConfig) -> str:
        return f"supervised, loss on {config.learn.loss_on}, {config.learn.aggregate}"

    def encoder(self, config: SftConfig, tokenizer: Any, source_name: str) -> ExampleEncoder:
        return ExampleEncoder(config.data, config.learn.loss_on, tokenizer, source_name)

    def samples(self, config: SftConfig, items: Sequence[Example]) -> list[Sample]:
        return to_samples(items, config.learn.aggregate)

    def objective(self, config: SftConfig, policy: Policy) -> Objective:
        return Likelihood()

    def metrics(self, stats: UpdateStats, samples: Sequence[Sample]) -> dict[str, float]:
        learned = sum(int(sample.weights.count_nonzero()) for sample in samples)
        return {"sft/loss": float(stats.sums["loss"]), "sft/tokens": float(learned)}

    def evaluate(self, config: SftConfig, trainer: Trainer, held_out: list[Sample]) -> dict[str, float]:
        trainer.score(held_out, "old_logprobs")
        loss = -sum(float((s.weights * s.old_logprobs).sum()) for s in held_out if s.old_logprobs is not None)
        for sample in held_out:
            sample.old_logprobs = None
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def export(self, config: SftConfig, trainer: Trainer, folder: Path, data: Examples) -> dict[str, Any]:
        trainer.export(folder)
        return {}


run_sft = partial(run_offline, Supervised())


def to_samples(examples: Sequence[Example], aggregate: str) -> list[Sample]:
    """Examples with each learned token's share of a step that consumes exactly these."""
    total = sum(sum(example.learned) for example in examples)
    samples = []
    for example in examples:
        start = example.start
        marks = torch.tensor(example.learned[start:], dtype=torch.float32)
        share = 1 / total if aggregate == "token_mean" else 1 / (len(examples) * int(marks.sum()))
        count = len(marks)
        samples.append(
            Sample(
                example.tokens[:start],
                torch.tensor(example.tokens[start:]),
                advantages=torch.ones(count),
                weights=share * marks,
                engine_logprobs=torch.zeros(count),
            )
        )
    return samples
