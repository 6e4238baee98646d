"""What each named algorithm stands for: one line each. `resolve` writes the choice into the `auto` keys of `learn`."""

from __future__ import annotations

from typing import NamedTuple

from trimtab.config.known import ResolvedClip, ResolvedDynamicSampling, ResolvedImportance, ResolvedLearn
from trimtab.config.learn import AdvantageName, AggregateName, Learn, LossName


class Recipe(NamedTuple):
    advantage: AdvantageName
    loss: LossName
    aggregate: AggregateName
    clip_low: float
    clip_high: float
    dynamic_sampling: bool = False


UNBOUNDED = 1.0  # ratios are positive, so a lower bound of 1 - 1 never binds

RECIPES: dict[str, Recipe] = {
    "grpo": Recipe("group_std", "clip", "sequence_mean", 0.2, 0.2),
    "dr_grpo": Recipe("group_mean", "clip", "constant", 0.2, 0.2),
    "dapo": Recipe("group_std", "clip", "token_mean", 0.2, 0.28, dynamic_sampling=True),
    "gspo": Recipe("group_std", "gspo", "sequence_mean", 3e-4, 4e-4),
    "cispo": Recipe("group_std", "cispo", "token_mean", UNBOUNDED, 5.0),
    "rloo": Recipe("leave_one_out", "sequence_clip", "sequence_sum", 0.2, 0.2),
    "reinforce": Recipe("batch_mean", "on_policy", "token_mean", 0.2, 0.2),
    "reinforce_pp": Recipe("global_norm", "clip", "token_mean", 0.2, 0.2),
    "reinforce_pp_baseline": Recipe("group_mean_global_norm", "clip", "token_mean", 0.2, 0.2),
    "ppo": Recipe("gae", "clip", "token_mean", 0.2, 0.2),
}

GROUP_ADVANTAGES = (
    "group_std",
    "group_mean",
    "leave_one_out",
    "group_mean_global_norm",
    "group_mean_global_std",
    "group_mean_batch_std",
)


def resolve(learn: Learn) -> ResolvedLearn:
    """The same settings with every `auto` written out. Idempotent, so a saved config resolves to itself."""
    recipe, clip, refills = RECIPES[learn.algorithm], learn.clip, learn.dynamic_sampling

    def pick(value: object, default: object) -> object:
        return default if value == "auto" else value

    bounds = {"low": pick(clip.low, recipe.clip_low), "high": pick(clip.high, recipe.clip_high)}
    enabled = {"enabled": pick(refills.enabled, recipe.dynamic_sampling)}
    ratio_corrects = learn.old_logprobs == "engine" and learn.updates_per_batch > 1
    level = {"level": pick(learn.importance.level, "token" if learn.staleness and not ratio_corrects else "off")}
    chosen = {
        "advantage": pick(learn.advantage, recipe.advantage),
        "loss": pick(learn.loss, recipe.loss),
        "aggregate": pick(learn.aggregate, recipe.aggregate),
        "clip": ResolvedClip.model_validate(dict(clip) | bounds),
        "importance": ResolvedImportance.model_validate(dict(learn.importance) | level),
        "dynamic_sampling": ResolvedDynamicSampling.model_validate(dict(refills) | enabled),
    }
    return ResolvedLearn.model_validate(dict(learn) | chosen)
