"""Runs that learn from what they sample: what is checked before one starts, and what is theirs alone when it is built
(open_run.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.cluster.split_fleet import SplitFleet, SplitGenerator
from trimtab.config.resolved import PlannedConfig, ResolvedConfig, eval_in_words, resolve_config
from trimtab.config.schema import Config
from trimtab.data.prompt import Prompt
from trimtab.data.stream import PromptStream
from trimtab.data.view import View
from trimtab.model.adapters import refuse_unknown_targets
from trimtab.model.load import load_config, refuse_dtype, refuse_without_weights
from trimtab.model.policy import Policy, refuse_other_layers
from trimtab.observe.card import rollout_batch
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.tasks import Tasks
from trimtab.plan.planner import Plan
from trimtab.plan.quantised import refuse_base, refuse_kv
from trimtab.plan.refusal import refuse_uneven_cut
from trimtab.plan.refuse_devices import refuse_cut_over_missing, refuse_unbuilt_placement
from trimtab.plan.work import refuse_mixture_keys
from trimtab.record.batches import SampledBatch, load_batches
from trimtab.record.checkpoint import RunState, read_state
from trimtab.record.folder import find_folder, refuse_existing
from trimtab.reward.models import ModelBackend
from trimtab.reward.scorer import Scorer
from trimtab.rollout.engine import Engine
from trimtab.rollout.external.find import refuse_without_engine
from trimtab.rollout.generator import LocalGenerator
from trimtab.rollout.no_rollout import NoRollout
from trimtab.rollout.seat import ONLY_SEAT, EngineSeat
from trimtab.run.buffer import Buffer
from trimtab.run.build import load_policy, refuse_kernels, refuse_missing_sinks, update_settings
from trimtab.run.engines import EnvironmentSession, external_note, open_engine, sampler_on
from trimtab.run.inputs import Inputs
from trimtab.run.open_run import OpenRun, open_run
from trimtab.run.ray_hosts import open_device
from trimtab.run.roles import Prompts, Session
from trimtab.run.rollout_data import (
    Work,
    open_hosts,
    open_replies,
    open_scorer,
    read_data,
    read_tokenizer,
    refuse_other_critic,
    with_found_rewards,
)
from trimtab.run.shapes import shape_of
from trimtab.run.stage import CheckedRun, OnWait
from trimtab.update.batch import Sample, parts_by_prompt
from trimtab.update.critic import open_critic
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.peers import Peers
from trimtab.update.samples import has_critic
from trimtab.update.updater import Updater


@dataclass(frozen=True, kw_only=True)
class CheckedPrompts(CheckedRun):
    """With prompts, rewards and an environment."""

    config: ResolvedConfig
    work: Work
    tasks: Tasks | None
    scorer: Scorer
    environment: EnvironmentSession | None


def rounded_kv(config: ResolvedConfig) -> str:
    """What to know of keys and values that are stored in fewer bits than the model's; empty where they are not."""
    if config.model.kv_dtype != "fp8" or config.learn.importance.level != "off":
        return ""
    return (
        "model.kv_dtype: fp8: tokens are sampled with rounded keys and values and learned without the rounding; "
        "rollout/logprob_gap says how far apart they are, and learn.importance.level: token corrects for it"
    )


