"""Batches that were sampled and not learned from yet: what a checkpoint holds of them where training lags behind sampling
(`learn.staleness`).

Their tokens came from weights that no longer exist, so they cannot be drawn again. What the data says of a prompt is not stored:
it is read from the row again. Rewards that were still being computed are computed again.

    batches.json           what each completion is, and how many tokens it has
    batches.safetensors    their tokens, log-probs, versions and masks, end to end
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from trimtab.base.errors import TrainingError
from trimtab.data.prompt import Prompt
from trimtab.record.checkpoint import explain_load_errors
from trimtab.rollout.trajectory import Conversation, Group, Trajectory

FACTS, TENSORS = "batches.json", "batches.safetensors"
KEPT = ("sample", "finish", "text", "rewards", "reward", "failure", "failed_in")
"""Of a trajectory, as it is."""
PLAYED = tuple(each.name for each in fields(Conversation))


@dataclass
class SampledBatch:
    """The completions of one step."""

    step: int
    """Steps done before the one that learns from it: the batch's place in the run, and its key in sampling."""
    groups: list[Group] = field(default_factory=list)
    scored: bool = False
    """Rewards are filled in. If not, they are being computed."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What is known so far of the step that learns from it."""


def batch_files(batches: Sequence[SampledBatch]) -> dict[str, bytes]:
    """The files that hold these batches, by name; none where there is none."""
    if not batches:
        return {}
    everyone = [t for batch in batches for group in batch.groups for t in group.trajectories]
    tensors = {
        "tokens": [t.tokens for t in everyone],
        "logprobs": [t.logprobs for t in everyone],
        "versions": [t.versions for t in everyone],
        "mask": [t.policy_mask for t in everyone if t.policy_mask is not None],
        "routes": [t.routes for t in everyone if t.routes is not None],
        "opening": [torch.tensor(_opening(group, t), dtype=torch.int64) for group, t in _members(batches)],
    }
    facts = [
        {
            "step": batch.step,
            "scored": batch.scored,
            "metrics": batch.metrics,
            "groups": [
                {
                    "prompt": group.prompt.id,
                    "trajectories": [_facts(group, t, batch.scored) for t in group.trajectories],
                }
                for group in batch.groups
            ],
        }
        for batch in batches
    ]
    joined = {name: torch.cat(found).contiguous() for name, found in tensors.items() if found}
    return {FACTS: json.dumps(facts).encode(), TENSORS: save(joined)}


def load_batches(checkpoint: Path, prompts: Callable[[Sequence[int]], list[Prompt]]) -> list[SampledBatch]:
    """The batches that a checkpoint holds. `prompts`: those of rows of the data, by number."""
    if not (checkpoint / FACTS).exists():
        return []
    with explain_load_errors(checkpoint):
        saved = json.loads((checkpoint / FACTS).read_text())
        ends = _Ends(load_file(checkpoint / TENSORS))
        ids = sorted({group["prompt"] for batch in saved for group in batch["groups"]})
        known = dict(zip(ids, prompts(ids), strict=True))
        found = [
            SampledBatch(
                batch["step"],
                [_group(known[group["prompt"]], index, group, ends) for index, group in enumerate(batch["groups"])],
                batch["scored"],
                batch["metrics"],
            )
            for batch in saved
        ]
        if not ends.used_up:
            raise TrainingError(f"{checkpoint / TENSORS} holds other tokens than {FACTS} says")
    return found


def _members(batches: Sequence[SampledBatch]) -> Iterator[tuple[Group, Trajectory]]:
    for batch in batches:
        for group in batch.groups:
            for trajectory in group.trajectories:
                yield group, trajectory


def _opening(group: Group, trajectory: Trajectory) -> list[int]:
    """What an environment put behind the row's prompt."""
    return trajectory.prompt.tokens[len(group.prompt.tokens) :]


def _facts(group: Group, trajectory: Trajectory, scored: bool) -> dict[str, Any]:
    """What is known of a completion beside tensors. What scoring would fill in is left out until it has."""
    facts = {name: getattr(trajectory, name) for name in KEPT}
    if not scored and trajectory.failed_in == "reward":
        facts |= {"rewards": {}, "reward": None, "failure": None}
    played = trajectory.conversation
    return facts | {
        "tokens": trajectory.tokens.shape[0],
        "drawn": trajectory.logprobs.shape[0],
        "mask": trajectory.policy_mask is not None,
        "routes": trajectory.routes is not None,
        "opening": len(_opening(group, trajectory)),
        "conversation": None if played is None else {name: getattr(played, name) for name in PLAYED},
    }


class _Ends:
    """Takes joined tensors apart again, from the front."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._taken = Counter[str]()

    def take(self, name: str, count: int) -> torch.Tensor:
        first = self._taken[name]
        self._taken[name] += count
        if name not in self._tensors or self._taken[name] > self._tensors[name].shape[0]:
            raise ValueError(f"{TENSORS} has too few {name}")
        return self._tensors[name][first : first + count].clone()

    @property
    def used_up(self) -> bool:
        return all(tensor.shape[0] == self._taken[name] for name, tensor in self._tensors.items())


def _group(prompt: Prompt, index: int, saved: Mapping[str, Any], ends: _Ends) -> Group:
    return Group(prompt, [_trajectory(prompt, each, ends) for each in saved["trajectories"]], index)


def _trajectory(prompt: Prompt, saved: Mapping[str, Any], ends: _Ends) -> Trajectory:
    opening = ends.take("opening", saved["opening"]).tolist()
    played = saved["conversation"]
    if played is not None:
        played = Conversation(**played | {"counts": Counter(played["counts"])})
    return Trajectory(
        replace(prompt, tokens=prompt.tokens + opening) if opening else prompt,
        tokens=ends.take("tokens", saved["tokens"]),
        logprobs=ends.take("logprobs", saved["drawn"]),
        versions=ends.take("versions", saved["drawn"]),
        policy_mask=ends.take("mask", saved["tokens"]) if saved["mask"] else None,
        conversation=played,
        routes=ends.take("routes", saved["tokens"]) if saved.get("routes") else None,
        **{name: saved[name] for name in KEPT},
    )
