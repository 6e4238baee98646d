"""Compares a plan with what is measured: for each step, the peak that the ledger gives for the micro-batches that really ran,
over the meter's. Law 7 is about this ratio; `memory/predicted_over_measured` shows it in every run on a device that has a meter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trimtab.config.run import Recompute
from trimtab.plan.activations import MicroBatchSize, UpdatePath
from trimtab.plan.ledger import EMBEDDING_GRADIENT, GIB, NOT_METERED, embedding_gradient, update_path
from trimtab.plan.planner import Plan
from trimtab.plan.update_work import critic_path, rounding_bytes, update_work

MICROBATCH_COMPONENTS = ("activations", "log-prob head", "backward work", EMBEDDING_GRADIENT)
"""Components of a micro-batch: as `update_peak` names them, and the last of its backward pass."""
ON_HOST = ("processes", "reward workers", "environment workers")
"""Components that a machine without a device has in the same memory."""
Sizes = tuple[int, int, int, int, int, int]
"""Sizes of a micro-batch, in the order of `MicroBatchSize`."""


class PlanWatch:
    """Remembers the micro-batches of a step and compares."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._path: UpdatePath | None = None
        self._steps: list[Sequence[Sizes]] = []
        self._products = 0.0
        """Operations of the last step's products with weights."""

    def saw(self, optimizer_step: Sequence[Sizes], recompute: Recompute, chunk: int, away: bool) -> None:
        """The micro-batches of one optimizer step, and the settings they ran with."""
        path = update_path(self.plan.job, self.plan.run)
        self._path = replace(path, recompute=recompute, chunk=chunk, away=away)
        self._steps.append(optimizer_step)

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Predicted peaks of the phases that were measured since the last call, in GiB as allocated."""
        steps, self._steps = self._steps, []
        self._products = sum(self._operations(MicroBatchSize(*sizes)) for step in steps for sizes in step)
        found: dict[str, float] = {}
        if "memory/rollout_peak_gib" in metrics:
            found["memory/rollout_predicted_gib"] = self.plan.ledger["rollout"].allocated / GIB
        if "memory/update_peak_gib" in metrics and any(steps):
            predicted = max(self.update_bytes(step) for step in steps if step) / GIB
            found["memory/update_predicted_gib"] = predicted
            found["memory/predicted_over_measured"] = predicted / metrics["memory/update_peak_gib"]
        return found

    def used(self, update_s: float) -> dict[str, float]:
        """The share of the device's matrix rate that the last step's update reached; what it recomputed does not count."""
        if not self._products or self.plan.machine.cpu or update_s <= 0:
            return {}
        return {"throughput/update_mfu": self._products / update_s / self.plan.machine.device.flops}

    def _operations(self, row: MicroBatchSize) -> float:
        """Operations of the forward and backward passes; a third less where weights have no gradients."""
        shape, critic = self.plan.job.shape, self.plan.job.critic
        factor = 4.0 if self.plan.job.rank else 6.0
        body = shape.active_parameters - shape.table
        return factor * (
            body * row.tokens + shape.table * row.predicted + (critic.parameters if critic else 0) * row.tokens
        )

    def _critic_bytes(self, optimizer_step: Sequence[Sizes]) -> int:
        """Bytes of the critic's passes over the same micro-batches, its own gradients included."""
        assert self._path is not None and self.plan.job.critic is not None
        job = replace(self.plan.job, shape=self.plan.job.critic)
        trained = job.adapters if job.rank else job.shape.parameters
        work = max(sum(update_work(job, MicroBatchSize(*s), critic_path(self._path)).values()) for s in optimizer_step)
        return work + 4 * trained

    def update_bytes(self, optimizer_step: Sequence[Sizes]) -> int:
        """Most bytes allocated in these micro-batches. During the first, only the gradients exist that its backward pass has
        reached: the head's while its activations are at their fullest, all of them once those are gone. A backward pass ends
        with the embedding's gradient, which autograd makes and the sums then take over."""
        assert self._path is not None
        job = self.plan.job
        held = self.plan.ledger["update"].device or self.plan.ledger["update"].host
        states = sum(
            size
            for name, size in held.items()
            if name not in (*NOT_METERED, *MICROBATCH_COMPONENTS, "gradients", "rounding", *ON_HOST)
        )
        gradients, cuda = 4 * job.trained if job.critic else held["gradients"], bool(self.plan.ledger["update"].device)
        rounding = rounding_bytes(job, self._path) if cuda else 0
        head = 0 if job.rank else 4 * job.shape.table
        peaks = []
        for index, sizes in enumerate(optimizer_step):
            work = sum(update_work(job, MicroBatchSize(*sizes), self._path).values())
            ended = gradients + embedding_gradient(job, first=index == 0)
            peaks.append(max(work + head if index == 0 else work + gradients, ended))
        if job.critic is not None:
            peaks.append(self._critic_bytes(optimizer_step))
        return states + rounding + max(peaks)
