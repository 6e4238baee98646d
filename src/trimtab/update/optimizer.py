"""AdamW on float32 master weights, one step at a time, all or nothing.

Guarantees: gradients add up in float32 whatever the model's type, so the number of micro-batches does not matter; the norm is
that of the whole step; a step whose gradient is not finite leaves weights, moments and step count exactly as they were.
In float32 (and wider) models the parameters are their own masters. Masters and moments are on the device or, offloaded, in host
memory, from where a step streams them through the device; the result is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from trimtab.config.learn import Learn
from trimtab.model.gradients import Gradients
from trimtab.update.conveyor import Conveyor, host_empty

PIECE = 2**26
"""Elements of the masters, at most, that an offloaded step has on the device at a time (thrice: see conveyor.py)."""
ALIGNED = 64
"""Elements to a multiple of which a parameter's state begins, so that kernels read it in whole lines."""


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float
    applied: bool


@dataclass(frozen=True)
class _Member:
    """A parameter and where its state lies in its bucket."""

    name: str
    parameter: torch.nn.Parameter
    start: int
    step: torch.Tensor

    def part(self, row: torch.Tensor) -> torch.Tensor:
        return row[self.start : self.start + self.parameter.numel()].view(self.parameter.shape)


@dataclass(frozen=True)
class _Bucket:
    """Parameters that are stepped together. `state`: their first and second moments and, if they have one, their masters."""

    members: list[_Member]
    weight_decay: float
    state: torch.Tensor

    @property
    def has_masters(self) -> bool:
        return self.state.shape[0] == 3


