"""TRL's RLOOConfig: what it has of its own. The rest it shares with GRPOConfig."""

from __future__ import annotations

from trimtab.convert.common import clip, optimizer
from trimtab.convert.rules import ConvertRule, dead, each, mapped, pair, real, some, together, unsupported, whole, yes
from trimtab.convert.sheet import Framework, Sheet
from trimtab.convert.trl_common import (
    NEWEST,
    TRAINER_DEFAULTS,
    data,
    logs,
    lora,
    rewards,
    sizes,
    spelling,
    steps_and_rates,
)
from trimtab.convert.trl_table import GRPO_ONLY_NAMES
from trimtab.convert.trl_table import RULES as TABLE
from trimtab.convert.versions import OldDefault

DEFAULTS = {**TRAINER_DEFAULTS, "num_generations": 2, "max_completion_length": 512, "beta": 0.05}
OLD_DEFAULTS = (OldDefault("1.10", "max_completion_length", 256), OldDefault("0.27", "max_prompt_length", 512))
"""From rloo_config.py of every release since 0.22."""
LEARNING_RATE = 1e-6
OWN_RULES: tuple[ConvertRule, ...] = (
    together("num_generations rloo_k", "learn.samples_per_prompt"),
    mapped("num_iterations num_ppo_epochs", "learn.epochs_per_step", whole, "passes over one batch of samples"),
    mapped("max_completion_length response_length", "learn.max_new_tokens", whole),
    together("beta kl_coef", "learn.kl.coef", "k1 of the whole completion, subtracted from the reward, as in Trimtab"),
    together("epsilon cliprange", "learn.clip.low", "bounds the ratio of the whole completion, as in Trimtab"),
    together("normalize_advantages normalize_advantage", "learn.advantage"),
    mapped("reward_clip_range", "learn.reward_clip", some(pair)),
    unsupported("normalize_reward", "TRL removed it; reward.N.normalize is similar"),
    unsupported("token_level_kl", "TRL removed it: the penalty is that of the whole completion"),
    *each(dead, GRPO_ONLY_NAMES, "belongs to GRPOConfig; RLOOConfig does not have it"),
)
_OWN = {rule.name for rule in OWN_RULES}
RULES = (*(rule for rule in TABLE if rule.name not in _OWN), *OWN_RULES)


def settle(sheet: Sheet) -> None:
    sheet.put("learn.algorithm", "rloo")
    sizes(sheet, 2)
    if sheet.read("normalize_advantages", yes, False):
        note = "leave-one-out equals the group mean up to a factor, and dividing by the standard deviation removes that factor"
        sheet.put("learn.advantage", "group_mean_global_std", "normalize_advantages", note=note)
    else:
        sheet.refuse("normalize_advantages", "off is RLOO's default", "dead")
    clip(sheet, "epsilon", high="epsilon_high")
    _kl(sheet)
    steps_and_rates(sheet, LEARNING_RATE)
    optimizer(sheet, "optim")
    data(sheet)
    rewards(sheet)
    logs(sheet)
    lora(sheet)


def _kl(sheet: Sheet) -> None:
    coef = sheet.read("beta", real, 0.0)
    sheet.put("learn.kl.coef", coef, "beta")
    if coef > 0:
        sheet.put("learn.kl.where", "reward", "beta")
        sheet.put("learn.kl.estimator", "k1", "beta")


FRAMEWORK = Framework(
    kind="trl-rloo",
    title="TRL",
    about="`RLOOConfig`, and flags of `trl rloo`. What it shares with `GRPOConfig` is in the table above.",
    rules=RULES,
    defaults=DEFAULTS,
    settle=settle,
    spelling=spelling,
    reads="RLOOConfig",
    newest=NEWEST,
    oldest="0.22.0",
    was=OLD_DEFAULTS,
)
