"""Contradictions about environments. Called by config/check.py."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import Contradiction, changed, clash
from trimtab.config.learn import Learn
from trimtab.config.schema import Config

ENVIRONMENT = "environment"


def conversation(config: Config, learn: Learn) -> Iterator[Contradiction]:
    """An environment that is not there, is there twice, or could say nothing."""
    asked = [place for place, part in enumerate(config.reward) if part.fn == ENVIRONMENT]
    environment = config.environment
    if environment is None:
        for place in asked:
            yield clash(
                f"reward.{place}.fn environment",
                "takes the reward from an environment, but there is no environment",
                "Write environment: {fn: file.py:Class}, or another reward",
            )
        return
    if environment.fn is not None and environment.tools:
        yield clash(
            "environment.fn environment.tools",
            "both are set, and both would answer the model",
            "Keep one of the two; your class can call functions itself",
        )
    if environment.fn is None and not environment.tools:
        yield clash(
            "environment.fn environment.tools",
            "the environment has neither a class nor a tool, so nothing answers the model",
            "Write environment: {tools: [calculator]} or environment: {fn: file.py:Class}",
        )
    if environment.fn is None and environment.args:
        yield clash(
            "environment.args environment.fn",
            "has no effect: the model gives tools their arguments",
            "Leave it out, or name a class with environment.fn",
        )
    if environment.tools and asked:
        yield clash(
            f"reward.{asked[0]}.fn environment.tools",
            "tools give no reward: every value would be 0",
            "Write another reward, such as number_match",
        )
    for place in asked:
        for name in changed(config.reward[place], "args", "timeout_s"):
            instead = "Write environment.timeout_s" if name == "timeout_s" else "Leave it out"
            yield clash(f"reward.{place}.{name}", "has no effect: the environment computes this reward", instead)
