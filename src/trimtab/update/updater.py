"""One optimizer step: pack under the cap, run each micro-batch forward and backward, apply the sum.

Guarantee: the gradient is that of the whole step, whatever the token budget, chunk size or checkpointing. Every weight in the
loss was fixed before packing, micro-batches only add up, and no quantity is averaged over a micro-batch. A step that fails before
it is applied has changed nothing, neither weights nor samples, and can be repeated; guard.py does that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.spans import log
from trimtab.config.run import Recompute
from trimtab.model.keep import Keep
from trimtab.model.memory import free
from trimtab.model.policy import AnyPolicy, Policy
from trimtab.model.sequence import tokens_here
from trimtab.model.sharded import ShardedPolicy
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.early_reduction import EarlyReduction
from trimtab.update.launching import Launching
from trimtab.update.loss_scale import first_scale, lower_scale, unscale
from trimtab.update.mixture import MixtureLoss, note_agreement
from trimtab.update.objectives.objective import Objective
from trimtab.update.optimizer import AnyLearn, MasterAdamW
from trimtab.update.overlapped_reduction import OverlappedReduction
from trimtab.update.pass_clock import PassClock
from trimtab.update.peers import ALONE, Peers
from trimtab.update.sharded import ShardedAdamW
from trimtab.update.shares import Share, cap, pack_samples
from trimtab.update.stats import Applied, UpdateStats

Part = Literal["forward", "backward", "optimizer step"]


@dataclass
class Progress:
    """Where a pass is; numbers only, so that it keeps nothing alive when the pass fails."""

    part: Part = "forward"
    microbatch: int = 0
    """Counted from one."""
    microbatches: int = 0
    tokens: int = 0
    """Tokens of this micro-batch."""
    largest: int = 0
    """Tokens of the largest micro-batch."""


MAX_CLOCKS = 1000
"""Optimizer steps whose times are kept where nobody asks for them."""
KEEP = {False: Keep.ALL, "some": Keep.SOME, True: Keep.INPUT}


class AnyUpdater(Protocol):
    """What a guard repeats and lowers: an updater in this process, or one on every rank (cluster/updater.py)."""

    token_budget: int
    score_token_budget: int
    logprob_chunk: int
    piece: int
    """Elements of offloaded optimizer state that are moved at a time."""

    @property
    def ranks(self) -> int: ...

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0) -> UpdateStats: ...

    def apply(self, lr: float) -> Applied: ...

    def score(self, samples: Sequence[Sample], policy: Any, field: str) -> None: ...

    def abandon(self) -> None:
        """Keep nothing of a step that failed half-way, and give its memory back."""

    def longest(self, samples: Sequence[Sample], policy: Any = None) -> int:
        """Tokens of the longest sequence that a device has to hold, in passes of this policy; None: of the trained one."""

    def recompute(self, activations: Recompute) -> None: ...

    def offload_activations(self) -> None: ...

    def offload_optimizer(self) -> None: ...

    def layer_input_bytes(self, tokens: int) -> int:
        """Bytes of the inputs of all layers for so many tokens: what offloaded activations take of the host."""

    def alloc_retries(self) -> int | None:
        """How often the device's allocator had to free memory and ask again; None where it does not say."""

    @property
    def device(self) -> torch.device: ...

    @property
    def progress(self) -> Progress: ...

    @property
    def checkpoint_activations(self) -> Recompute: ...

    @property
    def fused(self) -> bool: ...

    @property
    def activations_offloaded(self) -> bool: ...

    @property
    def optimizer_offloaded(self) -> bool: ...

    @property
    def state_bytes(self) -> int:
        """Of masters and moments, of all ranks of this host."""

    @property
    def applying(self) -> bool:
        """Weights have begun to change and not all have."""

    @property
    def begun(self) -> int:
        """Optimizer steps that have begun to change weights."""

    @property
    def trained(self) -> int:
        """Parameters that are trained."""

    @property
    def parameters(self) -> int: ...


