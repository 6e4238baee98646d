"""A process that is killed, hangs, runs out of memory or never starts: nothing is lost or comes twice, and the run says why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from tiny import tiny_tokenizer

from tests.rollout.contract.engines import OUTSIDE, PYTHONS, kill_now, make_engine, small_model, small_policy
from tests.rollout.contract.test_contract import ask, collect, prompts, tokens
from tests.running import guarded, left
from trimtab.base.errors import EngineError
from trimtab.model.policy import Policy
from trimtab.rollout.external import engine as engines
from trimtab.rollout.external import members
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.external.kinds import VLLM
from trimtab.rollout.external.messages import Done, Generate, Ready, Settled, Sleep
from trimtab.rollout.external.process import EngineLost, EngineProcess

BROKEN = """#!/bin/sh
echo "a library is missing" >&2
exit 3
"""


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_killed_process_is_started_again_with_current_weights_and_its_work_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the middle of a rollout and once more between two, under weights that are not those it began with."""
    policy = small_policy()
    engine = make_engine(kind, policy, logs=tmp_path / "logs", python=PYTHONS[kind]())
    assert isinstance(engine, ExternalEngine)
    said: list[str] = []
    engine.on_restart = said.append
    with torch.no_grad():
        for mine, new in zip(policy.model.parameters(), small_model(7).parameters()):
            mine.copy_(new)
    engine.publish(5)
    short, *others = prompts(8)
    requests = [*ask([short], samples=4, new=3), *ask(others, samples=4, new=90)]
    wanted = tokens(collect(make_engine("native", policy), requests))
    first, whole = engine.pids[0], ExternalEngine._next_done

    def interrupted(self: ExternalEngine) -> Done:
        if self.stats.sequences == 1 and self.pids[0] == first:  # one has come, and most are far from their end
            kill_now(self)
        return whole(self)

    monkeypatch.setattr(ExternalEngine, "_next_done", interrupted)
    groups = list(engine.generate(requests))
    assert engine.pids[0] != first and engine.stats.restarts == 1 and "SIGKILL" in said[0]
    assert tokens(sorted(groups, key=lambda g: g.index)) == wanted
    assert engine.stats.sequences == 32 and len(groups) == 8
    assert {v for g in groups for t in g.trajectories for v in t.versions.tolist()} == {5}
    hanging = guarded(engine.pids[0])
    hanging.suspend()  # alive and silent
    monkeypatch.setattr(engines, "SILENCE_TIMEOUT_S", 2.0)
    assert tokens(collect(engine, requests)) == wanted
    assert not hanging.is_running() and "has not answered" in said[1]
    engine.close()
    logs = [tmp_path / "logs" / f"{kind}-{number}.log" for number in (1, 2)]
    assert all(log.is_file() and str(log) in line for log, line in zip(logs, said, strict=True))


def test_a_process_that_cannot_start_ends_the_run_with_its_last_lines(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(BROKEN)
    python.chmod(0o755)
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(EngineError, match=r"exit status 3; its log is .*vllm-1.log(.|\n)*a library is missing"):
        ExternalEngine(
            VLLM, small_policy(), tiny_tokenizer(), [2], kv_bytes=2**20, max_sequences=4, prefill_tokens=64, page_tokens=32,
            longest=64, python=str(python), logs=tmp_path / "logs",
        )  # fmt: skip
    assert "a library is missing" in (tmp_path / "logs" / "vllm-1.log").read_text()
    assert not set(psutil.Process().children(recursive=True)) - before


IDLE = """
import sys, time
from trimtab.rollout.external.process import EngineProcess
print(EngineProcess('vllm', sys.executable, {}).pid, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_with_its_trainer_however_that_ends() -> None:
    started = subprocess.Popen([sys.executable, "-c", IDLE], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    child = psutil.Process(int(started.stdout.readline()))
    everything = [child, *child.children(recursive=True)]
    started.kill()
    started.communicate(timeout=30)
    assert not left(everything)


def test_an_engine_finds_this_package_and_nothing_that_is_installed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the package is installed, all of the trainer's libraries lie in the same folder."""
    for name in ("trimtab", "torch"):
        (tmp_path / "site" / name).mkdir(parents=True)
    monkeypatch.setattr("trimtab.rollout.external.process.PACKAGE", tmp_path / "site" / "trimtab")
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nls "${PYTHONPATH%%:*}"\n')
    python.chmod(0o755)
    process = EngineProcess("vllm", str(python), {})
    with pytest.raises(EngineLost, match="exit status 0"):
        process.receive(60.0)
    assert process.last_lines() == "trimtab"
    process.close()


class Scripted:
    """In place of a process: says what it is told to."""

    def __init__(self, script: list[object]) -> None:
        self.script, self.sent = script, []
        self.pid, self.closed, self.number = 0, False, 0

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self, seconds: float) -> object:
        said = self.script.pop(0)
        if isinstance(said, EngineLost):
            said.lines = self.last_lines()
            raise said
        return said

    def take(self) -> object:
        return self.receive(0.0)

    def last_lines(self) -> str:
        return f"the end of its log, {self.number}"

    def close(self) -> None:
        self.closed = True


