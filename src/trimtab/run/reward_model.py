"""Learning which of two answers is better (`trimtab reward-model`): a number after an answer's last token, by Bradley and Terry.

RUN/final is a Hugging Face folder of a sequence-classification model with one label, as other tools train and load them, and
beside it reward.json: what its scores were on the set they are normalised by, and `shift`, which is to be added to its output
(these classes have no bias) so that scores have mean 0 and standard deviation 1 there.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.known import ResolvedLearn, ResolvedRun
from trimtab.config.reward_model import RewardModelConfig
from trimtab.data.pairs import Pair, PairEncoder
from trimtab.learn.preferences import preference_loss
from trimtab.model.adapters import has_adapters, merged_state, save_adapters
from trimtab.model.load import load_config
from trimtab.model.policy import Policy
from trimtab.record.checkpoint import load_part, put_in_place
from trimtab.record.folder import FINAL
from trimtab.run.build import make_updater
from trimtab.run.offline import Run, run_offline
from trimtab.update.batch import Sample
from trimtab.update.scores import Answer, Scores, to_samples
from trimtab.update.updater import Updater, UpdateStats

HEAD, REWARD = "reward_head.safetensors", "reward.json"


class Preferences:
    """See offline.Stage."""

    unit = "pair"
    rehearses = False

    def refuse(self, config: RewardModelConfig) -> None:
        """A model that has no such class cannot be written out."""
        architecture = load_config(config.model)
        if type(architecture) not in AutoModelForSequenceClassification._model_mapping:
            what = f"transformers has no sequence classification for {architecture.model_type}"
            raise ConfigError([Problem("model.path", what, "Start from another model, such as a Llama or Qwen.")])

    def per_step(self, config: RewardModelConfig) -> int:
        return config.learn.pairs_per_step

    def words(self, config: RewardModelConfig) -> str:
        margin = f", margin from {config.data.margin}" if config.data.margin else ""
        return f"reward model, Bradley-Terry on pairs{margin}"

    def encoder(self, config: RewardModelConfig, tokenizer: Any, source_name: str) -> PairEncoder:
        return PairEncoder(config.data, tokenizer, source_name)

    def samples(self, config: RewardModelConfig, items: Sequence[Pair]) -> list[Sample]:
        return to_samples(items)

    def updater(self, config: RewardModelConfig, policy: Policy, learn: ResolvedLearn, run: ResolvedRun) -> Scores:
        made = make_updater(policy, learn, run, Scores)
        made.center = config.learn.center
        return made

    def metrics(self, stats: UpdateStats, samples: Sequence[Sample]) -> dict[str, float]:
        return {
            "rm/loss": float(stats.sums["loss"]),
            "rm/accuracy": stats.mean("right"),
            "rm/difference": stats.mean("apart"),
            "rm/score_mean": stats.mean("scores"),
        }

    def evaluate(self, run: Run) -> dict[str, float]:
        better, worse, margins = _scored(run, run.held_out)
        losses = preference_loss(better, worse, margins, run.config.learn.center)  # type: ignore[union-attr]
        right = (better > worse).double()
        return {
            "eval/loss": float(losses.mean()),
            "eval/accuracy": float(right.mean()),
            "eval/difference": float((better - worse).mean()),
        }

    def files(self, updater: Updater) -> dict[str, dict[str, torch.Tensor]]:
        assert isinstance(updater, Scores)
        return {HEAD: {name: parameter.detach() for name, parameter in updater.head.named_parameters()}}

    def restore(self, checkpoint: Path, updater: Updater) -> None:
        assert isinstance(updater, Scores)
        updater.head.load_state_dict(load_part(checkpoint / HEAD))

    def export(self, run: Run) -> dict[str, Any]:
        learn = run.config.learn
        better, worse, _ = _scored(run, run.held_out or run.first())
        scores = torch.cat([better, worse])
        spread = float(scores.std()) if len(scores) > 1 else 0.0
        mean, std = (float(scores.mean()), max(spread, 1e-6)) if learn.normalize else (0.0, 1.0)  # type: ignore[union-attr]
        aside = run.folder / f".writing-{FINAL}"
        head = run.updater.head  # type: ignore[attr-defined]
        run.guard.run("export", lambda: save_classifier(run.policy, head.weight / std, run.tokenizer, aside))
        if has_adapters(run.policy.model):
            save_adapters(run.policy.model, aside / "adapter")
        facts = {
            "mean": mean, "std": std, "shift": (float(head.bias.detach()) - mean) / std, "answers": len(scores),
            "measured_on": "data.eval" if run.held_out else "data.train",
        }  # fmt: skip
        (aside / REWARD).write_text(json.dumps(facts, indent=2) + "\n")
        put_in_place(aside, run.folder / FINAL)
        return {"accuracy": float((better > worse).double().mean()), "score_mean": mean, "score_std": std}


@torch.no_grad()
def save_classifier(policy: Policy, weight: torch.Tensor, tokenizer: Any, folder: Path) -> None:
    """The model's body with `weight` [1, E] as its one label, as transformers' sequence classification."""
    model = policy.model
    config = copy.deepcopy(model.config)
    config.num_labels = 1
    if config.pad_token_id is None:
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    state = merged_state(model) if has_adapters(model) else {k: v.cpu() for k, v in model.state_dict().items()}
    made = AutoModelForSequenceClassification.from_config(config, dtype=policy.dtype)
    state = {name: value for name, value in state.items() if name in made.state_dict()} | {"score.weight": weight.cpu()}
    missing = made.load_state_dict(
        {name: value.to(policy.dtype) for name, value in state.items()}, strict=False
    ).missing_keys
    assert not missing, f"{type(made).__name__} has weights that {policy.name} has not: {missing}"
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _scored(run: Run, samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores of better and of worse answers, and the pairs' margins."""
    run.guard.score(samples, run.policy, "score")
    pairs = [(s, s.mate) for s in samples if isinstance(s, Answer) and s.mate is not None]
    better, worse = (torch.stack([side.score for side in sides]) for sides in zip(*pairs))
    return better, worse, torch.tensor([first.margin for first, _ in pairs], dtype=better.dtype)


run_reward_model = partial(run_offline, Preferences())
