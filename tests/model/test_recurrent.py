"""Layers that carry a state, in packed rows: what a sequence gives does not depend on what lies beside it, and a prompt that is
in the row once gives all its samples what it would give each of them, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import BASE, HYBRIDS, MIXTURE_HYBRIDS, VOCABULARY, tiny_hybrid, tiny_model
from transformers import AutoConfig

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model import recurrent
from trimtab.model.context import HYBRIDS as SERVED
from trimtab.model.load import load_config
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.recurrent import PackedMixing, State
from trimtab.model.shapes import layer_shapes, state_shapes
from trimtab.model.versions import STATES_ARE_HANDED

pytestmark = pytest.mark.skipif(not STATES_ARE_HANDED, reason="transformers before 5.22 hands no states over")
COVER = ["qwen3_next", "olmo_hybrid", "lfm2", "nemotron_h"]
GROUPS = [(9, [5, 1, 7]), (4, [3, 3]), (1, [2]), (12, [])]
"""Prompts and their samples: of unequal and equal lengths, of one token, without samples."""
Tokens = list[tuple[torch.Tensor, list[torch.Tensor]]]


def drawn(groups: list[tuple[int, list[int]]], seed: int = 1) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randint(3, VOCABULARY, (n,), generator=g),
            [torch.randint(3, VOCABULARY, (m,), generator=g) for m in own],
        )
        for n, own in groups
    ]


def packed_hidden(policy: Policy, groups: Tokens) -> list[torch.Tensor]:
    """Log-probs over the vocabulary, segment by segment, of one row in which each prompt is once."""
    segments, prefixes = [], []
    for prompt, samples in groups:
        at = len(segments)
        segments += [prompt, *samples]
        prefixes += [None, *[at] * len(samples)]
    plan = PackedPlan([len(s) for s in segments], "cpu", prefixes=prefixes)
    hidden = policy.hidden(torch.cat(segments), plan.positions, plan)
    return list(policy.head.logits(hidden).log_softmax(-1).split(plan.lengths))


def weighted(logprobs: torch.Tensor) -> torch.Tensor:
    """A fixed weighting of the log-probs of a sample."""
    return (logprobs * torch.linspace(-1, 2, logprobs.numel(), dtype=logprobs.dtype).view_as(logprobs)).sum()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        gap = float((found[name] - gradient).abs().max() / (gradient.abs().max() + 1e-9))
        assert gap <= tolerance, f"{name}: off by {gap:.2g} of its largest"


def assert_as_alone(make: Callable[[torch.dtype], Any], checkpointed: bool = False) -> None:
    """A packed row with shared prompts against transformers' own forward pass of each sample with its prompt, by itself."""
    # Their delta rule and scan compute in float32, whatever the type.
    groups = drawn(GROUPS)
    model = make(torch.float64)
    model.set_attn_implementation("eager")
    total: Any = 0.0
    expected = []
    for prompt, samples in groups:
        for sample in samples:
            out = model(input_ids=torch.cat((prompt, sample))[None], use_cache=False).logits[0].log_softmax(-1)
            expected.append(out.detach())
            total = total + weighted(out[len(prompt) :])
    total.backward()
    theirs = gradients(model)
    policy = Policy(make(torch.float64))
    if checkpointed:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    rows, total, at = packed_hidden(policy, groups), 0.0, 0
    for _, samples in groups:
        head, at = rows[at], at + 1
        for _ in samples:
            whole = torch.cat((head, rows[at]))
            torch.testing.assert_close(whole.detach(), expected.pop(0), atol=2e-4, rtol=0, check_dtype=False)
            total, at = total + weighted(rows[at]), at + 1
    total.backward()
    assert_close(gradients(policy.model), theirs)


