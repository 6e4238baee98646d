"""From scored groups to samples with advantages and weights: the algorithm, before any batching.

Everything here is counted over the whole of what one optimizer step will consume, so nothing later can change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from trimtab.config.algorithms import GROUP_ADVANTAGES
from trimtab.config.known import ResolvedLearn
from trimtab.config.learn import Learn
from trimtab.learn.advantages import (
    ADVANTAGES,
    gae,
    global_norm,
    group_mean_global_norm,
    has_signal,
    normalised,
    returns,
)
from trimtab.learn.aggregate import token_weights
from trimtab.learn.kl import ESTIMATORS
from trimtab.learn.parts import Part, combine
from trimtab.learn.segments import sum_by
from trimtab.learn.shaping import overlong_penalty, reward_clip
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.batch import Sample


@dataclass
class SampleCounts:
    """What became of every sampled completion: law 9, the counts add up each step."""

    sampled: int
    trained: int
    dropped: Counter[str]

    def check(self) -> None:
        assert self.sampled == self.trained + sum(self.dropped.values()), f"completions went missing: {self}"


def has_reference(learn: ResolvedLearn) -> bool:
    """The policy is compared with the model that it began as."""
    return learn.kl.coef != 0


def has_critic(learn: ResolvedLearn) -> bool:
    return learn.advantage == "gae"


def usable(groups: list[Group]) -> tuple[list[Group], Counter[str]]:
    """Groups without the completions that have no reward, and why those have none."""
    dropped: Counter[str] = Counter()
    kept = []
    for group in groups:
        scored = [t for t in group.trajectories if t.reward is not None]
        for trajectory in group.trajectories:
            if trajectory.reward is None:
                dropped[f"{trajectory.failed_in}_failed" if trajectory.failure else "not_applicable"] += 1
        if scored:
            kept.append(Group(group.prompt, scored))
    return kept, dropped


def shaped_rewards(groups: list[Group], learn: Learn, parts: Sequence[Part] = ()) -> torch.Tensor:
    """Rewards as advantages see them: parts normalised and summed, clipped, then DAPO's penalty for running long."""
    trajectories = [t for group in groups for t in group.trajectories]
    if any(part.normalize != "none" for part in parts):
        nothing = float("nan")
        values = [[t.rewards.get(part.name, nothing) for part in parts] for t in trajectories]
        rewards = combine(torch.tensor(values, dtype=torch.float64), group_index(groups), parts)
    else:
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
    if learn.reward_clip is not None:
        rewards = reward_clip(rewards, *learn.reward_clip)
    if learn.overlong is not None:
        used = [len(t.prompt.tokens) + len(t.tokens) - len(g.prompt.tokens) for g in groups for t in g.trajectories]
        rewards = rewards + overlong_penalty(
            torch.tensor(used), learn.max_new_tokens, learn.overlong.buffer, learn.overlong.penalty
        )
    return rewards


def group_index(groups: list[Group]) -> torch.Tensor:
    """For each sample, which of the groups it belongs to."""
    return torch.tensor([g for g, group in enumerate(groups) for _ in group.trajectories], dtype=torch.int64)


def split_signal(groups: list[Group], learn: Learn, parts: Sequence[Part] = ()) -> tuple[list[Group], list[Group]]:
    """Groups whose rewards differ within the group, and groups that can teach nothing."""
    if not groups:
        return [], []
    signal = has_signal(shaped_rewards(groups, learn, parts), group_index(groups)).tolist()
    with_signal = [group for group, differs in zip(groups, signal) if differs]
    return with_signal, [group for group, differs in zip(groups, signal) if not differs]


def to_samples(groups: list[Group]) -> list[list[Sample]]:
    """The tensors of each group's completions; advantages and weights are still empty."""
    empty = torch.empty(0)
    return [
        [
            Sample(t.prompt.tokens, t.tokens, empty, empty, t.logprobs, policy_mask=t.policy_mask, routes=t.routes)
            for t in group.trajectories
        ]
        for group in groups
    ]


@dataclass(frozen=True)
class Batch:
    """What a step learns from."""

    groups: list[Group]
    samples: list[list[Sample]]
    """Of each group."""
    zero_signal: list[Group] | None
    """Groups that can teach nothing; None where samples are not compared within their groups."""
    counts: SampleCounts

    @property
    def flat(self) -> list[Sample]:
        return [sample for group in self.samples for sample in group]


def sort_out(groups: list[Group], learn: ResolvedLearn, parts: Sequence[Part] = ()) -> Batch:
    """What there is to learn from in scored groups; every sample is trained or dropped for a reason."""
    counts = SampleCounts(sum(len(group.trajectories) for group in groups), 0, Counter())
    kept, counts.dropped = usable(groups)
    # Elsewhere a group of equal rewards teaches as much as any other: it is not compared with itself.
    zero_signal = split_signal(kept, learn, parts)[1] if learn.advantage in GROUP_ADVANTAGES else None
    if learn.dynamic_sampling.enabled:
        assert zero_signal is not None, "refused with any other advantage"
        gone = {id(group) for group in zero_signal}
        kept = [group for group in kept if id(group) not in gone]
        counts.dropped["no_signal"] = sum(len(group.trajectories) for group in zero_signal)
    samples = to_samples(kept)
    masked = sum(not in_loss(trajectory, learn) for group in kept for trajectory in group.trajectories)
    if masked:
        counts.dropped["truncated"] = masked
    counts.trained = sum(map(len, samples)) - masked
    counts.check()
    return Batch(kept, samples, zero_signal, counts)