class Updater:
    """Turns samples into weight changes that make the objective smaller. A step has two halves: `accumulate` changes no weight,
    `apply` changes all."""

    def __init__(
        self,
        policy: Policy,
        objective: Objective,
        learn: AnyLearn,
        *,
        token_budget: int,
        score_token_budget: int,
        logprob_chunk: int,
        checkpoint_activations: Recompute,
        offload_optimizer: bool = False,
        offload_activations: bool = False,
        metered: Callable[[], AbstractContextManager[None]] = nullcontext,
        peers: Peers = ALONE,
        reduce_early: bool = False,
        overlap: bool = False,
        follows_routes: bool = True,
    ) -> None:
        """`learn`: the optimizer's settings. `metered` is entered around each `apply`, by whoever measures its memory. `peers`:
        other ranks, each of which accumulates a share of the step; with `reduce_early` gradients are summed over them in every
        micro-batch. `overlap`: they are summed while a backward pass runs. `follows_routes`: its experts are balanced, and chosen
        as the engine chose them, where `learn` says so; a critic chooses its own."""
        if policy.dtype == torch.float16 and peers.ranks > 1:
            what = "float16 is trained on one device: its loss scale is not shared yet"
            raise ConfigError([Problem("model.dtype", what, "Write run.devices: 1, or model.dtype: float32.")])
        self.policy = policy
        self.objective = objective
        self.token_budget = token_budget
        self.score_token_budget = score_token_budget
        self.logprob_chunk = logprob_chunk if objective.logits else 1
        self.optimizer = _optimizer(policy, learn, offload_optimizer, peers)
        policy.add_gradients_to(self.optimizer.gradients)
        self._early = EarlyReduction(policy, self.optimizer, overlap) if reduce_early else None
        alongside = overlap and not reduce_early and peers.ranks > 1 and not isinstance(policy, ShardedPolicy)
        self._overlapped = OverlappedReduction(policy, self.optimizer) if alongside else None
        policy.offload_activations(offload_activations)
        self._mixture = MixtureLoss(policy, float(getattr(learn, "router_aux_coef", 0.0)), follows_routes)
        self.checkpoint_activations: Recompute = False
        self.recompute(checkpoint_activations)
        self._metered = metered
        self._launching: Launching | None = None
        self._clock: PassClock | None = None
        self._clocks: deque[PassClock] = deque(maxlen=MAX_CLOCKS)
        """Of optimizer steps that were applied, and not asked for."""
        self.progress = Progress()

    def recompute(self, activations: Recompute) -> None:
        """From the next pass on, make so much again in the backward pass instead of keeping it."""
        self.checkpoint_activations = activations
        self.policy.keep_for_backward(KEEP[activations])

    def forget_step(self) -> None:
        """Keep nothing of the step so far."""
        self.optimizer.zero_grad()
        if isinstance(self.policy, ShardedPolicy):
            self.policy.reset()
        if self._early is not None:
            self._early.clear()
        if self.policy.activation_offload is not None:
            self.policy.activation_offload.clear()

    def abandon(self) -> None:
        """Keep nothing of a step that failed half-way, and give its memory back. Never in an `except` block."""
        if self._overlapped is not None and self._overlapped.is_awaited:
            free(self.device)
            self._overlapped.give_up()
        self.forget_step()
        free(self.device)

    @property
    def overlaps(self) -> bool:
        """Other ranks may wait for what this one sums with them until it has abandoned a step that failed."""
        return self._overlapped is not None

    def lose_peers(self) -> None:
        """Ranks have parted: what was begun with them does not end."""
        for reduction in (self._early, self._overlapped):
            if reduction is not None:
                reduction.lose()

    def rehearse(self, samples: Sequence[Sample]) -> None:
        """Forward and backward passes of one micro-batch that is not applied: what it takes is seen from outside. Gradients stay,
        as before the second micro-batch of a step, until `abandon`."""
        batch = MicroBatch.build(samples, self.policy.device)
        self._backward(self._loss(batch, 0.0, UpdateStats()))

    @torch.no_grad()
    def score(self, samples: Sequence[Sample], policy: AnyPolicy, field: str) -> None:
        """Write the objective's estimates by `policy` into one of the samples' fields. No gradient, its own budget."""
        assert policy.sequence is None, "whoever deals rows to several ranks packs them"
        self.score_share(self._pack(samples, self.score_token_budget), policy, field)

    @torch.no_grad()
    def score_share(self, share: Share, policy: AnyPolicy, field: str) -> None:
        """The same for micro-batches that are packed already."""
        self.progress = Progress()
        with policy.present():
            found = []
            for batch in self._micro_batches(share, policy):
                with self.policy.routers.during(self._mixture.scored(batch, policy)):
                    found.append((batch, self.objective.estimate(policy, batch, self.logprob_chunk)))
        for batch, estimates in found:  # the device is waited for once, after its last pass
            self.objective.write(estimates, batch, field)

    def accumulate(self, samples: Sequence[Sample], kl_coef: float = 0.0) -> UpdateStats:
        """The gradient of a step on all of `samples`, beside the weights."""
        share = self._pack(samples, self.token_budget)
        if self.balances:
            share = replace(share, choices=self.count_choices(share))
        return self.accumulate_share(share, kl_coef)

    @property
    def balances(self) -> bool:
        """Choices of experts are counted for a whole step (`count_choices`) before it is accumulated."""
        return self._mixture.balances

    def count_choices(self, share: Share) -> torch.Tensor:
        """By how many of the share's learned tokens each expert of each layer is chosen."""
        self.progress = Progress()
        first = len(share.batches) - share.fillers
        batches = ((batch, number >= first) for number, batch in enumerate(self._micro_batches(share, self.policy)))
        return self._mixture.count(batches)

    def accumulate_share(self, share: Share, kl_coef: float = 0.0) -> UpdateStats:
        """The same for micro-batches that are packed already: all of a step's, or this rank's. In float16 with a scale of
        the loss at which the gradient is finite (loss_scale.py)."""
        scale = first_scale(self.policy.dtype)
        while True:
            stats = self._accumulate_scaled(share, kl_coef, scale)
            done = scale == 1.0 or unscale(self.optimizer.grads(), scale)
            if done or not bool(stats.sums["loss"].isfinite()):  # a smaller scale would not help
                return stats
            scale = lower_scale(scale)

    def _accumulate_scaled(self, share: Share, kl_coef: float, scale: float) -> UpdateStats:
        stats = UpdateStats(loss_scale=scale)
        self.progress = Progress()
        if self._overlapped is not None:
            self._overlapped.begin()
        self.forget_step()
        group = self.policy.sequence
        stats.token_budget, stats.row_ranks = tokens_here(share.cap, group), 1 if group is None else group.ranks
        launching, self._clock = Launching(self.policy.device), PassClock(self.policy.device)
        if self._early is not None:
            self._early.begin()
            self.optimizer.reduced = self._early.parts
        for number, batch in enumerate(self._micro_batches(share, self.policy)):
            if self._early is not None:
                self._early.begin_micro_batch()
            filler = number >= len(share.batches) - share.fillers
            with self.policy.routers.during(self._mixture.of(batch, share, filler, scale)) as asked:
                loss = self._loss(batch, kl_coef, UpdateStats() if filler else stats)
                if self._overlapped is not None and number == len(share.batches) - 1:
                    self._overlapped.last_pass()
                note_agreement(asked, UpdateStats() if filler else stats)
                self._backward(loss if scale == 1.0 else loss * scale)
            del loss
            if self._early is not None:
                self._early.end_micro_batch()
            sizes = batch.sizes_on(group)
            self._clock.ended(sizes[0])
            if filler:
                continue
            stats.microbatches += 1
            stats.row_tokens += batch.tokens_T.shape[0]
            stats.largest = max(stats.largest, sizes[0])
            stats.sizes.append(sizes)
        launching.end()
        self._launching = launching
        if self._overlapped is not None:
            self._overlapped.begin_rest()
        return stats

    def prepare(self) -> None:
        """Allocate what `apply` needs. With other ranks: all of them prepare before one applies."""
        self.progress.part = "optimizer step"
        with self._metered():
            self.optimizer.prepare()

    def apply(self, lr: float) -> Applied:
        """Change the weights by what was accumulated."""
        self.progress.part = "optimizer step"
        if self._clock is not None:
            self._clock.applying()
        with self._metered():
            if not self.optimizer.prepared:
                self.optimizer.prepare()
            outcome = self.optimizer.apply(lr)
        if self._clock is not None:
            self._clock.applied()
            self._clocks.append(self._clock)
            self._clock = None
        if self._early is not None:
            self._early.clear()
        behind = None if self._launching is None else self._launching.behind(self.progress.microbatches)
        return Applied(outcome.grad_norm, outcome.applied, behind)

    def step(self, samples: Sequence[Sample], lr: float, kl_coef: float = 0.0) -> UpdateStats:
        """Both halves."""
        return self.accumulate(samples, kl_coef).complete(self.apply(lr))

    def longest(self, samples: Sequence[Sample], policy: Any = None) -> int:
        return tokens_here(cap(samples, 0), (policy or self.policy).sequence)

    def take_clocks(self) -> list[PassClock]:
        """Of the optimizer steps since the last call."""
        found = list(self._clocks)
        self._clocks.clear()
        return found

    @property
    def ranks(self) -> int:
        return self.optimizer.peers.ranks

    @property
    def device(self) -> torch.device:
        return self.policy.device

    @property
    def fused(self) -> bool:
        return self.policy.fused

    @property
    def activations_offloaded(self) -> bool:
        return self.policy.activation_offload is not None

    def offload_activations(self) -> None:
        self.policy.offload_activations(True)

    def layer_input_bytes(self, tokens: int) -> int:
        return 4 * self.policy.config.hidden_size * self.policy.config.num_hidden_layers * tokens

    @property
    def optimizer_offloaded(self) -> bool:
        return self.optimizer.offloaded

    def offload_optimizer(self) -> None:
        self.optimizer.offload()

    @property
    def piece(self) -> int:
        return self.optimizer.piece

    @piece.setter
    def piece(self, elements: int) -> None:
        self.optimizer.piece = elements

    @property
    def state_bytes(self) -> int:
        return self.optimizer.state_bytes

    @property
    def applying(self) -> bool:
        return self.optimizer.applying

    @property
    def begun(self) -> int:
        return self.optimizer.begun

    @property
    def trained(self) -> int:
        return sum(p.numel() for p in self.policy.parameters())

    @property
    def parameters(self) -> int:
        return self.policy.parameter_count()

    def alloc_retries(self) -> int | None:
        if self.device.type != "cuda":
            return None
        return int(torch.cuda.memory_stats(self.device).get("num_alloc_retries", 0))

    def _pack(self, samples: Sequence[Sample], budget: int) -> Share:
        return pack_samples(self.objective.together, samples, budget)

    def _micro_batches(self, share: Share, policy: AnyPolicy) -> Iterator[MicroBatch]:
        loads = [tokens_here(load, policy.sequence) for load in share.loads]
        for number, (samples, places, load) in enumerate(zip(share.batches, share.places, loads), 1):
            self.progress = Progress("forward", number, len(loads), load, max(loads))
            log.progress = (number - 1, len(loads), "micro-batches")
            place_of = {id(sample): place for sample, place in zip(samples, places)}
            yield MicroBatch.build(samples, self.policy.device, place_of)

    def _loss(self, batch: MicroBatch, kl_coef: float, stats: UpdateStats) -> torch.Tensor:
        return self.objective.loss(self.policy, batch, stats, chunk=self.logprob_chunk, kl_coef=kl_coef)

    def _backward(self, loss: torch.Tensor) -> None:
        """Runs in this thread: autograd's own would contend with it for the interpreter, and have a cuBLAS workspace besides."""
        self.progress.part = "backward"
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()


def _optimizer(policy: Policy, learn: AnyLearn, offload: bool, peers: Peers) -> MasterAdamW:
    if isinstance(policy, ShardedPolicy):
        return ShardedAdamW(policy.weights, policy.handed, learn, offload=offload, peers=peers)
    return MasterAdamW(policy.weights, learn, offload=offload, peers=peers)
