"""What one rank saves of a checkpoint: which tensors, in which files, copied and written.

    collect -> CheckpointPart of live tensors -> refuse_not_finite -> copy_part, where there is room -> write_part -> PartWritten

Nobody may change live tensors before they are copied, or, without a copy, written.

One rank writes the files that one device always wrote. Of several, each writes its own share of every file: whole tensors of
weights, dealt by unit of the weight store, and of optimizer state the stretches that it holds. The driver makes one checkpoint of
all of them (checkpoint.py), which is read by any number of ranks (shards.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.base.files import fsync
from trimtab.model.folder import (
    ADAPTERS_FILE,
    WEIGHTS_METADATA,
    as_stored,
    stored_weights,
    weights_file,
)
from trimtab.model.shard_store import whole_tensors
from trimtab.model.weights import Place, WeightStore, unit_name
from trimtab.record.checksums import Sum, sum_of_bytes
from trimtab.record.host_copy import HostCopy, is_finite, may_be_not_finite, size_of
from trimtab.record.tensor_file import write_tensors

OPTIMIZER = "optimizer.safetensors"
MAX_FILE_BYTES = 50 * 10**9
"""Weights of one rank beyond this are stored in several files, as transformers does."""
Stretches = Mapping[str, tuple[int, int]]
"""By unit: the number of the first element that is held, and how many are."""


class Stateful(Protocol):
    """What has state in flat tensors: an optimizer."""

    params: list[torch.nn.Parameter]

    @property
    def weights(self) -> WeightStore: ...

    def state_tensors(self) -> Mapping[str, torch.Tensor]:
        """KIND/UNIT: all of the unit's elements or a stretch of them, or a number a block of it (`_scales`); and step/UNIT, a
        number a parameter."""
        ...

    def table(self) -> list[Place]:
        """Which parameter lies where in whole units."""
        ...

    def stretches(self) -> Stretches:
        """What is held of units that are not held whole."""
        ...

    def load_stretches(self, fill: Callable[[torch.Tensor, str, Sequence[Place], int], bool]) -> None:
        """Take over what is held of units that are not held whole (`StateReader.fill_if_any`)."""
        ...

    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], table: Sequence[Place] | None) -> None:
        """Take over what the others gave. Without a table the tensors are named by parameter."""
        ...


@dataclass(frozen=True)
class TensorFile:
    """A file, or a rank's share of one."""

    tensors: dict[str, torch.Tensor]
    whole: str
    """The name of the file that it is a share of, or its own."""
    trained: frozenset[str] = frozenset()
    """Names of tensors that have to be finite; of others, what was loaded is stored."""
    stretches: Stretches = field(default_factory=dict)
    model: Any = None
    """Whose weights these are: they are put in order on the host before they are written."""


@dataclass(frozen=True)
class CheckpointPart:
    """All that one rank writes."""

    files: dict[str, TensorFile]
    tables: dict[str, list[Place]]
    other_files: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that a copy takes."""
        return size_of({str(number): tensor for number, tensor in enumerate(_unique(self))})


@dataclass(frozen=True)
class PartWritten:
    """What a rank tells the driver of its files, in plain data."""

    files: dict[str, Sum]
    """Of all of them."""
    shards: dict[str, dict[str, dict[str, tuple[int, int]]]]
    """By the name of a whole file, then of a share of it: its stretches."""
    weights: dict[str, list[str]]
    """Names of tensors of the model, by file."""
    weight_bytes: int
    tables: dict[str, list[Place]]


class NotFinite(Exception):
    """A tensor holds values that are not finite, which replace none that are."""

    def __init__(self, file: str, name: str) -> None:
        super().__init__(f"{file}: {name}")
        self.file, self.name = file, name


def collect(
    model: Any,
    optimizer: Stateful,
    others: Mapping[str, Mapping[str, torch.Tensor] | Stateful] | None = None,
    other_files: Mapping[str, bytes] | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> CheckpointPart:
    """What a rank saves, all of it still the live tensors. `others`: what is in more files, by name: tensors that every rank has
    whole, or what has state. `other_files`: what the model's folder holds beside weights; one rank is enough to have them."""
    files = dict(_weight_files(model, optimizer.weights, rank, ranks))
    part = collect_files({OPTIMIZER: optimizer, **(others or {})}, rank, ranks)
    return CheckpointPart(files | part.files, part.tables, other_files or {})


def collect_files(
    owners: Mapping[str, Mapping[str, torch.Tensor] | Stateful], rank: int = 0, ranks: int = 1
) -> CheckpointPart:
    """The same of files beside the model's weights alone: what ranks save that have another model than the policy."""
    files: dict[str, TensorFile] = {}
    tables = {}
    for whole, owner in owners.items():
        if isinstance(owner, Mapping):
            dealt = deal({name: tensor.nbytes for name, tensor in owner.items()}, ranks)
            tensors = whole_tensors(owner, [name for name in owner if dealt[name] == rank])
            files[shard_name(whole, rank, ranks)] = TensorFile(tensors, whole, frozenset(tensors))
        else:
            tensors, tables[whole] = dict(owner.state_tensors()), owner.table()
            files[shard_name(whole, rank, ranks)] = TensorFile(tensors, whole, frozenset(tensors), owner.stretches())
    return CheckpointPart(files, tables)


