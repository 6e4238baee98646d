"""Contradictions about what is learned from: normalised parts, judges, reward models, tasks. Called by config/check.py."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import REWARD_MODEL, Contradiction, changed, clash, reward_name
from trimtab.config.learn import Learn
from trimtab.config.run_clashes import AnyStage
from trimtab.config.schema import Config

JUDGE = "judge"


def normalized(config: Config, learn: Learn) -> Iterator[Contradiction]:
    """Z-scores that weigh nothing, compare nothing, or that the advantage would undo."""
    weighted = [place for place, part in enumerate(config.reward) if part.weight != 0]
    # What else is added to the reward, cuts it or predicts it is measured against the part's own scale.
    beside = learn.reward_clip or learn.overlong or (learn.kl.where != "loss" and learn.kl.coef > 0)
    beside = beside or learn.advantage == "gae"
    for place, part in enumerate(config.reward):
        key = f"reward.{place}.normalize"
        if part.normalize == "none":
            continue
        if part.weight == 0:
            yield clash(
                f"{key} reward.{place}.weight",
                "has no effect: the part's weight is 0",
                "Leave normalize out, or give the part a weight",
            )
        elif part.normalize == "group" and learn.samples_per_prompt == 1:
            yield clash(
                f"{key} learn.samples_per_prompt",
                "group compares the samples of one prompt, but learn.samples_per_prompt is 1: the part would always be 0",
                "Write normalize: step, or learn.samples_per_prompt: 8",
            )
        elif len(weighted) == 1 and not beside:
            yield clash(
                f"{key} reward learn.advantage learn.algorithm",
                "has no effect: it makes parts comparable, but only one part has a weight, and the advantage rescales it",
                "Leave normalize out, or choose another learn.advantage, such as group_std",
            )


def judges(config: Config, learn: Learn) -> Iterator[Contradiction]:
    for place, part in enumerate(config.reward):
        limit = part.args.get("timeout_s")
        if part.fn == JUDGE and isinstance(limit, int | float) and limit > part.timeout_s:
            yield clash(
                f"reward.{place}.args.timeout_s reward.{place}.timeout_s",
                f"allows {limit:g} s for one request, but reward.{place}.timeout_s allows {part.timeout_s:g} s for all its tries",
                f"Write reward.{place}.timeout_s: {4 * limit:g}, or a shorter args.timeout_s",
            )


def reward_models(config: Config, learn: Learn) -> Iterator[Contradiction]:
    for place, part in enumerate(config.reward):
        for name in changed(part, "args", "timeout_s") if part.fn.startswith(REWARD_MODEL) else []:
            yield clash(
                f"reward.{place}.{name} reward.{place}.fn",
                "has no effect: the trainer runs the reward model itself, without arguments or a timeout",
                "Leave it out",
            )


def tasks(config: Config, learn: Learn) -> Iterator[Contradiction]:
    bands = config.observe.kl_bands
    if config.data.task is not None and config.data.task == config.data.prompt:
        yield clash(
            "data.task data.prompt",
            f"{config.data.task} is the column of the prompt (data.prompt)",
            "Write the column that names the row's task, or leave it out",
        )
    if bands and config.data.task is None:
        yield clash(
            "observe.kl_bands data.task",
            "gives each task a band, but data.task does not say which column names the task",
            "Write data.task: COLUMN, or leave kl_bands out",
        )
    elif bands and learn.kl.coef == 0:
        yield clash(
            "observe.kl_bands learn.kl.coef",
            "has no effect while learn.kl.coef is 0: without a reference model, KL is not measured",
            "Write learn.kl.coef: 0.001, or leave kl_bands out",
        )
    for task, (low, high) in bands.items():
        if not 0 <= low < high:
            yield clash(
                f"observe.kl_bands.{task}",
                f"[{low:g}, {high:g}] is not a range of KL, which is 0 or more",
                "Write the lower bound first, such as [0.02, 0.06]",
            )


def curriculum(config: AnyStage, learn: Learn | None) -> Iterator[Contradiction]:
    if config.data.curriculum == "none":
        return
    if not isinstance(config, Config):
        yield clash("data.curriculum", "has no effect: nothing is sampled, so nothing succeeds", "Leave it out")
        return
    names = [reward_name(part) for part in config.reward]
    decides = config.reward[names.index(config.eval.part)] if config.eval.part in names else config.reward[0]
    if config.eval.threshold is None and decides.fn.startswith(REWARD_MODEL):
        yield clash(
            "data.curriculum eval.threshold reward",
            "pass_rate has to know which completions succeed, and a reward model's scores have no natural threshold",
            "Write eval.threshold: NUMBER, or data.curriculum: none",
        )
