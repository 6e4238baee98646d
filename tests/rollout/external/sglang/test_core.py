"""The engine's own part, on a scheduler that follows SGLang's rules: what is asked for arrives once, as it would be alone."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_tokenizer

from tests.rollout.external.sglang.fake import VOCABULARY, Model, Scheduler, modules
from tests.rollout.external.sglang.test_arguments import SETUP
from trimtab.config.learn import Sampling
from trimtab.rollout.external.messages import Ask, Done, Generate, Publish, Weight, Weights
from trimtab.rollout.external.sglang.arguments import NEEDED
from trimtab.rollout.external.sglang.core import SglangCore
from trimtab.rollout.sampler import sample
from trimtab.rollout.stops import CHECK_EVERY_TOKENS, StopStrings

STOP = 2


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SglangCore:
    return make(monkeypatch, tmp_path)


def make(monkeypatch: pytest.MonkeyPatch, folder: Path, **changes: Any) -> SglangCore:
    for name, module in modules([]).items():
        monkeypatch.setitem(sys.modules, name, module)
    driver = "trimtab.rollout.external.sglang.driver"
    monkeypatch.setattr(driver, sys.modules[driver], raising=False)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in {*os.environ, *NEEDED}:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # whatever the engine changes is undone
    tiny_tokenizer().save_pretrained(folder)
    made = SglangCore(replace(SETUP, folder=str(folder), max_sequences=6, **changes))
    made.publish(published(folder, 0))
    return made


def published(folder: Path, seed: int, version: int = 0, **more: Any) -> Publish:
    table = torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed))
    file = folder / f"weights-{seed}"
    file.write_bytes(table.numpy().tobytes())
    return Publish(version, Weights((Weight("table", "float32", tuple(table.shape), 0),), str(file)), **more)


def asks(prompts: int = 5, samples: int = 3, limit: int = 12) -> list[Ask]:
    count = prompts * samples
    return [Ask(id, [3 + id // samples, 5, 7], limit, 1000 + 17 * id) for id in range(count)]


def order(asked: list[Ask], call: int = 1, stop_ids: tuple[int, ...] = (STOP,), **sampling: Any) -> Generate:
    return Generate(call, asked, Sampling(**sampling).model_dump(), list(stop_ids))


def finish(core: SglangCore) -> dict[int, Done]:
    found: dict[int, Done] = {}
    for _ in range(1000):
        for done in core.step() if core.busy else ():
            assert done.id not in found
            found[done.id] = done
    assert not core.busy, "it does not come to an end"
    return found


def tokens(done: Done) -> list[int]:
    return np.frombuffer(done.tokens, np.int64).tolist()


def alone(
    seed: int, ask: Ask, stop_ids: tuple[int, ...] = (STOP,), **sampling: Any
) -> tuple[list[int], list[float], bool]:
    """One sequence by itself, a step at a time."""
    settings, model, made, logprobs = Sampling(**sampling), Model(), [], []
    model.table.data.copy_(torch.randn((VOCABULARY, VOCABULARY), generator=torch.Generator().manual_seed(seed)))
    stops, stopped = StopStrings(settings.stop, tiny_tokenizer()), False
    while len(made) < ask.limit and not stopped:
        scores = model.logits([*ask.tokens, *made])[None] / (settings.temperature or 1.0)
        token, logprob = sample(scores, settings, torch.tensor([ask.key]), torch.tensor([len(made)]))
        made.append(token.item())
        logprobs.append(logprob.item())
        stopped = made[-1] in stop_ids or (bool(stops) and stops._contains(made))
    return made, logprobs, stopped


def scheduler(core: SglangCore) -> Scheduler:
    found = core._scheduler
    assert isinstance(found, Scheduler)
    return found


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0}], ids=str)
def test_sequences_are_those_that_each_would_be_alone(core: SglangCore, sampling: dict) -> None:
    """Slots are fewer than sequences, and some are retracted."""
    asked = asks()
    core.begin(order(asked, **sampling))
    found = finish(core)
    assert sorted(found) == [ask.id for ask in asked]
    for ask in asked:
        wanted, logprobs, stopped = alone(0, ask, **sampling)
        assert (tokens(found[ask.id]), found[ask.id].stopped) == (wanted, stopped)
        assert np.frombuffer(found[ask.id].logprobs, np.float32).tolist() == pytest.approx(logprobs, abs=1e-5)
    assert (core.account.beat.prefill_tokens, core.account.beat.cached_tokens) == (5 * 3, 10 * 3), (
        "a prompt is computed once"
    )
    assert core.account.beat.decode_steps > 0 and core.account.beat.blocks == 16 and core.account.ready.blocks == 64


def test_a_stop_token_at_the_limit_is_a_stop(core: SglangCore) -> None:
    """SGLang looks at the limit first, and calls it a length."""
    whole = {ask.id: alone(0, ask, stop_ids=()) for ask in asks()}
    asked = [replace(ask, limit=4) for ask in asks()]
    last = {whole[ask.id][0][3] for ask in asked}
    core.begin(order(asked, stop_ids=tuple(last)))
    assert all(done.stopped == (tokens(done)[-1] in last) for done in finish(core).values())
    core.begin(order([replace(asks(1, 1)[0], limit=1)], call=2, stop_ids=(whole[0][0][0],)))
    (done,) = finish(core).values()
    assert done.stopped and len(tokens(done)) == 1


def test_stop_strings_end_where_they_are_complete(core: SglangCore) -> None:
    asked = asks(limit=30)
    core.begin(order(asked, stop=["a", "7+"]))
    found = finish(core)
    cut = 0
    for ask in asked:
        wanted, logprobs, stopped = alone(0, ask, stop=["a", "7+"])
        assert (tokens(found[ask.id]), found[ask.id].stopped) == (wanted, stopped)
        assert np.frombuffer(found[ask.id].logprobs, np.float32).tolist() == pytest.approx(logprobs, abs=1e-5)
        cut += stopped and wanted[-1] != STOP
    assert cut, "or nothing was tried"


def test_what_ended_with_a_stop_string_is_not_gone_on_with(core: SglangCore) -> None:
    core.begin(order(asks(2, limit=200), stop=["a", "7", "+"]))
    assert len(finish(core)) == 6
    there = [*scheduler(core).running, *scheduler(core).waiting_queue]
    assert not [request for request in there if not request.finished() and request.to_finish is None]


def test_no_more_enter_than_there_is_room_for(core: SglangCore) -> None:
    """But for the samples of a prompt, which follow its first."""
    core.begin(order(asks()))
    while core.busy:
        there = {*scheduler(core).running, *scheduler(core).waiting_queue}
        assert sum(not request.finished() for request in there) <= 6 + 2
        list(core.step())


def test_stop_strings_of_sequences_too_short_to_be_looked_at_are_found_at_their_end(core: SglangCore) -> None:
    asked = asks(limit=CHECK_EVERY_TOKENS - 2)
    core.begin(order(asked, stop=["a", "7", "+"]))
    found = finish(core)
    inside = 0
    for ask in asked:
        wanted, _, stopped = alone(0, ask, stop=["a", "7", "+"])
        assert (tokens(found[ask.id]), found[ask.id].stopped) == (wanted, stopped)
        inside += stopped and wanted[-1] != STOP and len(wanted) < ask.limit
    assert inside, "or nothing was tried"


def test_ended_by_a_stop_string_it_takes_no_other_with_it(core: SglangCore) -> None:
    """SGLang aborts every request whose name begins with the one that is named."""
    names = [core._name(Ask(id, [], 1, 0)) for id in range(120)]
    assert not [(one, two) for one in names for two in names if one != two and two.startswith(one)]


def test_nothing_is_left_of_what_was_aborted(core: SglangCore) -> None:
    core.begin(order(asks()))
    for _ in range(3):
        list(core.step())
    held = [name for name in core._running if name in core._drawing.keyed]
    core.abort()
    assert not core.busy and scheduler(core).is_fully_idle() and not core._admission
    assert held and not any(name in core._drawing.keyed for name in held), "slots are free again"
    core.begin(order(asks(2), call=2))
    assert {id: tokens(done) for id, done in finish(core).items()} == {ask.id: alone(0, ask)[0] for ask in asks(2)}


def test_new_weights_are_used_and_nothing_old_is(core: SglangCore, tmp_path: Path) -> None:
    core.begin(order(asks()))
    list(core.step())
    core.publish(published(tmp_path, 4, version=1))
    assert not core.busy and not scheduler(core).cache
    core.begin(order(asks(), call=2))
    assert {id: tokens(done) for id, done in finish(core).items()} == {ask.id: alone(4, ask)[0] for ask in asks()}


def test_memory_comes_back_in_parts_with_the_weights_in_between(core: SglangCore, tmp_path: Path) -> None:
    scheduler(core).log.clear()
    core.sleep()
    core.sleep()
    core.publish(published(tmp_path, 4, version=1))
    assert scheduler(core).log == ["release", "resume weights", "resume kv_cache", "flush"]
    core.sleep()
    core.begin(order(asks(1)))  # without another publication: those from before are read again
    assert {id: tokens(done) for id, done in finish(core).items()} == {ask.id: alone(4, ask)[0] for ask in asks(1)}


def test_adapters_alone_bring_back_the_weights_that_were_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = make(monkeypatch, tmp_path, rank=4)
    core.publish(published(tmp_path, 4, version=1))
    core.sleep()
    core.publish(Publish(2, None, adapters(tmp_path / "2")))
    core.begin(order(asks(1)))
    assert {id: tokens(done) for id, done in finish(core).items()} == {ask.id: alone(4, ask)[0] for ask in asks(1)}


def test_weights_that_are_not_taken_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Model, "load_weights", lambda self, weights: None)
    with pytest.raises(RuntimeError, match="did not take the weights of table"):
        make(monkeypatch, tmp_path)


def test_a_cache_that_is_not_emptied_is_an_error(
    core: SglangCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler(core), "flush_cache", lambda empty_cache: False)
    with pytest.raises(RuntimeError, match="did not empty its prefix cache"):
        core.publish(published(tmp_path, 4, version=1))


def test_an_engine_that_keeps_its_memory_does_not_sleep(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = make(monkeypatch, tmp_path, sleeps=False)
    core.sleep()
    assert "release" not in scheduler(core).log


def adapters(folder: Path, rank: int = 4) -> str:
    """As the trainer writes them."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    save_file({"lora_A": torch.zeros(1)}, folder / "adapter_model.safetensors")
    return str(folder)


