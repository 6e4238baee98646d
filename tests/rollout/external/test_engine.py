"""The trainer's side of an engine outside, with processes that say what they are told to."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_model

from tests.rollout.contract.engines import make_engine, small_policy
from tests.rollout.contract.test_adapters import adapted
from tests.rollout.contract.test_contract import ask, collect, flat, plain_logprobs, prompts
from tests.rollout.contract.test_failures import Scripted, done, scripted
from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.external import engine as engines
from trimtab.rollout.external import members, weights
from trimtab.rollout.external.agreement import lengths
from trimtab.rollout.external.messages import (
    Abort,
    Beat,
    Done,
    EngineSetup,
    Generate,
    Publish,
    Ready,
    Settled,
    Sleep,
    Unread,
)
from trimtab.rollout.external.process import EngineLost
from trimtab.rollout.external.weights import SharedWeights
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.trajectory import Trajectory


def asked(process: Scripted) -> list[int]:
    return [a.id for order in process.sent if isinstance(order, Generate) for a in order.asks]


def published(process: Scripted) -> list[Publish]:
    return [order for order in process.sent if isinstance(order, Publish)]


def test_processes_share_new_tokens_not_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt whose samples may be long weighs as much as several whose may not."""
    engine, made = scripted(monkeypatch, [done(1, n) for n in (0, 1)], [done(1, n) for n in range(2, 8)], processes=2)
    first, *others = prompts(4)
    assert len(collect(engine, [*ask([first], samples=2, new=60), *ask(others, samples=2, new=10)])) == 4
    assert [asked(process) for process in made] == [[0, 1], [2, 3, 4, 5, 6, 7]]
    engine.close()


def test_a_prompt_is_sent_once_for_all_of_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for samples in (1, 8):
        engine, made = scripted(monkeypatch, [done(1, n) for n in range(samples)])
        collect(engine, [Request(Prompt(0, "", [*range(50), *range(50)]), samples, 9, Sampling(), seed=0, step=0)])
        sizes.append(len(pickle.dumps(made[0].sent[-1])))
        engine.close()
    assert sizes[1] - sizes[0] < 7 * 100


def test_random_numbers_are_those_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one that goes on counting samples, or positions."""
    engine, made = scripted(monkeypatch, [done(1, 0), done(1, 1)])
    (prompt,) = prompts(1)
    collect(engine, [Request(prompt, 2, 9, Sampling(), seed=3, step=4, first_sample=5, first_position=6)])
    order = made[0].sent[-1]
    assert isinstance(order, Generate)
    assert [a.key for a in order.asks] == [stream_key(3, 4, prompt.id, number, 6) for number in (5, 6)]
    engine.close()


def test_what_processes_did_is_added_up_but_for_steps_which_they_do_together(monkeypatch: pytest.MonkeyPatch) -> None:
    late = Beat(0, 99, 999, 999, 99)  # of an earlier call
    engine, _ = scripted(
        monkeypatch, [Beat(1, 10, 100, 20, 3), late, done(1, 0)], [Beat(1, 7, 50, 5, 4), done(1, 1)], processes=2
    )
    collect(engine, ask(prompts(2), samples=1))
    stats = engine.stats
    assert (stats.decode_steps, stats.prefill_tokens, stats.cached_prefix_tokens) == (10, 150, 25)
    assert (stats.peak_pages, stats.total_pages) == (7, 18)
    engine.close()


def test_the_tail_is_the_time_with_few_sequences_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 slots fewer than 2 are used: the time of the last sequence, without that in which the caller has the groups."""
    engine, _ = scripted(monkeypatch, [done(1, n) for n in range(8)])
    now = [0.0]
    monkeypatch.setattr(engines.time, "perf_counter", lambda: now[0])
    take = engine._next_done

    def next_done(wait: bool = True) -> Done | None:
        now[0] += 1.0
        return take(wait)

    monkeypatch.setattr(engine, "_next_done", next_done)
    for _ in engine.generate(ask(prompts(8), samples=1)):
        now[0] += 100.0
    assert (engine.stats.tail_s, engine.stats.decode_s) == (1.0, 8.0)
    engine.close()


