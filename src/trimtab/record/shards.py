"""Optimizer state of a checkpoint, read by any number of ranks, however many wrote it.

`StateReader(checkpoint, "optimizer.safetensors")` finds the files that hold any stretch of any parameter's state and reads no
more than that. A stretch is given in elements of the parameter, in the order in which they lie in memory. State in 8 bits comes
in blocks: codes have an element each, and a parameter's last block is full; `_scales` have one number a block, so their stretches
begin and end on blocks. What is read and is not finite is refused.

One process takes `by_parameter()`, which reads a parameter when it is asked for. A rank that holds a stretch of a unit fills its
own flat tensors with `fill`, by the table of its own layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import safe_open

from trimtab.model.sizes import BLOCK
from trimtab.model.weights import Place, round_up
from trimtab.record.host_copy import is_finite


@dataclass(frozen=True)
class _Source:
    """A flat tensor of a file, and which elements of its unit it holds."""

    file: str
    opened: Any
    name: str
    first: int
    end: int


def files_of(checkpoint: Path, whole: str, saved: Mapping[str, Any]) -> dict[str, dict[str, tuple[int, int]]]:
    """The files that make up one that ranks have written in shares, with their stretches; or itself. `saved`: what `state.json`
    says."""
    found: dict[str, dict[str, tuple[int, int]]] = saved.get("shards", {}).get(whole, {whole: {}})
    return found


class StateReader:
    """The state in one file of a checkpoint, or in the shares of one."""

    def __init__(self, checkpoint: Path, whole: str, saved: Mapping[str, Any] | None = None) -> None:
        saved = json.loads((checkpoint / "state.json").read_text()) if saved is None else saved
        self._files = ExitStack()
        self._sources: dict[str, list[_Source]] = {}
        """By KIND/UNIT; in format 1, by KIND/PARAMETER."""
        tables = saved.get("tables")
        self.table = None if tables is None else TypeAdapter(list[Place]).validate_python(tables[whole])
        """Where each parameter lies in whole units; None in format 1, which names parameters."""
        self._places = {place.name: place for place in self.table or ()}
        for file, stretches in files_of(checkpoint, whole, saved).items():
            opened = self._files.enter_context(safe_open(checkpoint / file, "pt"))
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                first = stretches.get(name.partition("/")[2], (0, 0))[0]
                shape = opened.get_slice(name).get_shape()
                elements = (BLOCK if name.partition("/")[0].endswith("_scales") else 1) * (shape[0] if shape else 1)
                self._sources.setdefault(name, []).append(_Source(file, opened, name, first, first + elements))

    def close(self) -> None:
        self._files.close()

    def __enter__(self) -> StateReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def places(self, unit: str) -> list[Place]:
        """The parameters of a unit, as it was when it was written, in the order of its `step`."""
        return [place for place in self.table or () if place.unit == unit]

    def has(self, kind: str, parameter: str) -> bool:
        if self.table is None:
            return f"{kind}/{parameter}" in self._sources
        return parameter in self._places and f"{kind}/{self._places[parameter].unit}" in self._sources

    def read(self, kind: str, parameter: str, begin: int, end: int) -> torch.Tensor:
        """Elements [begin, end) of a parameter's state, flat; of `_scales`, the numbers of their blocks."""
        if self.table is None:
            whole = self._get(self._sources[f"{kind}/{parameter}"][0]).flatten()
            return whole[begin // BLOCK : -(-end // BLOCK)] if kind.endswith("_scales") else whole[begin:end]
        place = self._places[parameter]
        return self._read_unit(kind, place.unit, place.offset + begin, place.offset + end)

    def step(self, parameter: str) -> torch.Tensor:
        """Steps that the parameter has taken."""
        if self.table is None:
            return self._get(self._sources[f"step/{parameter}"][0])
        unit = self._places[parameter].unit
        number = [place.name for place in self.places(unit)].index(parameter)
        return self._get(self._sources[f"step/{unit}"][0])[number]

    def tensor(self, kind: str, parameter: str) -> torch.Tensor:
        """All of a parameter's state of a kind: codes and scales flat, all else in the parameter's shape."""
        if kind == "step":
            return self.step(parameter)
        if self.table is None:
            return self._get(self._sources[f"{kind}/{parameter}"][0])
        place = self._places[parameter]
        count = torch.Size(place.shape).numel()
        if kind.endswith(("_codes", "_scales")):
            return self.read(kind, parameter, 0, round_up(count, BLOCK))
        return self.read(kind, parameter, 0, count).as_strided(place.shape, place.stride)

    @torch.no_grad()
    def fill(self, out: torch.Tensor, kind: str, places: Sequence[Place], first: int = 0) -> None:
        """Fill a flat tensor that holds elements of a unit from number `first` on, where the unit has its parameters at `places`:
        those of whoever reads, not of the checkpoint. Elements between parameters are left as they are."""
        scale = BLOCK if kind.endswith("_scales") else 1
        last = first + out.numel() * scale
        for place in places:
            count = torch.Size(place.shape).numel()
            in_blocks = kind.endswith(("_codes", "_scales"))
            begin = max(first, place.offset)
            end = min(last, place.offset + (round_up(count, BLOCK) if in_blocks else count))
            if begin >= end:
                continue
            if in_blocks or self._lies_alike(place):
                part = self.read(kind, place.name, begin - place.offset, end - place.offset)
            else:
                whole = torch.empty_strided(place.shape, place.stride, dtype=out.dtype)
                whole.copy_(self.tensor(kind, place.name))
                part = whole.as_strided((count,), (1,))[begin - place.offset : end - place.offset]
            out[(begin - first) // scale : -(-(end - first) // scale)].copy_(part)

    def fill_if_any(self, out: torch.Tensor, kind: str, places: Sequence[Place], first: int) -> bool:
        """The same, where the checkpoint has state of this kind for these parameters."""
        if not places or not self.has(kind, places[0].name):
            return False
        self.fill(out, kind, places, first)
        return True

    def by_parameter(self) -> Mapping[str, torch.Tensor]:
        """KIND/PARAMETER, each read when it is asked for."""
        return _ByParameter(self)

    def names(self) -> Iterator[str]:
        """Of all that can be asked for, as KIND/PARAMETER."""
        if self.table is None:
            yield from self._sources
            return
        kinds: dict[str, list[str]] = {}
        for name in self._sources:
            kind, _, unit = name.partition("/")
            kinds.setdefault(unit, []).append(kind)
        for place in self.table:
            yield from (f"{kind}/{place.name}" for kind in kinds.get(place.unit, ()))

    def _lies_alike(self, place: Place) -> bool:
        if self.table is None:
            return place.stride == torch.empty(place.shape, device="meta").stride()
        return self._places[place.name].stride == place.stride

    def _read_unit(self, kind: str, unit: str, begin: int, end: int) -> torch.Tensor:
        """Elements of a unit, from as many files as have them."""
        scale = BLOCK if kind.endswith("_scales") else 1
        assert begin % scale == 0, f"{kind}/{unit} has one number for {BLOCK} elements"
        parts, at = [], begin
        for source in sorted(self._sources[f"{kind}/{unit}"], key=lambda source: source.first):
            if source.first <= at < min(source.end, end):
                until = min(source.end, end)
                parts.append(self._get(source, (at - source.first) // scale, -(-(until - source.first) // scale)))
                at = until
        if at < end:
            raise ValueError(f"no file holds elements {at:,} to {end:,} of {kind}/{unit}")
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _get(self, source: _Source, begin: int | None = None, end: int | None = None) -> torch.Tensor:
        whole = begin is None
        found: torch.Tensor = (
            source.opened.get_tensor(source.name) if whole else source.opened.get_slice(source.name)[begin:end]
        )
        if not is_finite(found):
            raise ValueError(f"{source.file}: {source.name} holds values that are not finite")
        return found


class _ByParameter(Mapping[str, torch.Tensor]):
    def __init__(self, reader: StateReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        kind, _, parameter = name.partition("/")
        if not self._reader.has(kind, parameter):
            raise KeyError(name)
        return self._reader.tensor(kind, parameter)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._reader.has(name.partition("/")[0], name.partition("/")[2])

    def __iter__(self) -> Iterator[str]:
        return self._reader.names()

    def __len__(self) -> int:
        return sum(1 for _ in self)
