"""Contradictions about what is learned from: normalised parts, judges, reward models, tasks. Called by config/check.py."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import REWARD_MODEL, Contradiction, changed, clash
from trimtab.config.learn import Learn
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
                "group compares the samples of one prompt, but there is only one: the part would always be 0",
                "Write normalize: step, or learn.samples_per_prompt: 8",
            )
        elif len(weighted) == 1 and not beside:
            yield clash(
                f"{key} reward learn.advantage learn.algorithm",
                "puts parts on one scale, but only one part has a weight; the advantage scales what is left",
                "Leave normalize out, or choose another learn.advantage, such as group_std",
            )


def judges(config: Config, learn: Learn) -> Iterator[Contradiction]:
    for place, part in enumerate(config.reward):
        limit = part.args.get("timeout_s")
        if part.fn == JUDGE and isinstance(limit, int | float) and limit > part.timeout_s:
            yield clash(
                f"reward.{place}.args.timeout_s reward.{place}.timeout_s",
                f"is {limit:g} s for one request, but all tries for a completion have {part.timeout_s:g} s together",
                f"Write reward.{place}.timeout_s: {4 * limit:g}, or a shorter args.timeout_s",
            )


def reward_models(config: Config, learn: Learn) -> Iterator[Contradiction]:
    for place, part in enumerate(config.reward):
        for name in changed(part, "args", "timeout_s") if part.fn.startswith(REWARD_MODEL) else []:
            yield clash(
                f"reward.{place}.{name} reward.{place}.fn",
                "has no effect: a reward model is run by the trainer itself, and takes no arguments",
                "Leave it out",
            )


def tasks(config: Config, learn: Learn) -> Iterator[Contradiction]:
    bands = config.observe.kl_bands
    if config.data.task is not None and config.data.task == config.data.prompt:
        yield clash(
            "data.task data.prompt",
            f"{config.data.task} is the column with the prompt",
            "Write the column that names the row's task, or leave it out",
        )
    if bands and config.data.task is None:
        yield clash(
            "observe.kl_bands data.task",
            "bands are for tasks, but no column names the task of a row",
            "Write data.task: COLUMN, or leave kl_bands out",
        )
    elif bands and learn.kl.coef == 0:
        yield clash(
            "observe.kl_bands learn.kl.coef",
            "KL to the reference is not measured while learn.kl.coef is 0: no reference is kept",
            "Write learn.kl.coef: 0.001, or leave kl_bands out",
        )
    for task, (low, high) in bands.items():
        if not 0 <= low < high:
            yield clash(
                f"observe.kl_bands.{task}",
                f"[{low:g}, {high:g}] is no band of KL, which is 0 or more",
                "Write the lower bound first, such as [0.02, 0.06]",
            )