@pytest.mark.parametrize("name", COVER)
def test_a_shared_prompt_gives_what_separate_sequences_give(name: str) -> None:
    assert_as_alone(lambda dtype: tiny_hybrid(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("name", HYBRIDS)
def test_every_family_forward_and_backward(name: str, checkpointed: bool) -> None:
    assert_as_alone(lambda dtype: tiny_hybrid(name, dtype), checkpointed)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURE_HYBRIDS)
def test_every_mixture_forward_and_backward(name: str) -> None:
    assert_as_alone(lambda dtype: tiny_model(name, dtype, **MIXTURE_HYBRIDS[name]))


def test_layers_that_are_computed_again_see_the_same_states() -> None:
    assert_as_alone(lambda dtype: tiny_hybrid("qwen3_5_text", dtype), checkpointed=True)


def test_neighbours_do_not_leak_into_each_other() -> None:
    """Changing one sequence changes nothing in the others, exactly."""
    for name in COVER:
        policy = Policy(tiny_hybrid(name))
        plan = PackedPlan([6, 6, 9], "cpu")
        tokens = torch.randint(3, VOCABULARY, (21,), generator=torch.Generator().manual_seed(1))
        changed = tokens.clone()
        changed[6:12] = (changed[6:12] + 5 - 3) % (VOCABULARY - 3) + 3
        with torch.no_grad():
            one, two = (policy.hidden(t, plan.positions, plan) for t in (tokens, changed))
        assert torch.equal(one[:6], two[:6]) and torch.equal(one[12:], two[12:])
        assert not torch.equal(one[6:12], two[6:12])


def planted_leak(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    given = PackedMixing._given
    if what == "neighbour's prompt":
        monkeypatch.setattr(
            PackedMixing, "_given",
            lambda self, *args: State(*(None if x is None else x.roll(1, 0) for x in vars(given(self, *args)).values())),
        )  # fmt: skip
    elif what == "no gradient to the prompt":
        monkeypatch.setattr(
            PackedMixing, "_given",
            lambda self, *args: State(*(None if x is None else x.detach() for x in vars(given(self, *args)).values())),
        )  # fmt: skip
    else:  # one long sequence, as a row is to a mixer that is not told
        monkeypatch.setattr(
            PackedMixing, "__call__", lambda self, mixer, x_TE: mixer.mix(x_TE[None], None)[0].squeeze(0)
        )


@pytest.mark.parametrize("what", ["neighbour's prompt", "no gradient to the prompt"])
def test_planted_errors_in_the_state_of_a_prompt_are_caught(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_leak(monkeypatch, what)
    with pytest.raises((AssertionError, ModelError)):
        assert_as_alone(lambda dtype: tiny_hybrid("qwen3_next", dtype))


@pytest.mark.parametrize("name", COVER)
def test_a_model_that_leaks_between_neighbours_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_leak(monkeypatch, "one sequence")
    with pytest.raises(ModelError, match="different log-probs when sequences are packed"):
        Policy(tiny_hybrid(name))


@pytest.mark.parametrize("name", COVER)
def test_a_prompts_state_that_goes_to_the_wrong_samples_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planted_leak(monkeypatch, "neighbour's prompt")
    with pytest.raises(ModelError, match="different log-probs when sequences are packed"):
        Policy(tiny_hybrid(name))


def test_what_layers_carry_is_seen_in_a_forward_pass() -> None:
    found = state_shapes(Policy(tiny_hybrid("qwen3_next")))
    assert found.keys() == {0, 1}
    assert (found[0].conv, found[0].recurrent) == ((56, 4), (4, 8, 6))
    assert found[0].nbytes == 4 * (56 * 4 + 4 * 8 * 6)
    both = Policy(tiny_hybrid("falcon_h1"))
    assert layer_shapes(both).keys() == state_shapes(both).keys() == {0, 1, 2}
    assert state_shapes(Policy(tiny_model("llama"))) == {}


def test_segments_of_like_length_run_together() -> None:
    batches = recurrent.batches_of([5, 300, 6, 310, 40, 7], [True] * 5 + [False], [False] * 6)
    assert [(b.segments, b.length, b.begins, b.padded) for b in batches] == [
        ([0, 2], 6, True, True), ([4], 40, True, False), ([1, 3], 310, True, True), ([5], 7, False, False),
    ]  # fmt: skip
    assert all(not b.padded for b in recurrent.batches_of([5, 6, 5], [True] * 3, [True] * 3))


def test_families_that_are_served_are_those_that_are_compared() -> None:
    assert set(SERVED) == HYBRIDS.keys() | MIXTURE_HYBRIDS.keys()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("mamba2", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2}),
        ("jamba", {"num_experts": 1, "mamba_d_state": 4, "mamba_dt_rank": 4}),
        ("kimi_linear", {"head_dim": 8}),
        ("mamba", {}),
        ("recurrent_gemma", {"attention_window_size": 8}),
    ],
)
def test_other_families_that_carry_states_are_refused_by_name(
    kind: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    """And told what is served instead, before any weight is read."""
    AutoConfig.for_model(kind, **{**BASE, **changes}).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=rf"carry a state.*not compared \({kind}\)\. .*serves: bamba, .*qwen3_next"):
        load_config(Model(path=str(tmp_path)))


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="none of its layers attends"):
        Policy(tiny_hybrid("granitemoehybrid", layer_types=["linear_attention"] * 3))