def test_no_process_has_less_than_its_part_of_the_sequences_nor_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs out of memory with one sequence a process is started again as it was."""
    short = EngineLost("out", out_of_memory=True)
    engine, made = scripted(monkeypatch, [], [], [], [short], [], [done(1, 1)], [done(1, 0)], processes=3)
    said: dict[str, list[str]] = {"lowered": [], "restarted": []}
    engine.on_recovery, engine.on_restart = said["lowered"].append, said["restarted"].append
    assert [process.sent[0].max_sequences for process in made] == [3, 3, 3], "8 in all"
    engine.lower({"max_sequences": 3}, 0)
    assert all(process.closed for process in made[:3]) and not any(process.closed for process in made[3:])
    made[4].script, made[5].script = [done(1, 1)], []
    assert len(collect(engine, ask(prompts(2), samples=1))) == 2
    assert [process.sent[0].max_sequences for process in made[3:]] == [1, 1, 1, 1]
    assert engine.lowered == {"max_sequences": 3} and not said["lowered"] and len(said["restarted"]) == 1
    engine.close()


def test_who_is_lost_between_two_rollouts_is_told_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [EngineLost("gone")], [done(1, 0), done(2, 0)])
    engine.publish(7)
    assert len(made) == 2 and published(made[1])[0].version == 7
    groups = collect(engine, ask(prompts(1), samples=1))
    assert engine.stats.restarts == 1 and flat(groups)[0].versions.tolist() == [7, 7]
    collect(engine, ask(prompts(1), samples=1))
    assert engine.stats.restarts == 0
    engine.close()


def test_who_is_lost_over_adapters_gets_them_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [EngineLost("gone")], [], policy=adapted())
    (begun,) = published(made[0])
    assert begun.weights is not None and begun.adapters is not None
    engine.publish(1)
    alone, again = published(made[0])[1], published(made[1])[0]
    assert alone.weights is None and again.weights is not None
    assert alone.adapters == again.adapters != begun.adapters and Path(again.adapters or "").is_dir()
    engine.close()


def test_who_is_lost_where_another_cannot_see_the_weights_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is not told twice before."""

    class Direct(SharedWeights):
        def __init__(self, policy: Policy, one_device: bool) -> None:
            super().__init__(policy, one_device)
            self.direct = True

    monkeypatch.setattr(weights, "export", lambda pointer: (b"a handle", pointer))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(members, "SharedWeights", Direct)
    engine, made = scripted(monkeypatch, [Unread("no longer"), Settled()], [EngineLost("gone")], [], processes=2)
    engine.publish(1)
    in_place = [[order.weights is not None and order.weights.file is None for order in published(p)] for p in made]
    assert in_place == [[True, True, False], [True, True], [False]]
    engine.close()


def test_a_process_that_is_lost_over_its_first_weights_has_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [[Settled(), EngineLost("gone")], [EngineLost("while it read them")], [Settled(), done(1, 0)]]
    engine, made = scripted(monkeypatch, *lives, first=[])
    said: list[str] = []
    engine.on_restart = said.append
    collect(engine, ask(prompts(1), samples=1))
    assert [line.split(";")[0] for line in said] == ["vLLM stopped (gone)", "vLLM did not start (while it read them)"]
    assert [asked(process) for process in made] == [[0], [], [0]]
    engine.close()


