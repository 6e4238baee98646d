"""Conversations: what is drawn is kept, masks say whose token is whose, and neither schedule nor workers change a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model, tiny_tokenizer

from trimtab.config.learn import Sampling
from trimtab.config.schema import Environment
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.rollout.conversations.episodes import Episodes
from trimtab.rollout.conversations.hosts import Answer, Hosts, Seat
from trimtab.rollout.conversations.observation import Observation
from trimtab.rollout.conversations.replies import ReplyEncoder
from trimtab.rollout.conversations.wire import Loaded, Opened, Said
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.sampler import stream_key, uniforms
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.workers.messages import Failure

HERE = Path(__file__).parent
TOKENIZER = tiny_tokenizer()
STOP = 2
SAMPLING = Sampling(stop_token_ids=list(range(3, 24)))


class Script:
    """An engine that draws from a key alone: any engine's `generate`, and nothing else. It notes what it was asked."""

    def __init__(self, reverse: bool = False) -> None:
        self.stats = RolloutStats()
        self.asked: list[list[Request]] = []
        self._reverse = reverse

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        self.asked.append(list(requests))
        self.stats = RolloutStats(sequences=len(requests))
        order = list(enumerate(requests))
        for index, request in order[::-1] if self._reverse else order:
            made = []
            for place, limit in enumerate(request.limits):
                key = stream_key(request.seed, request.step, request.prompt.id, request.first_sample + place)
                positions = torch.arange(limit) + request.first_position
                drawn = (uniforms(torch.tensor([key]), positions) * 60).long() + 3
                ends = (drawn < 15).nonzero()[:, 0].tolist()
                length = ends[0] + 1 if ends else limit
                finish = "stop" if ends else "length"
                tokens = drawn[:length]
                versions = torch.zeros(length, dtype=torch.int32)
                made.append(Trajectory(request.prompt, place, tokens, -tokens / 10, versions, finish))  # type: ignore[arg-type]
            self.stats.generated_tokens += sum(len(t) for t in made)
            yield Group(request.prompt, made, index)


class Desk:
    """Hosts without processes: answers come in an order of their own."""

    def __init__(self, plan: Any, max_turns: int, stateful: bool, late: bool) -> None:
        self.settings = Environment(fn="x:Y", max_turns=max_turns)
        self.loaded, self.stateful = Loaded(), stateful
        self._plan, self._late, self._answers, self._keys = plan, late, [], 0
        self.ended: list[int] = []
        self.seeds: list[int] = []

    def seat(self) -> Seat:
        self._keys += 1
        return Seat(self._keys)

    def reset(self, tag: Any, seat: Seat, seed: int, columns: Any) -> None:
        self.seeds.append(seed)
        self._answers.append(Answer(tag, self._plan(seed, None), 0.25))

    def step(self, tag: Any, seat: Seat, seed: int, text: str) -> None:
        self.seeds.append(seed)
        self._answers.append(Answer(tag, self._plan(seed, text), 0.25))

    def end(self, seat: Seat) -> None:
        self.ended.append(seat.key)

    def ready(self) -> list[Answer]:
        if self._late:
            return []
        found, self._answers = self._answers, []
        return found

    def wait(self) -> Answer | None:
        return self._answers.pop() if self._answers else None

    def forget(self) -> None:
        self._answers.clear()


def plan(seed: int, text: str | None) -> Any:
    """What an environment does, drawn from the seed of the call."""
    kind = seed % 11
    if kind == 0:
        return Failure("raised", "no")
    reply = "xyz<>"[: seed % 6]
    if text is None:
        return Opened(reply if kind < 5 else None, b"")
    return Said(Observation(reply, done=kind < 3, reward=float(kind), counts={"kinds": kind}), b"")


