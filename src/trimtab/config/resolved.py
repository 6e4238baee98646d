"""A config with every choice written out that follows from other keys: the algorithm's, and evaluation's stops.

What ends a completion belongs to the task, so evaluation has it from `learn` unless `eval` says otherwise: max_new_tokens, stop
strings and stop tokens. How tokens are drawn is evaluation's own; greedy unless told. Importable without torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.config.algorithms import resolve
from trimtab.config.known import ResolvedLearn, ResolvedRun
from trimtab.config.learn import Sampling
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.run import Run
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig

FILTERS, STOPS = ("top_k", "top_p", "min_p"), ("stop", "stop_token_ids")


class ResolvedConfig(Config):
    """A run whose `learn` is known; `run` is until it is planned what the user wrote."""

    learn: ResolvedLearn


class PlannedConfig(ResolvedConfig):
    """A run of which all is known: what its config.yaml is written from."""

    run: ResolvedRun


def resolve_config(config: Config) -> ResolvedConfig:
    """The algorithm's choices and evaluation's stops written out; without an evaluation set there are no stops to inherit."""
    source = eval_sampling(config) if config.data.eval is not None else config.eval.sampling
    measured = config.eval.with_values({f"sampling.{name}": getattr(source, name) or [] for name in STOPS})
    return ResolvedConfig.model_validate(dict(config) | {"learn": resolve(config.learn), "eval": measured})


def with_plan(config: ResolvedConfig, run: ResolvedRun) -> PlannedConfig:
    """The config with `run` as the planner has it."""
    return PlannedConfig.model_validate(dict(config) | {"run": run})


def with_offline_plan(config: SftConfig | RewardModelConfig, run: ResolvedRun) -> SftConfig | RewardModelConfig:
    """The same for a run that generates nothing: what only a rollout would use stays as the user wrote it."""
    unused = {"rollout": config.run.rollout, "reward_workers": config.run.reward_workers}
    return config.with_values({"run": Run.model_validate(dict(run) | unused)})


def eval_sampling(config: Config) -> Sampling:
    """How evaluation samples: as `eval.sampling` says, with the stops of training where it is silent."""
    asked, training = config.eval.sampling, config.learn.sampling
    return Sampling(
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        min_p=asked.min_p,
        stop=training.stop if asked.stop is None else asked.stop,
        stop_token_ids=training.stop_token_ids if asked.stop_token_ids is None else asked.stop_token_ids,
    )


def eval_max_new_tokens(config: Config) -> int:
    """Most new tokens of a completion in evaluation."""
    return config.eval.max_new_tokens or config.learn.max_new_tokens


def eval_in_words(config: Config) -> str:
    """How evaluation samples, each setting that is not training's beside training's."""
    return ", ".join(_settings(config))


def _settings(config: Config) -> Iterator[str]:
    learn, mine, theirs = config.learn, eval_sampling(config), config.learn.sampling
    drawn = f"temperature {mine.temperature:g}" if mine.temperature else "greedy"
    yield _beside(drawn, drawn, f"temperature {theirs.temperature:g}")
    for name in FILTERS if mine.temperature else ():  # greedy takes the most probable token whatever they are
        if getattr(mine, name) != getattr(theirs, name):
            yield _beside(f"{name} {getattr(mine, name):g}", getattr(mine, name), getattr(theirs, name))
    samples = config.eval.samples_per_prompt
    yield _beside(f"{samples} sample{'s' * (samples > 1)} a prompt", samples, learn.samples_per_prompt)
    longest = eval_max_new_tokens(config)
    yield _beside(f"at most {longest:,} new tokens", longest, learn.max_new_tokens)
    for name in STOPS:
        ends, ends_training = getattr(mine, name), getattr(theirs, name)
        if ends or ends_training:
            yield _beside(f"{name} {_items(ends)}", _items(ends), _items(ends_training))


def _beside(text: str, mine: object, training: object) -> str:
    """A setting of evaluation, and training's where that is another one."""
    told = f"{training:,}" if isinstance(training, int) else training
    return text if mine == training else f"{text} (training: {told})"


def _items(values: Sequence[object]) -> str:
    return " ".join(map(repr, values)) or "none"
