"""Weights on their way to an engine's process: one file in memory that both map, written by the trainer, read by the engine.

The file has no name, only the trainer's descriptor: when both processes are gone, however they ended, so is the memory. Its
layout is fixed when the engine starts; publishing copies bytes and moves no pages. A head that is tied to the embedding has a
name of its own and the same bytes: vLLM's CPU kernels keep a packed copy of it, and would go on with the old one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.vllm.messages import Weight
from trimtab.rollout.vllm.reading import view

ALIGNED = 256


def named_weights(policy: Policy) -> dict[str, torch.Tensor]:
    """Under the names of the checkpoint, without adapters."""
    model = policy.model.get_base_model() if has_adapters(policy.model) else policy.model
    return {n.replace(".base_layer.", "."): value for n, value in model.state_dict().items() if ".lora_" not in n}


class SharedWeights:
    """The trainer's side."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        entries, offset, places = [], 0, dict[int, int]()
        for name, value in named_weights(policy).items():
            if value.data_ptr() not in places:
                places[value.data_ptr()] = offset
                offset += -(-value.nbytes // ALIGNED) * ALIGNED
            dtype = str(value.dtype).removeprefix("torch.")
            entries.append(Weight(name, dtype, tuple(value.shape), places[value.data_ptr()]))
        self.layout = tuple(entries)
        self.nbytes = max(1, offset)
        self._file = os.memfd_create("trimtab-weights")
        os.truncate(self._file, self.nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = torch.from_file(self.path, shared=True, size=self.nbytes, dtype=torch.uint8)

    @torch.no_grad()
    def write(self) -> None:
        """Put the trainer's current weights where the engine reads them."""
        state = named_weights(self._policy)
        for entry in self.layout:
            view(self._bytes, entry).copy_(state[entry.name])

    def write_adapters(self, folder: Path) -> str | None:
        """The trainer's current adapters in a new folder within this one, where it has any; the one before is gone."""
        if not has_adapters(self._policy.model):
            return None
        for earlier in folder.glob("adapters-*"):
            shutil.rmtree(earlier)
        target = Path(tempfile.mkdtemp(prefix="adapters-", dir=folder))
        save_adapters(self._policy.model, target)
        return str(target)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