def test_adapters_replace_those_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = make(monkeypatch, tmp_path, rank=4)
    for version in (1, 2):
        core.publish(Publish(version, None, adapters(tmp_path / str(version))))
    assert len(scheduler(core).adapters) == 1 and "2" in scheduler(core).adapters[0]
    core.begin(order(asks(1)))
    assert len(finish(core)) == 3
    assert scheduler(core).with_adapters == 3 * scheduler(core).adapters
    with pytest.raises(RuntimeError, match="its rank is too high"):
        core.publish(Publish(3, None, adapters(tmp_path / "3", rank=8)))


def test_adapters_are_taken_again_with_memory_that_was_given_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    core = make(monkeypatch, tmp_path, rank=4)
    core.publish(Publish(1, None, adapters(tmp_path / "1")))
    (before,) = scheduler(core).adapters
    core.sleep()
    core.begin(order(asks(1)))
    assert len(finish(core)) == 3 and before not in scheduler(core).with_adapters
    assert scheduler(core).with_adapters == 3 * scheduler(core).adapters


def test_adapters_that_come_again_under_a_version_have_another_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang would use what it computed with those before."""
    core = make(monkeypatch, tmp_path, rank=4)
    core.publish(Publish(1, None, adapters(tmp_path / "1")))
    (before,) = scheduler(core).adapters
    core.publish(Publish(1, None, adapters(tmp_path / "2")))
    assert len(scheduler(core).adapters) == 1 and scheduler(core).adapters != [before]


def test_variables_are_the_engines_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SGLANG_MAX_NEW_TOKENS_LIMIT", "5")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32")
    make(monkeypatch, tmp_path, dtype="float32")
    assert "SGLANG_MAX_NEW_TOKENS_LIMIT" not in os.environ and os.environ["TRITON_F32_DEFAULT"] == "ieee"


def test_a_sequence_that_would_be_cut_short_is_an_error(core: SglangCore) -> None:
    scheduler(core).most = 5
    core.begin(order(asks()))
    with pytest.raises(RuntimeError, match="after 5 of 12 new tokens"):
        list(core.step())


def test_a_sequence_that_is_given_up_is_an_error(core: SglangCore) -> None:
    core.begin(order(asks(1, 1)))
    list(core.step())
    scheduler(core).abort_request(type("Order", (), {"rid": "1-0."})())
    with pytest.raises(RuntimeError, match="gave up a sequence: Aborted"):
        finish(core)


def test_a_sequence_that_is_lost_is_an_error(core: SglangCore) -> None:
    core.begin(order(asks(1, 1)))
    list(core.step())
    scheduler(core).running.clear()
    with pytest.raises(RuntimeError, match="1 sequences unfinished"):
        finish(core)
