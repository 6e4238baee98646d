"""The update on a CUDA device in bfloat16: as near to float64 as the model's own modules, and nearer where it keeps more bits."""

from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.attention import Rules, dense_attention
from trimtab.model.gradients import Gradients
from trimtab.model.head import Head
from trimtab.model.kernel_choice import fuse
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import FromHost, Policy
from trimtab.model.sizes import BLOCK
from trimtab.update import optimizer as optimizers
from trimtab.update.batch import Sample
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [37, 64, 5, 90]
PREFIXES = [None, 0, 0, None]


def gradients(policy: Policy) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of a row with a shared prompt, and the gradient of their weighted sum."""
    tokens = torch.randint(
        0, policy.config.vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(3)
    ).cuda()
    plan = PackedPlan(LENGTHS, "cuda", prefixes=PREFIXES)
    hidden = policy.hidden(tokens, plan.positions, plan)
    stats = policy.head.token_stats(hidden[:-1].contiguous(), tokens[1:], 0.9, 64, policy.gradients)
    weights = torch.linspace(-1, 1, len(tokens) - 1, device="cuda", dtype=stats.logprobs.dtype)
    (stats.logprobs * weights + 0.01 * stats.entropy).sum().backward()
    found = {name: p.grad.double() for name, p in policy.model.named_parameters() if p.grad is not None}
    policy.model.zero_grad()
    return stats.logprobs.detach().double(), found


def distance(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Of two gradients, relative to the size of the second."""
    assert found.keys() == exact.keys()
    off = sum(((found[name] - exact[name]) ** 2).sum() for name in exact)
    return float((off / sum((g**2).sum() for g in exact.values())).sqrt())


def compare(model) -> None:
    model = model.to(torch.bfloat16)
    exact_logprobs, exact = gradients(Policy(copy.deepcopy(model).double().cuda(), check=False))
    own_logprobs, own = gradients(Policy(copy.deepcopy(model).cuda(), check=False))
    policy = Policy(model.cuda())
    fuse(policy)
    assert policy.description == "fused layers"
    logprobs, found = gradients(policy)
    assert (logprobs - exact_logprobs).abs().mean() <= 1.2 * (own_logprobs - exact_logprobs).abs().mean()
    assert distance(found, exact) <= 1.2 * distance(own, exact) + 1e-3


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite"]
)
def test_fused_gradients_are_as_near_to_float64_as_the_modules(architecture: str) -> None:
    compare(tiny_model(architecture, num_hidden_layers=3))


def test_adapters_too() -> None:
    settings = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    compare(get_peft_model(tiny_model("qwen2", num_hidden_layers=3), settings))


def test_other_architectures_run_as_their_own_modules_and_say_so() -> None:
    policy = Policy(tiny_model("olmo2").to(torch.bfloat16).cuda())
    fuse(policy)
    assert policy.description.endswith("fused layers were not tested with the architecture olmo2")


@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (7, 1)])
def test_grouped_flash_attention_equals_dense(heads: int, kv_heads: int, window: int | None) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    whole = torch.randn(sum(LENGTHS), heads + 2 * kv_heads, 64, generator=g, device="cuda").bfloat16().requires_grad_()
    plan, rules = PackedPlan(LENGTHS, "cuda", prefixes=PREFIXES), Rules(0.125, window)
    out = plan.attend(0, *whole.split((heads, kv_heads, kv_heads), 1), rules)
    weights = torch.randn(out.shape, generator=g, device="cuda")
    (out * weights).sum().backward()
    exact = whole.detach().double().requires_grad_()
    q, k, v = exact.split((heads, kv_heads, kv_heads), 1)
    parts, starts = [], [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for i, prefix in enumerate(PREFIXES):
        own = slice(starts[i], starts[i + 1])
        before = slice(0, 0) if prefix is None else slice(starts[prefix], starts[prefix + 1])
        rows = torch.cat([torch.arange(before.start, before.stop), torch.arange(own.start, own.stop)]).cuda()
        at = torch.arange(len(rows), device="cuda")
        mine = at[len(rows) - LENGTHS[i] :]
        far = mine[:, None] - at[None, :]
        allowed = (far >= 0) & (far < (window or 10**9))
        part = dense_attention(
            q[own].transpose(0, 1)[None], k[rows].transpose(0, 1)[None], v[rows].transpose(0, 1)[None], rules, allowed
        )
        parts.append(part[0].transpose(0, 1))
    expected = torch.cat(parts)
    (expected * weights).sum().backward()
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)
    off = (whole.grad.double() - exact.grad).norm() / exact.grad.norm()
    assert off < 1e-2


