"""Data sets that are given and not sampled, of worked answers (sft.py) or of pairs (reward_model.py): how they are checked before
a run starts, and what is theirs alone when it is built (open_run.py)."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.load import Offline
from trimtab.config.row_ranks import longest_here
from trimtab.config.run import Run
from trimtab.data.examples import Checking, ExampleSet, measure_examples, validate_examples
from trimtab.data.sources import eval_rows, train_rows
from trimtab.data.stream import Stream
from trimtab.data.view import View, view_example
from trimtab.model.adapters import refuse_unknown_targets
from trimtab.model.context import context_of
from trimtab.model.load import load_config, load_tokenizer, refuse_dtype, refuse_without_weights
from trimtab.model.policy import Policy, refuse_other_layers
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.planner import Plan
from trimtab.plan.quantised import refuse_base
from trimtab.plan.work import Lengths
from trimtab.record.checkpoint import RunState
from trimtab.record.folder import find_folder, refuse_existing
from trimtab.rollout.engine import Engine
from trimtab.rollout.no_rollout import NoRollout
from trimtab.rollout.seat import ONLY_SEAT, EngineSeat
from trimtab.run.build import refuse_kernels, refuse_missing_sinks
from trimtab.run.inputs import Inputs, given_rows
from trimtab.run.ray_hosts import open_device
from trimtab.run.roles import Trainer
from trimtab.run.shapes import shape_of
from trimtab.run.stage import CheckedRun, OnWait
from trimtab.update.batch import Sample, parts_by_prompt
from trimtab.update.objectives.objective import Objective
from trimtab.update.peers import Peers
from trimtab.update.stats import UpdateStats
from trimtab.update.updater import Updater

MEASURED_CHARACTERS = 200_000_000
"""A training set up to this size is tokenised once at the start, a minute or two; of a larger one the longest texts are."""

STAND_IN_ROWS = 1000
"""Rows of the training set that stand in for a held-out set."""


@dataclass(frozen=True, kw_only=True)
class CheckedExamples(CheckedRun):
    """With worked answers, or pairs."""

    limit: int
    """Tokens of the longest example that is used."""
    train: ExampleSet
    held_out: list[Any]


@dataclass
class Examples:
    """What is learned from, and measured on."""

    stage: OfflineStage
    ready: CheckedExamples
    stream: Stream[Any]
    held_out: list[Sample]

    def first(self) -> list[Sample]:
        """First samples of the training set, to measure on where there are no held-out rows; none that is too long to be used."""
        stage, ready = self.stage, self.ready
        rows = ready.rows[:STAND_IN_ROWS]
        items = stage.encoder(ready.config, ready.tokenizer, "data.train").encode(range(len(rows)), rows)
        return stage.samples(ready.config, [item for item in items if len(item.tokens) <= ready.limit])


class OfflineStage(ABC):
    """See stage.py. What a subclass says is all that differs between kinds of examples."""

    unit: str
    """What a row is, in one word."""
    reading_note = "reading the tokenizer and the data, and counting tokens"
    rehearses: bool

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return parts_by_prompt(samples, budget)

    def refuse(self, config: Any) -> None:
        """Raise where nothing good can come of it, before any data is read."""
        return

    @abstractmethod
    def per_step(self, config: Any) -> int: ...

    @abstractmethod
    def words(self, config: Any) -> str:
        """What is learned, for the start card."""

    @abstractmethod
    def encoder(self, config: Any, tokenizer: Any, source_name: str) -> Checking[Any]: ...

    @abstractmethod
    def samples(self, config: Any, items: Sequence[Any]) -> list[Sample]:
        """Samples of these items, each with its share of a step that consumes exactly these."""

    @abstractmethod
    def objective(self, config: Any, policy: Policy) -> Objective: ...

    @abstractmethod
    def metrics(self, stats: UpdateStats, samples: Sequence[Sample]) -> dict[str, float]: ...

    @abstractmethod
    def evaluate(self, config: Any, trainer: Trainer, held_out: list[Sample]) -> dict[str, float]:
        """`eval/loss` and what else there is to know of held-out rows."""

    @abstractmethod
    def export(self, config: Any, trainer: Trainer, folder: Path, data: Examples) -> dict[str, Any]:
        """Write RUN/final, and add to the summary."""

    def check(self, config: Offline, inputs: Inputs, stack: ExitStack, *, resume: bool) -> CheckedExamples:
        return check(self, config, inputs, stack, resume=resume)

    def init_state(self, config: Offline, state: RunState, changed: Sequence[str] | None) -> None:
        return

    def open_engine(
        self,
        ready: CheckedExamples,
        plan: Plan,
        policy: Policy,
        recoveries: Recoveries,
        logs: Path | None,
        tell: OnWait,
        seat: EngineSeat = ONLY_SEAT,
    ) -> tuple[Plan, Engine]:
        return plan, NoRollout()

    def load_rewards(self, ready: CheckedExamples, policy: Policy, tell: OnWait) -> None:
        return

    def reward_models(self, ready: Any) -> None:
        return None

    def open_critic(
        self, config: Offline, device: torch.device, mesh: DeviceMesh | None, peers: Peers
    ) -> Updater | None:
        return None

    def shorter(self, config: Offline) -> str:
        return "lower learn.max_tokens"

    def stream(self, config: Offline, ready: CheckedExamples, position: int) -> Stream[Any]:
        # A fast tokenizer is not safe to share between threads, so the stream has its own.
        encoder = self.encoder(config, copy.deepcopy(ready.tokenizer), "data.train")
        seed, shuffle = config.learn.seed, config.data.shuffle
        return Stream(ready.rows, encoder, most_tokens=ready.limit, seed=seed, shuffle=shuffle, position=position)

    def view(self, ready: CheckedExamples, stop_token_ids: list[int]) -> View:
        encoder = self.encoder(ready.config, ready.tokenizer, "data.train")
        return view_example(self.unit, encoder, ready.rows[0], ready.tokenizer, stop_token_ids)

    def task_of(self, ready: CheckedExamples) -> None:
        return None

    def card(self, config: Offline, ready: CheckedExamples, engine: Engine) -> dict[str, Any]:
        return {
            "algorithm": self.words(config),
            "batch": [
                ("batch", f"{self.per_step(config)} {self.unit}s per step, {config.learn.steps} steps"),
                ("tokens", f"up to {ready.train.longest:,} per {self.unit}"),
            ],
            "eval_rows": len(ready.held_out) or None,
        }


def check(stage: OfflineStage, config: Offline, inputs: Inputs, stack: ExitStack, *, resume: bool) -> CheckedExamples:
    """Try everything that needs no weights, cheapest first. Writes nothing."""
    device = open_device(config.run, inputs.hosts, stack)
    folder = find_folder(config.observe.dir, inputs.name, resume)
    refuse_existing(folder, resume)
    refuse_missing_sinks(config.observe)
    refuse_kernels(config.run, config.model, device)
    refuse_dtype(config.model, device)
    stage.refuse(config)
    limit = _limit(config)
    if not resume:  # or a checkpoint may have them
        refuse_without_weights(config.model)
    refuse_other_layers(config.model)
    if config.model.lora is not None:
        refuse_unknown_targets(config.model.lora, load_config(config.model), config.model.trust_remote_code)
        if config.model.base in ("fp8", "4bit"):
            refuse_base(config.model.base, shape_of(config.model.path, config.model.trust_remote_code))
    tokenizer = load_tokenizer(config.model)
    learn, data = config.learn, config.data
    given = given_rows(inputs.train_rows, data.train, "data.train")
    rows = train_rows(data, seed=learn.seed) if given is None else [dict(row) for row in given]
    rows = rows[: data.limit]
    encoder = stage.encoder(config, tokenizer, "data.train")
    validate_examples(rows, encoder)
    budgets = {key: getattr(config.run, key) for key in ("token_budget", "score_token_budget")}
    pinned = {key: value for key, value in budgets.items() if value != "auto"}
    train = measure_examples(rows, encoder, limit, 2**62 if pinned else MEASURED_CHARACTERS)
    held_out, note = _read_held_out(stage, config, inputs, tokenizer, limit)
    longest = max(train.longest, *(getattr(item, "row_tokens", len(item.tokens)) for item in held_out), 1)
    _refuse_small_budgets(config.run, pinned, longest, stage.unit)
    steps = learn.steps or max(1, math.ceil(learn.epochs * train.fitting / stage.per_step(config)))
    if learn.schedule.warmup_steps >= steps:
        what = f"{learn.schedule.warmup_steps} warm-up steps leave none of {steps} at the full learning rate"
        raise ConfigError([Problem("learn.schedule.warmup_steps", what, "Lower it, or train longer.")])
    return CheckedExamples(
        config=config.with_values({"learn.steps": steps, "learn.epochs": 1.0}),
        device=device,
        folder=folder,
        tokenizer=tokenizer,
        rows=rows,
        lengths=Lengths(longest, longest, len(held_out)),
        notes=(train.note, note),
        limit=limit,
        train=train,
        held_out=held_out,
    )


def _limit(config: Offline) -> int:
    """Tokens of the longest example that the model can read."""
    context = context_of(load_config(config.model).get_text_config())
    asked = config.learn.max_tokens
    if asked is not None and asked > context:
        what = f"{asked} tokens exceed the model's context of {context}"
        raise ConfigError([Problem("learn.max_tokens", what, f"Write at most {context}.")])
    return asked or context


def _refuse_small_budgets(run: Run, pinned: dict[str, int], longest: int, unit: str) -> None:
    for key, value in pinned.items():
        here = longest_here(run, longest, key)
        if value < here:
            what = f"{value} tokens cannot hold the longest {unit} of {longest}"
            raise ConfigError([Problem(f"run.{key}", what, f"Write at least {here}, or auto.")])


def _read_held_out(
    stage: OfflineStage, config: Offline, inputs: Inputs, tokenizer: Any, limit: int
) -> tuple[list[Any], str]:
    given = given_rows(inputs.eval_rows, config.data.eval, "data.eval")
    if given is None and config.data.eval is None:
        return [], ""
    rows = eval_rows(config.data, seed=config.learn.seed) if given is None else [dict(row) for row in given]
    encoder = stage.encoder(config, tokenizer, "data.eval")
    validate_examples(rows, encoder)
    measured = measure_examples(rows, encoder, limit, 2**62)
    return [e for e in encoder.encode(range(len(rows)), rows) if len(e.tokens) <= limit], measured.note
