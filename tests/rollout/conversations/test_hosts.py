"""Environments in their processes: state, failures, and what survives the death of a process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.running import runs, wait_for
from trimtab.base.errors import EnvError
from trimtab.config.schema import Environment
from trimtab.rollout.conversations.hosts import Hosts
from trimtab.rollout.conversations.wire import ResetResult, StepResult
from trimtab.workers.messages import Failure

HERE = Path(__file__).parent


@pytest.fixture
def hosts() -> Iterator[Callable[..., Hosts]]:
    made: list[Hosts] = []

    def make(fn: str, workers: int = 2, objects: Any = None, **settings: Any) -> Hosts:
        named = fn if fn.startswith("object:") else f"worlds.py:{fn}"
        environment = Environment(fn=named, **{"timeout_s": 30.0, **settings})
        made.append(Hosts(environment, False, workers=workers, base_dir=HERE, objects=objects))
        return made[-1]

    yield make
    for one in made:
        one.close()
    mine = str(os.getpid())
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if {"trimtab.rollout.conversations.worker", mine} <= set(p.info["cmdline"] or [])
    ]
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive


def all_answers(hosts: Hosts) -> dict[Any, Any]:
    found = {}
    while (answer := hosts.wait()) is not None:
        assert answer.tag not in found
        found[answer.tag] = answer.result
    return found


def test_every_conversation_has_its_own_state(hosts) -> None:
    host = hosts("Echo", args={"turns": 3})
    handles = [host.new_handle() for _ in range(20)]
    for number, handle in enumerate(handles):
        host.reset(number, handle, number, {})
    assert all(isinstance(result, ResetResult) and result.opening is None for result in all_answers(host).values())
    for turn in range(3):
        for number, handle in enumerate(handles):
            host.step(number, handle, turn, "a" * number)
        for number, result in all_answers(host).items():
            assert result.observation.reply == f"<{number}>"
            assert result.observation.reward == number
            assert result.observation.done == (turn == 2)


@pytest.mark.parametrize(("fn", "survive"), [("Slow", True), ("Bound", False)])
def test_others_outlive_the_death_of_a_process_where_their_state_can_be_copied(hosts, fn: str, survive: bool) -> None:
    host = hosts(fn, workers=1, timeout_s=1.5)
    handles = [host.new_handle() for _ in range(4)]
    for number, handle in enumerate(handles):
        host.reset(number, handle, 0, {"hang": 2 if number == 1 else 0})
    all_answers(host)
    for number, handle in enumerate(handles):
        host.step(number, handle, 0, "one")
    first = all_answers(host)
    assert all(result.observation.reply.startswith("1 ") for result in first.values())
    for number, handle in enumerate(handles):
        host.step(number, handle, 0, "two")
    second = all_answers(host)
    assert second[1].kind == "timeout"
    assert "took longer than 1.5 s" in second[1].summary
    assert second[0].observation.reply.startswith("2 ")  # it answered before the process was lost
    for number in (2, 3):
        if survive:
            assert second[number].observation.reply.startswith("2 ")
            assert second[number].observation.reply != second[0].observation.reply  # in another process
        else:
            assert second[number].kind == "crashed"
            assert "lost its state" in second[number].summary
    if survive:
        for number in (0, 2, 3):
            host.step(number, handles[number], 0, "three")
        assert all(result.observation.reply.startswith("3 ") for result in all_answers(host).values())


def test_a_class_from_python_keeps_its_state_across_processes(hosts) -> None:
    class Local:
        def __init__(self) -> None:
            self.count = 0

        def reset(self, **_: Any) -> None:
            self.me = self

        def step(self, text: str) -> str:
            self.count += 1
            if text == "die":
                os._exit(1)
            return f"{self.count} {self.me is self} {type(self) is Local.real(self)}"

        @staticmethod
        def real(instance: Any) -> type:
            return type(instance)

    host = hosts("object:Local", workers=1, objects={"Local": Local})
    a, b = host.new_handle(), host.new_handle()
    host.reset("a", a, 0, {})
    host.reset("b", b, 0, {})
    all_answers(host)
    host.step("a", a, 0, "hi")
    host.step("b", b, 0, "die")
    answers = all_answers(host)
    assert answers["a"].observation.reply == "1 True True"
    assert answers["b"].kind == "crashed"
    host.step("a", a, 0, "hi")
    assert all_answers(host)["a"].observation.reply == "2 True True"


def test_random_numbers_depend_on_the_conversation_and_not_on_the_worker(hosts) -> None:
    runs = []
    for workers in (1, 3):
        host = hosts("Chance", workers=workers)
        handles = [host.new_handle() for _ in range(12)]
        order = range(12) if workers == 1 else reversed(range(12))
        said: dict[int, list[Any]] = {number: [] for number in range(12)}
        for number in order:
            host.reset(number, handles[number], 1000 + number, {})
        for number, result in all_answers(host).items():
            said[number].append(result.opening)
        for turn in range(2):
            for number in said:
                host.step(number, handles[number], 77 * turn + number, "hello")
            for number, result in all_answers(host).items():
                said[number].append((result.observation.reply, result.observation.done, result.observation.reward))
        runs.append(said)
    assert runs[0] == runs[1]
    assert len({str(one) for one in runs[0].values()}) > 6


@pytest.mark.parametrize(
    ("fn", "text", "kind", "words"),
    [
        ("Moody", chr(9), "raised", "raised ValueError: I did not like that"),
        (
            "Moody",
            chr(10),
            "invalid",
            "step returned NoneType None; return text, a list of messages or a trimtab.Observation",
        ),
        ("Moody", chr(11), "invalid", "as a reward; return a finite number"),
        ("Crash", "x", "crashed", "ended its process: exit status 3"),
    ],
)
def test_failures_have_a_kind_and_a_reason(hosts, fn: str, text: str, kind: str, words: str) -> None:
    host = hosts(fn)
    handle = host.new_handle()
    host.reset("a", handle, 0, {})
    all_answers(host)
    host.step("a", handle, 0, text)
    failure = all_answers(host)["a"]
    assert isinstance(failure, Failure)
    assert failure.kind == kind
    assert words in str(failure)
    if kind == "raised":
        assert "worlds.py" in failure.detail
        assert "trimtab/rollout/conversations/worker.py" not in failure.detail


def test_numpy_is_seeded_where_an_environment_imports_it_in_a_call(hosts) -> None:
    openings = set()
    for _ in range(2):
        host = hosts("Lazy", workers=1)
        host.reset("a", host.new_handle(), 5, {})
        openings.add(all_answers(host)["a"].opening)
    assert len(openings) == 1


def test_an_ended_conversation_is_closed_and_async_methods_are_awaited(hosts, tmp_path: Path) -> None:
    log = tmp_path / "log"
    host = hosts("Closes", workers=1)
    for _ in range(3):
        handle = host.new_handle()
        host.reset("a", handle, 0, {"log": str(log)})
        all_answers(host)
        host.end(handle)
        host.end(handle)
    handle = host.new_handle()
    host.reset("b", handle, 0, {"log": str(log)})
    all_answers(host)  # the one worker has come to this after the others
    assert log.read_text().splitlines() == ["closed"] * 3
    failing = hosts("Opens", workers=1)
    handle = failing.new_handle()
    failing.reset("a", handle, 0, {"log": str(log)})
    assert "raised ValueError: full" in str(all_answers(failing)["a"])
    assert log.read_text().splitlines() == ["closed"] * 4
    other = hosts("Async")
    handle = other.new_handle()
    other.reset("a", handle, 0, {})
    all_answers(other)
    other.step("a", handle, 0, "abc")
    result = all_answers(other)["a"]
    assert isinstance(result, StepResult)
    assert result.observation.reply == "<3>"


def test_the_end_of_a_run_waits_for_conversations_to_be_closed(hosts, tmp_path: Path) -> None:
    log = tmp_path / "log"
    host = hosts("ClosesSlowly", workers=2)
    handles = [host.new_handle() for _ in range(8)]
    for number, handle in enumerate(handles):
        host.reset(number, handle, 0, {"log": str(log)})
    all_answers(host)
    for handle in handles:
        host.end(handle)
    host.close()
    assert log.read_text().splitlines() == ["closed"] * 8
    host.close()


def test_the_end_of_a_run_does_not_wait_for_a_conversation_that_hangs(hosts, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("trimtab.rollout.conversations.hosts.CLOSE_TIMEOUT_S", 0.2)
    host = hosts("Slow", workers=1, timeout_s=1000.0)
    handle = host.new_handle()
    host.reset("a", handle, 0, {"hang": 1})
    all_answers(host)
    host.step("a", handle, 0, "hang")
    host.end(handle)
    workers = psutil.Process().children()
    assert workers and host._closing == 1
    host.close()
    assert not any(worker.is_running() for worker in workers) and host._closing == 1, "ended, not waited for"


@pytest.mark.parametrize("text", ["crash", "hang", "go on"])
def test_nothing_that_an_environment_started_outlives_its_process(hosts, tmp_path: Path, text: str) -> None:
    host, mark = hosts("Daemonic", workers=1, timeout_s=1.0 if text == "hang" else 60.0), str(tmp_path)
    handle = host.new_handle()
    host.reset("a", handle, 0, {"mark": mark})
    assert isinstance(all_answers(host)["a"], ResetResult)
    started: list[psutil.Process] = []
    assert wait_for(lambda: started.extend(p for p in psutil.process_iter() if mark in arguments(p)) or started)
    try:
        host.step("a", handle, 0, text)
        assert isinstance(all_answers(host)["a"], StepResult if text == "go on" else Failure)
        if text == "go on":
            assert all(map(runs, started)), "it lives as long as its process"
            host.close()
        assert not any(map(runs, started))
    finally:
        for one in filter(runs, started):
            one.kill()


def arguments(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


@pytest.mark.parametrize(
    ("fn", "settings", "error"),
    [
        ("Ecko", {}, "there is no 'Ecko' in it. Did you mean 'Echo'"),
        ("NoStep", {}, "has no method 'step'. Did you mean 'stepp'"),
        ("WrongStep", {}, "Write step(self, text)"),
        ("not_a_class", {}, "is not a class. Write a class with reset(self, **columns) and step(self, text)"),
        ("Echo", {"args": {"turn": 3}}, "It accepts: turns, opening"),
    ],
)
def test_what_is_no_environment_is_refused_before_anything_runs(hosts, fn: str, settings: Any, error: str) -> None:
    with pytest.raises(EnvError) as caught:
        hosts(fn, **settings)
    assert error in str(caught.value)


def test_columns_that_reset_needs_have_to_be_there(hosts) -> None:
    host = hosts("Slow")
    host.check({"hang", "other"})
    with pytest.raises(EnvError, match="reset needs the column 'hang', but not every row has it"):
        host.check({"hangs"})