class MasterAdamW:
    """Owns masters, gradients and moments of a list of named parameters."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], learn: Learn, *, offload: bool = False
    ) -> None:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.params = [p for _, p in named]
        self.max_grad_norm = learn.max_grad_norm
        self._settings = learn.optimizer
        apart = [p for p in self.params if _needs_master(p)]
        self.gradients = Gradients(apart)
        """Where products may add a gradient themselves; what autograd makes is taken over by hooks."""
        self._hooks = [p.register_post_accumulate_grad_hook(self.gradients.add) for p in apart]
        device = self.params[0].device if self.params else torch.device("cpu")
        self._conveyor = Conveyor(device) if offload else None
        self._buckets = [
            self._bucket(members, device)
            for masters in (True, False)
            for matrices in (True, False)
            for members in _cut(
                [(n, p) for n, p in named if _needs_master(p) == masters and (p.ndim >= 2) == matrices],
                PIECE if offload else None,
            )
        ]

    def _bucket(self, named: list[tuple[str, torch.nn.Parameter]], device: torch.device) -> _Bucket:
        members, end = [], 0
        for name, parameter in named:
            members.append(_Member(name, parameter, end, torch.zeros((), device=device)))
            end += -(-parameter.numel() // ALIGNED) * ALIGNED
        shape = (3 if _needs_master(named[0][1]) else 2, end)
        dtype = torch.promote_types(named[0][1].dtype, torch.float32)
        state = host_empty(shape, dtype, device) if self._conveyor else torch.empty(shape, dtype=dtype, device=device)
        state.zero_()
        bucket = _Bucket(members, self._settings.weight_decay if named[0][1].ndim >= 2 else 0.0, state)
        if bucket.has_masters:
            for member in members:
                member.part(state[2]).copy_(member.parameter.detach())
        return bucket

    def grads(self) -> list[torch.Tensor | None]:
        """The gradient of each parameter so far, summed in float32 or wider; None where there is none."""
        return [self.gradients.get(p) if p in self.gradients else p.grad for p in self.params]

    def masters(self) -> list[torch.Tensor]:
        """The float32 (or wider) weights, in the order of `params`, wherever they are."""
        found = {
            id(m.parameter): m.part(b.state[2]) if b.has_masters else m.parameter
            for b in self._buckets
            for m in b.members
        }
        return [found[id(p)] for p in self.params]

    @torch.no_grad()
    def step(self, lr: float) -> StepOutcome:
        """Apply the accumulated gradient at the given rate, then clear it."""
        by_parameter = {id(p): grad for p, grad in zip(self.params, self.grads()) if grad is not None}
        grads = list(by_parameter.values())
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        applied = bool(torch.isfinite(norm))
        if applied and grads:
            if self.max_grad_norm is not None:
                _clip(grads, self.max_grad_norm, norm)
            if self._conveyor is None:
                for index, bucket in enumerate(self._buckets):
                    self._apply(index, bucket.state, by_parameter, lr)
            else:
                pieces = [bucket.state for bucket in self._buckets]
                self._conveyor.run(pieces, lambda index, state: self._apply(index, state, by_parameter, lr))
        self.zero_grad()
        return StepOutcome(float(norm), applied)

    def _apply(self, index: int, state: torch.Tensor, grads: dict[int, torch.Tensor], lr: float) -> None:
        """AdamW on one bucket, whose state is here; masters are rounded into the working weights, which the engine reads."""
        bucket, settings = self._buckets[index], self._settings
        members = [member for member in bucket.members if id(member.parameter) in grads]
        if not members:
            return
        weights = [m.part(state[2]) if bucket.has_masters else m.parameter for m in members]
        adamw(
            weights, [grads[id(m.parameter)] for m in members], [m.part(state[0]) for m in members],
            [m.part(state[1]) for m in members], [], [m.step for m in members], fused=True, amsgrad=False,
            beta1=settings.beta1, beta2=settings.beta2, lr=lr, weight_decay=bucket.weight_decay, eps=settings.eps, maximize=False,
        )  # fmt: skip
        if bucket.has_masters:
            torch._foreach_copy_([m.parameter for m in members], weights)

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None
        self.gradients.clear()

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything beyond the working weights that a resumed run needs."""
        if self._conveyor is not None:
            self._conveyor.settle()
        tensors: dict[str, torch.Tensor] = {}
        for bucket in self._buckets:
            for member in bucket.members:
                tensors[f"step/{member.name}"] = member.step
                for key, row in zip(("exp_avg", "exp_avg_sq", "master"), bucket.state):
                    tensors[f"{key}/{member.name}"] = member.part(row)
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what `state_tensors` gave; moments that are not in it are as in the beginning."""
        for name, own in self.state_tensors().items():
            if name in tensors:
                own.copy_(tensors[name])
            else:
                assert not name.startswith("master/"), f"no {name} in the checkpoint"
                own.zero_()
        for bucket in self._buckets:
            if bucket.has_masters:
                for member in bucket.members:
                    member.parameter.copy_(member.part(bucket.state[2]))


def _needs_master(parameter: torch.Tensor) -> bool:
    return parameter.dtype.itemsize < 4


def _cut(named: list[tuple[str, torch.nn.Parameter]], most: int | None) -> list[list[tuple[str, torch.nn.Parameter]]]:
    """Into runs of at most `most` elements, or of one parameter, each of one type."""
    runs: list[list[tuple[str, torch.nn.Parameter]]] = []
    size = 0
    for name, parameter in named:
        full = most is not None and size + parameter.numel() > most
        if not runs or full or runs[-1][-1][1].dtype != parameter.dtype:
            runs.append([])
            size = 0
        runs[-1].append((name, parameter))
        size += parameter.numel()
    return runs


def _clip(grads: list[torch.Tensor], most: float, norm: torch.Tensor) -> None:
    """Scale by most / norm where that is below one, as torch's clipping does."""
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(grads, factor.to(grads[0].device))


def learning_rate(learn: Learn, step: int) -> float:
    """Rate of step `step` (from 0): linear warm-up, then the schedule down to its final fraction on the last step."""
    schedule = learn.schedule
    if step < schedule.warmup_steps:
        return learn.lr * (step + 1) / (schedule.warmup_steps + 1)
    if schedule.kind == "constant":
        return learn.lr
    left = max(1, learn.steps - 1 - schedule.warmup_steps)
    progress = min(1.0, (step - schedule.warmup_steps) / left)
    if schedule.kind == "linear":
        shape = 1.0 - progress
    else:
        shape = 0.5 * (1.0 + torch.cos(torch.tensor(progress * torch.pi, dtype=torch.float64)).item())
    return learn.lr * (schedule.final + (1.0 - schedule.final) * shape)
