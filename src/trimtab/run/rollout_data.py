"""The work of a run: its prompts, its rewards and its environment, read and tried before any weight is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, DataError, ModelError, Problem
from trimtab.base.suggestions import did_you_mean
from trimtab.config.resolved import ResolvedConfig
from trimtab.config.row_ranks import longest_here
from trimtab.config.schema import Config
from trimtab.data.encode import PromptEncoder, Tools, templated
from trimtab.data.prompt import Prompt
from trimtab.data.prompts import all_too_long, build_prompts, validate_rows
from trimtab.data.sources import eval_rows, train_rows
from trimtab.data.view import View, endless_turns, view
from trimtab.model.context import context_of
from trimtab.model.load import load_config, load_tokenizer, written_words
from trimtab.observe.task_names import MAX_TASKS
from trimtab.observe.tasks import Tasks
from trimtab.plan.work import Lengths
from trimtab.reward.load import ENVIRONMENT_ARGUMENTS, locate
from trimtab.reward.scorer import Scorer
from trimtab.rollout.conversations.hosts import Hosts, locate_environment
from trimtab.rollout.conversations.replies import ReplyEncoder, refuse_hidden_tools
from trimtab.run.inputs import Inputs, given_rows
from trimtab.run.machine import pick_reward_workers

MEASURED_CHARACTERS = 8_000_000
"""A training set up to this size is tokenised once at the start, a few seconds, so that sizes come from its real lengths."""
PROBED_ROWS = 64
TOKENIZED_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class TrainSet:
    """Rows to train on, each known to make a prompt."""

    rows: list[dict[str, Any]]
    columns: set[str]
    longest: int
    """No prompt that is used has more tokens."""
    typical: int
    """The longest prompt seen; the same number where all were looked at."""
    note: str
    """What was left out, or nothing."""


@dataclass(frozen=True)
class EvalSet:
    """Prompts to evaluate on; none where there is no evaluation."""

    prompts: list[Prompt]
    columns: set[str]
    note: str

    @property
    def longest(self) -> int:
        return max((len(prompt.tokens) for prompt in self.prompts), default=0)


@dataclass(frozen=True)
class Work:
    """What a training run works on."""

    tokenizer: Any
    limit: int
    """Tokens of the longest prompt that is used."""
    train: TrainSet
    eval: EvalSet
    tools: Tools = ()
    """Shown with every prompt."""

    def tasks(self, config: Config) -> Tasks | None:
        """What the rows' tasks are called in metrics; None where no column names them."""
        column, bands = config.data.task, config.observe.kl_bands
        if column is None:
            return None
        rows = [*self.train.rows, *(prompt.columns for prompt in self.eval.prompts)]
        there = {str(row[column]) for row in self.train.rows}
        for task in bands:
            if task not in there:
                what = f"no row of data.train has the task {task!r}"
                hint = did_you_mean(task, there).strip() or f"Its tasks: {', '.join(sorted(there)[:10])}."
                raise ConfigError([Problem(f"observe.kl_bands.{task}", what, hint)])
        if len(bands) >= MAX_TASKS:
            what = f"{len(bands)} bands are too many: metrics name at most {MAX_TASKS - 1} tasks"
            raise ConfigError([Problem("observe.kl_bands", what, "Remove some.")])
        return Tasks.found(column, rows, first=list(bands))

    def first_prompt(self, config: Config) -> list[int]:
        """What the model reads of the first row."""
        return self.prompts(config, [0])[0].tokens

    def prompts(self, config: Config, ids: Sequence[int]) -> list[Prompt]:
        """The prompts of rows of the training data, by their numbers."""
        encoder = PromptEncoder(config.data, self.tokenizer, "data.train", self.tools)
        return encoder.encode(ids, [self.train.rows[number] for number in ids])

    def view(self, config: Config, stop_token_ids: Sequence[int]) -> View:
        """The first prompt as the model reads it. `stop_token_ids`: the model's own."""
        sampling = config.learn.sampling
        stops = {*stop_token_ids, *sampling.stop_token_ids}
        warning = endless_turns(self.tokenizer, templated(config.data, self.tokenizer), stops, sampling.stop)
        return replace(view("prompt", self.first_prompt(config), self.tokenizer, stops, sampling.stop), warning=warning)

    @property
    def lengths(self) -> Lengths:
        """What a plan has to know of the data."""
        longest, typical = (max(mine, self.eval.longest) for mine in (self.train.longest, self.train.typical))
        return Lengths(longest, typical, len(self.eval.prompts))

    @property
    def columns(self) -> list[set[str]]:
        """The columns of each data set that rewards can count on."""
        return [self.train.columns, self.eval.columns] if self.eval.prompts else [self.train.columns]