def check(asked: Config, inputs: Inputs, stack: ExitStack, *, resume: bool) -> CheckedPrompts:
    """Try everything that needs no weights, cheapest first. Writes nothing."""
    device = open_device(asked.run, inputs.hosts, stack)
    folder = find_folder(asked.observe.dir, inputs.name, resume)
    refuse_existing(folder, resume)
    refuse_unbuilt_placement(asked.run)
    refuse_without_engine(asked.run, device)
    if inputs.hosts is None and asked.run.devices == "auto" and not isinstance(asked.run.placement, dict):
        refuse_cut_over_missing(asked.run, 1 if device.type == "cpu" else torch.cuda.device_count())
    refuse_missing_sinks(asked.observe)
    refuse_kernels(asked.run, asked.model, device)
    refuse_dtype(asked.model, device)
    config = with_found_rewards(resolve_config(asked), inputs)
    tokenizer, limit = read_tokenizer(config)
    if not resume:  # or a checkpoint may have them
        refuse_without_weights(config.model)
    refuse_other_layers(config.model)
    if config.run.cut > 1:
        refuse_uneven_cut(config.run, shape_of(config.model.path, config.model.trust_remote_code))
    hosts = open_hosts(config, inputs, tokenizer)
    if hosts is not None:
        stack.callback(hosts.close)
    work = read_data(config, inputs, tokenizer, limit, hosts.loaded.schemas if hosts else ())
    replies = open_replies(config, hosts, tokenizer, work.columns, work.first_prompt(config))
    if config.model.lora is not None or config.learn.router_aux_coef or config.learn.router_replay:
        refuse_mixture_keys(config, shape_of(config.model.path, config.model.trust_remote_code))
    if config.model.kv_dtype == "fp8":
        refuse_kv(config.model.kv_dtype, shape_of(config.model.path, config.model.trust_remote_code))
    if config.model.lora is not None:
        refuse_unknown_targets(config.model.lora, load_config(config.model), config.model.trust_remote_code)
        if config.model.base in ("fp8", "4bit"):
            refuse_base(config.model.base, shape_of(config.model.path, config.model.trust_remote_code))
    refuse_other_critic(config, work)
    tasks = work.tasks(config)
    scorer = open_scorer(config, inputs, work.columns, run_dir=folder)
    stack.callback(scorer.close)
    return CheckedPrompts(
        config=config,
        device=device,
        folder=folder,
        tokenizer=tokenizer,
        rows=work.train.rows,
        lengths=work.lengths,
        notes=(work.train.note, work.eval.note, rounded_kv(config)),
        before_loading=external_note(config.run),
        work=work,
        tasks=tasks,
        scorer=scorer,
        environment=EnvironmentSession(hosts, replies) if hosts is not None and replies is not None else None,
    )


def open_session(
    config: Config, inputs: Inputs, stack: ExitStack, *, resume: bool = False, console_file: IO[str] | None = None
) -> Session:
    """Build a run that learns from what it samples; see `open_run`."""
    opened = open_run(RolloutStage(), config, inputs, stack, resume=resume, console_file=console_file)
    ready, engine, trainer, learn = opened.ready, opened.engine, opened.trainer, opened.config.learn
    if learn.staleness and learn.importance.level == "off" and learn.old_logprobs == "trainer":
        opened.observer.warn(
            f"learn.staleness is {learn.staleness} and learn.importance.level is off: the policy learns from samples of an older "
            "one as if they were its own. Leave learn.importance.level out to correct for it"
        )
    sampler, waiting = sampler_on(engine, ready.environment), _waiting_batches(opened)
    if isinstance(engine, SplitFleet):
        generator: LocalGenerator = SplitGenerator(engine, sampler, trainer.guard.run)
        buffer = Buffer(waiting, engine.interrupt)
    else:
        generator, buffer = LocalGenerator(engine, sampler, trainer.guard.run), Buffer(waiting)
    stack.callback(buffer.close)
    return Session(
        config=opened.config,
        folder=ready.folder,
        state=opened.state,
        data=Prompts(opened.stream, ready.work.eval.prompts, ready.tasks),
        trainer=trainer,
        observer=opened.observer,
        generator=generator,
        rewarder=ready.scorer,
        buffer=buffer,
    )


def _waiting_batches(opened: OpenRun) -> list[SampledBatch]:
    """What the run that is resumed had sampled and not learned from; rewards that it waited for are being computed again."""
    if opened.checkpoint is None:
        return []
    ready, scorer = opened.ready, opened.ready.scorer
    if read_state(opened.checkpoint).data_mark != opened.state.data_mark:
        opened.observer.warn("batches that were sampled from the old data.train are dropped")
        return []
    batches = load_batches(opened.checkpoint, lambda ids: ready.work.prompts(opened.config, ids))
    for batch in batches:
        for group in [] if batch.scored else batch.groups:
            scorer.submit(group)
    return batches


