"""The stream of training prompts: the same for every way of taking it, and from every position."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from trimtab.base.errors import DataError
from trimtab.config.schema import Data
from trimtab.data.encode import PromptEncoder
from trimtab.data.prompt import Prompt
from trimtab.data.stream import PromptStream, row_order

from .conftest import make_tokenizer

TOKENIZER = make_tokenizer()
LIMIT = 8


def stream(lengths: list[int], *, seed: int = 0, shuffle: bool = True, **keys: Any) -> PromptStream:
    rows = [{"prompt": "x" * length, "answer": i} for i, length in enumerate(lengths)]
    data = Data(train="x.jsonl", shuffle=shuffle)
    return PromptStream(rows, data, TOKENIZER, **{"max_prompt_tokens": LIMIT, "seed": seed, **keys})


def taken(prompts: list[Prompt]) -> list[int]:
    return [prompt.id for prompt in prompts]


@pytest.fixture(autouse=True)
def every_thread_ends() -> Iterator[None]:
    yield
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name == "trimtab-prompts"]


lengths = st.lists(st.integers(1, 2 * LIMIT), min_size=1, max_size=30).filter(lambda found: min(found) <= LIMIT)


@settings(max_examples=60, deadline=None)
@given(lengths, st.lists(st.integers(0, 20), max_size=6), st.integers(0, 2**63), st.booleans(), st.integers(1, 200))
def test_any_split_of_takes_gives_the_same_stream_and_resumes(
    lengths: list[int], takes: list[int], seed: int, shuffle: bool, ahead: int
) -> None:
    total = sum(takes) + 7
    with stream(lengths, seed=seed, shuffle=shuffle) as whole:
        expected = taken(whole.take(total))
        end = whole.position
    got: list[int] = []
    position = 0
    with stream(lengths, seed=seed, shuffle=shuffle, ahead=ahead) as pieces:
        for count in takes:
            with stream(lengths, seed=seed, shuffle=shuffle, position=pieces.position) as resumed:
                assert taken(resumed.take(total - len(got))) == expected[len(got) :]
                assert resumed.position == end
            got += taken(pieces.take(count))
            assert pieces.position >= position
            position = pieces.position
        got += taken(pieces.take(7))
        assert pieces.position == end
    assert got == expected


def test_each_epoch_holds_every_usable_row_once() -> None:
    with stream([1, 99, 2, 3, 99, 4]) as prompts:
        epochs = [sorted(taken(prompts.take(4))) for _ in range(5)]
        assert epochs == [[0, 2, 3, 5]] * 5
        assert prompts.too_long == 2, "rows, not meetings"
        assert "skipped 2 so far" in prompts.report()


def test_file_order_without_shuffle() -> None:
    with stream([1, 1, 99, 1], shuffle=False) as prompts:
        assert taken(prompts.take(7)) == [0, 1, 3, 0, 1, 3, 0]
        assert prompts.position == 9
        prompts.take(1)
        assert prompts.position == 10


def test_order_depends_on_seed_and_epoch() -> None:
    orders = {
        tuple(islice(row_order(50, seed=seed, shuffle=True, position=50 * epoch), 50))
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(orders) == 4
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_the_order_is_this() -> None:
    """A change here breaks the resumption of every run started before it."""
    assert list(islice(row_order(8, seed=3, shuffle=True, position=5), 11)) == ORDER


ORDER = [4, 3, 0, 7, 3, 5, 6, 4, 0, 2, 1]


def test_prompts_carry_what_the_row_had() -> None:
    with stream([3], shuffle=False) as prompts:
        assert prompts.take(1) == [Prompt(0, "xxx", TOKENIZER("xxx").input_ids, {"answer": 0})]


def test_no_usable_prompt_is_an_error_after_one_epoch() -> None:
    with stream([9, 12, 10]) as prompts:
        for _ in range(2):
            with pytest.raises(DataError, match=r"all 3 prompts are longer than 8 tokens \(the longest has 12\)"):
                prompts.take(1)


def test_one_usable_row_among_many_is_found_wherever_it_stands() -> None:
    for seed in range(5):
        with stream([99] * 40 + [1], seed=seed) as prompts:
            assert taken(prompts.take(4)) == [40] * 4


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Row numbers as they are tokenised."""
    seen: list[int] = []
    real: Callable[..., list[Prompt]] = PromptEncoder.encode

    def encode(self: PromptEncoder, ids: list[int], rows: list[Any]) -> list[Prompt]:
        assert threading.current_thread().name == "trimtab-prompts"
        seen.extend(ids)
        return real(self, ids, rows)

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    return seen


def settle(seen: list[int]) -> int:
    """How many rows are tokenised once the thread has come to rest."""
    before = -1
    while before != len(seen) or before == 0:
        before = len(seen)
        time.sleep(0.1)
    return before


def test_rows_are_tokenised_ahead_but_not_all_of_them(tokenised: list[int]) -> None:
    with stream([1] * 5000, ahead=256) as prompts:
        ahead = settle(tokenised)
        assert 256 <= ahead <= 256 + 64
        assert prompts.position == 0, "tokenised is not used"
        first = taken(prompts.take(200))
        assert first == tokenised[:200]
        assert 200 + 64 <= settle(tokenised) <= 200 + 256 + 2 * 64


def test_a_failure_in_the_thread_is_raised_by_every_take(monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: PromptEncoder, ids: list[int], rows: list[Any]) -> list[Prompt]:
        raise RuntimeError("tokenizer broke")

    monkeypatch.setattr(PromptEncoder, "encode", encode)
    with stream([1, 1]) as prompts:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="tokenizer broke"):
                prompts.take(1)


def test_close_at_any_moment_and_again() -> None:
    for wait in (0.0, 0.001, 0.05):
        prompts = stream([1] * 3000, ahead=64)
        time.sleep(wait)
        prompts.close()
        prompts.close()
        with pytest.raises(AssertionError, match="after close"):
            prompts.take(1)


def test_a_dropped_stream_ends_its_thread() -> None:
    stream([1] * 100).take(3)


def test_the_callers_tokenizer_stays_usable_meanwhile(plain: PreTrainedTokenizerFast) -> None:
    rows = [{"prompt": "ab" * 50}] * 2000
    data = Data(train="x.jsonl")
    with PromptStream(rows, data, plain, max_prompt_tokens=100, seed=0) as prompts:
        for _ in range(200):
            plain("abc", truncation=True, max_length=2)
            plain("abc")
        assert len(prompts.take(1500)) == 1500


def test_a_million_rows_start_at_once() -> None:
    rows = [{"prompt": "ab"}] * 1_000_000
    start = time.monotonic()
    with PromptStream(rows, Data(train="x.jsonl"), TOKENIZER, max_prompt_tokens=10, seed=0) as prompts:
        prompts.take(32)
    assert time.monotonic() - start < 5.0