def read_data(config: Config, inputs: Inputs, tokenizer: Any, limit: int, tools: Tools = ()) -> Work:
    """Read and check the training and evaluation data."""
    train = read_train(config, inputs, tokenizer, limit, tools)
    return Work(tokenizer, limit, train, read_eval(config, inputs, tokenizer, limit, tools), tools)


def read_tokenizer(config: Config) -> tuple[Any, int]:
    """The tokenizer, and the tokens of the longest prompt. Errors in the model's own files are reported first."""
    limit = prompt_limit(config)
    return load_tokenizer(config.model), limit


def prompt_limit(config: Config) -> int:
    """Longest prompt that leaves room for a completion in the model's context."""
    context = context_of(load_config(config.model).get_text_config())
    new = {"learn.max_new_tokens": config.learn.max_new_tokens, "eval.max_new_tokens": config.eval.max_new_tokens or 0}
    most = max(new.values())
    problems = [
        Problem(key, f"{value} leaves no room for a prompt in the model's context of {context} tokens", "Lower it.")
        for key, value in new.items()
        if value >= context
    ]
    asked = config.data.max_prompt_tokens
    if asked is not None and not problems and asked + most > context:
        what = f"{asked} prompt tokens and {most} new ones exceed the model's context of {context}"
        problems = [Problem("data.max_prompt_tokens", what, f"Write at most {context - most}.")]
    if problems:
        raise ConfigError(problems)
    return asked or context - most


def read_train(config: Config, inputs: Inputs, tokenizer: Any, limit: int, tools: Tools = ()) -> TrainSet:
    """The training rows, checked, with the length of their prompts. A pinned budget that is too small is refused here."""
    given = given_rows(inputs.train_rows, config.data.train, "data.train")
    rows = train_rows(config.data, seed=config.learn.seed) if given is None else [dict(row) for row in given]
    rows = rows[: config.data.limit]
    validate_rows(rows, config.data, tokenizer, source_name="data.train", tools=tools)
    pinned = {
        key: value
        for key, value in (
            ("token_budget", config.run.token_budget),
            ("score_token_budget", config.run.score_token_budget),
        )
        if value != "auto"
    }
    characters = [len(str(row[config.data.prompt])) for row in rows]
    exact = sum(characters) <= MEASURED_CHARACTERS or bool(pinned) or config.run.rollout.kv_memory != "auto"
    longest_texts = sorted(range(len(rows)), key=characters.__getitem__)[-PROBED_ROWS:]
    lengths = _token_counts(config, rows, range(len(rows)) if exact else longest_texts, tokenizer, tools)
    fitting = [length for length in lengths if length <= limit]
    if exact and not fitting:
        raise all_too_long("data.train", len(rows), max(lengths), limit)
    typical = max(fitting, default=limit)
    _refuse_small_budgets(config, pinned, typical)
    left_out, at_least = len(lengths) - len(fitting), "" if exact else "at least "
    note = (
        f"data.train: {at_least}{left_out} of {len(rows)} prompts are longer than {limit} tokens and are left out"
        if left_out
        else ""
    )
    return TrainSet(rows, _columns(rows, config), typical if exact else limit, typical, note)


def read_eval(config: Config, inputs: Inputs, tokenizer: Any, limit: int, tools: Tools = ()) -> EvalSet:
    """The held-out prompts, all of them tokenised."""
    given = given_rows(inputs.eval_rows, config.data.eval, "data.eval")
    if given is None:
        rows = eval_rows(config.data, seed=config.learn.seed, limit=config.eval.limit)
        if config.data.eval is None:
            return EvalSet([], set(), "")
    else:
        rows = [dict(row) for row in given][: config.eval.limit]
    found = build_prompts(rows, config.data, tokenizer, max_prompt_tokens=limit, source_name="data.eval", tools=tools)
    return EvalSet(found.prompts, _columns(rows, config), found.report() if found.too_long else "")


def with_found_rewards(config: ResolvedConfig, inputs: Inputs) -> ResolvedConfig:
    """Reward files by absolute path, so that the run's config.yaml can be run again from anywhere. Missing files are errors."""
    parts = []
    for part in config.reward:
        source = locate(part.fn, inputs.base_dir, inputs.rewards)
        parts.append(part.with_values({"fn": str(source)}) if source.kind in ("file", "model") else part)
    return config.with_values({"reward": parts} | _found_environment(config, inputs))


def _found_environment(config: Config, inputs: Inputs) -> dict[str, Any]:
    settings = config.environment
    if settings is None:
        return {}
    found = locate_environment(settings, inputs.base_dir, inputs.environment)
    fn, tools = settings.fn, list(settings.tools)
    if found.made is not None and found.made.kind == "file":
        fn = str(found.made)
    tools = [str(tool) if tool.kind == "file" else named for tool, named in zip(found.tools, tools)]
    return {"environment": settings.with_values({"fn": fn, "tools": tools})}


