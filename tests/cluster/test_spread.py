"""Samples of a prompt lie on all engines where that costs next to nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trimtab.cluster.spread import MAX_SHARE_OF_CACHE, MAX_SHARE_OF_DECODING, pays_to_spread
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.rollout.engine import Request


def asked(prompts: int, tokens: int, samples: int, new: int) -> list[Request]:
    return [Request(Prompt(i, "", [0] * tokens), samples, new, Sampling(), seed=0, step=0) for i in range(prompts)]


shapes = st.tuples(st.integers(1, 20), st.integers(1, 400), st.integers(1, 20), st.integers(1, 4000))


@given(shapes, st.integers(1, 8), st.floats(0, 2000))
def test_what_is_prefilled_again_takes_a_hundredth_of_the_decoding_at_most(
    shape: tuple[int, int, int, int], engines: int, tokens_per_step: float
) -> None:
    prompts, tokens, samples, new = shape
    all_engines = sum(min(samples, engines) * tokens for _ in range(prompts))
    more = (all_engines - prompts * tokens) / engines
    spread = pays_to_spread(asked(*shape), engines, tokens_per_step)
    steps = more / tokens_per_step if tokens_per_step else float("inf") if more else 0.0
    cheap = steps <= MAX_SHARE_OF_DECODING * new and more <= MAX_SHARE_OF_CACHE * prompts * samples * new / engines
    assert spread == cheap or abs(steps - MAX_SHARE_OF_DECODING * new) < 1e-6 * steps


@given(shapes, st.integers(2, 8), st.floats(1, 2000))
def test_longer_completions_and_faster_prefill_never_speak_against_it(
    shape: tuple[int, int, int, int], engines: int, tokens_per_step: float
) -> None:
    prompts, tokens, samples, new = shape
    if pays_to_spread(asked(*shape), engines, tokens_per_step):
        assert pays_to_spread(asked(prompts, tokens, samples, 2 * new), engines, tokens_per_step)
        assert pays_to_spread(asked(*shape), engines, 2 * tokens_per_step)
        assert pays_to_spread(asked(prompts, max(1, tokens // 2), samples, new), engines, tokens_per_step)


def test_one_engine_and_one_sample_have_nothing_to_spread() -> None:
    assert pays_to_spread(asked(4, 100, 16, 10), 1, 0.0) and pays_to_spread(asked(4, 100, 1, 10), 8, 0.0)
    assert not pays_to_spread(asked(4, 100, 2, 10), 8, 0.0)
