"""The native engine on models whose layers carry a state: transformers' tokens when greedy, and the same tokens however the work
is scheduled."""

from __future__ import annotations

import pytest
import torch
from rollout.test_engine import GREEDY, assert_same, engine, generate, prompts
from tiny import HYBRIDS, MIXTURE_HYBRIDS, tiny_hybrid, tiny_model

from trimtab.base.errors import EngineError
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.model.shapes import layer_shapes
from trimtab.model.sizes import prompt_slots
from trimtab.model.versions import STATES_ARE_HANDED
from trimtab.rollout.native.snapshots import Snapshots
from trimtab.rollout.native.states import PrefillMixing, StateCache
from trimtab.rollout.trajectory import Trajectory

pytestmark = pytest.mark.skipif(not STATES_ARE_HANDED, reason="transformers before 5.22 hands no states over")
KINDS = ["qwen3_next", "lfm2", "nemotron_h", "falcon_h1"]
"""One family of each kind of layer, and one whose layers carry a state and attend."""


@pytest.fixture(scope="module")
def policies() -> dict[str, Policy]:
    return {name: Policy(tiny_hybrid(name)) for name in KINDS}


def page_bytes(policy: Policy, page_tokens: int) -> int:
    return page_tokens * sum(s.bytes_per_token(policy.dtype.itemsize) for s in layer_shapes(policy).values())


def assert_greedy(policy: Policy, model: torch.nn.Module) -> None:
    asked = prompts(4)
    found = generate(engine(policy), asked, samples=1, sampling=GREEDY, new=12)
    model.set_attn_implementation("eager")
    for prompt in asked:
        out = model.generate(
            torch.tensor([prompt.tokens]), max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=0
        )
        assert found[prompt.id, 0].tokens.tolist() == out[0, len(prompt.tokens) :].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_greedy_tokens_equal_transformers_generate(name: str, policies: dict[str, Policy]) -> None:
    assert_greedy(policies[name], tiny_hybrid(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in KINDS])
