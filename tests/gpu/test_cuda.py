"""The CUDA paths against the CPU ones: flash attention over packed rows, the engine, the gradient. Skipped without a device."""

from __future__ import annotations

import pytest
import torch
from rollout.test_engine import GREEDY, engine, generate, prompts
from tiny import ARCHITECTURES, VOCABULARY, tiny_model
from update.test_updater import samples

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn, Sampling
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.rollout.trajectory import Group
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.samples import to_samples
from trimtab.update.updater import Updater

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTHS = [3, 11, 11, 1, 19, 7]


def on_cuda(architecture: str, dtype: torch.dtype, **changes) -> Policy:
    return Policy(tiny_model(architecture, dtype, **changes).cuda())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_packed_bf16_forward_is_as_close_to_float64_as_bf16_allows(architecture: str) -> None:
    """The flash path may not be further from the exact answer than twice what eager bfloat16 on the CPU is."""
    tokens = torch.randint(3, VOCABULARY, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))

    def logprobs(policy: Policy) -> torch.Tensor:
        device = policy.device
        plan = PackedPlan(LENGTHS, device)
        with torch.no_grad():
            hidden = policy.hidden(tokens.to(device), plan.positions, plan)
        return policy.head.logits(hidden).log_softmax(-1).double().cpu()

    exact = logprobs(Policy(tiny_model(architecture, torch.float64)))
    eager = logprobs(Policy(tiny_model(architecture, torch.bfloat16), check=False))
    flash = logprobs(on_cuda(architecture, torch.bfloat16))
    weight = exact.exp()
    error_eager, error_flash = ((weight * (x - exact).abs()).sum(-1).mean() for x in (eager, flash))
    assert error_flash < 2 * error_eager + 0.01


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gemma3_text"])
def test_completions_that_share_a_prompt_equal_whole_sequences(architecture: str) -> None:
    """Queries shorter than their keys, causal from the end, with and without a window: the flash kernel's own alignment."""
    g = torch.Generator().manual_seed(2)
    prompt = torch.randint(3, VOCABULARY, (9,), generator=g).cuda()
    ends = [torch.randint(3, VOCABULARY, (n,), generator=g).cuda() for n in (1, 7, 7, 20)]
    policy = on_cuda(architecture, torch.bfloat16)
    plan = PackedPlan([9, *map(len, ends)], "cuda", [None, *[0] * len(ends)])
    with torch.no_grad():
        shared = policy.head.logits(policy.hidden(torch.cat([prompt, *ends]), plan.positions, plan)[9:]).log_softmax(-1)
        alone = []
        for end in ends:
            own = PackedPlan([9 + len(end)], "cuda")
            alone.append(policy.hidden(torch.cat([prompt, end]), own.positions, own)[-len(end) :])
    expected = policy.head.logits(torch.cat(alone)).log_softmax(-1)
    assert ((shared - expected).abs() * expected.exp()).sum(-1).max() < 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_generate(architecture: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    asked = prompts(4)
    found = generate(engine(on_cuda(architecture, torch.float32)), asked, samples=1, sampling=GREEDY)
    model = tiny_model(architecture).cuda()
    model.set_attn_implementation("eager")
    for prompt in asked:
        ids = torch.tensor([prompt.tokens], device="cuda")
        out = model.generate(ids, max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert found[prompt.id, 0].tokens.tolist() == out[0, len(prompt.tokens) :].tolist()


def test_sampled_tokens_do_not_depend_on_the_schedule() -> None:
    policy = on_cuda("llama", torch.float32)
    asked = prompts(6, shared=9)
    whole, cut = generate(engine(policy), asked), generate(engine(policy, max_sequences=3, prefill_tokens=5), asked)
    assert {k: t.tokens.tolist() for k, t in whole.items()} == {k: t.tokens.tolist() for k, t in cut.items()}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_engine_logprobs_equal_the_trainers(dtype: torch.dtype, tolerance: float) -> None:
    policy = on_cuda("llama", dtype, head_dim=32)
    found = generate(engine(policy), prompts(6), sampling=Sampling())
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=200,
        score_token_budget=200,
        logprob_chunk=16,
        checkpoint_activations=False,
    )
    flat = [s for group in to_samples([Group(t.prompt, [t]) for t in found.values()]) for s in group]
    updater.score(flat, policy, "old_logprobs")
    gap = torch.cat([(s.old_logprobs - s.engine_logprobs).abs() for s in flat])
    assert gap.mean() < tolerance


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("budget", [20, 200])
def test_bf16_gradient_points_where_the_float64_one_does(checkpointed: bool, budget: int) -> None:
    def gradient(policy: Policy) -> torch.Tensor:
        updater = Updater(
            policy,
            PolicyGradient(resolve(Learn())),
            resolve(Learn()),
            token_budget=budget,
            score_token_budget=200,
            logprob_chunk=16,
            checkpoint_activations=checkpointed,
        )
        captured: list[torch.Tensor] = []

        def capture(lr: float):
            captured.extend(g.double().flatten().cpu() for g in updater.optimizer.grads() if g is not None)
            raise StopIteration

        updater.optimizer.apply = capture
        batch = samples()
        for sample in batch:
            sample.old_logprobs = sample.ref_logprobs = None
        with pytest.raises(StopIteration):
            updater.step(batch, 1.0, 0.0)
        return torch.cat(captured)

    exact = gradient(Policy(tiny_model("llama", torch.float64, head_dim=32)))
    found = gradient(on_cuda("llama", torch.bfloat16, head_dim=32))
    assert torch.nn.functional.cosine_similarity(exact, found, dim=0) > 0.99
    assert 0.95 < found.norm() / exact.norm() < 1.05


def test_a_step_trains_and_leaves_no_page_behind() -> None:
    policy = on_cuda("qwen2", torch.bfloat16)
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=64,
        score_token_budget=64,
        logprob_chunk=16,
        checkpoint_activations=False,
    )
    before = [p.detach().clone() for p in policy.parameters()]
    batch = samples()
    for sample in batch:
        sample.old_logprobs = sample.ref_logprobs = None
    assert updater.step(batch, 1e-2, 0.0).applied
    assert any(not torch.equal(a, b) for a, b in zip(before, policy.parameters()))
    native = engine(policy)
    generate(native, prompts(3))
    assert native.pool.held == 0
