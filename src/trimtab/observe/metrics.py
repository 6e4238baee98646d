"""The numbers of a step under their stable names. Pure: from what happened to a dictionary. KL and entropy in nats per token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from trimtab.learn.values import explained_variance
from trimtab.rollout.engine import RolloutStats
from trimtab.rollout.trajectory import Group
from trimtab.update.batch import Sample
from trimtab.update.samples import SampleCounts
from trimtab.update.updater import UpdateStats


def rollout_metrics(stats: RolloutStats) -> dict[str, float]:
    """What all generation of a step came to."""
    metrics = {
        "rollout/tokens": float(stats.generated_tokens),
        "rollout/tokens_per_s": stats.generated_tokens / max(stats.prefill_s + stats.decode_s, 1e-9),
        "rollout/prefill_s": stats.prefill_s,
        "rollout/decode_s": stats.decode_s,
        "rollout/graph_share": stats.graph_share,
        "rollout/batch_occupancy": stats.occupancy,
        "rollout/kv_usage": stats.kv_usage,
        "rollout/parked": float(stats.preempted),
        "rollout/restarts": float(stats.restarts),
        "rollout/cached_prefix_tokens": float(stats.cached_prefix_tokens),
        "rollout/prefill_tokens": float(stats.prefill_tokens),
        "rollout/decode_steps": float(stats.decode_steps),
        "rollout/slots": float(stats.slots),
    }
    return metrics if stats.tail_s is None else metrics | {"rollout/tail_s": stats.tail_s}


def reward_metrics(
    groups: list[Group], parts: Sequence[str], zero_signal: Sequence[Group] | None, counts: SampleCounts
) -> dict[str, float]:
    """Rewards of everything that has one, lengths of everything sampled, and what became of it. `zero_signal`: the groups that
    can teach nothing; None where samples are not compared within their groups."""
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories if t.reward is not None])
    values = {name: [t.rewards[name] for t in trajectories if name in t.rewards] for name in parts}
    return {
        "reward/mean": float(rewards.mean()) if rewards.size else float("nan"),
        "reward/std": float(rewards.std()) if rewards.size else float("nan"),
        **({} if zero_signal is None else {"reward/zero_std_groups": len(zero_signal) / len(groups)}),
        "reward/failed": float(counts.dropped["reward_failed"]),
        **{f"reward/{name}": float(np.mean(found)) for name, found in values.items() if found},
        "response/length_mean": float(np.mean([len(t) for t in trajectories])),
        **_quantiles([len(t) for t in trajectories]),
        "response/truncated": sum(t.finish == "length" for t in trajectories) / len(trajectories),
        "run/samples": float(counts.sampled),
        "run/samples_trained": float(counts.trained),
        **{f"run/dropped_{reason}": float(count) for reason, count in counts.dropped.items()},
    }


def update_metrics(done: list[UpdateStats]) -> dict[str, float]:
    """Ratio and clipping over all updates of the step; entropy, KL and the engine's gap of the first, before any change."""
    tokens = sum(stats.tokens for stats in done)
    microbatches = sum(stats.microbatches for stats in done)
    room = sum(stats.microbatches * stats.token_budget * stats.row_ranks for stats in done)

    def over_all(name: str) -> float:
        return sum(float(stats.sums[name]) for stats in done) / max(1, tokens)

    metrics = {
        "policy/loss": sum(float(stats.sums["loss"]) for stats in done) / len(done),
        "policy/entropy": done[0].mean("entropy"),
        "policy/kl_old": over_all("kl_old"),
        "policy/ratio_mean": over_all("ratio"),
        "policy/clip_fraction": over_all("clipped"),
        "policy/grad_norm": sum(stats.grad_norm for stats in done) / len(done),
        "rollout/logprob_gap": done[0].mean("logprob_gap"),
        "run/token_budget": float(done[-1].token_budget),
        "run/max_microbatch_tokens": float(max(stats.largest for stats in done)),
        "run/microbatches": float(microbatches),
        "run/packing_fill": sum(stats.row_tokens for stats in done) / room,
        "run/samples_without_gradient": float(sum(stats.without_gradient for stats in done)),
        "run/skipped_updates": float(sum(not stats.applied for stats in done)),
    }
    if any(stats.loss_scale != 1.0 for stats in done):
        metrics["run/loss_scale"] = min(stats.loss_scale for stats in done)
    behind = [stats.behind for stats in done if stats.behind is not None]
    if behind:
        metrics["run/device_behind"] = min(behind)
    unequal = [stats.imbalance for stats in done if stats.imbalance is not None]
    if unequal:
        metrics["run/rank_imbalance"] = max(unequal)
    if float(done[0].sums.get("routes_replayed", 0.0)) > 0:
        metrics["rollout/router_agreement"] = float(done[0].sums["routes_agreed"] / done[0].sums["routes_replayed"])
    if "kl_ref" in done[0].sums:
        metrics["policy/kl_ref"] = done[0].mean("kl_ref")
    return metrics


def value_metrics(samples: Sequence[Sample], done: list[UpdateStats]) -> dict[str, float]:
    """How well the critic knew what would be earned, before it learned from it, and how it learned."""
    values = torch.cat([s.values for s in samples if s.values is not None])
    returns = torch.cat([s.returns for s in samples if s.returns is not None])
    tokens = sum(stats.tokens for stats in done)
    return {
        "value/loss": sum(float(stats.sums["loss"]) for stats in done) / len(done),
        "value/explained_variance": explained_variance(values, returns),
        "value/mean": float(values.mean()),
        "value/return_mean": float(returns.mean()),
        "value/clip_fraction": sum(float(stats.sums["clipped"]) for stats in done) / max(1, tokens),
        "value/grad_norm": sum(stats.grad_norm for stats in done) / len(done),
    }


def _quantiles(lengths: list[int]) -> dict[str, float]:
    """Half and nine tenths of completions are at most so long, and all of them."""
    half, most, longest = np.quantile(lengths, [0.5, 0.9, 1.0])
    return {
        "response/length_p50": float(half),
        "response/length_p90": float(most),
        "response/length_max": float(longest),
    }
