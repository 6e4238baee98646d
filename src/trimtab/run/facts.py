"""What RUN/run.json says of a run when it starts (record/run_file.py)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from trimtab.base.units import GIB
from trimtab.config.load import AnyConfig
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.sft import SftConfig
from trimtab.record.layout import run_name
from trimtab.record.run_file import commands, git_commit, keys_set, machine_facts
from trimtab.run.assemble import BuiltRun
from trimtab.run.inputs import Inputs


def stage_name(config: AnyConfig) -> str:
    if isinstance(config, SftConfig):
        return "sft"
    return "reward_model" if isinstance(config, RewardModelConfig) else "rl"


def uuids_of(gpus: Sequence[str]) -> list[str]:
    """What the driver calls GPUs that torch names; empty where torch does not tell."""
    found = [getattr(torch.cuda.get_device_properties(gpu), "uuid", None) for gpu in gpus]
    return [str(uuid) for uuid in found if uuid is not None]


def run_facts(asked: AnyConfig, config: AnyConfig, parts: BuiltRun, folder: Path, inputs: Inputs) -> dict[str, Any]:
    """`asked`: the config as the user wrote it. `set` is None where only the first start knows it: one after lost
    ranks has its folder's name set."""
    total = parts.facts.device_total_gib
    return {
        "stage": stage_name(config),
        "name": run_name(folder),
        **commands(inputs.resume_with),
        "set": None if inputs.rank_restarts else keys_set(asked),
        **machine_facts(),
        "device": {
            "name": parts.facts.device,
            "count": parts.plan.run.devices,
            "memory_bytes": psutil.virtual_memory().total if total is None else int(total * GIB),
        },
        "git": git_commit(inputs.base_dir),
        "seed": config.learn.seed,
        "parameters": parts.facts.parameters,
        "trained_parameters": parts.facts.trained,
    }