class RolloutStage:
    """See stage.py."""

    reading_note = "reading the tokenizer and the data, and starting the reward workers"
    rehearses = True

    def together(self, samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
        return parts_by_prompt(samples, budget)

    def check(self, config: Config, inputs: Inputs, stack: ExitStack, *, resume: bool) -> CheckedPrompts:
        return check(config, inputs, stack, resume=resume)

    def init_state(self, config: ResolvedConfig, state: RunState, changed: Sequence[str] | None) -> None:
        """A coefficient that is steered goes on from where it was, unless another is asked for."""
        steered = config.learn.kl.target is not None and changed is not None
        if not steered or any(change.startswith("learn.kl.coef ") for change in changed or ()):
            state.kl_coef = config.learn.kl.coef

    def open_engine(
        self,
        ready: CheckedPrompts,
        plan: Plan,
        policy: Policy,
        recoveries: Recoveries,
        logs: Path | None,
        tell: OnWait,
        seat: EngineSeat = ONLY_SEAT,
    ) -> tuple[Plan, Engine]:
        if not plan.job.generates:
            return plan, NoRollout()
        tell(f"starting the {plan.run.engine} engine")
        return open_engine(ready.config, plan, policy, ready.tokenizer, recoveries, logs, seat)

    def load_rewards(self, ready: CheckedPrompts, policy: Policy, tell: OnWait) -> None:
        if ready.scorer.models is not None:
            tell("loading the reward models")
            ready.scorer.models.load(policy.device, policy.dtype)

    def reward_models(self, ready: CheckedPrompts) -> ModelBackend | None:
        return ready.scorer.models

    def objective(self, config: ResolvedConfig, policy: Policy) -> PolicyGradient:
        return PolicyGradient(config.learn)

    def open_critic(
        self, config: PlannedConfig, device: torch.device, mesh: DeviceMesh | None, peers: Peers
    ) -> Updater | None:
        learn, run = config.learn, config.run
        if not has_critic(learn):
            return None
        source = config.model.with_values({"path": learn.critic.path or config.model.path})
        model = load_policy(
            source, learn.seed, device, run.kernels, shards=peers.shards, mesh=mesh, prefetch=run.prefetch,
            peers=peers,
        )  # fmt: skip
        return open_critic(model, learn, peers=peers, **update_settings(run))

    def shorter(self, config: PlannedConfig) -> str:
        return f"lower learn.max_new_tokens (now {config.learn.max_new_tokens:,})"

    def stream(self, config: PlannedConfig, ready: CheckedPrompts, position: int) -> PromptStream:
        work = ready.work
        return PromptStream(
            work.train.rows,
            config.data,
            work.tokenizer,
            max_prompt_tokens=work.limit,
            seed=config.learn.seed,
            position=position,
            tools=work.tools,
        )

    def view(self, ready: CheckedPrompts, stop_token_ids: list[int]) -> View:
        return ready.work.view(ready.config, stop_token_ids)

    def task_of(self, ready: CheckedPrompts) -> Callable[[Prompt], str] | None:
        return None if ready.tasks is None else ready.tasks.of

    def card(self, config: PlannedConfig, ready: CheckedPrompts, engine: Engine) -> dict[str, Any]:
        learn, held_out = config.learn, ready.work.eval.prompts
        return {
            "algorithm": f"{learn.algorithm} ({learn.advantage} advantage, {learn.loss} loss, {learn.aggregate})",
            "batch": rollout_batch(
                learn.prompts_per_step, learn.samples_per_prompt, learn.max_new_tokens, learn.updates_per_batch
            ),
            "eval_rows": len(held_out) or None,
            "evaluation": eval_in_words(config) if held_out else None,
            "engine": engine.description,
        }
