"""What all ranks of a run must have alike: the software that computes, and a run folder that they can write to.

Ranks with another torch or driver would compute otherwise, or wait for each other for ever. A folder that a rank cannot write to
would show at the first checkpoint, when a step has been paid for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from trimtab.base.errors import ConfigError, Problem, TrainingError


def software_here() -> dict[str, str]:
    """Versions of what computes in this process, by name."""
    found = {name: version(name) for name in ("torch", "transformers")}
    if torch.cuda.is_available():
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        found |= {"CUDA": str(torch.version.cuda), "CUDA driver": str(driver)}
        found |= {"NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def refuse_unequal_software(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Name what differs, and which ranks have which."""
    for name in dict.fromkeys(name for found in by_rank for name in found):
        ranks: dict[str, list[str]] = {}
        for rank, found in enumerate(by_rank):
            ranks.setdefault(found.get(name, "none"), []).append(str(rank))
        if len(ranks) > 1:
            told = "; ".join(f"{value} on rank {', '.join(which)}" for value, which in ranks.items())
            raise TrainingError(
                f"ranks have different versions of {name}: {told}. Install the same version for all of them."
            )


def refuse_folder_of_rank(folder: Path, rank: int) -> None:
    """The driver has made the folder; a rank may run elsewhere, or as somebody else."""
    if not folder.is_dir():
        raise ConfigError(
            [Problem("observe.dir", f"rank {rank} does not see {folder}", "Write a folder that all ranks share.")]
        )
    if not os.access(folder, os.W_OK):
        raise ConfigError(
            [
                Problem(
                    "observe.dir",
                    f"rank {rank} cannot write to {folder}",
                    "Write a folder that all ranks may write to.",
                )
            ]
        )