def requests(prompts: int, samples: int, limit: int, seed: int) -> list[Request]:
    return [
        Request(Prompt(p, f"p{p}", [5 + p] * (1 + p % 3), {"column": p}), samples, limit, Sampling(), seed, step=2)
        for p in range(prompts)
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 4), st.integers(1, 40), st.integers(1, 5), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 10_000),
)  # fmt: skip
def test_any_conversation_is_whole_masked_and_within_its_limits(
    prompts: int, samples: int, limit: int, max_turns: int, stateful: bool, late: bool, reverse: bool, seed: int
) -> None:
    asked = requests(prompts, samples, limit, seed)
    engine, desk = Script(reverse), Desk(plan, max_turns, stateful, late)
    made = list(Episodes(engine, desk, ReplyEncoder(TOKENIZER, False)).generate(asked))  # type: ignore[arg-type]
    assert sorted(group.index for group in made) == list(range(prompts))
    drawn = sum(len(t) for group in made for t in group.trajectories)
    for group in made:
        assert [t.sample for t in group.trajectories] == list(range(samples))
        for t in group.trajectories:
            own = torch.ones(len(t.tokens), dtype=torch.bool) if t.own is None else t.own
            used = len(t.prompt.tokens) - len(group.prompt.tokens) + len(t.tokens)
            assert used <= limit or t.finish == "failed"
            assert len(t) == int(own.sum()) == len(t.logprobs) == len(t.versions)
            torch.testing.assert_close(t.logprobs, -t.tokens[own] / 10)  # log-probs stay with their tokens
            assert t.prompt.tokens[: len(group.prompt.tokens)] == group.prompt.tokens
            assert t.played is not None
            assert 0 <= len(t.played.answers) <= max_turns
            assert (t.failure is None) == (t.finish != "failed")
            if t.finish != "failed":
                assert own[-1]
                assert t.failed_in == "reward"
            assert "".join(turn["content"] for turn in t.played.turns).endswith(t.text)
            assert (t.finish == "turns") <= (len(t.played.answers) == max_turns)
    assert sum(stats_of(call) for call in engine.asked) == drawn
    assert set(desk.ended) == set(range(1, prompts * samples + 1))


def stats_of(call: list[Request]) -> int:
    again = Script()
    return sum(len(t) for group in again.generate(call) for t in group.trajectories)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(4, 40), st.booleans(), st.integers(0, 10_000))
def test_neither_order_nor_company_changes_a_conversation(
    prompts: int, samples: int, limit: int, stateful: bool, seed: int
) -> None:
    def play(asked: list[Request], reverse: bool, late: bool) -> dict[tuple[int, int], Any]:
        engine, desk = Script(reverse), Desk(plan, 4, stateful, late)
        made = Episodes(engine, desk, ReplyEncoder(TOKENIZER, False)).generate(asked)  # type: ignore[arg-type]
        return {
            (g.prompt.id, t.sample): (
                t.prompt.tokens,
                t.tokens.tolist(),
                t.own is None or t.own.tolist(),
                t.finish,
                t.played,
            )
            for g in made
            for t in g.trajectories
        }

    asked = requests(prompts, samples, limit, seed)
    together = play(asked, False, False)
    assert play(asked, True, True) == together
    alone = {key: value for request in asked for key, value in play([request], False, True).items()}
    assert alone == together


def test_every_random_number_is_used_once() -> None:
    """Positions go on counting through what the environment said, and no call of an environment shares its seed with another."""
    engine, desk = Script(), Desk(lambda seed, text: Said(Observation("ab", reward=None), b""), 5, False, True)
    asked = requests(3, 4, 60, 1)
    list(Episodes(engine, desk, ReplyEncoder(TOKENIZER, False)).generate(asked))  # type: ignore[arg-type]
    used: list[tuple[int, int, int]] = []
    for call in engine.asked:
        for group, request in zip(Script().generate(call), call):
            for t in group.trajectories:
                at = range(request.first_position, request.first_position + len(t))
                used += [(request.prompt.id, request.first_sample + t.sample, position) for position in at]
    assert len(used) == len(set(used))
    assert len(desk.seeds) == len(set(desk.seeds))
    assert len(engine.asked) > 3


def test_a_key_that_begins_later_is_the_same_stream() -> None:
    key, later = (torch.tensor([stream_key(3, 4, 5, 6, first)]) for first in (0, 17))
    assert torch.equal(uniforms(later, torch.arange(20)), uniforms(key, torch.arange(17, 37)))


def test_samples_that_read_the_same_share_a_request_and_later_turns_do_not() -> None:
    def says(seed: int, text: str | None) -> Any:
        return Opened("go", b"") if text is None else Said(Observation("x"), b"")

    engine, desk = Script(), Desk(says, 3, True, True)
    list(Episodes(engine, desk, ReplyEncoder(TOKENIZER, False)).generate(requests(2, 4, 50, 0)))  # type: ignore[arg-type]
    assert [request.samples for request in engine.asked[0]] == [4, 4]
    assert {request.samples for request in engine.asked[1]} == {1}


