"""What a trainer starts ends with everything that it started, whoever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.running import guarded, left, runs, wait_for
from trimtab.workers.spawn import KILL_EARLY, KILL_FIRST, how_it_ended, kill_all, start

STARTER = """
    import os, signal, subprocess, sys, time

    SLEEP = "import os, sys, time; open(os.path.join(sys.argv[1], str(os.getpid())), 'w').close(); time.sleep(600)"


    def main(end, folder):
        command = [sys.executable, "-c", SLEEP, folder]
        subprocess.Popen(command)
        subprocess.Popen(command, start_new_session=True)
        subprocess.Popen(["setsid", "-f", *command])
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                os.execv(sys.executable, command)
            os._exit(0)
        while len(os.listdir(folder)) < 4:
            time.sleep(0.01)
        open(os.path.join(folder, "ready"), "w").close()
        if end == "exit":
            sys.exit(3)
        if end == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if end == "kill its group":
            os.killpg(os.getpgrp(), signal.SIGKILL)
        time.sleep(600)


    def reap_none(folder):
        for _ in range(5):
            if os.fork() == 0:
                if os.fork() == 0:
                    time.sleep(0.05)
                os._exit(0)
            os.wait()
        open(os.path.join(folder, "ready"), "w").close()
        time.sleep(600)


    def hop(folder):
        open(os.path.join(folder, "ready"), "w").close()
        end = time.time() + 60
        if os.fork() == 0:
            while time.time() < end:
                if os.fork():
                    os._exit(0)
        time.sleep(600)
"""
STARTED = 4


@pytest.fixture
def module(tmp_path: Path) -> dict[str, str]:
    """Variables with which a process finds the module `starter`."""
    (tmp_path / "starter.py").write_text(textwrap.dedent(STARTER))
    (tmp_path / "hopper.py").write_text("from starter import hop as main")
    (tmp_path / "ender.py").write_text("from starter import reap_none as main")
    source = str(Path(__file__).parents[2] / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((source, str(tmp_path)))}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where what is started says its process id; killed after the test, if it should be there."""
    made = tmp_path / "started"
    made.mkdir()
    yield made
    for one in started_in(made):
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


def started_in(folder: Path) -> list[psutil.Process]:
    """Processes that run and have the folder among their arguments: those that the module started, guardians, itself."""
    return [p for p in psutil.process_iter(["cmdline"]) if str(folder) in (p.info["cmdline"] or []) and runs(p)]


def begin(module: dict[str, str], folder: Path, end: str = "") -> subprocess.Popen[bytes]:
    process = start("starter", [end, folder], fds=[], env=module)
    assert wait_for((folder / "ready").exists)
    return process


def test_nothing_is_left_after_kill_all(module: dict[str, str], folder: Path) -> None:
    process = begin(module, folder)
    everything = started_in(folder)
    assert len(everything) == STARTED + 3
    kill_all(process)
    assert not any(map(runs, everything)), "gone when it returns"
    assert process.returncode == -signal.SIGTERM
    kill_all(process)


@pytest.mark.parametrize(
    ("end", "code"), [("exit", 3), ("crash", -signal.SIGSEGV), ("kill its group", -signal.SIGKILL)]
)
def test_nothing_is_left_after_a_process_that_ended_and_its_guardian_ends_alike(
    module: dict[str, str], folder: Path, end: str, code: int
) -> None:
    process = begin(module, folder, end)
    assert process.wait(60) == code
    assert not started_in(folder)


@pytest.mark.parametrize("which", ["first guardian", "second guardian", "process"])
def test_nothing_is_left_when_one_is_killed(module: dict[str, str], folder: Path, which: str) -> None:
    process = begin(module, folder)
    everything, worker = started_in(folder), guarded(process.pid)
    victims: dict[str, Callable[[], psutil.Process | None]] = {
        "first guardian": lambda: psutil.Process(process.pid), "second guardian": worker.parent, "process": lambda: worker,
    }  # fmt: skip
    victim = victims[which]()
    assert victim is not None
    victim.kill()
    assert process.wait(60) == -signal.SIGKILL
    assert not left(everything)


