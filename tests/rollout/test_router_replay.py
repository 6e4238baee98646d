"""Experts that the native engine chose are those of the trainer for the same tokens, and reach it whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.routing import FREE, Asked
from trimtab.record.batches import SampledBatch, batch_files, load_batches
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Group

LAYERS, USED = 3, 2


def generate(policy: Policy, **settings) -> list[Group]:
    usual = {"max_sequences": 8, "kv_bytes": 2**20, "page_tokens": 4, "prefill_tokens": 64, "prefix_cache": True}
    engine = NativeEngine(policy, tiny_tokenizer(), [2], **usual | settings)
    prompts = [Prompt(number, "", [5 + number, 9, 11, 30 + number][: 2 + number], {}) for number in range(3)]
    requests = [Request(p, 3, [14, 14, 9], Sampling(temperature=1.0), seed=3, step=0) for p in prompts]
    found = sorted(engine.generate(requests), key=lambda group: group.index)
    if settings.get("kv_bytes"):
        assert engine.stats.preempted > 0
    return found


def trainers_choice(policy: Policy, tokens: list[int]) -> torch.Tensor:
    """[T, L, K]: experts of every token in one forward pass."""
    seen: dict[int, torch.Tensor] = {}
    plan = PackedPlan([len(tokens)], policy.device)
    with torch.no_grad(), policy.routers.during(Asked(record=seen.__setitem__)):
        policy.hidden(torch.tensor(tokens), plan.positions, plan)
    return torch.stack([seen[layer] for layer in sorted(seen)], 1)


@pytest.mark.parametrize(("architecture", "settings"), [
    ("qwen3_moe", {}), ("gpt_oss", {}), ("deepseek_v2", {}),
    ("qwen3_moe", {"max_sequences": 2}),
    ("qwen3_moe", {"kv_bytes": 12 * 4 * 3 * 2 * 2 * 8 * 8}),  # sequences are preempted
])  # fmt: skip
def test_what_is_kept_is_what_the_trainer_would_choose(architecture: str, settings: dict) -> None:
    policy = Policy(tiny_model(architecture, torch.float64))
    policy.routers.kept = True
    groups = generate(policy, **settings)
    assert sum(len(group.trajectories) for group in groups) == 9
    for group in groups:
        for trajectory in group.trajectories:
            routes, prompt = trajectory.routes, trajectory.prompt.tokens
            layers = LAYERS - 1 if architecture == "deepseek_v2" else LAYERS  # whose first layer is dense
            assert routes.shape == (len(trajectory.tokens), layers, USED)
            assert routes.dtype == torch.int16 and (routes[-1] == FREE).all()
            whole = trainers_choice(policy, [*prompt, *trajectory.tokens.tolist()])
            assert torch.equal(routes[:-1].long().sort(-1).values, whole[len(prompt) : -1].sort(-1).values)


def test_nothing_is_kept_where_nobody_asks() -> None:
    groups = generate(Policy(tiny_model("qwen3_moe")))
    assert all(trajectory.routes is None for group in groups for trajectory in group.trajectories)


def test_a_batch_in_a_checkpoint_has_them(tmp_path) -> None:
    policy = Policy(tiny_model("qwen3_moe"))
    policy.routers.kept = True
    groups = generate(policy)
    for name, content in batch_files([SampledBatch(0, groups)]).items():
        (tmp_path / name).write_bytes(content)
    prompts = {group.prompt.id: group.prompt for group in groups}
    (again,) = load_batches(tmp_path, lambda ids: [prompts[number] for number in ids])
    for group, back in zip(groups, again.groups):
        for one, two in zip(group.trajectories, back.trajectories):
            assert torch.equal(one.routes, two.routes) and torch.equal(one.tokens, two.tokens)
            assert dataclasses.replace(one, routes=None).routes is None