def refuse_not_finite(part: CheckpointPart) -> None:
    """Raise NotFinite if a part should not be saved as it is."""
    tensors = _unique(part)
    suspected = {id(tensor) for tensor, suspect in zip(tensors, may_be_not_finite(tensors)) if suspect}
    for file in part.files.values():
        for name in sorted(file.trained):
            if id(file.tensors[name]) in suspected and not is_finite(file.tensors[name]):
                raise NotFinite("" if file.model is not None else file.whole, name)


def copy_part(part: CheckpointPart, memory: HostCopy) -> CheckpointPart:
    """The part as it is now, in memory that has room for it."""
    tensors = _unique(part)
    taken = {id(tensor): copy for tensor, copy in zip(tensors, memory.take(tensors))}
    files = {
        name: replace(file, tensors={key: taken[id(tensor)] for key, tensor in file.tensors.items()})
        for name, file in part.files.items()
    }
    return replace(part, files=files)


def write_part(folder: Path, part: CheckpointPart, tell: Callable[[str], None] = lambda file: None) -> PartWritten:
    """Write a part's files into a folder; they are on disk when this returns. May run in a thread. `tell`: which file is next."""
    sums: dict[str, Sum] = {}
    weights: dict[str, list[str]] = {}
    weight_bytes = 0
    for name, data in part.other_files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)
        fsync(folder / name)
        sums[name] = sum_of_bytes(data)
    for name, file in part.files.items():
        if file.model is None:
            tell(name)
            sums[name] = write_tensors(folder / name, file.tensors)
            continue
        for share, tensors in _in_files(name, as_stored(file.model, _on_host(file.tensors))):
            tell(share)
            sums[share] = write_tensors(folder / share, tensors, WEIGHTS_METADATA)
            weights[share] = list(tensors)
            weight_bytes += sum(tensor.nbytes for tensor in tensors.values())
    shards: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
    for name, file in part.files.items():
        if name != file.whole and file.model is None:
            shards.setdefault(file.whole, {})[name] = dict(file.stretches)
    return PartWritten(sums, shards, weights, weight_bytes, part.tables)


def shard_name(whole: str, rank: int, ranks: int) -> str:
    """What a rank's share of a file is called: `optimizer-00002-of-00004.safetensors`; of one rank, the file's own name."""
    return whole if ranks == 1 else whole.replace(".safetensors", f"-{rank + 1:05d}-of-{ranks:05d}.safetensors")


def deal(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Which rank writes what, in about equal shares. The same on every rank."""
    loads, dealt = [0] * ranks, {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        dealt[name] = loads.index(min(loads))
        loads[dealt[name]] += sizes[name]
    return dealt


def _weight_files(model: Any, store: WeightStore, rank: int, ranks: int) -> Iterator[tuple[str, TensorFile]]:
    state, whole = stored_weights(model), weights_file(model)
    trained = frozenset(name for name, value in state.items() if _is_trained(value, whole))
    if whole == ADAPTERS_FILE:  # PEFT reads one file
        if rank == 0:
            yield whole, TensorFile(state, whole, trained, model=model)
        return
    # A unit stays together: what a model's loading has joined (experts) is taken apart again within one.
    units = {
        name: store.place(value)[0].name if value in store else unit_name(name, value) for name, value in state.items()
    }
    sizes: dict[str, int] = {}
    for name, value in state.items():
        sizes[units[name]] = sizes.get(units[name], 0) + value.nbytes
    dealt = deal(sizes, ranks)
    own = whole_tensors(state, [name for name in state if dealt[units[name]] == rank], store)
    yield shard_name(whole, rank, ranks), TensorFile(own, whole, trained & own.keys(), model=model)


def _is_trained(value: torch.Tensor, file: str) -> bool:
    return file == ADAPTERS_FILE or value.requires_grad


def _in_files(name: str, tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Tensors under the name of their file, or in several files where one would be too large."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    count = 1 if "-of-" in name else -(-size // MAX_FILE_BYTES) or 1
    dealt = deal({key: tensor.nbytes for key, tensor in tensors.items()}, count)
    for number in range(count):
        share = {key: tensor for key, tensor in tensors.items() if dealt[key] == number}
        yield shard_name(name, number, count), share


def _on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied ones stay one object."""
    found = {id(tensor): tensor.detach().cpu() for tensor in tensors.values()}
    return {name: found[id(tensor)] for name, tensor in tensors.items()}


def _unique(part: CheckpointPart) -> list[torch.Tensor]:
    return list({id(tensor): tensor for file in part.files.values() for tensor in file.tensors.values()}.values())
