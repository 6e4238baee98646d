"""The native engine: same tokens as transformers when greedy, same tokens however it is scheduled, no page lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import ARCHITECTURES, VOCABULARY, tiny_model, tiny_tokenizer

from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Trajectory

GREEDY = Sampling(temperature=0.0)
Key = tuple[int, int]


def prompts(count: int = 5, shared: int = 0, seed: int = 1) -> list[Prompt]:
    """Random prompts of 1 to 30 tokens, the first `shared` tokens in common."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randint(3, VOCABULARY, (shared,), generator=g).tolist()
    lengths = torch.randint(1, 31, (count,), generator=g).tolist()
    return [
        Prompt(i, "", head + torch.randint(3, VOCABULARY, (n,), generator=g).tolist()) for i, n in enumerate(lengths)
    ]


def engine(policy: Policy, **changes) -> NativeEngine:
    settings = {"kv_bytes": 2**22, "page_tokens": 4, "max_sequences": 64, "prefill_tokens": 1024, **changes}
    return NativeEngine(policy, tiny_tokenizer(), settings.pop("stop_token_ids", [2]), **settings)


def generate(
    native: NativeEngine, asked: list[Prompt], samples=3, new=20, sampling=None, step=0
) -> dict[Key, Trajectory]:
    sampling = sampling or Sampling()
    requests = [Request(p, samples, new, sampling, seed=0, step=step) for p in asked]
    groups = list(native.generate(requests))
    assert sorted(g.prompt.id for g in groups) == [p.id for p in asked]
    assert all([t.sample for t in g.trajectories] == list(range(samples)) for g in groups)
    assert native.pool.held == 0
    return {(g.prompt.id, t.sample): t for g in groups for t in g.trajectories}


