"""Sampling: a pure function of its key, the right distribution, the right support."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.config.learn import Sampling
from trimtab.rollout.sampler import keep, sample, stream_key, uniforms

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, -4.0]])


def draw(logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
    keys = torch.tensor([stream_key(0, 0, 0, s) for s in range(count)])
    return sample(logits.expand(count, -1), sampling, keys, torch.zeros(count, dtype=torch.int64))[0]


def test_uniforms_are_uniform_and_independent_of_the_batch() -> None:
    keys = torch.tensor([stream_key(1, 2, 3, s) for s in range(4096)])
    positions = torch.arange(4096) % 7
    u = uniforms(keys, positions)
    assert u.min() >= 0
    assert u.max() < 1
    # Of 4,096 draws each tenth holds 409.6 on average with a deviation of 19.2; six deviations never happen by chance.
    counts = torch.histc(u, 10, 0, 1)
    assert (counts - 409.6).abs().max() < 6 * 19.2
    assert torch.equal(u[100:101], uniforms(keys[100:101], positions[100:101]))


def test_keys_differ_in_every_part() -> None:
    keys = {stream_key(a, b, c, d) for a in range(5) for b in range(5) for c in range(5) for d in range(5)}
    assert len(keys) == 5**4
    assert all(-(2**63) <= k < 2**63 for k in keys)


def test_frequencies_follow_the_distribution() -> None:
    count = 40_000
    tokens = draw(LOGITS, Sampling(), count)
    expected = torch.softmax(LOGITS[0].double(), -1)
    found = torch.bincount(tokens, minlength=5) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() < 5 * deviation).all()


def test_logprobs_are_over_the_whole_vocabulary() -> None:
    keys = torch.tensor([stream_key(0, 0, 0, s) for s in range(64)])
    zeros = torch.zeros(64, dtype=torch.int64)
    tokens, logprobs = sample(LOGITS.expand(64, -1), Sampling(top_k=2), keys, zeros)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, LOGITS[0].log_softmax(-1)[tokens])


def test_temperature_zero_is_greedy() -> None:
    assert draw(LOGITS, Sampling(temperature=0.0), 8).tolist() == [0] * 8


@pytest.mark.parametrize(
    ("settings_", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 1e-300}, {0}),  # 0 in float32
        ({"top_p": 0.5}, {0}),  # the most probable token alone has 0.636
        ({"top_p": 0.7}, {0, 1}),  # 0.636, then 0.870 with the second
        ({"min_p": 0.3}, {0, 1}),  # e^-1 = 0.37 of the first is kept, e^-2 = 0.14 is not
        ({"top_k": 3, "min_p": 0.1, "top_p": 0.99}, {0, 1, 2}),
        ({"top_k": 50}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_by_hand(settings_: dict, kept: set[int]) -> None:
    filtered = keep(LOGITS, Sampling(**settings_))[0]
    assert {i for i in range(5) if filtered[i] > float("-inf")} == kept
    assert set(draw(LOGITS, Sampling(**settings_), 4000).tolist()) <= kept


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 6), st.floats(0.05, 1.0), st.floats(0, 0.9), st.integers(0, 2**31))
def test_filters_equal_a_plain_loop(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(seed)) * 3
    got = keep(logits, Sampling(top_k=top_k, top_p=top_p, min_p=min_p)) > float("-inf")
    for row in range(3):
        order = sorted(range(7), key=lambda i: -logits[row, i].item())
        kept = order[:top_k] if top_k else order
        weights = torch.softmax(logits[row][kept], -1)
        inside, mass = [], 0.0
        for token, weight in zip(kept, weights.tolist()):
            if mass < top_p - 1e-6 or not inside:
                inside.append(token)
            elif abs(mass - top_p) < 1e-5:
                return  # a tie within rounding is either way
            mass += weight
        best = logits[row].max().item()
        allowed = {t for t in inside if logits[row, t].item() >= best + torch.log(torch.tensor(min_p)).item()}
        assert set(got[row].nonzero()[:, 0].tolist()) == allowed
