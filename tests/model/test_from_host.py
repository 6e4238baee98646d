"""A policy whose weights wait in host memory: the same log-probs, on its device only while it is used."""

from __future__ import annotations

import torch
from tiny import tiny_model

from trimtab.model.packed import PackedPlan
from trimtab.model.parts import join
from trimtab.model.policy import FromHost, Policy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_gives_the_same_and_keeps_joined_weights_together() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).to(DEVICE).requires_grad_(False))
    attention = policy.body.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    joined = join(parts).clone()
    tokens, plan = torch.arange(9, device=DEVICE), PackedPlan([4, 5], DEVICE)
    with torch.no_grad():
        expected = policy.hidden(tokens, plan.positions, plan)
        away = FromHost(policy)
        assert all(p.device.type == "cpu" for p in policy.model.parameters())
        for _ in range(2):
            with away.present():
                assert all(p.device.type == DEVICE.type for p in policy.model.parameters())
                assert torch.equal(away.hidden(tokens, plan.positions, plan), expected)
                whole = join(parts)
                assert whole.data_ptr() == parts[0].data_ptr() and torch.equal(whole, joined)
            assert all(p.device.type == "cpu" for p in policy.model.parameters())
    assert away.head.weight_VE is policy.head.weight_VE
