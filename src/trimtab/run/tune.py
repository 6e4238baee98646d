"""`trimtab tune`: the run's own model, engine and update, timed on this machine; what is found is kept for later runs."""

from __future__ import annotations

import datetime
import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from trimtab.base.units import GIB
from trimtab.cluster.trainer import RankedTrainer
from trimtab.cluster.updater import RankedUpdater
from trimtab.config.load import resolved_yaml
from trimtab.config.resolved import resolve_config, with_plan
from trimtab.config.schema import Config
from trimtab.observe.card import shown
from trimtab.observe.recoveries import Recoveries
from trimtab.observe.waiting import waiting
from trimtab.plan.cache import applied, keep, prepare
from trimtab.plan.job import Machine
from trimtab.plan.place import place_over
from trimtab.plan.planner import Plan
from trimtab.plan.trials import Trial
from trimtab.record.checkpoint import RunState
from trimtab.run.assemble import assemble
from trimtab.run.assemble_ranks import assemble_ranks, plan_ranks
from trimtab.run.inputs import Inputs
from trimtab.run.session import CheckedPrompts, RolloutStage, check
from trimtab.run.tuner import LocalTries, RankTries, Tries, tune


def run_tuning(config: Config, inputs: Inputs, file: IO[str]) -> dict[str, Any]:
    """Measure, keep, and return the resolved config with what was found."""
    console = Console(file=file, highlight=False)
    prepare()
    with ExitStack() as stack:
        with waiting(file, "reading the data and loading the model"):
            ready = check(config, inputs, stack, resume=True)
            plan, machine, tries = _build(ready, stack)
        planned = {choice.key: choice.value for choice in plan.choices}
        console.print(f"{'key':>14}  {'size':>9}  {'tokens/s':>12}  {'peak':>9}")

        def report(trial: Trial) -> None:
            rate = "did not fit" if trial.rate is None else f"{trial.rate:,.0f}"
            peak = "" if trial.peak is None else f"{trial.peak / GIB:.1f} GiB"
            console.print(f"{trial.key:>14}  {trial.value:>9,}  {rate:>12}  {peak:>9}")

        most = min(plan.run.rollout.max_sequences, plan.job.in_flight)
        found = tune(tries, plan.job, most, report)
    tuned, values = applied(config.run, {"token_budget": found.token_budget, "max_sequences": found.max_sequences})
    chosen = place_over(tuned.with_values({"engine": plan.run.engine}), plan.job, machine, config.run.profile)
    for key, value in values.items():
        before = f" (planned {shown(key, planned[key])})" if key in planned and planned[key] != value else ""
        console.print(f"{key}: {shown(key, value)}{before}")
    kept = None
    if len(values) == 2 and chosen.fits:
        kept = keep(found, plan.job, machine, config.run, datetime.date.today().isoformat())
        console.print(f"saved for later runs in {kept}")
    else:
        why = "they do not fit with the rest of the plan" if not chosen.fits else "the config sets one of these sizes"
        console.print(f"not saved for later runs: {why}")
    run = chosen.run if chosen.fits else plan.run
    resolved = with_plan(resolve_config(config), run)
    trials = [vars(trial) for trial in found.trials]
    return {
        "run": run.model_dump(),
        "tuned": values,
        "trials": trials,
        "cache": kept and str(kept),
        "config": resolved_yaml(resolved),
    }


def _build(ready: CheckedPrompts, stack: ExitStack) -> tuple[Plan, Machine, Tries]:
    """What is timed, on as many devices as a run would use, and the machine that it was planned for."""
    stage, recoveries = RolloutStage(), Recoveries(RunState(), lambda line, kind: None)
    planned = plan_ranks(ready)
    if planned is None:
        parts = assemble(stage, ready, stack, recoveries)
        return parts.plan, parts.plan.machine, LocalTries(parts.updater, parts.engine, parts.plan.job)
    logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="trimtab-tune-")))
    ready = replace(ready, folder=logs)  # a run's own would stay
    run = assemble_ranks(planned, stage, ready, stack, recoveries, None, logs, lambda what: None)
    assert isinstance(run.trainer, RankedTrainer)
    updater = run.trainer.guard.updater
    assert isinstance(updater, RankedUpdater)
    return run.plan, planned.machine, RankTries(run.trainer.ranks, updater, run.engine, run.plan.job)