def assert_same(one: dict[Key, Trajectory], two: dict[Key, Trajectory]) -> None:
    assert one.keys() == two.keys()
    for key in one:
        assert one[key].tokens.tolist() == two[key].tokens.tolist(), key
        torch.testing.assert_close(one[key].logprobs, two[key].logprobs, atol=2e-5, rtol=0)
        assert (one[key].finish, one[key].text) == (two[key].finish, two[key].text)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_equal_transformers_generate(architecture: str) -> None:
    asked = prompts(4)
    policy = Policy(tiny_model(architecture))
    found = generate(engine(policy), asked, samples=1, sampling=GREEDY)
    model = tiny_model(architecture)
    model.set_attn_implementation("eager")
    for prompt in asked:
        out = model.generate(
            torch.tensor([prompt.tokens]), max_new_tokens=20, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert found[prompt.id, 0].tokens.tolist() == out[0, len(prompt.tokens) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_sequences": 1},
        {"max_sequences": 4},
        {"prefill_tokens": 1},
        {"prefill_tokens": 7},
        {"page_tokens": 1},
        {"page_tokens": 64},
        {"prefix_cache": False},
        {"kv_bytes": 24 * 4 * 384},
        {"kv_bytes": 15 * 4 * 384, "prefix_cache": False, "max_sequences": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tokens_do_not_depend_on_the_schedule(architecture: str, changes: dict) -> None:
    """Batch of one = batch of many, chunked = whole prefill, preempted and resumed = uninterrupted, cached = computed."""
    policy = Policy(tiny_model(architecture))
    asked = prompts(6, shared=9)
    assert_same(generate(engine(policy), asked), generate(engine(policy, **changes), asked))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=6),
    st.integers(0, 6),
    st.sampled_from([1, 3, 4, 7]),
    st.sampled_from([1, 3, 5, 64]),
    st.sampled_from([1, 6, 1024]),
    st.sampled_from([(0, 1), (0, 4), (1, 1), (1, 3), (1, 16), (2, 5)]),
    st.booleans(),
)
def test_any_schedule_gives_the_same_tokens(work, spare, page, rows, prefill, rounds, cached) -> None:
    """Pools that hold hardly more than one sequence, few rows, any page size, looking late: preempted wherever it may happen."""
    policy = SMALL
    g = torch.Generator().manual_seed(len(work))
    asked = [
        Request(
            Prompt(i, "", torch.randint(3, VOCABULARY, (length,), generator=g).tolist()), samples, new, Sampling(), 0, 0
        )
        for i, (length, samples, new) in enumerate(work)
    ]
    pages = max(-(-(length + new) // page) for length, _, new in work) + 1 + spare
    tight = engine(
        policy, page_tokens=page, max_sequences=rows, prefill_tokens=prefill, prefix_cache=cached,
        kv_bytes=pages * page * policy_bytes(policy),
    )  # fmt: skip
    tight._decoder.rounds_ahead, tight._decoder.most_steps = rounds

    def tokens(native: NativeEngine) -> dict[int, list[list[int]]]:
        return {g.index: [t.tokens.tolist() for t in g.trajectories] for g in native.generate(asked)}

    assert tokens(tight) == tokens(engine(policy))
    assert tight.pool.held == 0


def policy_bytes(policy: Policy) -> int:
    return sum(s.bytes_per_token(policy.dtype.itemsize) for s in layer_shapes(policy).values())


SMALL = Policy(tiny_model("llama", num_hidden_layers=1))


@pytest.mark.parametrize("steps", [1, 3, 16])
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "changes",
    [{}, {"max_sequences": 4}, {"kv_bytes": 15 * 4 * 384, "prefix_cache": False}, {"page_tokens": 64}],
    ids=str,
)
def test_tokens_do_not_depend_on_rounds(changes: dict, ahead: int, steps: int) -> None:
    """Many steps between looks, and launching before looking, as on a GPU: stop tokens, strings, limits and parking included."""
    policy = Policy(tiny_model())
    asked = prompts(6, shared=9)
    sampling = Sampling(stop=["a", "7+"])
    native = engine(policy, **changes)
    native._decoder.rounds_ahead, native._decoder.most_steps = ahead, steps
    assert_same(generate(engine(policy), asked, sampling=sampling), generate(native, asked, sampling=sampling))


def test_a_tight_cache_really_parks() -> None:
    native = engine(Policy(tiny_model()), kv_bytes=15 * 4 * 384)
    generate(native, prompts(6, shared=9))
    assert native.stats.preempted > 0
    assert native.stats.peak_pages <= native.pool.total == 15


def test_forked_group_equals_independent_samples() -> None:
    policy = Policy(tiny_model())
    asked = prompts(3)
    together = generate(engine(policy), asked, samples=4)
    for (prompt, sample), expected in together.items():
        request = Request(asked[prompt], 1, 20, Sampling(), seed=0, step=0, first_sample=sample)
        (alone,) = engine(policy).generate([request])
        assert alone.trajectories[0].tokens.tolist() == expected.tokens.tolist()


def test_arrival_order_does_not_matter() -> None:
    policy = Policy(tiny_model())
    asked = prompts(5)
    forward = generate(engine(policy, max_sequences=4), asked)
    backward = {}
    for group in engine(policy, max_sequences=4).generate(
        [Request(p, 3, 20, Sampling(), 0, 0) for p in reversed(asked)]
    ):
        backward |= {(group.prompt.id, t.sample): t for t in group.trajectories}
    assert_same(forward, backward)


def test_seed_step_and_sample_change_the_tokens() -> None:
    policy = Policy(tiny_model())
    asked = prompts(2)
    first, second = generate(engine(policy), asked), generate(engine(policy), asked, step=1)
    assert first[0, 0].tokens.tolist() != first[0, 1].tokens.tolist()
    assert first[0, 0].tokens.tolist() != second[0, 0].tokens.tolist()


def test_a_new_version_forgets_the_prefix_cache_and_stamps_tokens() -> None:
    policy = Policy(tiny_model())
    native = engine(policy)
    asked = prompts(4, shared=16)
    for prompt in asked:  # one by one, so that later prompts find the shared beginning
        generate(native, [Prompt(0, "", prompt.tokens)])
    assert native.stats.cached_prefix_tokens >= 16
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.3)
    native.publish(7)
    again = generate(native, asked)
    assert all(t.versions.tolist() == [7] * len(t) for t in again.values())
    assert_same(again, generate(engine(policy), asked))


def test_stop_tokens_strings_and_limits_are_honoured() -> None:
    policy = Policy(tiny_model())
    asked = prompts(6)
    free = generate(engine(policy, stop_token_ids=[]), asked, new=40)
    assert all(len(t) == 40 and t.finish == "length" for t in free.values())
    stop = free[0, 0].tokens[5].item()
    for key, cut in generate(engine(policy, stop_token_ids=[stop]), asked, new=40).items():
        whole = free[key].tokens.tolist()
        end = whole.index(stop) + 1 if stop in whole else 40
        assert cut.tokens.tolist() == whole[:end]
        assert cut.finish == ("stop" if stop in whole else "length")
    string = free[1, 1].text[7:9]
    for key, cut in generate(
        engine(policy, stop_token_ids=[]), asked, new=40, sampling=Sampling(stop=[string])
    ).items():
        text = free[key].text
        expected = text[: text.index(string) + len(string)] if string in text else text
        assert cut.text == expected
        assert cut.finish == ("stop" if string in text else "length")
    first = free[2, 1].tokens[0].item()
    for key, cut in generate(engine(policy, stop_token_ids=[first]), asked, new=40).items():
        whole = free[key].tokens.tolist()
        assert cut.tokens.tolist() == whole[: whole.index(first) + 1 if first in whole else 40]
    one = generate(engine(policy), asked, new=1)
    assert all(len(t) == 1 for t in one.values())


def test_requests_may_differ_in_length_and_samples() -> None:
    policy = Policy(tiny_model())
    asked = prompts(3)
    requests = [Request(p, i + 1, 3 * (i + 1), Sampling(), 0, 0) for i, p in enumerate(asked)]
    groups = {g.prompt.id: g for g in engine(policy, stop_token_ids=[]).generate(requests)}
    assert [[len(t) for t in groups[i].trajectories] for i in range(3)] == [[3], [6, 6], [9, 9, 9]]


def test_samples_of_a_group_may_differ_in_length() -> None:
    policy = Policy(tiny_model())
    prompt = prompts(1)[0]
    (group,) = engine(policy, stop_token_ids=[]).generate([Request(prompt, 3, [1, 9, 4], Sampling(), 0, 0)])
    (whole,) = engine(policy, stop_token_ids=[]).generate([Request(prompt, 3, 9, Sampling(), 0, 0)])
    assert [len(t) for t in group.trajectories] == [1, 9, 4]
    for cut, full in zip(group.trajectories, whole.trajectories):
        assert cut.tokens.tolist() == full.tokens[: len(cut)].tolist()


def test_groups_come_out_as_soon_as_they_are_whole() -> None:
    policy = Policy(tiny_model())
    native = engine(policy, stop_token_ids=[])
    asked = prompts(2)
    requests = [Request(asked[0], 2, 30, Sampling(), 0, 0), Request(asked[1], 2, 3, Sampling(), 0, 0)]
    stream = native.generate(requests)
    assert next(stream).prompt.id == 1
    assert native.stats.generated_tokens < 20
    assert next(stream).prompt.id == 0


def test_a_caller_that_stops_listening_leaves_no_page_behind() -> None:
    native = engine(Policy(tiny_model()), max_sequences=4)
    stream = native.generate([Request(p, 3, 20, Sampling(), 0, 0) for p in prompts(6)])
    next(stream)
    assert native.pool.held > 0
    stream.close()
    assert native.pool.held == 0


def test_one_call_at_a_time() -> None:
    native = engine(Policy(tiny_model()))
    asked = [Request(p, 1, 4, Sampling(), 0, 0) for p in prompts(3)]
    stream = native.generate(asked)
    next(stream)
    for meddle in (lambda: list(native.generate(asked)), lambda: native.publish(2)):
        with pytest.raises(EngineError, match=r"before the previous generate finished\. Exhaust or close its iterator"):
            meddle()
    assert len(list(stream)) == 2
    native.publish(2)
    assert len(list(native.generate(asked))) == 3


def test_what_cannot_be_served_is_refused_before_any_work() -> None:
    policy = Policy(tiny_model())
    prompt = prompts(1)[0]
    with pytest.raises(EngineError, match=r"exceeds the model's context of 256"):
        list(engine(policy).generate([Request(prompt, 1, 10_000, Sampling(), 0, 0)]))
    with pytest.raises(EngineError, match=r"Raise run.rollout.kv_memory or lower learn.max_new_tokens"):
        list(engine(policy, kv_bytes=4 * 4 * 384).generate([Request(prompt, 1, 100, Sampling(), 0, 0)]))
    for empty in (
        Request(Prompt(0, "", []), 1, 4, Sampling(), 0, 0),
        Request(prompt, 0, 4, Sampling(), 0, 0),
        Request(prompt, 2, [4, 0], Sampling(), 0, 0),
    ):
        with pytest.raises(EngineError, match="at least one prompt token, one sample and one new token"):
            list(engine(policy).generate([empty]))
    mixed = [Request(prompt, 1, 4, Sampling(), 0, 0), Request(prompt, 1, 4, GREEDY, 0, 0)]
    with pytest.raises(EngineError, match="share their sampling"):
        list(engine(policy).generate(mixed))


def test_occupancy_is_what_decode_steps_brought_of_what_they_could() -> None:
    """Two slots, 3 and 9 tokens, the first of each drawn with the prompt: 2 + 8 of the 16 that eight steps have room for."""
    native = engine(Policy(tiny_model("llama")), max_sequences=2, stop_token_ids=[])
    list(native.generate([Request(prompts(1)[0], 2, [3, 9], Sampling(), seed=0, step=0)]))
    assert (native.stats.decode_steps, native.stats.generated_tokens) == (8, 12)
    assert native.stats.occupancy == 10 / 16
