"""Keys and values in 8 bits: how far codes are off, kernels that write and read the same codes, an engine whose tokens do not
depend on what it finds in its pages and what it computes again."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from rollout.test_engine import engine, generate, prompts
from tiny import tiny_model

from tests.invariants.test_gradient_invariance import assert_same_gradient, step
from trimtab.base.errors import ConfigError
from trimtab.config.learn import Sampling
from trimtab.model.kernels.e4m3 import from_e4m3, to_e4m3
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.plan.job import Job
from trimtab.plan.quantised import refuse_kv
from trimtab.plan.shape import read_shape
from trimtab.rollout.native.kv_codes import decode, encode, stored_bytes
from trimtab.run.shapes import shape_of_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@triton.jit
def there_and_back(X, CODES, BACK, N: tl.constexpr):
    at = tl.arange(0, N)
    code = to_e4m3(tl.load(X + at))
    tl.store(CODES + at, code.to(tl.uint8))
    tl.store(BACK + at, from_e4m3(code))


def heads(count: int, size: int, seed: int = 0) -> torch.Tensor:
    """Head vectors of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(count, 2, size, generator=generator)
    return found * torch.logspace(-6, 5, count)[:, None, None]


def test_codes_are_a_sixteenth_off_at_most_and_stay_as_they_are() -> None:
    x = torch.cat((heads(40, 16), torch.zeros(1, 2, 16), torch.full((1, 2, 16), 3e38)))
    codes, powers = encode(x)
    found = decode(codes, powers, torch.float64)
    least = 2.0**-10 * torch.exp2(powers[..., None].double())
    assert ((found - x.double()).abs() <= torch.maximum(x.double().abs() / 16, least)).all()
    again, same = encode(found.float())
    assert torch.equal(decode(again, same, torch.float64), found), "what was read is stored as it was"


