"""Rollout engines as a config names them, and conversations on top of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.base.errors import EngineError
from trimtab.config.known import ResolvedRun
from trimtab.config.run import Run
from trimtab.config.schema import Config
from trimtab.model.load import stop_token_ids
from trimtab.model.policy import Policy
from trimtab.model.sharded import ShardedPolicy
from trimtab.observe.recoveries import Recoveries
from trimtab.plan.planner import Choice, Plan
from trimtab.plan.refusal import planned
from trimtab.rollout.conversations.episodes import Episodes
from trimtab.rollout.conversations.hosts import Hosts
from trimtab.rollout.conversations.replies import ReplyEncoder
from trimtab.rollout.engine import Engine, Sampler
from trimtab.rollout.external.engine import ExternalEngine, kv_cut
from trimtab.rollout.external.find import interpreter
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.external.lent import LentDevice
from trimtab.rollout.native.cut import CutEngine
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.native.kv_codes import Stored
from trimtab.rollout.native.replica import ReplicaEngine
from trimtab.rollout.native.together import Together
from trimtab.rollout.seat import ONLY_SEAT, EngineSeat


@dataclass(frozen=True)
class EnvironmentSession:
    """What it takes to have conversations with an environment."""

    hosts: Hosts
    replies: ReplyEncoder


def sampler_on(engine: Engine, environment: EnvironmentSession | None) -> Sampler:
    """The engine, or conversations of it with an environment."""
    return engine if environment is None else Episodes(engine, environment.hosts, environment.replies)


def open_engine(
    config: Config,
    plan: Plan,
    policy: Policy,
    tokenizer: Any,
    recoveries: Recoveries,
    logs: Path | None = None,
    seat: EngineSeat = ONLY_SEAT,
) -> tuple[Plan, Engine]:
    """The engine that a plan names. Where that is not what was asked for and cannot be had, the native one, with a plan of its
    own; ranks leave that to their driver."""
    longest = plan.job.longest_sequence
    if not seat.owner and plan.run.external:
        return plan, LentDevice(policy, longest)
    try:
        kv_dtype = config.model.kv_dtype
        return plan, make_engine(plan.run, policy, tokenizer, longest, recoveries, logs, seat, kv_dtype)
    except EngineError as error:
        if seat.ranks > 1 or not gives_way(config.run, plan):
            raise
        choice = native_instead(plan, error)
    plan = planned(config.run.with_values({"engine": "native"}), plan.job, plan.machine)
    plan = replace(plan, choices=(*plan.choices, choice))
    return plan, make_engine(plan.run, policy, tokenizer, longest, recoveries, kv_dtype=config.model.kv_dtype)


def gives_way(asked: Run, plan: Plan) -> bool:
    """The native engine may take the place of the one that was planned: nobody has asked for that one."""
    return asked.engine == "auto" and plan.run.external


def native_instead(plan: Plan, error: EngineError) -> Choice:
    why = f"{plan.run.engine} was planned but did not start: {str(error).splitlines()[0]}"
    return Choice("run.engine", "native", why)


def make_engine(
    run: ResolvedRun,
    policy: Policy,
    tokenizer: Any,
    longest: int,
    recoveries: Recoveries,
    logs: Path | None = None,
    seat: EngineSeat = ONLY_SEAT,
    kv_dtype: Stored = "auto",
) -> Engine:
    """The rollout engine of a plan, for sequences of up to this many tokens. `seat`: the rank's, where there are several."""
    rollout = run.rollout
    settings: dict[str, Any] = {
        "policy": policy,
        "tokenizer": tokenizer,
        "stop_token_ids": stop_token_ids(policy.model, tokenizer),
        "kv_bytes": rollout.kv_memory,
        "page_tokens": rollout.page_tokens,
        "max_sequences": rollout.max_sequences,
        "prefill_tokens": rollout.prefill_tokens,
        "prefix_cache": rollout.prefix_cache,
        "lend_memory": rollout.lend_memory,
        "on_recovery": recoveries.of_engine,
    }
    if run.engine == "native":
        settings["kv_dtype"] = kv_dtype
    if run.engine == "native" and rollout.tensor_parallel > 1:
        assert seat.meeting is not None
        parts, store = rollout.tensor_parallel, seat.open_store()
        together = Together(store, seat.place, parts, seat.devices[seat.place], seat.meeting.backend)
        return CutEngine(**settings, together=together, kv_parts=kv_cut(policy.config, parts))
    if run.engine == "native":
        return (ReplicaEngine if isinstance(policy, ShardedPolicy) else NativeEngine)(**settings)
    eager = policy.device.type == "cpu" if rollout.eager is None else rollout.eager
    python = interpreter(rollout.python)
    settings |= {"longest": longest, "eager": eager, "python": python, "processes": rollout.processes}
    settings |= {"tensor_parallel": rollout.tensor_parallel, "logs": logs, "on_restart": recoveries.restarted}
    settings |= {"devices": seat.devices}
    return ExternalEngine(KINDS[run.engine], **settings)


def external_note(run: Run) -> str:
    """The message while an external engine starts; empty for the native engine."""
    return f"starting {KINDS[run.engine].title}, which takes about a minute" if run.external else ""
