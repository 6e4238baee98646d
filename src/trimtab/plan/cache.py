"""What `trimtab tune` found, kept by model, work, device and versions in TRIMTAB_CACHE, or else in the user's cache folder. A
later run of the same work on such a device starts with it; everything else about that run stays as planned.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.files import write_json
from trimtab.base.package import VERSION, installed_version
from trimtab.config.row_ranks import longest_here
from trimtab.config.run import Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB
from trimtab.plan.trials import Tuned


def folder() -> Path:
    own = os.environ.get("TRIMTAB_CACHE")
    base = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trimtab"
    return base / "tuned"


def prepare() -> None:
    """Make the folder, before minutes are spent on what goes into it."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot write to {folder()} ({error.strerror})"
        raise ConfigError([Problem("TRIMTAB_CACHE", what, "Set it to a folder that you can write to.")]) from None


def key_of(job: Job, machine: Machine, run: Run) -> str:
    """A hash of all that the best sizes depend on: the job, the device, pinned keys other than those sizes, and versions."""
    pinned = run.model_dump()
    pinned["token_budget"] = pinned["rollout"]["max_sequences"] = "auto"
    shape = job.shape
    facts: dict[str, Any] = {
        "model": [shape.kind, shape.hidden, shape.vocabulary, shape.layers, shape.parameters],
        "job": {
            name: value
            for name, value in vars(job).items()
            if name not in ("shape", "lengths", "correction", "critic", "reward_models")
        },
        "critic": None if job.critic is None else [job.critic.kind, job.critic.hidden, job.critic.parameters],
        "reward models": [[shape.kind, shape.hidden, shape.parameters] for shape in job.reward_models],
        "device": ["cpu" if machine.cpu else machine.device.name, machine.cores, machine.devices],
        "engines": list(machine.engines) if run.engine == "auto" else [],
        "memory": None if machine.cpu else machine.device.memory // (8 * GIB),
        "run": pinned,
        "versions": [VERSION, *map(installed_version, ("torch", "transformers"))],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:20]


def keep(tuned: Tuned, job: Job, machine: Machine, run: Run, when: str) -> Path:
    file = folder() / f"{key_of(job, machine, run)}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    found = {"token_budget": tuned.token_budget, "max_sequences": tuned.max_sequences, "when": when}
    write_json(file, found | {"trials": [vars(trial) for trial in tuned.trials]}, indent=1, shared=True)
    return file


def recall(job: Job, machine: Machine, run: Run) -> dict[str, Any] | None:
    """What was kept for this work on such a machine; None where there is nothing, or nothing that can be read."""
    try:
        read = json.loads((folder() / f"{key_of(job, machine, run)}.json").read_text())
        found: dict[str, Any] = {
            "token_budget": int(read["token_budget"]),
            "max_sequences": int(read["max_sequences"]),
            "when": str(read["when"]),
        }
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
    return (
        found
        if found["token_budget"] >= longest_here(run, job.longest_trained, "token_budget")
        and found["max_sequences"] >= 1
        else None
    )


def applied(run: Run, found: dict[str, Any]) -> tuple[Run, dict[str, int]]:
    """`run` with what was found in place of `auto`, and the keys that got a value so."""
    values = {}
    if run.token_budget == "auto":
        values["token_budget"] = int(found["token_budget"])
    if run.rollout.max_sequences == "auto":
        values["rollout.max_sequences"] = int(found["max_sequences"])
    return run.with_values(values), {f"run.{key}": value for key, value in values.items()}