def test_the_kernel_writes_and_reads_these_codes() -> None:
    """A decode step over pages in codes is dense attention over what the codes stand for, the new token's among them."""
    from trimtab.model.attention import Rules
    from trimtab.rollout.native.kernels.attention import DecodeBatch, DecodeShape, Partials, decode_attention

    shape, page, lengths = DecodeShape(4, 2, 16, 16), 4, [5, 0, 9]
    tables = torch.tensor([[3, 0, 7], [5, 1, 2], [6, 4, 8]], device=DEVICE)
    stored = [heads(9 * page, 16, seed).to(DEVICE) / 100 for seed in (1, 2)]
    keys, values = (encode(x)[0].view(9, page, 2, 16) for x in stored)
    powers = tuple(encode(x)[1].view(9, page, 2) for x in stored)
    q = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    k, v = (heads(3, 16, seed).to(DEVICE) for seed in (4, 5))
    index = torch.arange(3, device=DEVICE)
    batch = DecodeBatch(
        index, tables, torch.tensor(lengths, device=DEVICE), torch.zeros(3, dtype=torch.int32, device=DEVICE),
        torch.zeros_like(index), None, page,
    )  # fmt: skip

    def empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=DEVICE)

    out = empty((3, 4, 16), torch.float32)
    rules = Rules(scale=0.25)
    decode_attention(batch, shape, rules, Partials(4, [shape], empty), q, k, v, keys, values, out, powers=powers)
    for i, length in enumerate(lengths):
        at = tables[i, length // page], length % page
        for x, codes, power in ((k, keys, powers[0]), (v, values, powers[1])):
            wanted, exponent = encode(x[i])
            assert torch.equal(codes[at], wanted) and torch.equal(power[at], exponent)
        seen = [(tables[i, t // page], t % page) for t in range(length + 1)]
        past_k, past_v = (
            torch.stack([decode(codes[p], power[p], torch.float64) for p in seen], 1)
            for codes, power in ((keys, powers[0]), (values, powers[1]))
        )
        for head in range(4):
            scores = (past_k[head // 2] @ q[i, head].double()) * 0.25
            expected = scores.softmax(0) @ past_v[head // 2]
            torch.testing.assert_close(out[i, head].double(), expected, rtol=1e-4, atol=1e-5)


def test_every_float_is_rounded_as_torch_rounds_it() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    every = every[every.isfinite()]
    between = torch.cat((every, every * 1.03125, every * 1.0625, every * 1.09375, every / 3, torch.randn(778) * 5))
    x = between.clamp(-448, 448)[:2048].to(DEVICE)
    assert len(x) == 2048
    codes, back = torch.zeros(2048, dtype=torch.uint8, device=DEVICE), torch.zeros(2048, device=DEVICE)
    there_and_back[(1,)](x, codes, back, N=2048)
    assert torch.equal(codes, x.to(torch.float8_e4m3fn).view(torch.uint8))
    assert torch.equal(back, x.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("stored", ["bf16", "fp8"])
def test_tokens_do_not_depend_on_how_the_engine_runs(stored: str) -> None:
    """Preempted sequences are prefilled again, others find their prompt in pages: every way sees the same rounded numbers."""
    policy = Policy(tiny_model("qwen3", torch.float64))  # in float32 another order of sums may round a key otherwise
    plain = generate(engine(policy), prompts(6))
    ways = [{}, {"max_sequences": 2}, {"page_tokens": 3}, {"prefill_tokens": 16}, {"prefix_cache": False}]
    found = [generate(engine(policy, kv_dtype=stored, **way), prompts(6)) for way in ways]
    page = engine(policy, kv_dtype=stored, page_tokens=4).page_bytes
    small = engine(policy, kv_dtype=stored, page_tokens=4, kv_bytes=16 * page)
    found.append(generate(small, prompts(6)))
    assert small.stats.preempted > 0
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, trajectory in other.items():
            assert trajectory.tokens.tolist() == found[0][key].tokens.tolist()
            torch.testing.assert_close(trajectory.logprobs, found[0][key].logprobs, rtol=1e-5, atol=1e-5)
    gaps = [(found[0][key].logprobs[0] - plain[key].logprobs[0]).abs() for key in plain]
    assert max(gaps) > 0, "the numbers are rounded"


@pytest.mark.parametrize("stored", ["auto", "bf16", "fp8"])
def test_the_planner_counts_what_a_page_takes(stored: str) -> None:
    policy = Policy(tiny_model("qwen3"))
    job = Job(shape_of_model(policy.model), 4, 1, 1, 8, 8, 8, kv_stored=stored)
    assert job.kv_token_bytes == sum(stored_bytes(s, torch.float32, stored) for s in layer_shapes(policy).values())
    assert engine(policy, kv_dtype=stored, page_tokens=4).page_bytes == 4 * job.kv_token_bytes
    cache = engine(policy, kv_dtype=stored, page_tokens=4)._decoder.cache
    assert sum(store[0].nbytes for store in cache._stores) == 4 * job.kv_token_bytes


def test_law_1_holds_with_keys_and_values_in_codes(model_folder, tmp_path) -> None:
    model = {"path": str(model_folder), "dtype": "float64", "kv_dtype": "fp8"}
    one = step(model_folder, tmp_path, model=model)
    two = step(model_folder, tmp_path, "rollout.max_sequences", 3, model=model)
    assert one[0] == two[0]
    assert_same_gradient(one[1], two[1])
    assert Sampling().temperature == 1.0


def test_latents_are_refused_by_name() -> None:
    shape = read_shape({
        "model_type": "deepseek_v3", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 50,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": None,
        "intermediate_size": 16, "first_k_dense_replace": 1, "moe_intermediate_size": 8, "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    })  # fmt: skip
    with pytest.raises(ConfigError, match=r"model\.kv_dtype.*Write model\.kv_dtype: auto"):
        refuse_kv("fp8", shape)
    refuse_kv("auto", shape)
