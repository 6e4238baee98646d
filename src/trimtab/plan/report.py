"""A plan as one JSON object, and the step time with more memory or more devices."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trimtab.config.run import Run
from trimtab.plan.ledger import GIB
from trimtab.plan.place import place_over
from trimtab.plan.planner import PROFILES, Plan, limits_of
from trimtab.plan.refusal import with_memory

MAX_STEP_RATIO_TO_OFFER = 0.99
"""Another profile is offered only if a step then takes at most this share of the time."""


def as_dict(plan: Plan) -> dict[str, Any]:
    job, machine = plan.job, plan.machine
    return {
        "fits": plan.fits,
        "binding": plan.ledger.binding,
        "binding_phase": plan.ledger.fullest.name,
        "device": "cpu" if machine.cpu else machine.device.name,
        "devices": machine.devices,
        "device_memory": 0 if machine.cpu else machine.device.memory,
        "host_memory": machine.host_memory,
        "limit": asdict(plan.limits),
        "parameters": job.shape.parameters,
        "trained_parameters": job.trained,
        "kv_bytes_per_token": job.kv_token_bytes,
        "state_bytes_per_sequence": job.shape.state_bytes(job.itemsize),
        "shard": plan.place.shard,
        "shard_devices": plan.place.shard_devices,
        "placement": asdict(plan.place),
        "phases": [
            {
                "name": phase.name,
                "allocated_bytes": phase.allocated,
                "device_bytes": phase.device_bytes,
                "host_bytes": phase.host_bytes,
                "components": phase.device,
                "host_components": phase.host,
            }
            for phase in plan.ledger.phases
        ],
        "choices": [asdict(choice) for choice in plan.choices],
        "step_seconds": plan.times.as_dict() if plan.fits else None,
        "communication_seconds": asdict(plan.times.waits) if plan.fits else None,
        "start_seconds": plan.times.start if plan.fits else None,
    }


def as_recorded(plan: Plan, asked: Run) -> dict[str, Any]:
    """What plan.json says: with the profile that was used, the lengths that were assumed, and what other machines would do.
    `asked`: the section as the user wrote it."""
    job = plan.job
    profile = asked.profile if plan.limits == limits_of(plan.machine, asked.profile) else "max"
    lengths: dict[str, Any] = {"longest_trained": job.longest_trained}
    if job.generates:
        known = "measured" if job.lengths else "all as long as they may be"
        lengths |= {
            "longest_prompt": job.longest_prompt,
            "typical_prompt": job.typical_prompt,
            "completion_limit": job.completion,
            "expected_completion": job.expected_completion,
            "completions": known,
        }
    found = [{"text": offer.words, "seconds": offer.seconds} for offer in offers(plan, asked, profile)]
    return as_dict(plan) | {"profile": profile, "assumed_lengths": lengths, "offers": found}


@dataclass(frozen=True)
class Offer:
    """What a change of the machine or of the profile would do to a step."""

    words: str
    seconds: float
    """Seconds of a step with it."""


def offers(plan: Plan, run: Run, profile: str) -> list[Offer]:
    """A step with more of the memory filled, where that helps; with a gigabyte more, with half as much again, and with twice as
    many devices."""
    if plan.machine.cpu or not plan.fits:
        return []
    machine, memory = plan.machine, plan.machine.device.memory
    run = run.with_values({"memory": None})  # which the plan's machine has no more than already
    placed = {key: getattr(plan.run, key) for key in ("devices", "shard", "shard_devices")}
    as_now = run.with_values(placed)
    tries = [
        ("1 GiB more per device", as_now, with_memory(machine, memory + GIB)),
        ("50 % more memory per device", as_now, with_memory(machine, memory * 3 // 2)),
    ]
    if run.devices == "auto":
        twice = 2 * machine.devices
        tries.append(("twice as many devices", run.with_values({"devices": twice}), machine.on(twice)))
    found = []
    fuller = place_over(as_now, plan.job, machine, "max")
    if fuller.fits and fuller.times.total < MAX_STEP_RATIO_TO_OFFER * plan.times.total:
        found.append(
            Offer(f"run.profile: max, which fills {PROFILES['max']:.0%}".replace("%", " %"), fuller.times.total)
        )
    for words, asked, other in tries if machine.hosts == 1 else ():  # for several hosts there are runners-up
        better = place_over(asked, plan.job, other, profile)
        if better.fits:
            found.append(Offer(words, better.times.total))
    return found
