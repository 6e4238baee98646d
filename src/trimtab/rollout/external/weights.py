"""Weights on their way to an engine's process: the trainer's own where both are on one GPU, or else a copy in host memory.

On a GPU the engine is told where the trainer's weights lie and reads them there: nothing is copied but into the engine, and no
host memory is taken. Elsewhere, where an engine has several GPUs, where a GPU's memory cannot be shared (expandable segments,
some containers), and where a checkpoint holds weights in another shape than the model does (experts), one file in memory is
written by the trainer and read by the engine. It has no name, only the trainer's descriptor: when both processes are gone,
however they ended, so is the memory. Weights that ranks hold in parts go the same way (gathered.py). A head that is tied to the
embedding has a name of its own and the same bytes: vLLM's CPU kernels keep a packed copy of it, and would go on with the old one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.external.ipc import NotShared, export
from trimtab.rollout.external.messages import Weight, Weights
from trimtab.rollout.external.reading import count, view

ALIGNMENT_BYTES = 256


def named_weights(policy: Policy) -> Iterator[tuple[str, torch.Tensor]]:
    """Under the names of the checkpoint, without adapters. Most are the model's own tensors; experts, which transformers has in
    one tensor and checkpoints one by one, are copies, made a layer at a time. What ranks hold in parts is gathered a layer at a
    time: a collective, which every rank follows to the end."""
    return checkpoint_names(policy.model, policy.weights.whole)


def checkpoint_names(
    model: Any, whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model under the names of its checkpoint. `whole`: makes what lies in parts whole."""
    model = model.get_base_model() if has_adapters(model) else model
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if ".lora_" not in name:
            name = name.replace(".base_layer.", ".")
            layers.setdefault(_layer(name), {})[name] = value
    for found in layers.values():
        with torch.no_grad():
            converted = revert_weight_conversion(model, {name: whole(value) for name, value in found.items()})
        yield from converted.items()


def _layer(name: str) -> str:
    """What is converted together: up to the first number of a name."""
    parts = name.split(".")
    return ".".join(parts[: next((i for i, part in enumerate(parts) if part.isdigit()), 0) + 1])


class SharedWeights:
    """The trainer's side."""

    def __init__(self, policy: Policy, one_device: bool = True) -> None:
        self._policy = policy
        self._file: WeightsFile | None = None
        self.direct = policy.device.type == "cuda" and one_device
        """The engine reads them where the trainer has them."""

    @property
    def host_bytes(self) -> int:
        return 0 if self._file is None else self._file.nbytes

    def publish(self) -> Weights:
        """Where the engine finds the current ones, all of them written."""
        if self.direct:
            try:
                found = _places(self._policy)
            except NotShared:
                self.direct = False
            else:
                torch.cuda.synchronize(self._policy.device)
                return found
        if self._file is None:
            self._file = WeightsFile(Layout(checkpoint_names(self._policy.model)))
        self._file.write(named_weights(self._policy))
        return Weights(self._file.layout.entries, self._file.path)

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
        if self._file is not None:
            self._file.close()
            self._file = None


def _places(policy: Policy) -> Weights:
    """Where the weights themselves lie on the device: in their units, each of which is shared once."""
    store, buffers = policy.lay_out_weights(), {id(buffer) for buffer in policy.model.buffers()}
    units = {unit.name: export(store.flats[unit.name].data_ptr()) for unit in store.units}
    handles: dict[bytes, int] = {}
    layout = []
    for name, value in named_weights(policy):
        if not value.is_contiguous() or (value not in store and id(value) not in buffers):
            raise NotShared(f"{name} is not a piece of the model's memory")
        if value in store:
            unit, entry = store.place(value)
            handle, begin = units[unit.name]
            offset = begin + entry.offset * value.element_size()
        else:
            handle, offset = export(value.data_ptr())
        layout.append(_entry(name, value, offset, handles.setdefault(handle, len(handles))))
    return Weights(tuple(layout), None, tuple(handles))


class Layout:
    """Where each weight lies in a file. What is tied has one place."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        entries, places, self.nbytes = [], dict[int | str, int](), 0
        for name, value in named:
            key = id(value) if isinstance(value, torch.nn.Parameter) else name
            if key not in places:
                places[key] = self.nbytes
                self.nbytes += -(-value.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            entries.append(_entry(name, value, places[key]))
        self.entries = tuple(entries)


class WeightsFile:
    """A copy in host memory. Its layout is fixed; writing it copies bytes and moves no pages."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.nbytes = layout, max(1, layout.nbytes)
        self._file = os.memfd_create("trimtab-weights")
        os.truncate(self._file, self.nbytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self._bytes = torch.from_file(self.path, shared=True, size=self.nbytes, dtype=torch.uint8)

    @torch.no_grad()
    def write(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        for entry, (_, value) in zip(self.layout.entries, named, strict=True):
            view(self._bytes[entry.offset : entry.offset + count(entry)], entry).copy_(value)

    def close(self) -> None:
        os.close(self._file)


def _entry(name: str, value: torch.Tensor, offset: int, handle: int = 0) -> Weight:
    return Weight(name, str(value.dtype).removeprefix("torch."), tuple(value.shape), offset, handle)
