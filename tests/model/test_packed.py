"""Packed = unpacked: for every architecture, forward and backward, against a plain padded forward in float64."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy, refuse_other_layers

LENGTHS = [3, 11, 11, 1, 19, 7]


def rows(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in LENGTHS]


def padded_reference(architecture: str, sequences: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of every next token from one right-padded eager forward, and the gradient of a fixed weighting of them."""
    model = tiny_model(architecture, torch.float64)
    model.set_attn_implementation("eager")
    longest = max(LENGTHS)
    ids = torch.stack([torch.nn.functional.pad(s, (0, longest - len(s))) for s in sequences])
    # Padding on the right is behind every real token, so causality alone hides it and no padding mask is needed.
    logits = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)
    chosen = [logits[i, :-1].gather(1, ids[i, 1:, None])[: len(s) - 1, 0] for i, s in enumerate(sequences)]
    flat = torch.cat(chosen)
    (flat * weighting(flat)).sum().backward()
    return flat.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def weighting(flat: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1.0, 2.0, flat.shape[0], dtype=flat.dtype)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_equals_padded_forward_and_backward(architecture: str, checkpointed: bool) -> None:
    sequences = rows()
    expected, gradients = padded_reference(architecture, sequences)
    policy = Policy(tiny_model(architecture, torch.float64))
    if checkpointed:
        policy.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    plan = PackedPlan(LENGTHS, "cpu")
    hidden = policy.hidden(torch.cat(sequences), plan.positions, plan)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    predictors = torch.cat([torch.arange(a, b - 1) for a, b in pairwise(starts)])
    targets = torch.cat([s[1:] for s in sequences])
    logprobs = policy.head.token_stats(hidden[predictors], targets, 1.0, chunk=5).logprobs
    # transformers' eager attention takes its softmax in float32, which bounds how well the two can agree.
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)
    (logprobs * weighting(logprobs)).sum().backward()
    found = {n: p.grad for n, p in policy.model.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        scale = gradient.abs().max().item() + 1e-12
        torch.testing.assert_close(
            found[name] / scale, gradient / scale, atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_neighbours_do_not_leak_into_each_other() -> None:
    """Changing one sequence changes nothing in the others, exactly."""
    policy = Policy(tiny_model("llama"))
    plan = PackedPlan([6, 6, 9], "cpu")
    tokens = torch.randint(3, VOCABULARY, (21,), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[6:12] = (changed[6:12] + 5 - 3) % (VOCABULARY - 3) + 3
    with torch.no_grad():
        one, two = (policy.hidden(t, plan.positions, plan) for t in (tokens, changed))
    assert torch.equal(one[:6], two[:6])
    assert torch.equal(one[12:], two[12:])
    assert not torch.allclose(one[6:12], two[6:12])


@pytest.mark.parametrize("architecture", ["bloom"])
def test_architectures_outside_the_interface_are_refused_by_name(architecture: str) -> None:
    config = AutoConfig.for_model(architecture, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, n_head=4)
    with pytest.raises(ModelError, match=f"(?i){architecture}ForCausalLM does not use"):
        Policy(AutoModelForCausalLM.from_config(config))


def test_a_model_whose_packing_differs_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the registered attention were wrong for an architecture, loading it must say so."""
    monkeypatch.setattr(
        PackedPlan, "attend", lambda self, layer, q, k, v, rules: v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    )
    with pytest.raises(ModelError, match="LlamaForCausalLM computes different log-probs when sequences are packed"):
        Policy(tiny_model("llama"))


def test_layers_of_an_unknown_kind_are_refused_by_name() -> None:
    model = tiny_model("qwen2")
    model.config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="Qwen2ForCausalLM has layers of kind linear_attention"):
        Policy(model)


PHIMOE = {"sliding_window": 40, "num_local_experts": 2, "num_experts_per_tok": 1}


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("diffllama", {}, "layer 0 attends more than once"),  # a cache would keep its second values
        ("phimoe", PHIMOE, "a sliding window of 40 tokens and do not pass it"),  # which short sequences cannot show
        ("nemotron", {}, "the attention plan did not reach"),
        ("doge", {}, "its layers make masks of their own"),
        ("roberta", {}, "tokens see later tokens"),
    ],
)
def test_layers_that_attend_otherwise_are_refused_with_weights_and_without(
    architecture: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    told = f"cannot run through Trimtab's attention: .*{why}"
    model = tiny_model(architecture, **changes)
    with pytest.raises(ModelError, match=told):
        Policy(model)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=told):
        refuse_other_layers(Model(path=str(tmp_path)))


def test_layers_with_other_windows_than_the_probe_is_long_are_served() -> None:
    Policy(tiny_model("mistral", sliding_window=40)).look_at_layers()


def test_log_probs_in_float64_may_differ_by_what_a_float32_softmax_costs() -> None:
    """Gemma 4 does not scale its scores, so its softmax rounds most."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 4}
    Policy(tiny_model("gemma4_text", torch.float64, layer_types=kinds, vocab_size_per_layer_input=VOCABULARY, **sizes))


def test_dropout_is_off() -> None:
    model = tiny_model("gpt2", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    policy = Policy(model)
    plan = PackedPlan([8], "cpu")
    with torch.no_grad():
        one, two = (policy.hidden(torch.arange(3, 11), plan.positions, plan) for _ in range(2))
    assert torch.equal(one, two)


FLOAT32_ROUTERS = {"deepseek_v2", "glm4_moe"}
"""Families whose router is a product in float32, whatever the model's type: it rounds by the number of rows."""


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_completions_that_share_a_prompt_equal_whole_sequences(architecture: str) -> None:
    """The prompt is in the row once, and each completion continues from it as if it had its own."""
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=g) for n in (9, 2)]
    completions = [(0, 1), (0, 7), (0, 7), (1, 4), (1, 12)]
    ends = [torch.randint(3, VOCABULARY, (n,), generator=g) for _, n in completions]
    policy = Policy(tiny_model(architecture, torch.float64))
    plan = PackedPlan([9, 2, *(n for _, n in completions)], "cpu", [None, None, *(p for p, _ in completions)])
    with torch.no_grad():
        shared = policy.hidden(torch.cat([*prompts, *ends]), plan.positions, plan)
        alone = []
        for (prompt, n), end in zip(completions, ends):
            own = PackedPlan([len(prompts[prompt]) + n], "cpu")
            alone.append(policy.hidden(torch.cat([prompts[prompt], end]), own.positions, own)[-n:])
    rounded = architecture in FLOAT32_ROUTERS
    torch.testing.assert_close(shared[11:], torch.cat(alone), atol=2e-6 if rounded else 1e-9, rtol=0)


@pytest.mark.parametrize(
    ("error", "told"),
    [(torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError), (RuntimeError("a shape"), ModelError)],
)
def test_memory_that_runs_out_says_nothing_about_an_architecture(
    error: Exception, told: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: Policy) -> torch.Tensor:
        raise error

    monkeypatch.setattr(Policy, "probe", failing)
    with pytest.raises(told):
        Policy(tiny_model())


def test_weights_that_are_no_numbers_are_named() -> None:
    model = tiny_model()
    name, weight = next((n, w) for n, w in model.named_parameters() if "layers" in n)
    with torch.no_grad():
        weight.view(-1)[0] = float("nan")
    with pytest.raises(ModelError, match=rf"NaN: {name} holds values that are not finite"):
        Policy(model)


def test_layers_that_add_noise_while_they_are_trained_are_refused(tmp_path: Path) -> None:
    """By name before weights are read, and by what they compute."""
    model = tiny_model("phimoe", num_local_experts=4, num_experts_per_tok=2)
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM draws its experts by chance.*The nearest.*mixtral"):
        Policy(model)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="draws its experts by chance"):
        refuse_other_layers(Model(path=str(tmp_path)))
    Policy(tiny_model("mixtral", router_jitter_noise=0.5))  # which can be switched off
    noisy = tiny_model("mixtral")
    mlp = noisy.model.layers[0].mlp
    before = mlp.forward
    mlp.forward = lambda x: before(x) * (1.5 if mlp.training else 1.0)
    with pytest.raises(ModelError, match="MixtralForCausalLM computes other log-probs while it is trained"):
        Policy(noisy)