TRAINER = """
import os, sys, time
from trimtab.workers.spawn import start
start("starter", ["", sys.argv[1]], fds=[], env=os.environ)
time.sleep(600)
"""


@pytest.mark.parametrize("between", [[], ["sh", "-c", '"$@"; exit 1', "script"]], ids=["trainer", "script"])
def test_nothing_is_left_when_the_trainer_is_killed(module: dict[str, str], folder: Path, between: list[str]) -> None:
    """Also where a script stands between it and the guardians, which lives on."""
    program = TRAINER.replace("env=os.environ", f"env=os.environ, python=[*{between!r}, sys.executable]")
    trainer = subprocess.Popen([sys.executable, "-c", program, str(folder)], env=module)
    try:
        assert wait_for((folder / "ready").exists)
        everything = started_in(folder)
        assert len(everything) == STARTED + 4 + bool(between)
    finally:
        trainer.kill()
        trainer.wait(30)
    assert not left(everything)


def test_a_process_outlives_the_thread_that_started_it(module: dict[str, str], folder: Path) -> None:
    """The kernel's word that a parent has gone is about threads."""
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(target=lambda: started.append(begin(module, folder)))
    thread.start()
    thread.join()
    everything = started_in(folder)
    time.sleep(0.2)
    assert started[0].poll() is None and all(map(runs, everything))
    kill_all(started[0])


def test_nothing_is_left_of_a_process_that_forks_away(module: dict[str, str], folder: Path) -> None:
    process = start("hopper", [folder], fds=[], env=module)
    assert wait_for((folder / "ready").exists)
    kill_all(process)
    assert process.returncode == -signal.SIGTERM
    time.sleep(0.2)
    assert not started_in(folder)


def test_a_guardian_reaps_what_lost_its_parent(module: dict[str, str], folder: Path) -> None:
    """A reward that leaves one dead child a call would otherwise use up the machine's process ids."""
    process = start("ender", [folder], fds=[], env=module)
    assert wait_for((folder / "ready").exists)
    second = guarded(process.pid).parent()
    assert second is not None
    assert wait_for(lambda: len(second.children()) == 1)
    kill_all(process)


@pytest.mark.skipif(sys.platform != "linux", reason="oom_score_adj is Linux's")
@pytest.mark.parametrize("score", [KILL_FIRST, KILL_EARLY])
def test_memory_that_is_short_costs_the_process_before_its_guardians(
    module: dict[str, str], folder: Path, score: int
) -> None:
    process = start("starter", ["", folder], fds=[], env=module, oom_score=score)
    assert wait_for((folder / "ready").exists)
    scores = {one.pid: int(Path(f"/proc/{one.pid}/oom_score_adj").read_text()) for one in started_in(folder)}
    ours = int(Path("/proc/self/oom_score_adj").read_text())
    second = guarded(process.pid).ppid()
    assert scores.pop(process.pid) == scores.pop(second) == ours
    assert len(scores) == STARTED + 1 and set(scores.values()) == {max(score, ours)}
    kill_all(process)


def test_what_is_no_guardian_and_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script in Python's place, as of an engine."""
    monkeypatch.setattr("trimtab.workers.spawn.KILL_TIMEOUT_S", 0.2)
    said = tmp_path / "said"
    script = f"trap '' TERM; sleep 600 & echo $! > {said}; while :; do sleep 600; done"
    process = start("none", [], fds=[], env=os.environ, python=["sh", "-c", script])
    assert wait_for(lambda: said.exists() and said.read_text().strip())
    child = psutil.Process(int(said.read_text()))
    try:
        kill_all(process)
        assert process.returncode == -signal.SIGKILL and not left([child])
    finally:
        os.killpg(process.pid, signal.SIGKILL) if runs(child) else None


def test_endings_are_told_in_words() -> None:
    assert how_it_ended(3) == "exit status 3"
    assert "SIGTERM" in how_it_ended(-15) and "memory" not in how_it_ended(-15)
    assert "out of memory" in how_it_ended(-9)
