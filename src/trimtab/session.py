"""Puts a run together, cheapest checks first: data and rewards are read and tried before any weight is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from trimtab.checkpoint import RunState, load_optimizer, load_state
from trimtab.config.algorithms import resolve
from trimtab.config.schema import Config, Model
from trimtab.data.prompt import Prompt
from trimtab.data.prompts import build_prompts, validate_rows
from trimtab.data.sources import eval_rows, train_rows
from trimtab.data.stream import PromptStream
from trimtab.errors import ConfigError, Problem
from trimtab.folder import find_folder, open_folder, resume_point, write_whole
from trimtab.model.load import load_config, load_model, load_tokenizer, stop_token_ids
from trimtab.model.policy import Policy
from trimtab.observe.card import StartCard
from trimtab.observe.console import Console
from trimtab.observe.meters import MemoryMeter
from trimtab.observe.sinks import Sinks
from trimtab.observe.timeline import Timeline
from trimtab.plan.auto import Choice, Facts, free_memory, physical_cores, pick_device, resolve_run
from trimtab.reward.scorer import Scorer
from trimtab.rollout.engine import Engine
from trimtab.rollout.native.cache import layer_shapes
from trimtab.rollout.native.engine import NativeEngine
from trimtab.update.updater import Updater

PROBED_ROWS = 64
GIB = 2**30


@dataclass
class Inputs:
    """What a caller may hand over as Python objects instead of naming it in the config."""

    train_rows: Sequence[Mapping[str, Any]] | None = None
    eval_rows: Sequence[Mapping[str, Any]] | None = None
    rewards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    base_dir: Path = field(default_factory=Path.cwd)
    """Reward files are relative to this: the folder of the config file."""
    name: str = "run"


@dataclass
class Work:
    """Data and rewards, read and checked."""

    tokenizer: Any
    train: list[dict[str, Any]]
    eval: list[Prompt]
    max_prompt_tokens: int
    longest_prompt: int
    """Of the rows that were looked at; decides sizes, not correctness."""
    notes: list[str]


@dataclass
class Session:
    """A run with everything in place."""

    config: Config
    folder: Path
    state: RunState
    resumed: bool
    tokenizer: Any
    policy: Policy
    reference: Policy | None
    engine: Engine
    updater: Updater
    scorer: Scorer
    stream: PromptStream
    eval_prompts: list[Prompt]
    console: Console
    timeline: Timeline
    sinks: Sinks
    meter: MemoryMeter

    @property
    def eval_part(self) -> str:
        return self.config.eval.part or self.scorer.names[0]


def read_work(config: Config, inputs: Inputs) -> Work:
    """Everything about the data that can be known before the model is loaded."""
    tokenizer = load_tokenizer(config.model)
    limit = _prompt_limit(config)
    given = inputs.train_rows
    train = [dict(row) for row in given] if given is not None else train_rows(config.data, seed=config.learn.seed)
    validate_rows(train, config.data, tokenizer, source_name="data.train")
    notes, held_out = [], []
    given = inputs.eval_rows
    rows = (
        [dict(row) for row in given][: config.eval.limit]
        if given is not None
        else eval_rows(config.data, seed=config.learn.seed, limit=config.eval.limit)
    )
    if rows:
        validate_rows(rows, config.data, tokenizer, source_name="data.eval")
        found = build_prompts(rows, config.data, tokenizer, max_prompt_tokens=limit, source_name="data.eval")
        held_out = found.prompts
        if found.too_long:
            notes.append(found.report())
    longest = _longest_prompt(config, train, tokenizer, limit)
    return Work(tokenizer, train, held_out, limit, longest, notes)


def open_session(
    config: Config, inputs: Inputs, stack: ExitStack, *, resume: bool = False, console_file: IO[str] | None = None
) -> Session:
    """Build a run. Whatever it opens is closed by `stack`, in the right order, also when a later part fails."""
    config = config.model_copy(update={"learn": resolve(config.learn)})
    device = pick_device(config.run)
    console = stack.enter_context(Console(config.learn.steps, file=console_file))
    work = read_work(config, inputs)
    folder = find_folder(config.observe.dir, inputs.name, resume)
    workers = config.run.reward_workers
    scorer = Scorer(
        config.reward,
        workers=physical_cores() if workers == "auto" else workers,
        base_dir=inputs.base_dir,
        functions=inputs.rewards,
    )
    stack.callback(scorer.close)
    scorer.check(work.train[0].keys() - {config.data.prompt})
    checkpoint = resume_point(folder) if resume else None
    policy, reference = _load_policies(config, device, checkpoint)
    run, choices = resolve_run(config.run, _facts(config, policy, reference, work))
    config = config.model_copy(update={"run": run})
    stack.enter_context(open_folder(folder, config, resume))
    write_whole(folder / "plan.json", json.dumps({"choices": [vars(c) for c in choices]}, indent=2) + "\n")
    torch.set_num_threads(_known(run.threads))
    updater = Updater(
        policy,
        config.learn,
        token_budget=_known(run.token_budget),
        score_token_budget=_known(run.score_token_budget),
        logprob_chunk=_known(run.logprob_chunk),
        checkpoint_activations=bool(run.checkpoint_activations),
    )
    state = RunState(kl_coef=config.learn.kl.coef)
    if checkpoint is not None:
        state = load_state(checkpoint)
        load_optimizer(checkpoint, updater.optimizer)
    stream = PromptStream(
        work.train,
        config.data,
        work.tokenizer,
        max_prompt_tokens=work.max_prompt_tokens,
        seed=config.learn.seed,
        position=state.data_position,
    )
    stack.callback(stream.close)
    sinks = Sinks(folder, config.observe, state.step if checkpoint else None)
    stack.callback(sinks.close)
    console.card(_card(config, folder, policy, work, choices, state.step if checkpoint else None))
    for note in work.notes:
        console.note(note)
    timeline = Timeline(folder, on_phase=console.working)
    stack.callback(timeline.close)
    engine = make_engine(config, policy, work.tokenizer)
    stack.callback(engine.close)
    engine.publish(state.version)
    return Session(
        config, folder, state, checkpoint is not None, work.tokenizer, policy, reference, engine, updater, scorer,
        stream, work.eval, console, timeline, sinks, MemoryMeter(device),
    )  # fmt: skip


def make_engine(config: Config, policy: Policy, tokenizer: Any) -> Engine:
    """The rollout engine of a config whose `run` is resolved."""
    rollout = config.run.rollout
    return NativeEngine(
        policy,
        tokenizer,
        stop_token_ids(policy.model, tokenizer),
        kv_bytes=_known(rollout.kv_memory),
        page_tokens=_known(rollout.page_tokens),
        max_sequences=_known(rollout.max_sequences),
        prefill_tokens=_known(rollout.prefill_tokens),
        prefix_cache=rollout.prefix_cache,
    )


def _prompt_limit(config: Config) -> int:
    """Longest prompt that leaves room for a completion; said before the weights are read."""
    architecture = load_config(config.model).get_text_config()
    context = int(getattr(architecture, "max_position_embeddings", None) or 2**31)
    new = max(config.learn.max_new_tokens, config.eval.max_new_tokens or 0)
    if new >= context:
        where = "learn.max_new_tokens" if config.learn.max_new_tokens == new else "eval.max_new_tokens"
        raise ConfigError(
            [Problem(where, f"{new} leaves no room for a prompt in the model's context of {context} tokens")]
        )
    asked = config.data.max_prompt_tokens
    if asked is not None and asked + new > context:
        raise ConfigError(
            [
                Problem(
                    "data.max_prompt_tokens",
                    f"{asked} prompt tokens and {new} new ones exceed the model's context of {context}",
                    f"At most {context - new}.",
                )
            ]
        )
    return asked or context - new


def _longest_prompt(config: Config, rows: list[dict[str, Any]], tokenizer: Any, limit: int) -> int:
    """Longest prompt of the training set, exactly where a pinned budget depends on it, else of the longest texts.

    A pinned budget is never a reason to drop a prompt: one that is too small is refused here.
    """
    budgets = {"token_budget": config.run.token_budget, "score_token_budget": config.run.score_token_budget}
    pinned = {key: value for key, value in budgets.items() if value != "auto"}
    exact = any(value < limit + config.learn.max_new_tokens for value in pinned.values())
    by_length = sorted(rows, key=lambda row: -len(str(row[config.data.prompt])))
    looked_at = rows if exact else by_length[:PROBED_ROWS]
    found = build_prompts(looked_at, config.data, tokenizer, max_prompt_tokens=limit, source_name="data.train")
    longest = max(len(prompt.tokens) for prompt in found.prompts)
    need = longest + config.learn.max_new_tokens
    problems = [
        Problem(
            f"run.{key}",
            f"{value} tokens cannot hold the longest sequence, {longest} of prompt and {config.learn.max_new_tokens} new",
            f"At least {need}.",
        )
        for key, value in pinned.items()
        if value < need
    ]
    if problems:
        raise ConfigError(problems)
    return longest


def _load_policies(config: Config, device: torch.device, checkpoint: Path | None) -> tuple[Policy, Policy | None]:
    source = config.model
    if checkpoint is not None:
        source = Model(path=str(checkpoint), dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code)
    policy = Policy(load_model(source, device))
    reference = None
    if config.learn.kl.coef > 0:
        frozen = load_model(config.model, device).requires_grad_(False)
        reference = Policy(frozen, check=False)
    return policy, reference


def _facts(config: Config, policy: Policy, reference: Policy | None, work: Work) -> Facts:
    architecture = policy.config
    itemsize = policy.dtype.itemsize
    new = max(config.learn.max_new_tokens, config.eval.max_new_tokens or 0)
    states = policy.parameter_count() * (12 if itemsize >= 4 else 16)  # gradients, moments, and masters where separate
    return Facts(
        device=policy.device,
        free_bytes=max(GIB // 4, free_memory(policy.device) - states),
        cores=physical_cores(),
        hidden=architecture.hidden_size,
        intermediate=getattr(architecture, "intermediate_size", None) or 4 * architecture.hidden_size,
        layers=architecture.num_hidden_layers,
        vocabulary=architecture.vocab_size,
        itemsize=itemsize,
        kv_bytes_per_token=sum(s.bytes_per_token(itemsize) for s in layer_shapes(policy).values()),
        longest_sequence=work.max_prompt_tokens + new,
        typical_sequence=work.longest_prompt + new + 16,
        sequences=max(config.learn.sequences_per_step, len(work.eval) * config.eval.samples_per_prompt),
    )


def _card(
    config: Config, folder: Path, policy: Policy, work: Work, choices: list[Choice], resumed_from: int | None
) -> StartCard:
    import psutil

    learn = config.learn
    device, total = "CPU", None
    if policy.device.type == "cuda":
        properties = torch.cuda.get_device_properties(policy.device)
        device, total = properties.name, properties.total_memory / GIB
    return StartCard(
        run_dir=folder,
        model=config.model.path,
        parameters=policy.parameter_count(),
        dtype=str(policy.dtype).removeprefix("torch."),
        device=device,
        algorithm=f"{learn.algorithm} ({learn.advantage} advantage, {learn.loss} loss, {learn.aggregate})",
        prompts_per_step=learn.prompts_per_step,
        samples_per_prompt=learn.samples_per_prompt,
        max_new_tokens=learn.max_new_tokens,
        updates_per_batch=learn.updates_per_batch,
        data_rows=len(work.train),
        eval_rows=len(work.eval) or None,
        device_total_gib=total,
        host_total_gib=psutil.virtual_memory().total / GIB,
        choices=[(c.key, c.value, c.why) for c in choices],
        resumed_from=resumed_from,
    )


def _known(value: int | str) -> int:
    """A key that `resolve_run` has filled in."""
    assert isinstance(value, int)
    return value
