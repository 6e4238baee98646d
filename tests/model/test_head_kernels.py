"""Log-probs, entropies and their gradients by tiles against the whole computation in float64.

Without a CUDA device the kernels run in Triton's interpreter, with one they are compiled.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from model.test_head import whole

from trimtab.model import head as heads
from trimtab.model.head import Head
from trimtab.model.kernels import head as kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOKENS, WIDTH, VOCABULARY = 21, 40, 150


@pytest.fixture(autouse=True)
def _by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles smaller than the problem in every direction, in float32 too."""
    monkeypatch.setattr(heads, "_has_kernels", lambda hidden, weight: True)
    monkeypatch.setattr(kernels, "tiles_for", lambda itemsize: kernels.Tiles(16, 64, 16, 4, 2))


def inputs(bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH, generator=g), torch.randn(VOCABULARY, WIDTH, generator=g) * 0.5
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=g)
    targets[:2] = torch.tensor([0, VOCABULARY - 1])
    offset = torch.randn(VOCABULARY, generator=g).to(DEVICE) if bias else None
    return hidden.to(DEVICE), weight.to(DEVICE), offset, targets.to(DEVICE)


@pytest.mark.parametrize("chunk", [7, 100])
@pytest.mark.parametrize(
    ("bias", "scale", "softcap", "temperature"),
    [(False, 1.0, None, 1.0), (False, 1.0, None, 0.7), (True, 0.5, 3.0, 1.3)],
)
def test_equals_the_whole_computation(chunk: int, bias: bool, scale: float, softcap, temperature: float) -> None:
    hidden, weight, offset, targets = inputs(bias)
    leaves = [t.requires_grad_() for t in (hidden, weight, offset) if t is not None]
    got = Head(weight, offset, scale, softcap).token_stats(hidden, targets, temperature, chunk)
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (hidden, weight, offset)]
    want = whole(*exact, targets, scale, softcap, temperature)
    torch.testing.assert_close(got.logprobs.double(), want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.entropy.double(), want[1], atol=1e-5, rtol=1e-5)
    mix = torch.linspace(-1, 1, TOKENS, device=DEVICE)
    found = torch.autograd.grad((got.logprobs * mix + got.entropy * mix.flip(0)).sum(), leaves)
    mix = mix.double()
    expected = torch.autograd.grad((want[0] * mix + want[1] * mix.flip(0)).sum(), [t for t in exact if t is not None])
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-4)


def test_log_probs_alone_need_no_entropy() -> None:
    hidden, weight, _, targets = inputs(False)
    hidden.requires_grad_()
    got = Head(weight).token_stats(hidden, targets, 1.0, 8)
    exact = hidden.detach().double().requires_grad_()
    want, _ = whole(exact, weight.double(), None, targets, 1.0, None, 1.0)
    (found,), (expected,) = torch.autograd.grad(got.logprobs.sum(), hidden), torch.autograd.grad(want.sum(), exact)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)


def test_large_logits_do_not_overflow() -> None:
    hidden, weight, _, targets = inputs(False)
    got = Head(weight * 100).token_stats(hidden * 10, targets, 1.0, 8)
    want, entropy = whole(hidden.double() * 10, weight.double() * 100, None, targets, 1.0, None, 1.0)
    torch.testing.assert_close(got.logprobs.double(), want, atol=1e-2, rtol=1e-5)
    torch.testing.assert_close(got.entropy.double(), entropy, atol=1e-2, rtol=1e-4)
