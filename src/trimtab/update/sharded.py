"""AdamW on the parts of a model that ranks hold together (`run.shard: full`; model/sharded.py).

What optimizer.py guarantees holds here. Parts are their own masters, FSDP2 has summed their gradients over ranks, and each rank
steps its own: nothing is gathered after a step, but in the next pass. Vectors and adapters are whole on every rank; their
gradients are summed over ranks here, and every rank takes the same step.

A part is a unit of its own, under its parameter's name: a checkpoint says which elements of the parameter are in which file, and
is read by any number of ranks, sharded in any way. In half precision, parts are written as the masters they are.

State of 8 bits has blocks of 256 elements. They are the same for any number of ranks only where rows are whole blocks, so other
models are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.model.handed import Handed, HandedGradients
from trimtab.model.shard_store import ShardedParameter, ShardStore
from trimtab.model.sizes import BLOCK
from trimtab.model.weights import Place
from trimtab.update.optimizer import AnyLearn, Fill, MasterAdamW, StepOutcome, _clip_factor, _Prepared, _take_over
from trimtab.update.peers import Peers
from trimtab.update.states import UnitState, needs_master


class _Whole:
    """Other ranks as a unit sees them that every rank has whole."""

    shards, shard = 1, 0

    def __init__(self, peers: Peers) -> None:
        self.rank, self.ranks, self.sum = peers.rank, peers.ranks, peers.sum
        self.sum_into_parts, self.send, self.tell = peers.sum, peers.send, peers.tell
        self.begin_sum = self.begin_sum_into_parts = peers.begin_sum

    def sum_of_parts(self, values: torch.Tensor) -> None:
        return

    gather = sum_of_parts


class ShardedAdamW(MasterAdamW):
    """See optimizer.py."""

    weights: ShardStore

    def __init__(
        self, weights: ShardStore, handed: Handed, learn: AnyLearn, *, offload: bool = False, peers: Peers
    ) -> None:
        """`handed`: what FSDP2 has of the model (`ShardedPolicy.handed`)."""
        if learn.optimizer.states == "8bit":
            refuse_cut_blocks(weights.sharded.values())
        super().__init__(weights, learn, offload=offload, peers=_Whole(peers))
        self._parts_peers = peers
        self._replicated = [
            p for name, p in weights.parameters.items() if p.requires_grad and name not in weights.sharded
        ]
        self._sharded = [one for one in weights.sharded.values() if one.whole.requires_grad]
        self._part_ids = {id(one.part) for one in self._sharded}
        for hook in self._hooks:
            hook.remove()
        self.gradients = HandedGradients(weights, self._replicated, handed)
        self._hooks = [_take_over(parameter, self.gradients) for parameter in self._replicated]

    def grads(self) -> list[torch.Tensor | None]:
        """By parameter: of parts, this rank's."""
        parts = self._part_grads()
        return [parts.get(id(p)) if id(p) in self._part_ids else self.gradients.get(p) for p in self.params]

    @torch.no_grad()
    def prepare(self) -> None:
        marks = [float(self.gradients.touched(p)) for p in self._replicated]
        touched = torch.tensor(marks, dtype=torch.float32, device=self._device)
        self.gradients.complete(self._replicated)
        grads = {id(p): self.gradients.view(p) for p in self._replicated} | self._part_grads()
        pieces, slots = self._pieces(grads)
        self._prepared = _Prepared(grads, touched, pieces, slots, self._chunk_rooms())

    @torch.no_grad()
    def apply(self, lr: float) -> StepOutcome:
        assert self._prepared is not None, "prepare comes first"
        prepared, self._prepared = self._prepared, None
        assert prepared.touched is not None
        peers, sums = self._parts_peers, [self.gradients.sums[unit.unit.name] for unit in self._whole_units]
        peers.sum(prepared.touched)
        for total in sums:
            peers.sum(total)
        skipped = {id(p) for p, mark in zip(self._replicated, prepared.touched.tolist()) if not mark}
        grads = {key: grad for key, grad in prepared.grads.items() if key not in skipped}
        parts = [grads[id(one.part)] for one in self._sharded if id(one.part) in grads]
        norm = self._norm(sums, parts)
        applied = bool(torch.isfinite(norm))
        if applied:
            self.begun += 1
            self.applying = True
            if self.max_grad_norm is not None:
                torch._foreach_mul_([*sums, *parts], _clip_factor(self.max_grad_norm, norm).to(self._device))
            self._step_whole(grads, lr)
            self._step_in_pieces(prepared.pieces, grads, lr, prepared.slots, prepared.rooms)
            self.applying = False
        self.zero_grad()
        return StepOutcome(float(norm), applied)

    @property
    def _whole_units(self) -> list[UnitState]:
        return [unit for unit in self._units if not self.weights.is_sharded(unit.unit)]

    def _part_grads(self) -> dict[int, torch.Tensor]:
        """Gradients of parts, as FSDP2 left them."""
        found = {}
        for one in self._sharded:
            if one.whole.grad is not None and one.part.numel():
                found[id(one.part)] = one.whole.grad.to_local()  # type: ignore[attr-defined]
        return found

    def _norm(self, sums: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """One number for all ranks, in float64: every element of the step counts once."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._device)
        for at, tensors in enumerate((sums, parts)):
            for tensor in tensors:
                squares[at] += torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        whole, split = squares[:1], squares[1:]
        self._parts_peers.sum_of_parts(split)
        return (whole + split).sqrt()[0]

    def zero_grad(self) -> None:
        super().zero_grad()
        for one in getattr(self, "_sharded", ()):
            one.whole.grad = None

    # Checkpoints

    def _writes(self, unit: UnitState) -> bool:
        return self._writes_parts if self.weights.is_sharded(unit.unit) else super()._writes(unit)

    @property
    def _writes_parts(self) -> bool:
        """Ranks that hold a copy of a set of parts write none of it."""
        return self._parts_peers.rank < self._parts_peers.shards

    def state_tensors(self) -> dict[str, torch.Tensor]:
        found = super().state_tensors()
        for one in self._sharded if self._writes_parts else ():
            count = one.part.numel()
            for kind in ("exp_avg", "exp_avg_sq"):
                if count and f"{kind}/{one.name}" in found:
                    found[f"{kind}/{one.name}"] = found[f"{kind}/{one.name}"][:count]
            if count and needs_master(one.dtype):
                found[f"master/{one.name}"] = one.part.data.view(-1)
        return found

    def table(self) -> list[Place]:
        whole = [place for place in super().table() if place.unit not in self.weights.sharded]
        return [*whole, *map(_place, self._sharded)]

    def stretches(self) -> dict[str, tuple[int, int]]:
        held = [one for one in self._sharded if self._writes_parts and one.part.numel()]
        return {one.name: (one.first, one.part.numel()) for one in held}

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, torch.Tensor], table: Sequence[Place] | None) -> None:
        assert table is None, "a checkpoint is read by parameter"
        self._settle()
        for unit in self._units:
            sharded = self.weights.is_sharded(unit.unit)
            for member in unit.members:
                parts = {} if sharded else member.parts  # load_stretches has the others
                for kind, own in {"step": member.step, **parts}.items():
                    found = tensors.get(f"{kind}/{member.name}")
                    assert found is not None or kind != "master", f"no {kind}/{member.name} in the checkpoint"
                    if found is None:
                        own.zero_()
                    else:
                        own.copy_(found)
                if "master" in parts:
                    member.parameter.copy_(parts["master"])

    @torch.no_grad()
    def load_stretches(self, fill: Fill) -> None:
        self._settle()
        own = {unit.unit.name: unit for unit in self._units}
        for one in self._sharded:
            count = one.part.numel()
            if not count:
                continue
            rows = dict(own[one.name].rows)
            if needs_master(one.dtype):
                rows["master"] = one.part.data.view(-1)
            for kind, row in rows.items():
                held = row if kind.endswith(("_codes", "_scales")) else row[:count]
                if not fill(held, kind, [_place(one)], one.first):
                    assert kind != "master", f"no masters of {one.name} in the checkpoint"
                    row.zero_()


def _place(one: ShardedParameter) -> Place:
    stride = torch.empty(one.shape, device="meta").stride()
    return Place(one.name, one.name, one.shape, tuple(stride), str(one.dtype).removeprefix("torch."), 0)


def refuse_cut_blocks(sharded: Iterable[ShardedParameter]) -> None:
    """Refuse 8-bit state where a row is no whole number of blocks."""
    cut = [one for one in sharded if one.whole.requires_grad and one.row_elements % BLOCK]
    if cut:
        what = (
            f"8-bit state with run.shard: full needs rows that are multiples of {BLOCK} elements, and those of {cut[0].name} "
            f"have {cut[0].row_elements}"
        )
        raise ConfigError([Problem("learn.optimizer.states", what, "Write run.shard: gradients, or states: full.")])
