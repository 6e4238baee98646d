"""An evaluation on several devices: a rank on each loads the model and generates; the driver scores."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from trimtab.cluster.fleet import Fleet
from trimtab.cluster.mesh import LOCALHOST, open_store
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.rewards import RankedClassifier
from trimtab.config.resolved import ResolvedConfig
from trimtab.observe.stall_watch import STALL_STEPS
from trimtab.plan.job import Job, Machine
from trimtab.plan.work import Lengths, evaluation_job_of
from trimtab.reward.models import ModelBackend
from trimtab.rollout.seat import EngineMeeting
from trimtab.run.assemble_ranks import RankPlan, plan_over
from trimtab.run.evaluation_rank import EvaluationSetup
from trimtab.run.generating_rank import EngineFacts
from trimtab.run.shapes import shape_of, stated_models


def plan_evaluation(config: ResolvedConfig, device: torch.device, lengths: Lengths) -> RankPlan | None:
    """The plan of an evaluation on several devices; None where it has one. Nothing is trained, so nothing is cut into parts."""

    def job(machine: Machine) -> Job:
        shape = shape_of(config.model.path, config.model.trust_remote_code)
        stated = replace(stated_models(config, shape, machine.cpu), adapters=0, critic=None)
        return evaluation_job_of(config, stated, lengths)

    whole = {"shard": "auto", "shard_devices": "auto", "sequence_parallel": "auto"}
    return plan_over(config.run.with_values(whole), device, job)


def open_fleet(
    planned: RankPlan, config: ResolvedConfig, tokenizer: Any, models: ModelBackend | None, stack: ExitStack
) -> Fleet:
    """Ranks with an engine each, which end with `stack`; reward models, where there are any, are on them too."""
    plan, devices = planned.plan, planned.devices
    paths = () if models is None else tuple(models.paths)
    count = len(devices)
    store = open_store()
    meeting = EngineMeeting(LOCALHOST, store.port, "evaluation", planned.backend)
    setups = [
        EvaluationSetup(
            rank=rank,
            ranks=count,
            device=where,
            config=config,
            tokenizer=tokenizer,
            plan=plan,
            devices=devices,
            reward_models=paths,
            meeting=meeting,
        )
        for rank, where in enumerate(devices)
    ]
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-ranks-")))
    ranks = Ranks(
        "trimtab.run.evaluation_rank",
        setups,
        logs,
        variables=[{"OMP_NUM_THREADS": str(plan.run.threads), "GLOO_SOCKET_IFNAME": "lo"}] * count,
        stall_s=STALL_STEPS * plan.times.total,
    )
    stack.callback(ranks.close)
    ranks.store = store  # it lives as long as they do
    facts: list[EngineFacts] = ranks.wait_until_built()
    if models is not None:
        models.use([RankedClassifier(ranks, number) for number in range(len(paths))])
    return Fleet(
        ranks,
        facts[0].engine,
        plan.run.rollout.max_sequences,
        [each.lowered for each in facts],
        plan.engine_devices,
        plan.prefill_tokens_per_step,
        joint=plan.joint_ranks,
    )