def test_what_cannot_be_written_down_costs_its_completion_alone() -> None:
    def says(seed: int, text: str | None) -> Any:
        reply = [{"role": "user", "content": "x"}] if seed % 2 else "x"
        return Opened(None, b"") if text is None else Said(Observation(reply), b"")

    made = Episodes(Script(), Desk(says, 2, True, True), ReplyEncoder(TOKENIZER, False)).generate(requests(4, 4, 50, 0))  # type: ignore[arg-type]
    trajectories = [t for group in made for t in group.trajectories]
    failed = [t for t in trajectories if t.failure is not None]
    assert 0 < len(failed) < len(trajectories)
    for t in failed:
        assert (t.finish, t.failed_in) == ("failed", "environment")
        assert "environment, step 1: the environment returned messages, but there is no chat template" in str(t.failure)


def test_a_reply_far_beyond_the_limit_is_not_even_tokenised(monkeypatch) -> None:
    def says(seed: int, text: str | None) -> Any:
        huge = "x" * 10_000_000
        if text is None:
            return Opened(huge if seed % 4 == 0 else None, b"")
        return Said(Observation(huge), b"")

    replies = ReplyEncoder(TOKENIZER, False)
    monkeypatch.setattr(replies, "_behind", None)
    made = Episodes(Script(), Desk(says, 9, True, True), replies).generate(requests(4, 4, 50, 0))  # type: ignore[arg-type]
    ends = {(t.finish, len(t.played.turns)) for group in made for t in group.trajectories if t.played is not None}
    assert ends == {("length", 1), ("failed", 0)}


def test_what_all_rounds_did_is_added_up() -> None:
    one = RolloutStats(**dict.fromkeys(RolloutStats.__dataclass_fields__, 2))
    both = RolloutStats()
    both.add(one)
    both.add(one)
    largest = {"slots", "peak_pages", "total_pages"}
    assert {name for name, value in vars(both).items() if value != 4} == largest


def play(
    policy: Policy, workers: int, sampling: Sampling = SAMPLING, **engine: Any
) -> dict[tuple[int, int], Trajectory]:
    """Real processes and the real engine."""
    sizes = {"kv_bytes": 1 << 22, "page_tokens": 4, "max_sequences": 32, "prefill_tokens": 64, **engine}
    with ExitStack() as stack:
        native = NativeEngine(policy, TOKENIZER, [STOP], **sizes)
        stack.callback(native.close)
        settings = Environment(fn="worlds.py:Chance", max_turns=4)
        hosts = Hosts(settings, False, workers=workers, base_dir=HERE)
        stack.callback(hosts.close)
        held = native.pool.held
        prompts = [Prompt(i, "", [10 + i, 11, 12][: 1 + i % 3], {}) for i in range(4)]
        asked = [Request(p, 3, 40, sampling, seed=7, step=1) for p in prompts]
        groups = list(Episodes(native, hosts, ReplyEncoder(TOKENIZER, False)).generate(asked))
        assert native.pool.held == held
        return {(g.prompt.id, t.sample): t for g in groups for t in g.trajectories}


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny_model("llama"))


@pytest.fixture(scope="module")
def baseline(policy: Policy) -> dict[tuple[int, int], Trajectory]:
    return play(policy, workers=2)


@pytest.mark.parametrize(
    ("workers", "engine"),
    [(1, {}), (3, {"max_sequences": 2}), (2, {"prefix_cache": False, "page_tokens": 7}), (2, {"prefill_tokens": 3})],
    ids=str,
)
def test_tokens_depend_on_no_schedule(policy, baseline, workers: int, engine: dict[str, Any]) -> None:
    again = play(policy, workers, **engine)
    assert again.keys() == baseline.keys()
    for key, t in baseline.items():
        assert again[key].tokens.tolist() == t.tokens.tolist()
        assert again[key].prompt.tokens == t.prompt.tokens
        assert again[key].played.turns == t.played.turns
        assert again[key].played.earned == t.played.earned
        torch.testing.assert_close(again[key].logprobs, t.logprobs, atol=2e-5, rtol=0)
    assert any(t.own is not None for t in baseline.values())
    assert len({len(t.played.answers) for t in baseline.values()}) > 1


def test_log_probs_are_those_of_one_forward_over_the_whole_conversation(policy, baseline) -> None:
    """Law 3 for conversations: what the engine drew turn by turn is what the trainer sees at once."""
    model = tiny_model("llama")
    for t in baseline.values():
        ids = torch.tensor([[*t.prompt.tokens, *t.tokens.tolist()]])
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0]
        logp = logits[len(t.prompt.tokens) - 1 : -1].log_softmax(-1).gather(1, t.tokens[:, None])[:, 0]
        own = torch.ones(len(t.tokens), dtype=torch.bool) if t.own is None else t.own
        torch.testing.assert_close(t.logprobs, logp[own], atol=1e-5, rtol=0)