@pytest.mark.parametrize("vocabulary", [151936, 50257, 1000])
def test_the_head_in_half_precision_never_stores_logits(vocabulary: int) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    hidden = torch.randn(1000, 256, generator=g, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, 256, generator=g, device="cuda") / 8).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (1000,), generator=g, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stats = Head(weight).token_stats(hidden, targets, 1.0, 128)
    assert torch.cuda.max_memory_allocated() - before < 1000 * vocabulary
    stats.logprobs.sum().backward()
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    logp = (exact_hidden @ exact_weight.t()).log_softmax(-1)
    chosen = logp.gather(1, targets[:, None])[:, 0]
    chosen.sum().backward()
    torch.testing.assert_close(stats.logprobs.double(), chosen, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(stats.entropy.double(), -(logp.exp() * logp).sum(-1), atol=1e-4, rtol=1e-4)
    for found, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert (found.double() - exact).norm() / exact.norm() < 5e-3


def step_of(policy: Policy, **settings) -> tuple[list[torch.Tensor], Updater]:
    """Working weights after two optimizer steps on three samples, two of them of one prompt."""
    learn = resolve(Learn(lr=1e-3))
    sizes = {"token_budget": 40, "score_token_budget": 40, "logprob_chunk": 16}
    updater = Updater(policy, PolicyGradient(learn), learn, **{"checkpoint_activations": False} | sizes | settings)
    draw = torch.Generator().manual_seed(0)
    samples = []
    for prompt, length in (([3, 5, 7], 9), ([3, 5, 7], 14), ([11, 4], 20)):
        tokens = torch.randint(0, policy.config.vocab_size, (length,), generator=draw)
        values = torch.randn(3, length, generator=draw)
        samples.append(Sample(prompt, tokens, values[0], torch.full((length,), 1 / 43), values[1]))
    for _ in range(2):
        assert updater.step(samples, 1e-3, 0.0).applied
    return [p.detach().clone() for p in policy.parameters()], updater


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_where_things_are_kept_changes_nothing(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed, in host memory, streamed in pieces: the same bits, if flash attention adds up in order."""
    monkeypatch.setattr(optimizers, "MAX_PIECE_ELEMENTS", 12 * BLOCK)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        compare_settings(architecture)
    finally:
        torch.use_deterministic_algorithms(False)


def compare_settings(architecture: str) -> None:
    model = tiny_model(architecture, num_hidden_layers=3).to(torch.bfloat16)

    def run(**settings) -> list[torch.Tensor]:
        policy = Policy(copy.deepcopy(model).cuda())
        fuse(policy)
        assert policy.fused
        return step_of(policy, **settings)[0]

    plain = run()
    assert any(not torch.equal(a, b.detach().cuda()) for a, b in zip(plain, model.parameters()))
    for settings in (
        {"checkpoint_activations": "some"},
        {"checkpoint_activations": True},
        {"checkpoint_activations": True, "offload_activations": True},
        {"offload_optimizer": True},
    ):
        assert all(torch.equal(a, b) for a, b in zip(plain, run(**settings))), settings


def test_products_add_to_float32_sums() -> None:
    """As near to float64 as the sums of rounded products, and nothing passes through autograd but embedding and first norm."""
    model = tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16)
    exact = Policy(copy.deepcopy(model).double().cuda(), check=False)
    _, wanted = gradients(exact)
    policy = Policy(model.cuda())
    fuse(policy)
    policy.gradients = Gradients(policy.weights, policy.parameters())
    names = {id(p): name for name, p in policy.model.named_parameters()}
    _, left = gradients(policy)
    assert set(left) <= {name for name in wanted if "embed" in name or "layers.0.input_layernorm" in name}
    found = {}
    for parameter in policy.parameters():
        name, total = names[id(parameter)], policy.gradients.get(parameter)
        parts = [x for x in (left.get(name), None if total is None else total.double()) if x is not None]
        found[name] = sum(parts)
    assert distance(found, wanted) < 0.04


def test_a_reference_that_waits_in_host_memory_runs_fused() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).to(torch.bfloat16).cuda().requires_grad_(False))
    fuse(policy)
    tokens, plan = torch.arange(9, device="cuda"), PackedPlan([4, 5], "cuda")
    with torch.no_grad():
        expected = policy.hidden(tokens, plan.positions, plan)
        held = torch.cuda.memory_allocated()
        weights = sum(p.nbytes for p in policy.model.parameters())
        away = FromHost(policy)
        for _ in range(3):
            with away.present():
                assert torch.equal(away.hidden(tokens, plan.positions, plan), expected)
            assert held - torch.cuda.memory_allocated() > 0.9 * weights
    assert policy.description == "fused layers"


@pytest.mark.parametrize("fused", [True, False])
def test_layers_of_a_reference_wait_for_weights_that_are_still_on_their_way(monkeypatch, fused: bool) -> None:
    policy = Policy(tiny_model("qwen3", num_hidden_layers=4).to(torch.bfloat16).cuda().requires_grad_(False))
    if fused:
        fuse(policy)
        assert policy.fused
    tokens, plan = torch.arange(9, device="cuda"), PackedPlan([4, 5], "cuda")
    with torch.no_grad():
        expected = policy.hidden(tokens, plan.positions, plan)
        away = FromHost(policy)
        record = away._inward.record_event

        def slowly() -> torch.cuda.Event:
            event = record()
            torch.cuda._sleep(2_000_000)  # a millisecond between one storage and the next
            return event

        monkeypatch.setattr(away._inward, "record_event", slowly)
        monkeypatch.setattr(torch, "empty_like", lambda x, **where: torch.full_like(x, 255, **where))
        for _ in range(2):
            with away.present():
                found = [away.hidden(tokens, plan.positions, plan) for _ in range(2)]
            assert all(torch.equal(hidden, expected) for hidden in found)


def test_the_host_never_waits_between_the_first_micro_batch_and_the_norm() -> None:
    policy = Policy(tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16).cuda())
    fuse(policy)
    _, updater = step_of(policy)
    tokens = [torch.randint(0, 64, (n,)) for n in (9, 30)]
    samples = [Sample([3, 5], t, torch.randn(len(t)), torch.ones(len(t)) / 39, torch.randn(len(t))) for t in tokens]
    apply = updater.optimizer.apply

    def step(lr: float):
        torch.cuda.set_sync_debug_mode("default")
        return apply(lr)

    updater.optimizer.apply = step
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert updater.step(samples, 1e-3, 0.0).microbatches == 2
    finally:
        torch.cuda.set_sync_debug_mode("default")
