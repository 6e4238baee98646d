"""One contract for all engines (rollout/engine.py). Each test runs on every engine there is.

An engine is made once for the module: real ones take seconds to start. Every test publishes the weights it wants.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tiny import VOCABULARY, tiny_tokenizer

from tests.rollout.contract.engines import DEVICE, LONGEST, OUTSIDE, STOP, make_engine, small_model, small_policy
from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Engine, Request
from trimtab.rollout.trajectory import Group, Trajectory

LOGPROBS = 1e-4
"""Nats, in float32."""


@dataclass
class Served:
    kind: str
    engine: Engine
    policy: Policy
    version: int = 0

    def load(self, seed: int) -> None:
        """Other weights, as a step would leave them, under a new version."""
        with torch.no_grad():
            for mine, new in zip(self.policy.model.parameters(), small_model(seed).parameters()):
                mine.copy_(new)
        self.version += 1
        self.engine.publish(self.version)


@pytest.fixture(scope="module", params=["native", *OUTSIDE])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    policy = small_policy()
    made = make_engine(request.param, policy, lend_memory=DEVICE.type == "cuda")
    yield Served(request.param, made, policy)
    made.close()


@pytest.fixture(autouse=True)
def first_weights(served: Served) -> None:
    served.load(0)


def prompts(count: int = 4, shared: int = 0, longest: int = 30) -> list[Prompt]:
    numbers = torch.Generator().manual_seed(count + shared)
    head = torch.randint(3, VOCABULARY, (shared,), generator=numbers).tolist()
    lengths = torch.randint(1, longest, (count,), generator=numbers).tolist()
    return [
        Prompt(i, "", head + torch.randint(3, VOCABULARY, (n,), generator=numbers).tolist())
        for i, n in enumerate(lengths)
    ]


def ask(asked: list[Prompt], samples: int = 3, new: int = 20, seed: int = 0, **sampling) -> list[Request]:
    return [Request(p, samples, new, Sampling(**sampling), seed=seed, step=0) for p in asked]


def collect(engine: Engine, requests: list[Request]) -> list[Group]:
    return sorted(engine.generate(requests), key=lambda group: group.index)


def flat(groups: list[Group]) -> list[Trajectory]:
    return [t for group in groups for t in group.trajectories]


def tokens(groups: list[Group]) -> list[list[int]]:
    return [t.tokens.tolist() for t in flat(groups)]


@torch.no_grad()
def plain_logprobs(policy: Policy, trajectory: Trajectory, temperature: float = 1.0) -> torch.Tensor:
    """By a forward pass of transformers in float64, unpacked."""
    model = small_model().double()
    model.load_state_dict({k: v.double().cpu() for k, v in policy.model.state_dict().items()})
    model.set_attn_implementation("eager")
    row = torch.tensor([trajectory.prompt.tokens + trajectory.tokens.tolist()])
    logits = model(row).logits[0, len(trajectory.prompt.tokens) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(1, trajectory.tokens[:, None])[:, 0].float()


def test_every_request_is_answered_once_and_whole(served: Served) -> None:
    requests = ask(prompts(6), samples=3)
    groups = list(served.engine.generate(requests))
    assert sorted(g.index for g in groups) == list(range(6))
    for group in groups:
        assert group.prompt is requests[group.index].prompt
        assert [t.sample for t in group.trajectories] == [0, 1, 2]
        for t in group.trajectories:
            assert len(t.tokens) == len(t.logprobs) == len(t.versions) <= 20
            assert t.tokens.dtype == torch.int64 and t.logprobs.dtype == torch.float32
            assert (t.tokens[-1] == STOP) == (t.finish == "stop") and STOP not in t.tokens[:-1]
            assert t.finish == "stop" or len(t.tokens) == 20


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 1.3, "top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0.0}],
    ids=str,
)
def test_logprobs_are_the_trainers_under_the_whole_distribution(served: Served, sampling: dict) -> None:
    for t in flat(collect(served.engine, ask(prompts(), **sampling))):
        wanted = plain_logprobs(served.policy, t, sampling.get("temperature", 1.0) or 1.0)
        torch.testing.assert_close(t.logprobs, wanted, atol=LOGPROBS, rtol=0)


def test_greedy_takes_the_largest(served: Served) -> None:
    for t in flat(collect(served.engine, ask(prompts(3), samples=1, temperature=0.0))):
        model = small_model()
        model.set_attn_implementation("eager")
        row = torch.tensor([t.prompt.tokens])
        out = model.generate(row, max_new_tokens=20, do_sample=False, eos_token_id=STOP, pad_token_id=0)
        assert t.tokens.tolist() == out[0, row.shape[1] :].tolist()


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"top_k": 8}, {"stop": ["a", "7+"]}], ids=str
)
def test_tokens_are_those_of_the_native_engine(served: Served, sampling: dict) -> None:
    """Whatever generates: what is sampled is a function of the weights and the request alone."""
    requests = ask(prompts(5, shared=7), **sampling)
    native = make_engine("native", served.policy)
    assert tokens(collect(served.engine, requests)) == tokens(collect(native, requests))


def test_what_else_is_in_flight_changes_nothing(served: Served) -> None:
    requests = ask(prompts(8, shared=5), samples=4)
    together = collect(served.engine, requests)
    alone = [collect(served.engine, [request])[0] for request in requests]
    assert tokens(together) == tokens(alone)
    turned = sorted(served.engine.generate(requests[::-1]), key=lambda group: -group.index)
    assert tokens(turned) == tokens(together)


def test_seed_step_and_sample_change_the_tokens(served: Served) -> None:
    (prompt,) = prompts(1)
    first = tokens(collect(served.engine, ask([prompt], samples=4)))
    assert len(set(map(tuple, first))) > 1
    assert tokens(collect(served.engine, ask([prompt], samples=4, seed=1))) != first
    later = Request(prompt, 2, 20, Sampling(), seed=0, step=0, first_sample=2)
    assert tokens(collect(served.engine, [later])) == first[2:]


def test_samples_may_differ_in_length(served: Served) -> None:
    (prompt,) = prompts(1)
    (group,) = collect(served.engine, [Request(prompt, 3, [1, 5, 9], Sampling(), seed=0, step=0)])
    assert all(len(t.tokens) <= n for t, n in zip(group.trajectories, (1, 5, 9)))
    longer = collect(served.engine, [Request(prompt, 3, 20, Sampling(), seed=0, step=0)])
    for short, long in zip(group.trajectories, flat(longer)):
        assert short.tokens.tolist() == long.tokens.tolist()[: len(short.tokens)]


def test_requests_may_name_more_tokens_that_end_them(served: Served) -> None:
    ends = list(range(3, 20))
    found = flat(collect(served.engine, ask(prompts(5), stop_token_ids=ends)))
    assert {t.finish for t in found} >= {"stop"}
    for t in found:
        assert (t.tokens[-1].item() in [STOP, *ends]) == (t.finish == "stop")
        assert not {STOP, *ends} & set(t.tokens[:-1].tolist())


def test_stop_strings_end_at_the_token_that_completes_them(served: Served) -> None:
    tokenizer = tiny_tokenizer()
    found = flat(collect(served.engine, ask(prompts(6), samples=4, stop=["a", "7+"])))
    assert any("a" in t.text or "7+" in t.text for t in found)
    for t in found:
        assert t.text == tokenizer.decode(t.tokens, skip_special_tokens=True)
        before = tokenizer.decode(t.tokens[:-1], skip_special_tokens=True)
        assert "a" not in before and "7+" not in before
        assert (t.finish == "stop") == ("a" in t.text or "7+" in t.text or t.tokens[-1].item() == STOP)


def test_new_weights_are_used_and_nothing_old_is(served: Served) -> None:
    """Tied head and prefix cache included: the same prompts, before and after."""
    requests = ask(prompts(4, shared=40))
    collect(served.engine, requests)
    before = collect(served.engine, requests)
    assert served.engine.stats.cached_prefix_tokens >= 3 * 32, "what the next weights must not find"
    served.load(7)
    after = collect(served.engine, requests)
    assert tokens(before) != tokens(after)
    for t in flat(after):
        torch.testing.assert_close(t.logprobs, plain_logprobs(served.policy, t), atol=LOGPROBS, rtol=0)
    served.load(0)
    assert tokens(collect(served.engine, requests)) == tokens(before)


def test_tokens_are_stamped_with_the_version_that_made_them(served: Served) -> None:
    served.engine.publish(41)
    assert {v for t in flat(collect(served.engine, ask(prompts(2)))) for v in t.versions.tolist()} == {41}


def test_memory_that_was_lent_comes_back_by_itself(served: Served) -> None:
    """Where there is a GPU; on a CPU there is one memory for all."""
    requests = ask(prompts(3))
    before = tokens(collect(served.engine, requests))
    served.engine.lend()
    served.engine.publish(served.version)
    assert tokens(collect(served.engine, requests)) == before
    served.engine.lend()
    assert tokens(collect(served.engine, requests)) == before, "without publishing again"


def test_a_caller_that_stops_listening_leaves_no_ghost(served: Served) -> None:
    requests = ask(prompts(8), samples=4, new=60)
    whole = tokens(collect(served.engine, requests))
    listening = served.engine.generate(requests)
    next(listening)
    listening.close()
    again = collect(served.engine, ask(prompts(2), samples=1, seed=5))
    assert sorted(g.index for g in again) == [0, 1]
    assert tokens(collect(served.engine, requests)) == whole


def test_one_call_at_a_time(served: Served) -> None:
    listening = served.engine.generate(ask(prompts(3), new=40))
    next(listening)
    for call in (lambda: next(served.engine.generate(ask(prompts(1)))), lambda: served.engine.publish(9)):
        with pytest.raises(EngineError, match="before the previous generate finished"):
            call()
    listening.close()


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "without requests"),
        ([Request(Prompt(0, "", []), 1, 5, Sampling(), 0, 0)], "at least one prompt token"),
        ([Request(Prompt(0, "", [3]), 0, 5, Sampling(), 0, 0)], "one sample"),
        ([Request(Prompt(0, "", [3] * 100), 1, 10**6, Sampling(), 0, 0)], "exceeds the model's context"),
        ([Request(Prompt(0, "", [3, 10**6]), 1, 5, Sampling(), 0, 0)], "contains token 1000000, but the model has"),
        ([*ask(prompts(1)), *ask(prompts(1), temperature=0.5)], "share their sampling"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_refused(served: Served, requests: list[Request], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        list(served.engine.generate(requests))
    assert collect(served.engine, ask(prompts(1)))


@pytest.mark.parametrize("sampling", [{}, {"stop": ["a", "7+"]}], ids=["", "stop strings"])
def test_statistics_add_up(served: Served, sampling: dict) -> None:
    requests = ask(prompts(6, shared=40), samples=4, **sampling)
    groups = collect(served.engine, requests)
    stats = served.engine.stats
    assert stats.sequences == 24 and stats.generated_tokens == sum(len(t.tokens) for t in flat(groups))
    assert stats.decode_steps > 0 and 0 < stats.occupancy <= 1 and stats.decode_s > 0 and 0 < stats.kv_usage <= 1
    assert stats.prefill_tokens > 0 and stats.cached_prefix_tokens > 0
    if served.kind != "native":  # whose samples share a prompt without looking for it
        assert stats.prefill_tokens + stats.cached_prefix_tokens == sum(4 * len(r.prompt.tokens) for r in requests)


def test_long_sequences_fill_the_context(served: Served) -> None:
    prompt = Prompt(0, "", [5] * (LONGEST - 40))
    (group,) = collect(served.engine, [Request(prompt, 2, 40, Sampling(), seed=3, step=0)])
    assert all(len(t.tokens) == 40 or t.finish == "stop" for t in group.trajectories)
