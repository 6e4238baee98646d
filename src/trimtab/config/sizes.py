"""Contradictions of sizes with any machine there is. Called by config/check.py."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.config.contradiction import Contradiction, clash
from trimtab.config.learn import Learn
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

MAX_SEQUENCES = 1_000_000
"""A step's completions are held in memory, kilobytes each: more would fill any machine before the first is learned from."""


def too_large(config: Config | SftConfig | RewardModelConfig, learn: Learn | None = None) -> Iterator[Contradiction]:
    """Steps and evaluations that no machine can hold. `learn` is that of `trimtab train`, resolved."""
    if not isinstance(config, Config):
        size = "sequences_per_step" if isinstance(config, SftConfig) else "pairs_per_step"
        count = getattr(config.learn, size)
        if count > MAX_SEQUENCES:
            yield clash(f"learn.{size}", f"is {count:,}; a step holds {MAX_SEQUENCES:,} at most", "Lower it")
        return
    prompts, samples = config.learn.prompts_per_step, config.learn.samples_per_prompt
    if prompts * samples > MAX_SEQUENCES:
        keys = ["learn.samples_per_prompt", "learn.prompts_per_step"]
        larger = keys if samples > prompts else keys[::-1]
        what = f"{prompts:,} prompts × {samples:,} samples are {prompts * samples:,} sequences a step"
        yield clash(" ".join(larger), f"{what}; a step holds {MAX_SEQUENCES:,} at most", "Lower it")
    if config.eval.samples_per_prompt > MAX_SEQUENCES:
        what = f"is {config.eval.samples_per_prompt:,}; an evaluation holds {MAX_SEQUENCES:,} sequences at most"
        yield clash("eval.samples_per_prompt", what, "Lower it")
