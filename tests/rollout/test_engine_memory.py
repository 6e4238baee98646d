"""The engine without enough memory: smaller prefills, fewer sequences, a smaller cache, and always the same tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout.test_engine import SMALL, assert_same, engine, generate, prompts
from tiny import tiny_model

from trimtab.base.errors import MemoryExhausted
from trimtab.model.policy import Policy
from trimtab.rollout.native.cache import DecodePlan, PrefillPlan
from trimtab.rollout.native.engine import NativeEngine

Limits = dict[type, int]


def limit(policy: Policy, monkeypatch: pytest.MonkeyPatch, most: Limits, first_calls: int = 10**9) -> list[int]:
    """Forward passes of more tokens than `most` for their kind run out of memory; returns the sizes that did."""
    run, failed, calls = policy.hidden, [], [0]

    def hidden(tokens_T, positions_T, plan):
        calls[0] += 1
        if calls[0] <= first_calls and tokens_T.shape[0] > most.get(type(plan), 10**9):
            failed.append(tokens_T.shape[0])
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(tokens_T, positions_T, plan)

    monkeypatch.setattr(policy, "hidden", hidden)
    return failed


def telling(native: NativeEngine) -> list[str]:
    said: list[str] = []
    native.on_recovery = said.append
    return said


def test_a_prefill_that_does_not_fit_is_done_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = Policy(tiny_model()), prompts(6, shared=9)
    expected = generate(engine(policy), asked)
    native = engine(policy)
    said = telling(native)
    failed = limit(policy, monkeypatch, {PrefillPlan: 40})
    assert_same(expected, generate(native, asked))
    whole = sum(len(p.tokens) for p in asked)
    assert failed == [whole, whole // 2]
    assert said[1] == (
        f"out of memory in prefill ({whole // 2} tokens); rollout.prefill_tokens {whole // 2} -> {whole // 4}"
    )
    assert native.lowered == {"prefill_tokens": whole // 4}
    assert_same(expected, generate(native, asked))
    assert len(said) == 2, "the next call knows"


def test_sequences_that_cannot_all_decode_are_parked_and_fewer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = Policy(tiny_model()), prompts(6, shared=9)
    expected = generate(engine(policy), asked)
    native = engine(policy)
    said = telling(native)
    failed = limit(policy, monkeypatch, {DecodePlan: 5})
    assert_same(expected, generate(native, asked))
    assert failed == [18, 9]
    assert native.stats.preempted == 18 + 9
    assert said[0] == "out of memory in decoding (18 sequences); preempted them; rollout.max_sequences -> 9"
    assert native.lowered == {"max_sequences": 4}
    assert_same(expected, generate(native, asked))
    assert len(said) == 2


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([17, 30, 64]),
    st.integers(1, 6),
    st.integers(1, 60),
    st.sampled_from([(0, 1), (0, 4), (1, 1), (1, 3), (2, 5)]),
    st.sampled_from([4, 64]),
)
def test_no_token_depends_on_what_ran_out_when(count, samples, prefill, decode, calls, rounds, page) -> None:
    """Launching before looking and several steps at a time, as on a GPU: a round that fails in its middle is forgotten too."""
    asked = prompts(count, shared=5)
    expected = generate(engine(SMALL), asked, samples=samples)
    native = engine(SMALL, page_tokens=page)
    native._decoder.rounds_ahead, native._decoder.most_steps = rounds
    with pytest.MonkeyPatch.context() as patch:
        limit(SMALL, patch, {PrefillPlan: prefill, DecodePlan: decode}, first_calls=calls)
        assert_same(expected, generate(native, asked, samples=samples))


def test_first_tokens_are_drawn_and_pages_copied_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = Policy(tiny_model()), prompts(4)
    expected = generate(engine(policy), asked)
    native = engine(policy)
    draw, copy = native._decoder.draw, native._decoder.cache.copy_pages
    monkeypatch.setattr(native._decoder, "draw", lambda i, h: _short() if len(i) > 2 else draw(i, h))
    monkeypatch.setattr(native._decoder.cache, "copy_pages", lambda p: _short() if p.shape[1] > 3 else copy(p))
    monkeypatch.setattr(native, "max_sequences", 2)  # a decode step draws too, and here not in parts
    assert_same(expected, generate(native, asked))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_copying_pages_that_fails_among_the_layers_is_repeated(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Stores that were copied already are copied again: no page may have been overwritten that others are copied from."""
    policy, asked = Policy(tiny_model()), prompts(4)
    expected = generate(engine(policy), asked)
    native = engine(policy)
    cache = native._decoder.cache
    copy, failed = cache.copy_pages, []

    def copy_pages(pairs: torch.Tensor) -> None:
        if pairs.shape[1] > 3:
            failed.append(pairs.shape[1])
            source, target = pairs
            for store in [*cache.keys.values(), *cache.values.values()][:after]:
                store[target] = store[source]
            _short()
        copy(pairs)

    monkeypatch.setattr(cache, "copy_pages", copy_pages)
    assert_same(expected, generate(native, asked))
    assert failed


def _short() -> None:
    raise torch.OutOfMemoryError


@pytest.mark.parametrize(
    ("most", "what"), [({PrefillPlan: 10}, "a prefill of 1"), ({DecodePlan: 0}, "decoding a single sequence")]
)
def test_a_rollout_that_cannot_go_on_says_so_and_leaves_no_page(
    most: Limits, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(tiny_model())
    native = engine(policy)
    limit(policy, monkeypatch, most)
    with pytest.raises(MemoryExhausted, match=rf"{what}.*learn\.max_new_tokens.*model\.lora") as caught:
        generate(native, prompts(6))
    assert caught.value.__context__ is None
    assert native.pool.held == 0


def test_a_smaller_cache_gives_the_same_tokens() -> None:
    policy, asked = Policy(tiny_model()), prompts(6)
    native = engine(policy, kv_bytes=40 * 4 * 384)
    expected = generate(native, asked)
    before = sum(k.nbytes for k in native._decoder.cache.keys.values())
    assert native.shrink(50) == (40 * 4 * 384, 20 * 4 * 384)
    assert sum(k.nbytes for k in native._decoder.cache.keys.values()) == before // 2
    assert_same(expected, generate(native, asked))
    assert native.shrink(50) == (20 * 4 * 384, 14 * 4 * 384), "one sequence of 50 tokens and a page to copy"
    assert native.shrink(50) is None
    assert_same(expected, generate(native, asked))
    assert engine(policy, lend_memory=True).shrink(50) is None, "the update has that memory already"


def test_a_new_engine_can_start_as_low_as_an_old_one() -> None:
    policy = Policy(tiny_model())
    old = engine(policy, kv_bytes=40 * 4 * 384)
    old.max_sequences, old.prefill_tokens = 8, 100
    old.shrink(50)
    new = engine(policy, kv_bytes=40 * 4 * 384)
    assert new.lowered == {}
    new.lower(old.lowered, 50)
    assert new.lowered == old.lowered == {"max_sequences": 8, "prefill_tokens": 100, "kv_memory": 20 * 4 * 384}
    longer = engine(policy, kv_bytes=40 * 4 * 384)
    longer.lower(old.lowered, 100)
    assert longer.pool.total == 26, "the longest sequence has to fit"


def test_memory_that_was_lent_is_asked_for_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, asked = Policy(tiny_model()), prompts(4)
    native = engine(policy, lend_memory=True)
    expected = generate(native, asked)
    native.lend()
    reclaim, calls = native._decoder.reclaim, []

    def late() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError
        reclaim()

    monkeypatch.setattr(native._decoder, "reclaim", late)
    assert_same(expected, generate(native, asked))
