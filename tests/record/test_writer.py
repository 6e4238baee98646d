"""Checkpoints written behind the training hold what was there when they were asked for, one at a time; no error is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from trimtab.base.errors import DivergedError, TrainingError
from trimtab.config.learn import Learn
from trimtab.model.folder import other_files
from trimtab.model.memory import Shortage, attempt
from trimtab.model.weights import WeightStore
from trimtab.record import host_copy, part
from trimtab.record.checkpoint import RunState, checkpoints, load_state
from trimtab.record.part import CheckpointPart, collect
from trimtab.record.saving import PendingCheckpoint
from trimtab.record.tensor_file import write_tensors
from trimtab.record.writer import CheckpointWriter
from trimtab.update.optimizer import MasterAdamW

CPU = torch.device("cpu")


class Training:
    """A model that is trained and saved."""

    def __init__(self, run: Path, tokenizer: Any, copies: bool = True) -> None:
        self.model = tiny_model()
        self.optimizer = MasterAdamW(WeightStore(self.model.named_parameters()), Learn(lr=1e-2))
        self.files = other_files(self.model, tokenizer)
        self.run, self.recoveries = run, 0
        self.writer = CheckpointWriter(CPU, self.guarded, copies)
        self.state = RunState()

    def guarded(self, where: str, work: Callable[[], Any]) -> Any:
        while isinstance(outcome := attempt(work), Shortage):
            self.recoveries += 1
        return outcome

    def part(self) -> CheckpointPart:
        return collect(self.model, self.optimizer, None, self.files)

    def step(self) -> None:
        for parameter in self.model.parameters():
            parameter.sum().backward()
        self.writer.before_change()
        self.optimizer.step(1e-2)

    def save(self, step: int) -> None:
        self.state.step = step
        self.writer.save(self.part, PendingCheckpoint(self.run, self.state, 2))

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {f"model/{name}": p.detach() for name, p in self.model.named_parameters()}
        return {name: t.clone() for name, t in (named | self.optimizer.state_tensors()).items()}

    def saved(self, step: int) -> dict[str, torch.Tensor]:
        folder = self.run / f"checkpoints/step-{step}"
        weights = {f"model/{name}": t for name, t in load_file(folder / "model.safetensors").items()}
        return weights | load_file(folder / "optimizer.safetensors")


class Gate:
    """Holds a write until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.event = threading.Event()
        monkeypatch.setattr(part, "write_tensors", self.write)

    def write(self, *args: Any) -> Any:
        assert self.event.wait(30)
        return write_tensors(*args)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_what_changes_after_save_is_not_in_the_checkpoint(tmp_path: Path, tokenizer: Any, gate: Gate) -> None:
    training = Training(tmp_path, tokenizer)
    training.step()
    expected = training.tensors()
    training.save(1)
    training.step()
    training.state.step, training.state.memory["token_budget"] = 2, 7
    assert not checkpoints(tmp_path), "it is not written yet"
    gate.event.set()
    training.writer.wait()
    found = training.saved(1)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(training.tensors()["model/model.norm.weight"], found["model/model.norm.weight"])
    assert load_state(tmp_path / "checkpoints/step-1") == RunState(step=1)


def test_one_write_at_a_time(tmp_path: Path, tokenizer: Any, gate: Gate) -> None:
    training = Training(tmp_path, tokenizer)
    training.save(1)
    threading.Timer(0.2, gate.event.set).start()
    begin = time.perf_counter()
    training.save(2)
    assert time.perf_counter() - begin > 0.15 and 1 in checkpoints(tmp_path)
    training.writer.close()
    assert list(checkpoints(tmp_path)) == [1, 2]
    metrics = training.writer.take_metrics()
    assert metrics["checkpoint/wait_s"] > 0.15 and metrics["checkpoint/write_s"] > 0.15
    assert training.writer.take_metrics() == {}