def open_scorer(
    config: Config,
    inputs: Inputs,
    columns: Iterable[set[str]],
    run_dir: Path | None = None,
) -> Scorer:
    """Reward workers with every function loaded and its columns present in every row; closed again where not."""
    scorer = Scorer(
        config.reward,
        workers=pick_reward_workers(config.run),
        base_dir=inputs.base_dir,
        functions=inputs.rewards,
        run_dir=run_dir,
        places=None if inputs.hosts is None else inputs.hosts.worker_places(),
    )
    try:
        for there in columns:
            scorer.check(there, played=config.environment is not None)
    except BaseException:
        scorer.close()
        raise
    return scorer


def open_hosts(config: Config, inputs: Inputs, tokenizer: Any) -> Hosts | None:
    """Workers with the environment or the tools loaded, where there are any."""
    if config.environment is None:
        return None
    return Hosts(
        config.environment,
        templated(config.data, tokenizer),
        workers=pick_reward_workers(config.run),
        base_dir=inputs.base_dir,
        objects=inputs.environment,
        places=None if inputs.hosts is None else inputs.hosts.worker_places(),
    )


def open_replies(
    config: Config, hosts: Hosts | None, tokenizer: Any, columns: Iterable[set[str]], prompt: list[int]
) -> ReplyEncoder | None:
    """How the environment's words are written, when it fits data and chat template. `prompt`: one that the model will read."""
    if hosts is None:
        return None
    for there in columns:
        hosts.check(there)
        for name in sorted(there & {*ENVIRONMENT_ARGUMENTS}):
            what = f"the data has a column {name!r}, but the environment passes {name} to the rewards itself"
            raise DataError(f"environment: {what}. Rename the column")
    schemas = hosts.loaded.schemas
    replies = ReplyEncoder(tokenizer, templated(config.data, tokenizer), schemas)
    if replies.templated and schemas:
        refuse_hidden_tools(tokenizer.decode(prompt), schemas)
    return replies


def refuse_other_critic(config: Config, work: Work) -> None:
    """A critic that is named has to be there, and to read what the policy reads."""
    path = config.learn.critic.path
    if config.learn.advantage != "gae" or path is None:
        return
    critic = config.model.with_values({"path": path, "tokenizer": None})
    try:
        read = load_config(critic).get_text_config()
    except ModelError as error:
        raise ModelError(str(error).replace("model.path: ", "learn.critic.path: ", 1)) from error
    vocab_size = load_config(config.model).get_text_config().vocab_size
    if read.vocab_size < vocab_size:
        what = f"{path} has a vocabulary of {read.vocab_size} tokens, fewer than the policy's {vocab_size}"
        raise ConfigError([Problem("learn.critic.path", what, "Name a model with the policy's tokenizer.")])
    mine, theirs = written_words(config.model), written_words(critic)
    if mine and theirs and mine != theirs:
        what = f"the tokenizer of {path} differs from the policy's, so token ids have other meanings"
        raise ConfigError([Problem("learn.critic.path", what, "Name a model with the policy's tokenizer.")])
    context = context_of(read)
    longest = work.train.longest + config.learn.max_new_tokens
    if context < longest:
        what = f"{path} has a context of {context} tokens, but sequences have up to {longest}"
        raise ConfigError([Problem("learn.critic.path", what, "Name a model with a longer context.")])


def _columns(rows: Sequence[Mapping[str, Any]], config: Config) -> set[str]:
    """Columns that rewards can count on."""
    return set.intersection(*(set(row) for row in rows)) - {config.data.prompt}


def _token_counts(
    config: Config, rows: list[dict[str, Any]], chosen: Sequence[int], tokenizer: Any, tools: Tools
) -> list[int]:
    encoder = PromptEncoder(config.data, tokenizer, "data.train", tools)
    counts: list[int] = []
    for start in range(0, len(chosen), TOKENIZED_ROWS_AT_ONCE):
        ids = chosen[start : start + TOKENIZED_ROWS_AT_ONCE]
        counts += [len(prompt.tokens) for prompt in encoder.encode(ids, [rows[i] for i in ids])]
    return counts


def _refuse_small_budgets(config: Config, pinned: Mapping[str, Any], longest: int) -> None:
    """A pinned budget is never a reason to drop a prompt."""
    new = config.learn.max_new_tokens
    problems = [
        Problem(
            f"run.{key}",
            f"{value} tokens cannot hold the longest sequence: {longest} prompt tokens and {new} new ones",
            f"Write at least {here}, or auto.",
        )
        for key, value in pinned.items()
        if value < (here := longest_here(config.run, longest + new, key))
    ]
    if problems:
        raise ConfigError(problems)
