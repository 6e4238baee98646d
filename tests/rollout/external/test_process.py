"""Both ends of an engine's process: the trainer's never waits for ever, the other one says what ended it."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.running import runs
from trimtab.rollout.external import worker
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.external.messages import Failed
from trimtab.rollout.external.process import EngineLost, EngineProcess
from trimtab.workers.messages import Channel

LARGE = bytes(2**24)
"""More than a socket holds."""


def program(tmp_path: Path, text: str) -> str:
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\n{text}")
    python.chmod(0o755)
    return str(python)


def test_a_process_that_reads_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    process = EngineProcess("vllm", program(tmp_path, "import time; time.sleep(600)"), {})
    with pytest.raises(EngineLost, match="not read for 1 s"):
        process.send(LARGE, seconds=1.0)
    process.close()


def test_a_process_that_reads_slowly_gets_all_of_a_large_message(tmp_path: Path) -> None:
    reads = (
        "import socket, sys, time; from trimtab.workers.messages import Channel; time.sleep(0.3)\n"
        "link = Channel(socket.socket(fileno=int(sys.argv[-1]))); link.send(len(link.receive())); link.receive()"
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
    def failing(kind: str, link: Channel) -> None:
        raise error

    ours, theirs = socket.socketpair()
    monkeypatch.setattr(worker, "serve", failing)
    with pytest.raises(SystemExit):
        worker.main("vllm", str(theirs.detach()))
    said = Channel(ours).receive()
    assert isinstance(said, Failed) and said.out_of_memory is short and str(error) in said.text


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_engine_has_a_core(kind: str) -> None:
    found = importlib.util.find_spec(worker.core_module(kind))
    assert found is not None and found.origin is not None
    assert f"class {worker.core_class(kind)}:" in Path(found.origin).read_text()


STAND_IN = """
import os, signal, socket, subprocess, sys, time, types
from trimtab.workers import guardian
from trimtab.workers.messages import Channel
def main(kind, descriptor):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(command, start_new_session=True)]
    link = Channel(socket.socket(fileno=int(descriptor)))
    link.send([os.getpid(), *(child.pid for child in children)])
    if kind == "crashes" and link.receive():
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
stand_in = sys.modules["trimtab.rollout.external.worker"] = types.ModuleType("stand_in")
stand_in.main = main
guardian.main(int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
"""


@pytest.mark.parametrize("kind", ["hangs", "crashes"])
def test_nothing_that_a_library_started_is_left(kind: str, tmp_path: Path) -> None:
    process = EngineProcess(kind, program(tmp_path, STAND_IN), {})
    everything = list(map(psutil.Process, process.receive(60.0)))
    try:
        if kind == "crashes":
            process.send("now")
            with pytest.raises(EngineLost, match="SIGKILL"):
                process.receive(60.0)
        process.close(patience_s=0.1)
        assert not any(map(runs, everything))
    finally:
        for one in filter(runs, everything):
            one.kill()