def test_greedy_tokens_of_further_families(name: str) -> None:
    assert_greedy(Policy(tiny_hybrid(name)), tiny_hybrid(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURE_HYBRIDS)
def test_greedy_tokens_of_mixtures(name: str) -> None:
    assert_greedy(Policy(tiny_model(name, **MIXTURE_HYBRIDS[name])), tiny_model(name, **MIXTURE_HYBRIDS[name]))


SCHEDULES = {
    "one at a time": {"max_sequences": 1},
    "four at a time": {"max_sequences": 4},
    "chunks of one token": {"prefill_tokens": 1},
    "chunks of seven": {"prefill_tokens": 7},
    "preempted": {"pages": 15, "max_sequences": 6},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", KINDS[:3])
def test_tokens_do_not_depend_on_the_schedule(name: str, schedule: str, policies: dict[str, Policy]) -> None:
    """Chunked = whole prefill, forked = independent, batch of one = batch of many, preempted = uninterrupted."""
    policy, changes = policies[name], dict(SCHEDULES[schedule])
    asked = prompts(5, shared=9)
    if pages := changes.pop("pages", None):
        changes["kv_bytes"] = pages * page_bytes(policy, 4)
    native = engine(policy, **changes)
    found = generate(native, asked, new=16)
    assert_same(generate(engine(policy), asked, new=16), found)
    if pages:
        assert native.stats.preempted > 0


@pytest.mark.parametrize("name", KINDS[:3])
def test_log_probs_are_those_of_a_packed_forward_pass(name: str, policies: dict[str, Policy]) -> None:
    policy = policies[name]
    model = tiny_hybrid(name)
    model.set_attn_implementation("eager")
    for (at, _), trajectory in generate(engine(policy, prefill_tokens=5), prompts(3), samples=2, new=10).items():
        prompt = prompts(3)[at].tokens
        ids = torch.tensor([prompt + trajectory.tokens.tolist()])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        expected = logits[len(prompt) - 1 : -1].gather(1, trajectory.tokens[:, None])[:, 0]
        torch.testing.assert_close(trajectory.logprobs, expected, atol=1e-4, rtol=0)


def test_an_engine_that_lends_its_memory_forgets_no_state_it_needs(policies: dict[str, Policy]) -> None:
    policy = policies["qwen3_next"]
    native, asked = engine(policy, lend_memory=True), prompts(3)
    first = generate(native, asked)
    native.lend()
    assert_same(first, generate(native, asked))


def test_a_prefill_that_ran_out_of_memory_half_way_is_tried_again_from_where_it_began(
    policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk that fails in its last layer has changed no state."""
    policy, asked = policies["qwen3_next"], prompts(3, shared=20)
    expected = generate(engine(policy), asked)
    native = engine(policy, prefill_tokens=32)
    failures = iter([False, True])
    prefill = native._decoder.prefill

    def fails(*args: object) -> torch.Tensor:
        hidden = prefill(*args)  # type: ignore[arg-type]
        if next(failures, False):
            raise torch.OutOfMemoryError("planted")
        return hidden

    monkeypatch.setattr(native._decoder, "prefill", fails)
    assert_same(expected, generate(native, asked))
    assert native.prefill_tokens < 32


@pytest.fixture
def leaking(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "neighbour":  # a fork that takes what the prompt beside it carried
        whole = StateCache.copy
        monkeypatch.setattr(
            StateCache, "copy", lambda self, pairs: whole(self, torch.stack((pairs[0].roll(1), pairs[1])))
        )
    elif request.param == "no chunk":  # a chunk that begins anew
        begin = PrefillMixing.__init__
        monkeypatch.setattr(
            PrefillMixing, "__init__", lambda self, s, n, starts, *more: begin(self, s, n, [0] * len(n), *more)
        )
    else:  # a step that forgets
        monkeypatch.setattr(StateCache, "write", lambda *_: None)


@pytest.mark.parametrize("leaking", ["neighbour", "no chunk", "no step"], indirect=True)
@pytest.mark.parametrize("name", KINDS[:3])
def test_an_engine_that_leaks_or_loses_a_state_is_refused(
    name: str, leaking: None, policies: dict[str, Policy]
) -> None:
    """Before anything is drawn that would be learned from, in every kind of layer."""
    with pytest.raises(EngineError, match="steps of decoding and the forward pass compute different log-probs"):
        engine(policies[name])


def test_there_are_slots_for_every_row_and_a_few_prompts() -> None:
    assert [prompt_slots(rows) for rows in (1, 8, 64, 512)] == [1, 8, 24, 136]


def assert_alike(one: dict[tuple[int, int], Trajectory], two: dict[tuple[int, int], Trajectory]) -> None:
    """The same tokens; log-probs up to the rounding of a delta rule that is cut elsewhere."""
    for key in one:
        assert one[key].tokens.tolist() == two[key].tokens.tolist(), key
        torch.testing.assert_close(one[key].logprobs, two[key].logprobs, atol=1e-4, rtol=0)


def followed(asked: list[Prompt], found: dict[tuple[int, int], Trajectory], more: list[int]) -> list[Prompt]:
    """The next turn of each conversation."""
    return [Prompt(p.id, "", p.tokens + found[p.id, 0].tokens.tolist() + more) for p in asked]


@pytest.mark.parametrize("name", KINDS[:3])
def test_what_was_carried_at_the_end_of_a_prefix_is_found_again(name: str, policies: dict[str, Policy]) -> None:
    """Turns of conversations, and prompts with one beginning: from the second time on less is computed, and the tokens are the
    same."""
    policy = policies[name]
    native, plain = engine(policy), engine(policy, prefix_cache=False)
    asked = [Prompt(i, "", [5] * 13 + p.tokens + [7] * 12) for i, p in enumerate(prompts(3))]
    reused = []
    for turn in range(4):
        found = generate(native, asked, samples=2, new=6, step=turn)
        assert_alike(generate(plain, asked, samples=2, new=6, step=turn), found)
        reused.append(native.stats.cached_prefix_tokens)
        asked = followed(asked, found, [9, 10, 11])
    # One turn is met for the first time, one for the second; the next goes on from it.
    assert reused[1] <= reused[2] and reused[3] >= 3 * 24
    assert plain.stats.cached_prefix_tokens == 0
    native.publish(1)
    generate(native, asked[:1], samples=1, new=2)
    assert native.stats.cached_prefix_tokens == 0


def test_snapshots_give_way_to_prompts_and_to_newer_ones(policies: dict[str, Policy]) -> None:
    """One slot for prompts, so that every snapshot is overwritten by the next prompt; and pages that run out."""
    policy = policies["qwen3_next"]
    asked = prompts(6, shared=17)
    for changes in ({"max_sequences": 1}, {"max_sequences": 3, "kv_bytes": 20 * page_bytes(policy, 4)}):
        native, plain = engine(policy, **changes), engine(policy, prefix_cache=False)
        for turn in range(3):
            found = generate(native, asked, samples=2, new=6, step=turn)
            assert_alike(generate(plain, asked, samples=2, new=6, step=turn), found)


def test_a_snapshot_of_another_prefix_changes_what_is_drawn(
    policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted error: the comparison above sees what is not the prefix's own."""
    policy = policies["lfm2"]
    asked = [Prompt(i, "", [5] * 13 + p.tokens + [7] * 12) for i, p in enumerate(prompts(3))]
    expected = generate(engine(policy, prefix_cache=False), asked, samples=1, new=6)
    native = engine(policy)
    generate(native, asked, samples=1, new=6)
    generate(native, asked, samples=1, new=6)
    find = Snapshots.find

    def other(self: Snapshots, tokens: list[int], pages: int, **settings: bool) -> tuple[int, int]:
        count, slot = find(self, tokens, pages, **settings)
        return count, slot if slot < 0 else next(s for s in self._kept.values() if s != slot)

    monkeypatch.setattr(Snapshots, "find", other)
    with pytest.raises(AssertionError):
        assert_alike(expected, generate(native, asked, samples=1, new=6))
