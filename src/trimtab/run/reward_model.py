"""Learning which of two answers is better (`trimtab reward-model`): a number after an answer's last token, by Bradley and Terry.

RUN/final is a Hugging Face folder of a sequence-classification model with one label, as other tools train and load them, and
beside it reward.json: what its scores were on the set they are normalised by, and `shift`, which is to be added to its output
(these classes have no bias) so that scores have mean 0 and standard deviation 1 there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.reward_model import RewardModelConfig
from trimtab.data.pairs import Pair, PairEncoder
from trimtab.learn.preferences import preference_loss
from trimtab.model.load import load_config
from trimtab.model.policy import Policy
from trimtab.run.offline import run_offline
from trimtab.run.offline_data import Examples, OfflineStage
from trimtab.run.roles import Trainer
from trimtab.update.batch import Sample
from trimtab.update.critic import add_value_head
from trimtab.update.objectives.preferences import BradleyTerry, PairSample, pairs_of, to_samples
from trimtab.update.stats import UpdateStats


class Preferences(OfflineStage):
    """See offline_data.py."""

    unit = "pair"
    rehearses = False

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return pairs_of(samples, budget)

    def refuse(self, config: RewardModelConfig) -> None:
        """A model that has no such class cannot be written out."""
        architecture = load_config(config.model)
        if type(architecture) not in AutoModelForSequenceClassification._model_mapping:
            what = f"transformers has no sequence-classification model for {architecture.model_type}"
            raise ConfigError([Problem("model.path", what, "Use another model, such as a Llama or a Qwen.")])

    def per_step(self, config: RewardModelConfig) -> int:
        return config.learn.pairs_per_step

    def words(self, config: RewardModelConfig) -> str:
        margin = f", margin from {config.data.margin}" if config.data.margin else ""
        return f"reward model, Bradley-Terry on pairs{margin}"

    def encoder(self, config: RewardModelConfig, tokenizer: Any, source_name: str) -> PairEncoder:
        return PairEncoder(config.data, tokenizer, source_name)

    def samples(self, config: RewardModelConfig, items: Sequence[Pair]) -> list[Sample]:
        return to_samples(items)

    def objective(self, config: RewardModelConfig, policy: Policy) -> BradleyTerry:
        return BradleyTerry(add_value_head(policy), config.learn.center)

    def metrics(self, stats: UpdateStats, samples: Sequence[Sample]) -> dict[str, float]:
        return {
            "rm/loss": float(stats.sums["loss"]),
            "rm/accuracy": stats.mean("right"),
            "rm/difference": stats.mean("apart"),
            "rm/score_mean": stats.mean("scores"),
        }

    def evaluate(self, config: RewardModelConfig, trainer: Trainer, held_out: list[Sample]) -> dict[str, float]:
        better, worse, margins = _scored(trainer, held_out)
        losses = preference_loss(better, worse, margins, config.learn.center)
        right = (better > worse).double()
        return {
            "eval/loss": float(losses.mean()),
            "eval/accuracy": float(right.mean()),
            "eval/difference": float((better - worse).mean()),
        }

    def export(self, config: RewardModelConfig, trainer: Trainer, folder: Path, data: Examples) -> dict[str, Any]:
        better, worse, _ = _scored(trainer, data.held_out or data.first())
        scores = torch.cat([better, worse])
        spread = float(scores.std()) if len(scores) > 1 else 0.0
        mean, std = (float(scores.mean()), max(spread, 1e-6)) if config.learn.normalize else (0.0, 1.0)
        measured_on = "data.eval" if data.held_out else "data.train"
        trainer.export(folder, {"mean": mean, "std": std, "answers": len(scores), "measured_on": measured_on})
        return {"accuracy": float((better > worse).double().mean()), "score_mean": mean, "score_std": std}


def _scored(trainer: Trainer, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of better and of worse answers, and the pairs' margins."""
    trainer.score(samples, "score")
    pairs = [(s, s.mate) for s in samples if isinstance(s, PairSample) and s.mate is not None]
    better, worse = (torch.stack([side.score for side in sides]) for sides in zip(*pairs))
    return better, worse, torch.tensor([first.margin for first, _ in pairs], dtype=better.dtype)


run_reward_model = partial(run_offline, Preferences())
