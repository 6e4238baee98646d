"""The plan of a checked run, from its model's description alone: what a dry run shows, and what it refuses as the run would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trimtab.base.units import GIB
from trimtab.plan.planner import Plan
from trimtab.plan.refusal import planned
from trimtab.plan.work import job_of
from trimtab.run.assemble_split import SplitPlan
from trimtab.run.machine import machine_here
from trimtab.run.open_run import plan_of
from trimtab.run.shapes import shape_of, stated_models
from trimtab.run.stage import CheckedRun


def plan_ahead(ready: CheckedRun) -> list[Plan]:
    """The plans of a run's sets of devices, as the run will make them; raises where it would refuse. Loads no weights. A Ray
    cluster is not asked: the plan is then for as many devices as the config says, on this machine's kind."""
    found = plan_of(ready, None)
    if isinstance(found, SplitPlan):
        return [each.plan for each in found.sets.values()]
    if found is not None:
        return [found.plan]
    config, machine = ready.config, machine_here(ready.device)
    shape = shape_of(config.model.path, config.model.trust_remote_code)
    job = job_of(config, stated_models(config, shape, machine.cpu, machine.device.tiled_head), ready.lengths)
    return [planned(config.run, job, machine)]


def plan_lines(ready: CheckedRun) -> tuple[dict[str, Any], list[str]]:
    """A dry run's part about the plan: as facts, and as lines."""
    if ready.config.run.cluster not in ("auto", "local"):
        return {}, [
            "plan: not made in a dry run with run.cluster; the run makes it once it knows the cluster's devices"
        ]
    plans = plan_ahead(ready)
    waits = len(plans) == 1 or not ready.config.learn.staleness  # devices that generate work beside those that train
    facts = {
        "fits": all(plan.fits for plan in plans),
        "devices": sum(plan.run.devices for plan in plans),
        "peak_gib": round(max(peak for plan in plans for _, peak in _peaks(plan)) / GIB, 3),
        "step_seconds": (sum if waits else max)(plan.times.total for plan in plans),
    }
    return {"plan": facts}, [line for plan in plans for line in _lines(plan)]


def _peaks(plan: Plan) -> Iterator[tuple[str, int]]:
    for phase in plan.ledger.phases:
        yield phase.name, phase.host_bytes if plan.machine.cpu else phase.device_bytes


def _lines(plan: Plan) -> Iterator[str]:
    name, peak = max(_peaks(plan), key=lambda each: each[1])
    where = "host memory" if plan.machine.cpu else "device memory"
    count = f"{plan.run.devices} devices, each " if plan.run.devices > 1 else ""
    yield f"plan: {count}at most {peak / GIB:.2f} GiB of {where} (in {name}), about {plan.times.total:.3g} s a step"
    if not plan.fits:
        yield "warning: this may be more memory than is free now; the run would start all the same on a CPU"
