"""From recorded rewards to one advantage a token, group by group and sequence by sequence, in padded tensors.

Legend: B sequences, P positions of a padded batch; `mask_BP` says which of them are learned.
"""

from __future__ import annotations

from typing import Any

import torch
from replica.record import Completion

EPS = 1e-4
Groups = list[list[Completion]]


def normalized(values: list[float | None]) -> list[float]:
    """Z-scores of those that are there; 0 for the others, and where all are the same."""
    there = torch.tensor([v for v in values if v is not None], dtype=torch.float64)
    if len(there) < 2 or float(there.max()) == float(there.min()):
        return [0.0] * len(values)
    return [0.0 if v is None else float((v - there.mean()) / there.std()) for v in values]


def shaped(groups: Groups, settings: dict[str, Any], parts: list[dict[str, Any]]) -> list[list[float]]:
    """Rewards by group: parts summed, clipped, less the penalty for running long."""
    if any(part.get("normalize", "none") != "none" for part in parts):
        rewards = [[0.0] * len(group) for group in groups]
        for part in parts:
            found: list[list[float | None]] = [[c.parts.get(part["name"]) for c in group] for group in groups]
            how = part.get("normalize", "none")
            if how == "group":
                scores = [normalized(values) for values in found]
            elif how == "step":
                flat = iter(normalized([v for values in found for v in values]))
                scores = [[next(flat) for _ in values] for values in found]
            else:
                scores = [[v or 0.0 for v in values] for values in found]
            rewards = [[r + part.get("weight", 1.0) * s for r, s in zip(*pair)] for pair in zip(rewards, scores)]
    else:
        rewards = [[float(c.reward or 0.0) for c in group] for group in groups]
    if settings["reward_clip"] is not None:
        low, high = settings["reward_clip"]
        rewards = [[min(max(r, low), high) for r in group] for group in rewards]
    if settings["overlong"] is not None:
        buffer, most = settings["overlong"]["buffer"], settings["max_new_tokens"]
        penalty = settings["overlong"].get("penalty", 1.0)
        rewards = [
            [r - penalty * min(max(c.used - (most - buffer), 0) / buffer, 1.0) for r, c in zip(values, group)]
            for values, group in zip(rewards, groups)
        ]
    return rewards


def usable(groups: Groups, settings: dict[str, Any], parts: list[dict[str, Any]]) -> Groups:
    """Without the completions that have no reward and, with dynamic sampling, without the groups that teach nothing."""
    kept = [[c for c in group if c.reward is not None] for group in groups]
    kept = [group for group in kept if group]
    if settings["dynamic"]:
        differ = [max(values) > min(values) for values in shaped(kept, settings, parts)]
        kept = [group for group, learns in zip(kept, differ) if learns]
    return kept


def of_samples(name: str, rewards: list[list[float]]) -> torch.Tensor:
    """[B] for advantages that all tokens of a sequence share."""
    step = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    found = []
    for values in rewards:
        own = torch.tensor(values, dtype=torch.float64)
        n = len(values)
        if name == "leave_one_out":
            found.append(own - (own.sum() - own) / (n - 1) if n > 1 else torch.zeros(1, dtype=torch.float64))
        elif name == "batch_mean":
            found.append(own - step.mean())
        elif name == "group_std":
            found.append((own - own.mean()) / ((own.std() if n > 1 else 0.0) + EPS))
        else:
            found.append(own - own.mean())
    centred = torch.cat(found)
    if name == "group_mean_global_std":
        return centred / (centred.std() + EPS)
    if name == "group_mean_batch_std":
        return centred / (step.std() + EPS)
    return centred


def whitened(values_BP: torch.Tensor, mask_BP: torch.Tensor) -> torch.Tensor:
    seen = values_BP[mask_BP]
    return (values_BP - seen.mean()) / (seen.std() + EPS)


def to_go(values_BP: torch.Tensor, mask_BP: torch.Tensor) -> torch.Tensor:
    """What a token and those after it have together."""
    return (values_BP * mask_BP).flip(1).cumsum(1).flip(1)


def of_tokens(
    settings: dict[str, Any],
    rewards: list[list[float]],
    penalty_BP: torch.Tensor,
    mask_BP: torch.Tensor,
    values_BP: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Advantages [B, P], and with a critic returns [B, P]. `penalty_BP`: what each token pays for its KL, outside of the loss."""
    name, where = settings["advantage"], settings["kl"]["where"]
    flat = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    if name == "gae":
        assert values_BP is not None
        return generalised(settings["critic"], flat, penalty_BP, mask_BP, values_BP)
    if name == "global_norm":
        return whitened(flat[:, None] - to_go(penalty_BP, mask_BP), mask_BP), None
    if where == "reward":
        paid = iter((penalty_BP * mask_BP).sum(1).tolist())
        rewards = [[r - next(paid) for r in group] for group in rewards]
        penalty_BP = torch.zeros_like(penalty_BP)
    kind = "group_mean" if name == "group_mean_global_norm" else name
    advantages_BP = of_samples(kind, rewards)[:, None] - to_go(penalty_BP, mask_BP)
    return whitened(advantages_BP, mask_BP) if name == "group_mean_global_norm" else advantages_BP, None


def generalised(
    critic: dict[str, Any], rewards: torch.Tensor, penalty_BP: torch.Tensor, mask_BP: torch.Tensor, values_BP: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """GAE by its recurrence, from each sequence's last token to its first."""
    advantages_BP, returns_BP = torch.zeros_like(values_BP), torch.zeros_like(values_BP)
    for b in range(len(rewards)):
        places = mask_BP[b].nonzero().flatten().tolist()
        following = later = 0.0
        for place in reversed(places):
            earned = float(rewards[b]) * (place == places[-1]) - float(penalty_BP[b, place])
            delta = earned + critic["gamma"] * following - float(values_BP[b, place])
            later = delta + critic["gamma"] * critic["lam"] * later
            following = float(values_BP[b, place])
            advantages_BP[b, place] = later
            returns_BP[b, place] = later + following
    return whitened(advantages_BP, mask_BP), returns_BP