def scripted(
    monkeypatch: pytest.MonkeyPatch, *scripts: list[object], first: list[object] | None = None, policy: Policy | None = None,
    **changes: int,
) -> tuple[ExternalEngine, list[Scripted]]:  # fmt: skip
    waiting, made = list(scripts), []
    begins = [Settled()] if first is None else first

    def start(kind: str, python: str, variables: dict[str, str]) -> Scripted:
        made.append(Scripted([Ready("0", 9), *begins, *(waiting.pop(0) if waiting else [EngineLost("again")])]))
        made[-1].number = len(made)
        return made[-1]

    monkeypatch.setattr(members, "EngineProcess", start)
    monkeypatch.setattr(engines, "wait_for", lambda processes: None)
    monkeypatch.setattr(engines, "refuse_other_logprobs", lambda *_: None)
    engine = make_engine("vllm", policy or small_policy(), max_sequences=8, python="", **changes)
    return engine, made  # type: ignore[return-value]


def done(call: int, id: int, token: int = 5) -> object:
    return Done(
        call, id, torch.tensor([token, 2]).numpy().tobytes(), torch.tensor([-1.0, -2.0]).numpy().tobytes(), True
    )


def test_memory_that_runs_out_halves_what_runs_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(
        monkeypatch, [done(1, 1), EngineLost("out", out_of_memory=True)], [done(1, 0), done(1, 2), done(1, 3)]
    )
    said: list[str] = []
    engine.on_recovery = said.append
    (group,) = engine.generate(ask(prompts(1), samples=4))
    assert [t.sample for t in group.trajectories] == [0, 1, 2, 3] and engine.lowered == {"max_sequences": 4}
    assert made[1].sent[0].max_sequences == 4 and "max_sequences -> 4" in said[0]
    assert sorted(a.id for a in made[1].sent[2].asks) == [0, 2, 3], "what had arrived is not asked for again"


def test_what_comes_twice_or_from_an_earlier_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = scripted(monkeypatch, [done(0, 1, 7), done(1, 1), done(1, 1, 8), done(7, 0, 9), done(1, 0)])
    (group,) = engine.generate(ask(prompts(1), samples=2))
    assert engine.stats.sequences == 2 and [t.sample for t in group.trajectories] == [0, 1]
    assert [t.tokens.tolist() for t in group.trajectories] == [[5, 2], [5, 2]]