def optimizer_steps(batch: Batch, learn: ResolvedLearn) -> Iterator[tuple[int, list[Sample]]]:
    """The samples of each optimizer step, with their shares of it, and its number in the batch; once for every epoch."""
    for epoch in range(learn.epochs_per_step):
        parts = np.array_split(np.arange(len(batch.groups)), min(learn.updates_per_step, len(batch.groups)))
        for number, part in enumerate(parts, epoch * learn.updates_per_step):
            flat = [sample for group in part for sample in batch.samples[group]]
            set_weights([trajectory for group in part for trajectory in batch.groups[group].trajectories], flat, learn)
            flat = [sample for sample in flat if sample.weights.any()]  # without a share nothing needs to be computed
            if flat:
                yield number, flat


def with_gradient(samples: list[Sample], learn: ResolvedLearn) -> list[Sample]:
    """Those of an optimizer step's samples that its policy gradient depends on; at least one, so that there is always a pass.

    A sample whose every advantage is 0 adds exactly 0 to the gradient, unless the loss has terms beside the policy's own. Its
    share in the denominators stays: every token's weight was set before. Where the distance to a reference is measured, every
    sample is passed, so that it is measured over all of them.
    """
    if learn.entropy_coef or learn.router_aux_coef or has_reference(learn):
        return samples
    return [sample for sample in samples if sample.advantages.any()] or [min(samples, key=len)]


def set_advantages(
    groups: list[Group], samples: list[list[Sample]], learn: ResolvedLearn, kl_coef: float, parts: Sequence[Part] = ()
) -> None:
    """Fill in every sample's advantage, over the whole step. Reference log-probs are there where the reward needs them."""
    flat = [sample for group in samples for sample in group]
    rewards = shaped_rewards(groups, learn, parts)
    lengths = torch.tensor([len(t) for group in groups for t in group.trajectories])
    penalty = _kl_penalty(flat, learn, kl_coef)
    offsets = _offsets(lengths)
    if learn.advantage == "gae":
        _against_critic(flat, rewards, penalty, lengths, learn)
        return
    if learn.advantage == "global_norm":
        _assign(flat, global_norm(rewards, penalty, offsets).float(), lengths)
        return
    if learn.kl.where == "reward":  # the whole sequence pays, before it is compared with others
        sequence = torch.repeat_interleave(torch.arange(len(flat)), lengths)
        rewards, penalty = rewards - sum_by(penalty, sequence, len(flat)), torch.zeros_like(penalty)
    if learn.advantage == "group_mean_global_norm":
        tokens = group_mean_global_norm(rewards, group_index(groups), penalty, offsets)
    else:
        tokens = returns(ADVANTAGES[learn.advantage](rewards, group_index(groups)), penalty, offsets)
    _assign(flat, tokens.float(), lengths)


def _kl_penalty(samples: list[Sample], learn: Learn, kl_coef: float) -> torch.Tensor:
    """[T]: what each token of the step pays for its distance from the reference, outside of the loss."""
    if not kl_coef or learn.kl.where == "loss":
        return torch.zeros(sum(sample.learned for sample in samples), dtype=torch.float64)
    policy = torch.cat([s.engine_logprobs if s.old_logprobs is None else s.old_logprobs for s in samples]).double()
    reference = torch.cat([s.ref_logprobs for s in samples if s.ref_logprobs is not None]).double()
    return kl_coef * ESTIMATORS[learn.kl.estimator](policy, reference)


def _against_critic(
    samples: list[Sample], rewards: torch.Tensor, penalty: torch.Tensor, lengths: torch.Tensor, learn: Learn
) -> None:
    """GAE over the step: every token pays its penalty, the last of a sequence earns its reward; advantages are then normalised by
    the mean and standard deviation of all tokens of the step."""
    values = torch.cat([s.values for s in samples if s.values is not None]).double()
    offsets = _offsets(lengths)
    earned = (-penalty).index_add(0, offsets[1:] - 1, rewards)
    advantages, returns = gae(earned, values, offsets, learn.critic.gamma, learn.critic.lam)
    _assign(samples, normalised(advantages).float(), lengths)
    for sample, part in zip(samples, returns.float().split(lengths.tolist())):
        sample.returns = part


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))


def in_loss(trajectory: Trajectory, learn: Learn) -> bool:
    """False for a completion that others are compared with, and that is not learned from itself."""
    return not (learn.mask_truncated and trajectory.finish == "length")


def set_weights(trajectories: list[Trajectory], samples: list[Sample], learn: ResolvedLearn) -> None:
    """Fill in each token's share of the loss of one optimizer step that consumes exactly these samples."""
    lengths = torch.tensor([len(t) for t in trajectories])
    include = torch.tensor([in_loss(t, learn) for t in trajectories])
    weights = token_weights(lengths, learn.aggregate, learn.max_new_tokens, include)
    for sample, weight, length in zip(samples, weights, lengths.tolist()):
        sample.weights = weight.expand(length)


def _assign(samples: list[Sample], values: torch.Tensor, lengths: torch.Tensor) -> None:
    for sample, part in zip(samples, values.split(lengths.tolist())):
        sample.advantages = part