@pytest.mark.parametrize("why", ["the plan", "the host"])
def test_without_room_for_a_copy_the_write_ends_before_the_next_step(
    tmp_path: Path, tokenizer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "the host":
        monkeypatch.setattr(host_copy, "host_memory", lambda: (10**9, 1000))
    training = Training(tmp_path, tokenizer, copies=why == "the host")
    training.step()
    expected = training.tensors()
    training.save(1)
    assert not checkpoints(tmp_path)
    threading.Timer(0.2, gate.event.set).start()
    training.step()
    assert 1 in checkpoints(tmp_path), "the step did not wait"
    assert all(torch.equal(training.saved(1)[name], tensor) for name, tensor in expected.items())
    assert training.writer.take_metrics()["checkpoint/wait_s"] > 0.15


def test_with_a_copy_no_step_waits(tmp_path: Path, tokenizer: Any, gate: Gate) -> None:
    training = Training(tmp_path, tokenizer)
    training.writer.prepare(training.part().nbytes)
    training.save(1)
    training.step()
    training.writer.raise_if_failed()
    assert not checkpoints(tmp_path)
    gate.event.set()
    training.writer.close()
    assert 1 in checkpoints(tmp_path)


@pytest.mark.parametrize("call", ["save", "wait", "close", "raise_if_failed", "before_change"])
def test_an_error_is_raised_by_the_next_call_in_words(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    training = Training(tmp_path, tokenizer, copies=call != "before_change")
    training.save(1)
    training.writer.wait()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(part, "write_tensors", full)
    training.save(2)
    while not training.writer._behind.ended:
        time.sleep(0.01)
    calls: dict[str, Callable[[], object]] = {"save": lambda: training.save(3)}
    with pytest.raises(
        TrainingError, match=r"no space left for the checkpoint of step 2 in .*complete checkpoint is step-1"
    ):
        calls.get(call, getattr(training.writer, call, None))()  # type: ignore[misc]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1"]
    monkeypatch.undo()
    if call != "close":
        training.save(3)
        training.writer.close()
        assert list(checkpoints(tmp_path)) == [1, 3]


@pytest.mark.parametrize("copies", [True, False])
def test_values_that_are_not_finite_are_refused_before_save_returns(
    tmp_path: Path, tokenizer: Any, copies: bool
) -> None:
    training = Training(tmp_path, tokenizer, copies)
    training.save(1)
    training.writer.wait()
    with torch.no_grad():
        training.model.lm_head.weight[-1, -1] = float("nan")
    with pytest.raises(DivergedError, match=r"step 2 is not saved: lm_head\.weight holds .* step-1 is intact"):
        training.save(2)
    training.writer.close()
    assert list(checkpoints(tmp_path)) == [1]


def test_a_write_that_runs_out_of_memory_is_done_again(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, calls = Training(tmp_path, tokenizer), list[int]()

    def short(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return write_tensors(*args)

    monkeypatch.setattr(part, "write_tensors", short)
    training.save(1)
    training.step()
    training.writer.wait()
    assert training.recoveries == 1 and list(checkpoints(tmp_path)) == [1]
    assert load_state(tmp_path / "checkpoints/step-1").step == 1


def test_a_stop_while_it_waits_loses_nothing(
    tmp_path: Path, tokenizer: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(tmp_path, tokenizer, copies=False)
    training.save(1)

    def stopped(self: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", stopped)
        with pytest.raises(KeyboardInterrupt):
            training.writer.wait()
    threading.Timer(0.1, gate.event.set).start()
    training.writer.before_change()
    assert list(checkpoints(tmp_path)) == [1]


def test_writes_are_told_with_their_times(tmp_path: Path, tokenizer: Any) -> None:
    training, spans = Training(tmp_path, tokenizer), list[tuple[float, float]]()
    training.writer.on_written = lambda begin, end: spans.append((begin, end))
    before = time.perf_counter()
    for step in (1, 2):
        training.save(step)
    training.writer.close()
    assert len(spans) == 2 and before < spans[0][0] < spans[0][1] <= spans[1][0] < spans[1][1] < time.perf_counter()