def test_two_processes_share_prompts_and_one_that_is_lost_repeats_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples 0 and 1 are of the first prompt, 2 and 3 of the second, 4 and 5 of the third."""
    first = [done(1, 1), EngineLost("gone"), done(1, 4)]
    engine, made = scripted(
        monkeypatch, first, [done(1, 3), done(1, 2)], [done(1, 5), done(1, 0), done(1, 4)], processes=2
    )
    assert [process.sent[0].max_sequences for process in made] == [4, 4]
    assert made[0].sent[0].kv_bytes == made[1].sent[0].kv_bytes == 2**25
    groups = sorted(engine.generate(ask(prompts(3), samples=2)), key=lambda group: group.index)
    asked = [sorted(a.id for order in p.sent if isinstance(order, Generate) for a in order.asks) for p in made]
    assert asked == [[0, 1, 4, 5], [2, 3], [0, 4, 5]]
    assert [[t.sample for t in group.trajectories] for group in groups] == [[0, 1]] * 3
    assert engine.stats.sequences == 6 and engine.stats.restarts == 1 and len(engine.pids) == 2
    engine.close()


def test_processes_that_run_out_of_memory_together_get_fewer_sequences_once(monkeypatch: pytest.MonkeyPatch) -> None:
    short = EngineLost("out", out_of_memory=True)
    engine, made = scripted(monkeypatch, [short], [short], [done(1, 0)], [done(1, 1)], processes=2)
    assert len(list(engine.generate(ask(prompts(2), samples=1)))) == 2
    assert engine.lowered == {"max_sequences": 4} and [p.sent[0].max_sequences for p in made] == [4, 4, 2, 2]
    engine.close()


def test_who_is_lost_when_memory_is_lent_lends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [Settled()], [EngineLost("gone")], [Settled()], processes=2)
    engine._sleeps = True
    engine.lend()
    assert [[type(order) for order in process.sent].count(Sleep) for process in made] == [1, 1, 1]
    engine.close()


@pytest.mark.parametrize("kind", OUTSIDE)
def test_two_processes_give_what_one_gives(kind: str) -> None:
    policy = small_policy()
    requests = ask(prompts(5, shared=20), samples=3, new=24)
    wanted = tokens(collect(make_engine("native", policy), requests))
    engine = make_engine(kind, policy, processes=2)
    assert isinstance(engine, ExternalEngine) and len(set(engine.pids)) == 2 and "2 processes" in engine.description
    assert tokens(collect(engine, requests)) == wanted
    with torch.no_grad():
        for mine, new in zip(policy.model.parameters(), small_model(7).parameters()):
            mine.copy_(new)
    engine.publish(1)
    native = make_engine("native", policy)
    assert tokens(collect(engine, requests)) == tokens(collect(native, requests)) != wanted
    some = engine.generate(requests)
    next(some)
    some.close()  # nothing of it comes later
    assert tokens(collect(engine, requests)) == tokens(collect(native, requests))
    engine.close()
    assert engine.pids == []


def test_a_process_that_fails_again_and_again_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = scripted(monkeypatch, [EngineLost("its process was ended by SIGSEGV")])
    said: list[str] = []
    engine.on_restart = said.append
    with pytest.raises(EngineError, match=r"failed: again, 4 times in a row(.|\n)*the end of its log"):
        list(engine.generate(ask(prompts(1), samples=2)))
    assert len(made) == 1 + members.MAX_FAILURES_IN_A_ROW
    assert [line.split(" (")[0] for line in said] == ["vLLM stopped"] * members.MAX_FAILURES_IN_A_ROW


def test_the_last_lines_are_those_of_the_process_that_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_FAILURES_IN_A_ROW", 0)
    engine, _ = scripted(monkeypatch, [done(1, 0)], [EngineLost("gone")], processes=2)
    with pytest.raises(EngineError, match=r"gone(.|\n)*the end of its log, 2"):
        list(engine.generate(ask(prompts(2), samples=1)))


def test_a_sequence_in_between_gives_it_another_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    lives = [[done(1, n), EngineLost("again")] for n in range(7)]
    engine, made = scripted(monkeypatch, *lives, [done(1, 7)])
    (group,) = engine.generate(ask(prompts(1), samples=8))
    assert len(group.trajectories) == 8 and len(made) == 8 and engine.stats.restarts == 7


def test_a_process_that_dies_is_noticed_at_once(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -9 $$\n")
    python.chmod(0o755)
    process = EngineProcess("vllm", str(python), {})
    with pytest.raises(EngineLost, match="SIGKILL"):
        process.receive(60.0)
    process.close()


@pytest.mark.parametrize("kind", OUTSIDE)
def test_nothing_is_left_after_close(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do the trainer's variables reach what the engine depends on."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "0.001")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    before = set(psutil.Process().children(recursive=True))
    engine = make_engine(kind, small_policy(), python=PYTHONS[kind]())
    assert collect(engine, ask(prompts(2)))
    engine.close()
    assert not set(psutil.Process().children(recursive=True)) - before
