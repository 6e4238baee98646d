"""AdamW on float32 master weights, one step at a time, all or nothing.

Guarantees: gradients add up in float32 whatever the model's type, so the number of micro-batches does not matter; the norm is
that of the whole step; a step whose gradient is not finite leaves weights, moments and step count exactly as they were.
In float32 (and wider) models the parameters are their own masters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from trimtab.config.learn import Learn
from trimtab.model.gradients import Gradients


@dataclass(frozen=True)
class StepOutcome:
    grad_norm: float
    applied: bool


class MasterAdamW:
    """Owns masters, gradients and moments of a list of named parameters."""

    def __init__(self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], learn: Learn) -> None:
        named = [(name, p) for name, p in named_parameters if p.requires_grad]
        self.names = [name for name, _ in named]
        self.params = [p for _, p in named]
        self.masters = [p if p.dtype.itemsize >= 4 else p.detach().float() for p in self.params]
        self.max_grad_norm = learn.max_grad_norm
        settings = learn.optimizer
        matrices = [m for m in self.masters if m.ndim >= 2]
        vectors = [m for m in self.masters if m.ndim < 2]
        self._adamw = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=learn.lr,
            betas=(settings.beta1, settings.beta2),
            eps=settings.eps,
            fused=True,
        )
        apart = [(p, master) for p, master in zip(self.params, self.masters) if p is not master]
        self.gradients = Gradients([p for p, _ in apart], [master for _, master in apart])
        """Where products may add a gradient themselves; what autograd makes is taken over by hooks."""
        self._hooks = [p.register_post_accumulate_grad_hook(self.gradients.add) for p, _ in apart]

    def step(self, lr: float) -> StepOutcome:
        """Apply the accumulated gradient at the given rate, then clear it."""
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        applied = bool(torch.isfinite(norm))
        if applied and grads:
            if self.max_grad_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.masters, self.max_grad_norm, norm)
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
            self._write_back()
        self.zero_grad()
        return StepOutcome(float(norm), applied)

    def zero_grad(self) -> None:
        for parameter in self.params:
            parameter.grad = None
        self.gradients.clear()

    @torch.no_grad()
    def _write_back(self) -> None:
        """Round masters into the working weights in place: the engine reads the same storage."""
        apart = [(p, master) for p, master in zip(self.params, self.masters) if p is not master]
        if apart:
            torch._foreach_copy_([p for p, _ in apart], [master for _, master in apart])

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Everything beyond the working weights that a resumed run needs."""
        tensors: dict[str, torch.Tensor] = {}
        for name, p, master in zip(self.names, self.params, self.masters):
            state = self._adamw.state.get(master, {})
            tensors |= {f"{key}/{name}": value for key, value in state.items()}
            if p is not master:
                tensors[f"master/{name}"] = master
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, p, master in zip(self.names, self.params, self.masters):
            if p is not master:
                master.copy_(tensors[f"master/{name}"])
            # torch's fused AdamW keeps its step counter on the parameter's device.
            kept = {
                key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in tensors
            }
            if kept:
                self._adamw.state[master] = {key: value.to(master.device, copy=True) for key, value in kept.items()}
        self._write_back()


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
