"""Multi-head latent attention: the native engine stores latents, and draws what transformers' own cache and modules draw."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer

from trimtab.config.learn import Sampling
from trimtab.config.schema import Lora
from trimtab.data.prompt import Prompt
from trimtab.model.adapters import add_adapters
from trimtab.model.attention import Rules
from trimtab.model.latent import Latent
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Group

PROMPTS = [[5, 9, 11, 30, 17, 44], [8, 9], [21, 50, 13, 13, 4, 33, 60, 7, 12]]
NEW = 10


def policy(architecture: str, adapters: bool = False) -> Policy:
    model = tiny_model(architecture)
    if adapters:
        model = add_adapters(model, Lora(r=3, targets=["kv_b_proj", "o_proj"]), seed=0)
        numbers = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if ".lora_B." in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=numbers))
    return Policy(model.double())


def engine(known: Policy, **settings) -> NativeEngine:
    usual = {"max_sequences": 8, "kv_bytes": 2**20, "page_tokens": 4, "prefill_tokens": 64, "prefix_cache": True}
    return NativeEngine(known, tiny_tokenizer(), [], **usual | settings)


def generate(made: NativeEngine, temperature: float, samples: int) -> list[Group]:
    sampling = Sampling(temperature=temperature)
    requests = [Request(Prompt(i, "", p), samples, NEW, sampling, seed=1, step=0) for i, p in enumerate(PROMPTS)]
    return sorted(made.generate(requests), key=lambda group: group.index)


@pytest.mark.parametrize(
    ("architecture", "adapters"), [("deepseek_v2", False), ("deepseek_v3", False), ("deepseek_v3", True)]
)
def test_greedy_completions_are_those_of_generate(architecture: str, adapters: bool) -> None:
    known = policy(architecture, adapters)
    groups = generate(engine(known), 0.0, 1)
    known.model.set_attn_implementation("eager")
    for group, prompt in zip(groups, PROMPTS):
        given = torch.tensor([prompt])
        with torch.no_grad():
            own = known.model.generate(
                input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=NEW, min_new_tokens=NEW,
                do_sample=False, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        assert group.trajectories[0].tokens.tolist() == own[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_log_probs_are_the_trainers_however_the_cache_is_used(architecture: str) -> None:
    """Whole, prefilled in chunks, with pages of one token, preempted: the same tokens, and the packed forward's log-probs."""
    known = policy(architecture)
    latent = sum(s.bytes_per_token(8) for s in layer_shapes(known, latents=True).values())
    ways = [{}, {"prefill_tokens": 3}, {"page_tokens": 1}, {"kv_bytes": latent * 4 * 13, "max_sequences": 6}]
    found = []
    for settings in ways:
        made = engine(known, **settings)
        found.append(generate(made, 1.0, 3))
        assert made.page_bytes == latent * made.pool.page_tokens
    assert made.stats.preempted > 0
    for groups in found[1:]:
        for one, other in zip(found[0], groups):
            assert [t.tokens.tolist() for t in one.trajectories] == [t.tokens.tolist() for t in other.trajectories]
    for group in found[0]:
        for trajectory in group.trajectories:
            row = torch.tensor([*group.prompt.tokens, *trajectory.tokens.tolist()])
            plan = PackedPlan([len(row)], known.device)
            with torch.no_grad():
                logp = known.head.logits(known.hidden(row, plan.positions, plan)).log_softmax(-1)
            drawn = logp[len(group.prompt.tokens) - 1 : -1].gather(1, trajectory.tokens[:, None])[:, 0]
            torch.testing.assert_close(trajectory.logprobs.double(), drawn.double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("heads", "latent", "rotated", "lengths"), [(4, 16, 4, [3, 0, 9]), (20, 24, 8, [70, 1])])
def test_the_kernel_attends_to_latents_as_dense_attention_does(
    heads: int, latent: int, rotated: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over pages in any order, with a row that is done, in one part and in several; and the new key is stored."""
    attention = pytest.importorskip("trimtab.rollout.native.kernels.attention", reason="Triton is not installed")
    from trimtab.rollout.native.kernels.latent import latent_attention

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numbers, size, page = torch.Generator().manual_seed(0), latent + rotated, 4
    width, count = max(lengths) // page + 1, len(lengths)
    pages = torch.randperm(count * width, generator=numbers).view(count, width)
    pages = torch.cat((pages, torch.zeros(1, width, dtype=torch.int64))).to(device)
    store = torch.randn(count * width, page, 1, size, generator=numbers).to(device)
    q, k = (torch.randn(count + 1, n, size, generator=numbers).to(device) for n in (heads, 1))
    index = torch.arange(count + 1, device=device)
    done = torch.tensor([0] * count + [1], dtype=torch.int32, device=device)
    positions = torch.tensor([*lengths, 0], device=device)
    batch = attention.DecodeBatch(index, pages, positions, done, torch.zeros_like(index), None, page)
    rules, expected, before = Rules(0.3), [], store.clone()
    for row, length in enumerate(lengths):
        seen = before[pages[row]].flatten(0, 1)[:length, 0]
        keys = torch.cat((seen, k[row]))
        shares = (q[row] @ keys.t() * 0.3).softmax(-1)
        expected.append(shares @ keys[:, :latent])
    for most in (1, 4):
        monkeypatch.setattr(attention, "MAX_SPLITS", most)
        space = attention.Partials(
            count + 1,
            [attention.DecodeShape(heads, 1, size, latent)],
            lambda shape, dtype: torch.full(shape, 7.0, device=device),
        )
        store.copy_(before)
        out = torch.full((count + 1, heads, latent), float("nan"), device=device)
        latent_attention(batch, rules, space, q, k, store, out)
        torch.testing.assert_close(out[:count], torch.stack(expected), atol=1e-4, rtol=1e-4)
        assert not out[count].any()
        for row, length in enumerate(lengths):
            assert torch.equal(store[pages[row, length // page], length % page, 0], k[row, 0])


def test_a_latent_is_stored_once_and_is_smaller() -> None:
    known = policy("deepseek_v2")
    whole, latent = layer_shapes(known)[0], layer_shapes(known, latents=True)[0]
    assert whole.bytes_per_token(1) == 4 * (12 + 6) and latent.bytes_per_token(1) == 16 + 4
    cache = engine(known)._decoder.cache
    assert cache.values[0].data_ptr() == cache.keys[0].data_ptr() and cache.latents == {0, 1, 2}


def test_a_wrong_matrix_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: values read through the keys' neighbour."""
    known, right = policy("deepseek_v2"), Latent.unfold
    expected = generate(engine(known), 1.0, 1)
    monkeypatch.setattr(Latent, "unfold", lambda self, out: right(self, out.roll(1, 1)))
    found = generate(engine(known), 1.0, 1)
    assert [g.trajectories[0].tokens.tolist() for g in found] != [g.trajectories[0].tokens.tolist() for g in expected]
