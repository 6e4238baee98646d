"""Both ends of an engine's process: the trainer's never waits for ever, the other one says what ended it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from trimtab.rollout.outside import worker
from trimtab.rollout.outside.messages import Failed
from trimtab.rollout.outside.process import EngineLost, EngineProcess

LARGE = bytes(2**24)
"""More than a socket holds."""


def program(tmp_path: Path, text: str) -> str:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{text}")
    python.chmod(0o755)
    return str(python)


def test_a_process_that_reads_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    process = EngineProcess("vllm", program(tmp_path, "import time; time.sleep(600)"), {})
    with pytest.raises(EngineLost, match="read nothing for 1 s"):
        process.send(LARGE, seconds=1.0)
    process.close()


def test_a_process_that_reads_slowly_gets_all_of_a_large_message(tmp_path: Path) -> None:
    reads = (
        "import sys, time; from multiprocessing.connection import Connection; time.sleep(0.3)\n"
        "link = Connection(int(sys.argv[4])); link.send(len(link.recv())); link.recv()"
    )
    process = EngineProcess("vllm", program(tmp_path, reads), {})
    process.send(LARGE, seconds=60.0)
    assert process.receive(60.0) == len(LARGE)
    process.close()


@pytest.mark.parametrize(
    ("error", "short"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (ValueError("the engine ran out of memory"), True),
        (RuntimeError("an illegal memory access was encountered"), False),
    ],
    ids=str,
)
def test_a_process_says_what_ended_it_and_whether_that_was_memory(
    error: Exception, short: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(kind: str, link: Connection) -> None:
        raise error

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "serve", failing)
    monkeypatch.setattr(sys, "argv", ["worker", "vllm", str(theirs.detach()), str(os.getppid())])
    with pytest.raises(SystemExit):
        worker.main()
    said = Connection(ours.detach()).recv()
    assert isinstance(said, Failed) and said.out_of_memory is short and str(error) in said.text


@pytest.mark.parametrize("gone", [True, False])
def test_a_script_may_be_between_a_process_and_its_trainer(gone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a one lives on when the trainer is killed, so that is looked for by itself."""
    looked: list[float] = []
    ended = subprocess.Popen(["true"])
    ended.wait()
    trainer = ended.pid if gone else os.getpid()

    class Ended(Exception): ...

    def end(code: int) -> None:
        raise Ended

    def wait(seconds: float) -> None:
        looked.append(seconds)
        if len(looked) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(worker.os, "_exit", end)
    monkeypatch.setattr(worker.time, "sleep", wait)
    with pytest.raises(Ended if gone else KeyboardInterrupt):
        worker.end_with_trainer(trainer)
    assert len(looked) == (0 if gone else 3)
