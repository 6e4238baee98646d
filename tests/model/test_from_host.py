"""A policy whose weights wait in host memory: the same log-probs, on its device only while it is used."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tiny import tiny_model

from trimtab.model.norms import OFFSET
from trimtab.model.packed import PackedPlan
from trimtab.model.parts import read_parts
from trimtab.model.policy import FromHost, Policy
from trimtab.model.shapes import layer_shapes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_gives_the_same_and_keeps_joined_weights_together() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).to(DEVICE).requires_grad_(False))
    attention = policy.body.layers[0].self_attn
    parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
    joined = policy.weights.joined(parts).clone()
    tokens, plan = torch.arange(9, device=DEVICE), PackedPlan([4, 5], DEVICE)
    with torch.no_grad():
        expected = policy.hidden(tokens, plan.positions, plan)
        away = FromHost(policy)
        assert all(p.device.type == "cpu" for p in policy.model.parameters())
        for _ in range(2):
            with away.present():
                assert all(p.device.type == DEVICE.type for p in policy.model.parameters())
                assert torch.equal(away.hidden(tokens, plan.positions, plan), expected)
                whole = policy.weights.joined(parts)
                assert whole.data_ptr() == parts[0].data_ptr() and torch.equal(whole, joined)
            assert all(p.device.type == "cpu" for p in policy.model.parameters())
    assert away.head.weight_VE is policy.head.weight_VE


@pytest.mark.parametrize("tied", [True, False])
def test_a_layer_runs_when_what_it_reads_is_there(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    """All outside of layers, every layer up to it, and the norm that the next one begins with."""
    policy = Policy(tiny_model("qwen2", num_hidden_layers=3, tie_word_embeddings=tied).to(DEVICE).requires_grad_(False))
    layers = policy.body.layers
    inside = {id(p) for layer in layers for p in layer.parameters()}
    away, asked = FromHost(policy), []
    for index in range(3):
        there = {unit.name for _, unit in away._units[: away._needed[index]]}
        for parameter in policy.model.parameters():
            early = id(parameter) not in inside or any(parameter is p for p in layers[index].parameters())
            following = index < 2 and parameter is layers[index + 1].input_layernorm.weight
            assert policy.weights.place(parameter)[0].name in there or not (early or following)
    assert away._needed[-1] == len(away._homes) and away._needed[0] < away._needed[-1]
    monkeypatch.setattr(FromHost, "_wait_for", lambda self, layer: asked.append(layer))
    tokens, plan = torch.arange(9, device=DEVICE), PackedPlan([4, 5], DEVICE)
    with torch.no_grad(), away.present():
        away.hidden(tokens, plan.positions, plan)
    assert asked == [0, 0, 1, 2]


def test_norms_are_tried_once_wherever_their_weights_go() -> None:
    """Trying reads values, which are not there yet where weights arrive while layers run."""
    policy = Policy(tiny_model("gemma2", num_hidden_layers=2).to(DEVICE).requires_grad_(False))
    shapes = layer_shapes(policy)
    kinds = [layer.before_attention.kind for layer in read_parts(policy, shapes).layers]
    assert kinds == [OFFSET, OFFSET]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.fill_(float("nan"))
    assert [layer.before_attention.kind for layer in read_parts(policy, shapes).layers] == kinds


def test_fused_layers_keep_nothing_of_weights_that_left() -> None:
    """What a pass made of the weights' places is gone with them."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from trimtab.model.fused import FusedForward

    policy = Policy(tiny_model("qwen2", num_hidden_layers=1).to(DEVICE).requires_grad_(False), check=False)
    policy.fused_forward = FusedForward(policy)
    tokens, plan = torch.arange(9, device=DEVICE), PackedPlan([4, 5], DEVICE)
    away = FromHost(policy)
    with torch.no_grad():
        for _ in range(2):
            with away.present():
                away.hidden(tokens, plan.positions, plan)
                joined = weakref.ref(policy.fused_forward.parts.layers[0].qkv.weight)
                assert joined() is not None
            gc.collect()
            assert joined() is None and not policy.fused_forward._known


def test_memory_that_runs_out_before_the_first_pass_is_told_as_that() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    from trimtab.model.fused import FusedForward

    policy = Policy(tiny_model("qwen2", num_hidden_layers=1).to(DEVICE).requires_grad_(False), check=False)
    policy.fused_forward = FusedForward(policy)
    away = FromHost(policy)
    with pytest.raises(torch.OutOfMemoryError), away.present():
        raise torch.OutOfMemoryError("before the first layer")
    assert all(p.device.type == "cpu" for p in policy.model.parameters())
