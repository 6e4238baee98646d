"""Chunked log-probs and entropies equal the whole thing, forward and backward, and never hold a batch of logits."""

from __future__ import annotations

import weakref

import pytest
import torch

from trimtab.model import head
from trimtab.model.head import Head

TOKENS, WIDTH, VOCABULARY = 13, 6, 17


def parts(bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=torch.float64, generator=g)
    weight = torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=g)
    offset = torch.randn(VOCABULARY, dtype=torch.float64, generator=g) if bias else None
    return hidden, weight, offset, torch.randint(0, VOCABULARY, (TOKENS,), generator=g)


def whole(hidden, weight, bias, targets, scale, softcap, temperature):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logp = (logits / temperature).log_softmax(-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
@pytest.mark.parametrize(("bias", "scale", "softcap", "temperature"), [(False, 1.0, None, 1.0), (True, 0.5, 3.0, 0.7)])
def test_equals_the_whole_computation(chunk: int, bias: bool, scale: float, softcap, temperature: float) -> None:
    hidden, weight, offset, targets = parts(bias)
    leaves = [t.requires_grad_() for t in (hidden, weight, offset) if t is not None]
    head = Head(weight, offset, scale, softcap)
    got = head.token_stats(hidden, targets, temperature, chunk)
    want = whole(hidden, weight, offset, targets, scale, softcap, temperature)
    torch.testing.assert_close(got.logprobs, want[0])
    torch.testing.assert_close(got.entropy, want[1])
    mix = torch.linspace(-1, 1, TOKENS, dtype=torch.float64)
    found = torch.autograd.grad((got.logprobs * mix + got.entropy * mix.flip(0)).sum(), leaves)
    expected = torch.autograd.grad((want[0] * mix + want[1] * mix.flip(0)).sum(), leaves)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


def test_gradient_matches_finite_differences() -> None:
    hidden, weight, offset, targets = parts(True)
    leaves = tuple(t.requires_grad_() for t in (hidden, weight, offset))

    def stats(h, w, b):
        return tuple(Head(w, b, 0.8, 5.0).token_stats(h, targets, 0.9, 4))

    assert torch.autograd.gradcheck(stats, leaves)


def test_logits_of_a_batch_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest logits tensor that is ever made has `chunk` rows, in the backward pass too."""
    hidden, weight, _, targets = parts(False)
    seen = []
    original = Head.logits

    def watched(self, rows, temperature=1.0):
        seen.append(rows.shape[0])
        return original(self, rows, temperature)

    monkeypatch.setattr(Head, "logits", watched)
    Head(weight.requires_grad_()).token_stats(hidden.requires_grad_(), targets, 1.0, 4).logprobs.sum().backward()
    assert max(seen) == 4
    assert len(seen) == 8  # four chunks forward, four backward


def test_half_precision_sums_in_float32() -> None:
    hidden, weight, _, targets = parts(False)
    exact = whole(hidden, weight, None, targets, 1.0, None, 1.0)[0]
    low = Head(weight.bfloat16()).token_stats(hidden.bfloat16(), targets, 1.0, 4).logprobs
    assert low.dtype == torch.float32
    from_rounded = whole(hidden.bfloat16().double(), weight.bfloat16().double(), None, targets, 1.0, None, 1.0)[0]
    torch.testing.assert_close(low.double(), from_rounded, atol=1e-5, rtol=0)
    assert (low.double() - exact).abs().max() > 1e-4  # the rounding of the inputs is really there


def test_one_chunks_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    made, alive = head._chunk_grad, []

    def watched(*arguments):
        alive.append(sum(seen() is not None for seen in grads))
        out = made(*arguments)
        grads.append(weakref.ref(out))
        return out

    grads: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(head, "_chunk_grad", watched)
    hidden, weight, _, targets = parts(bias=False)
    Head(weight.requires_grad_()).token_stats(hidden.requires_grad_(), targets, 1.0, 2).logprobs.sum().backward()
    assert len(alive) > 2 and max(alive) == 0
