"""Attention with sinks through flash kernels against a softmax written out, with all gradients."""

from __future__ import annotations

import pytest
import torch
from emulated_cuda import flash
from tiny import tiny_model

from trimtab.model import attention
from trimtab.model.attention import Rules, _explicit_attention, causal_window, dense_attention
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize(("length", "seen", "window"), [(9, 9, None), (9, 9, 4), (5, 12, None), (5, 12, 6)])
def test_rows_equal_a_softmax_with_one_more_score(
    heads: int, kv_heads: int, length: int, seen: int, window: int | None
) -> None:
    tensors = [
        numbers(2, heads, length, 8, seed=1),
        numbers(2, kv_heads, seen, 8, seed=2),
        numbers(2, kv_heads, seen, 8, seed=3),
    ]
    sinks = numbers(heads, seed=4)
    rules, at = Rules(0.4, window, None, sinks), torch.arange(seen)
    allowed = causal_window(at[seen - length :], at, window)
    expected = _explicit_attention(*tensors, rules, allowed)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    gradients = torch.autograd.grad((expected * weights).sum(), [*tensors, sinks])
    found = dense_attention(*tensors, rules, None if length == seen else allowed)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    for one, other in zip(torch.autograd.grad((found * weights).sum(), [*tensors, sinks]), gradients):
        torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


@pytest.mark.parametrize("window", [None, 4])
def test_sequences_on_a_gpu_equal_a_softmax_with_one_more_score(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's kernels are played by the CPU (tests/emulated_cuda/flash.py)."""
    for name in ("forward", "backward"):
        monkeypatch.setattr(
            torch.ops.aten, f"_flash_attention_{name}", flash.REPLACED[f"aten::_flash_attention_{name}"]
        )
    plan = PackedPlan([6, 5, 3], "cpu", prefixes=[None, 0, None])
    q, k, v = (numbers(14, heads, 8, seed=s, dtype=torch.float16) for s, heads in ((1, 4), (2, 2), (3, 2)))
    sinks = numbers(4, seed=4, dtype=torch.float16)
    rules = Rules(0.4, window, None, sinks)
    weights = torch.randn((14, 4, 8), generator=torch.Generator().manual_seed(5))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    expected = plan.attend(0, *wide[:3], Rules(0.4, window, None, wide[3]))
    gradients = torch.autograd.grad((expected * weights).sum(), wide)
    seen = plan._keys_seen
    assert seen is not None
    found = plan._flash(q, k[seen], v[seen], rules)
    torch.testing.assert_close(found.double(), expected, atol=4e-3, rtol=0)
    for one, other in zip(torch.autograd.grad((found.float() * weights).sum(), (q, k, v, sinks)), gradients):
        torch.testing.assert_close(one.double(), other, atol=2e-2, rtol=2e-2)


def test_no_scores_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(*_: object) -> torch.Tensor:
        raise AssertionError("a matrix of scores was made")

    policy = Policy(tiny_model("gpt_oss"))
    monkeypatch.setattr(attention, "_explicit_attention", scores)
    policy.probe()