@pytest.mark.parametrize("back", ["publish", "generate"])
def test_what_was_lent_is_given_up_by_the_trainers_allocator_before_it_is_taken_back(
    back: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; and where nothing was lent nothing is given up."""
    order: list[object] = []
    engine, made = scripted(monkeypatch, [Settled(), Settled(), Settled(), done(1, 0), Settled(), done(2, 0)])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: order.append("room"))
    send = Scripted.send
    monkeypatch.setattr(Scripted, "send", lambda self, message: (order.append(type(message)), send(self, message)))
    engine._sleeps = True
    engine.publish(1)
    engine.lend()
    if back == "publish":
        engine.publish(2)
        assert order == [Publish, Sleep, "room", Publish]
    made[0].script = [done(1, 0)]
    collect(engine, ask(prompts(1), samples=1))
    assert order[-1] is Generate and order.count("room") == 1 and order.index("room") == 2
    engine.close()


@pytest.mark.parametrize("eager", [False, True])
def test_the_first_process_compiles_for_the_others(eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted(monkeypatch, [], [], [], processes=3)
    engine.members._settings |= {"cuda": True, "eager": eager}
    order: list[str] = []

    class Noted(Scripted):
        def send(self, message: object) -> None:
            super().send(message)
            if isinstance(message, EngineSetup):
                order.append("starts")

        def receive(self, seconds: float) -> object:
            found = super().receive(seconds)
            if isinstance(found, Ready):
                order.append("ready")
            return found

    monkeypatch.setattr(members, "EngineProcess", lambda *_: Noted([Ready("0", 9), Settled()]))
    engine.lower({"max_sequences": 4}, 0)
    alone = [] if eager else ["starts", "ready"]
    together = 3 if eager else 2
    assert order == [*alone, *["starts"] * together, *["ready"] * together]
    engine.close()


def test_what_nobody_listens_to_is_called_off(monkeypatch: pytest.MonkeyPatch) -> None:
    late = [done(1, 1), Settled()]
    engine, made = scripted(monkeypatch, [done(1, 0), *late, EngineLost("gone")], [done(2, 0)])
    said: list[str] = []
    engine.on_restart = said.append
    listening = engine.generate(ask(prompts(2), samples=1))
    next(listening)
    listening.close()
    assert isinstance(made[0].sent[-1], Abort) and made[0].script == [made[0].script[-1]], "its answer was waited for"
    engine.publish(1)
    assert "generating 0 sequences again" in said[0]
    assert len(collect(engine, ask(prompts(1), samples=1))) == 1
    engine.close()


def test_who_is_lost_when_it_is_called_off_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [done(1, 0), EngineLost("gone")], [done(2, 0)])
    said: list[str] = []
    engine.on_restart = said.append
    listening = engine.generate(ask(prompts(2), samples=1))
    next(listening)
    listening.close()
    assert len(made) == 2 and made[0].closed and not asked(made[1])
    assert len(said) == engine.stats.restarts == 1, "and it is told"
    assert len(collect(engine, ask(prompts(1), samples=1))) == 1
    engine.close()


Shift = Callable[[torch.Tensor], torch.Tensor]


class Computing(Scripted):
    """Answers with tokens of its own and the trainer's log-probs of them, changed in some way."""

    def __init__(self, policy: Policy, shift: Shift) -> None:
        super().__init__([Ready("0", 9), Settled()])
        self.policy, self.shift = policy, shift

    def send(self, message: object) -> None:
        super().send(message)
        if isinstance(message, Generate):
            for a in message.asks:
                tokens = torch.arange(a.limit) % 7 + 5
                made = Trajectory(Prompt(0, "", a.tokens), 0, tokens, torch.empty(0), torch.empty(0), "length")
                values = self.shift(plain_logprobs(self.policy, made)).numpy().astype(np.float32)
                self.script.append(Done(message.call, a.id, tokens.numpy().tobytes(), values.tobytes(), False))


def computing(monkeypatch: pytest.MonkeyPatch, shift: Shift, made: list[Computing], **changes: int) -> object:
    policy = small_policy()

    def start(*_: object) -> Computing:
        made.append(Computing(policy, shift))
        return made[-1]

    monkeypatch.setattr(members, "EngineProcess", start)
    monkeypatch.setattr(engines, "wait_for", lambda processes: None)
    return make_engine("vllm", policy, **changes)


def one_token(logprobs: torch.Tensor) -> torch.Tensor:
    return torch.cat([logprobs[:1] + 0.01, logprobs[1:]])


def little(logprobs: torch.Tensor) -> torch.Tensor:
    return logprobs + 1e-3


@pytest.mark.parametrize(("shift", "longest"), [(little, 128), (one_token, 128), (little, 5)])
def test_log_probs_that_are_the_trainers_on_the_average_are_taken(
    shift: Shift, longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 0.002 nats a token in float32; and what was tried is not counted."""
    made: list[Computing] = []
    engine = computing(monkeypatch, shift, made, longest=longest, processes=2)
    assert isinstance(engine, engines.ExternalEngine) and engine.stats.sequences == 0
    assert sum(len(asked(process)) for process in made) >= 4 and not any(process.closed for process in made)
    engine.close()


@pytest.mark.parametrize(
    "shift",
    [
        lambda found: found - 0.004,
        lambda found: found + 0.004 * (-1) ** torch.arange(len(found)),
        lambda found: found + float("nan"),
    ],
    ids=["less", "both ways", "no numbers"],
)
def test_log_probs_that_are_not_the_trainers_are_refused_and_nothing_is_left(
    shift: Shift, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Computing] = []
    with pytest.raises(EngineError, match=r"compute different log-probs for Qwen2ForCausalLM(.|\n)*run.engine: native"):
        computing(monkeypatch, shift, made, processes=2)
    assert len(made) == 2 and all(process.closed for process in made)
    assert not Path(made[0].sent[0].folder).exists()


@pytest.mark.parametrize(
    ("window", "context", "wanted"),
    [
        (None, 4096, (12, 12)),
        (None, 5, (2, 3)),
        (None, 1, (1, 1)),
        (128, 4096, (256, 12)),
        (128, 200, (188, 12)),
        (4, 4096, (12, 12)),
        (4096, 300, (12, 12)),
    ],
)
def test_what_is_tried_goes_beyond_a_window_that_sequences_grow_out_of(
    window: int | None, context: int, wanted: tuple[int, int]
) -> None:
    assert lengths(window, context) == wanted


def test_what_is_tried_is_as_long_as_the_models_window_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, made = small_policy(), list[Computing]()
    policy.config.sliding_window = 20
    monkeypatch.setattr("tests.rollout.external.test_engine.small_policy", lambda: policy)
    engine = computing(monkeypatch, little, made)
    assert isinstance(engine, engines.ExternalEngine)
    assert {len(a.tokens) for order in made[0].sent if isinstance(order, Generate) for a in order.asks} == {40}
    engine.close()


@pytest.mark.parametrize("parts", [1, 2])
def test_weights_are_read_in_place_where_one_device_has_all_of_them(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def shared(policy: Policy, one_device: bool) -> SharedWeights:
        asked.append(one_device)
        on_gpu = SimpleNamespace(device=torch.device("cuda"))
        assert SharedWeights(on_gpu, one_device).direct is (parts == 1)  # type: ignore[arg-type]
        return SharedWeights(policy, one_device)

    monkeypatch.setattr(members, "SharedWeights", shared)
    two = Policy(tiny_model("qwen2", num_key_value_heads=2))
    scripted(monkeypatch, policy=two, tensor_parallel=parts)[0].close()
    assert asked == [parts == 1]


@pytest.mark.parametrize(
    ("heads", "devices", "wanted"),
    [
        ({}, 1, 1),
        ({"num_attention_heads": 8}, 4, 4),
        ({"num_attention_heads": 8, "num_key_value_heads": 4}, 2, 2),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, 2),
    ],
    ids=["no heads, one device", "all of keys", "some", "fewer than devices"],
)
def test_a_cache_is_cut_by_heads_of_keys(heads: dict[str, int], devices: int, wanted: int) -> None:
    assert engines.kv_cut(SimpleNamespace(**heads), devices) == wanted


def test_every_process_and_device_has_its_part_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Policy(tiny_model("qwen2", num_key_value_heads=2))
    for changes, wanted in (({"processes": 2}, 2**25), ({"tensor_parallel": 2}, 2**25), ({}, 2**26)):
        engine, made = scripted(monkeypatch, policy=two, kv_bytes=2**26, **changes)
        setup = made[0].sent[0]
        assert isinstance(setup, EngineSetup) and setup.kv_bytes == wanted
        assert setup.tensor_parallel == changes.get("tensor_parallel", 1)
        assert changes != {"tensor_parallel": 2} or "the model split over 2 devices" in engine.description
        engine.close()
