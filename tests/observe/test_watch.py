"""`trimtab watch` as a process: on a pseudo-terminal that is resized and typed into, and without a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from tests.observe.planted import plant
from trimtab.observe.watch.app import ReaderPlace
from trimtab.observe.watch.keys import Keys, split_keys
from trimtab.observe.watch.plain import StepPrinter, follow
from trimtab.observe.watch.source import RunSource
from trimtab.observe.watch.view import RunView
from trimtab.record.columns import MetricTable

DEADLINE_S = 60.0
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    """A process on a pseudo-terminal. Nothing here waits longer than the deadline."""

    def __init__(self, arguments: list[str], rows: int, columns: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(rows, columns)
        self.before = termios.tcgetattr(slave)
        environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": os.pathsep.join(sys.path)}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "trimtab", *arguments], stdin=slave, stdout=slave, stderr=slave, env=environment,
            start_new_session=True, preexec_fn=lambda: ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self.slave = slave
        self.raw = ""

    def resize(self, rows: int, columns: int) -> None:
        ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def type(self, keys: str) -> None:
        self.raw = ""
        os.write(self.master, keys.encode())

    def wait_for(self, words: str | Callable[[str], Any]) -> str:
        """What was written since keys were last typed, until these words are in it."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            text = ESCAPE.sub("", self.raw)
            if words(text) if callable(words) else words in text:
                return text
            assert time.monotonic() < deadline, f"waited for {words!r}, got {text[-2000:]!r}"
            self._read(0.2)

    def wait_until_it_ends(self) -> int:
        deadline = time.monotonic() + DEADLINE_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, ESCAPE.sub("", self.raw)[-2000:]
            self._read(0.1)
        self._read(0.2)
        return self.process.wait()

    def _read(self, seconds: float) -> None:
        ready, _, _ = select.select([self.master], [], [], seconds)
        if ready:
            self.raw += os.read(self.master, 1 << 16).decode("utf-8", "replace")


@contextmanager
def terminal(*arguments: str, rows: int = 24, columns: int = 80) -> Iterator[Terminal]:
    opened = Terminal(list(arguments), rows, columns)
    try:
        yield opened
    finally:
        if opened.process.poll() is None:
            opened.process.kill()
            opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)


def test_a_run_is_watched_resized_and_typed_into(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "quiet")
    with terminal("watch", str(run)) as screen:
        first = screen.wait_for("1 overview")
        assert "planted-quiet" in first and "▲ quiet" in first and "── reward" in first
        assert "\x1b[?1049h" in screen.raw  # the other screen: what was there before comes back
        screen.type("2")
        assert "sample 1 of" in screen.wait_for("── completion")
        screen.type("j")
        screen.wait_for("sample 2 of")
        screen.type("k")
        screen.wait_for("sample 1 of")
        screen.type("3")
        screen.wait_for("checkpoint step-50 is written")
        screen.type("4")
        screen.wait_for("quit; so does Ctrl-C")
        for rows, columns in ((50, 200), (10, 30), (40, 120)):
            screen.raw = ""
            screen.resize(rows, columns)
            os.killpg(screen.process.pid, signal.SIGWINCH)
            text = screen.wait_for("1 overview")
            _, *lines = text.splitlines()  # the first may begin with the end of what was drawn before
            assert max(map(len, lines)) <= columns
        screen.type("1")
        screen.wait_for("── memory")
        screen.type("q")
        assert screen.wait_until_it_ends() == 0
        assert "\x1b[?1049l" in screen.raw and "\x1b[?25h" in screen.raw  # the first screen, and the cursor
        assert termios.tcgetattr(screen.slave) == screen.before


def test_it_shows_what_is_written_and_ends_with_the_run(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "running")
    keep_alive(run)
    with terminal("watch", str(run)) as screen:
        screen.wait_for("step 60/150")
        screen.raw = ""
        rows = (run / "metrics.jsonl").read_text().splitlines()
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**json.loads(rows[-1]), "step": 61}) + "\n")
        keep_alive(run)
        screen.wait_for("step 61/150")
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, "state": "finished"}))
        assert screen.wait_until_it_ends() == 0
        assert "✓ finished" in ESCAPE.sub("", screen.raw.rpartition("\x1b[?1049l")[2])  # the last look stays


def keep_alive(run: Path) -> None:
    now = json.loads((run / "now.json").read_text())
    (run / "now.json").write_text(json.dumps({**now, "at": time.time() + 3600, "host": "elsewhere"}))


def test_ctrl_c_leaves_no_traceback_and_the_terminal_as_it_was(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "quiet")
    with terminal("watch", str(run)) as screen:
        screen.wait_for("1 overview")
        screen.type("\x03")
        assert screen.wait_until_it_ends() == 0
        assert "Traceback" not in screen.raw and "\x1b[?25h" in screen.raw
        assert termios.tcgetattr(screen.slave) == screen.before


def test_a_run_that_has_ended_stays_only_if_it_is_asked_to(tmp_path: Path) -> None:
    run = plant(tmp_path / "runs" / "run", "failed")
    with terminal("watch", str(run)) as screen:
        assert screen.wait_until_it_ends() == 0
        assert "✗ failed" in screen.raw
    with terminal("watch", str(run), "--stay") as screen:
        screen.wait_for("1 overview")
        screen.type("q")
        assert screen.wait_until_it_ends() == 0
    with terminal("watch", str(tmp_path / "runs")) as screen:
        screen.wait_for("✗ failed")
        screen.type("q")
        assert screen.wait_until_it_ends() == 0


def test_without_a_terminal_there_is_a_line_a_step(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "hostile")
    code = (
        "import sys; from trimtab.cli import app; app(['watch', sys.argv[1]], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=60, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" | ")[0] for line in lines if line.startswith("step ")] == [
        f"step {n}/150" for n in range(1, 151)
    ]
    assert "\x1b" not in done.stdout and "\x00" not in done.stdout and "␛[31mred" in done.stdout
    assert "next:" in lines[-1] or "next:" in lines[-2]


def test_lines_follow_a_run_until_it_ends(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "running")
    keep_alive(run)
    out, asleep = io.StringIO(), list[float]()

    def sleep(seconds: float) -> None:
        asleep.append(seconds)
        facts = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**facts, "state": "stopped"}))

    follow(RunSource(run), out, stay=False, sleep=sleep)
    assert asleep and "step 60/150" in out.getvalue() and "Stopped at step 60" in out.getvalue()


def test_steps_that_a_resume_repeats_are_printed_again() -> None:
    out = io.StringIO()
    lines = StepPrinter(out)
    table = MetricTable({"step": step, "time/total": 1.0, "reward/mean": 0.1} for step in (1, 2, 3))
    lines.show(RunView({"facts": {"steps": 9}}, table))
    lines.show(RunView({"facts": {"steps": 9}}, table))
    table.extend([{"step": 2, "time/total": 1.5, "reward/mean": 0.2}])
    lines.show(RunView({"facts": {"steps": 9}}, table))
    assert [line.split(" | ")[0] for line in out.getvalue().splitlines()] == [f"step {n}/9" for n in (1, 2, 3, 2)]


def test_keys_are_read_one_by_one() -> None:
    assert split_keys("1jk\x1b[A\x1b[B\x1bOCx\x1b[5~") == ["1", "j", "k", "k", "j", "l", "x", "~"]
    read, write = os.pipe()
    os.write(write, b"2j")
    keys = Keys(read)
    assert [keys.wait(1.0), keys.wait(1.0), keys.wait(0.01)] == ["2", "j", None]
    os.close(write)
    assert keys.wait(1.0) == "q"  # the terminal is gone
    os.close(read)
    assert Keys(None).wait(0.0) is None


def test_places_stay_within_what_there_is() -> None:
    place = ReaderPlace()
    assert place.press("2", [], 0, 0, 10) and place.page == 2
    for key in "kkjjjj":
        assert place.press(key, [1, 10], 3, 0, 10)
    assert place.sample == 2
    place.press("h", [1, 10], 3, 0, 10)
    assert (place.step, place.sample) == (1, 0)
    place.press("l", [1, 10], 3, 0, 10)
    assert place.step is None  # the newest, and it stays so when there are more
    place.press(" ", [1, 10], 3, 0, 10)
    assert place.skip == 10
    place.press("3", [], 0, 5, 10)
    for key in "kkkkkkkkj":
        place.press(key, [], 0, 5, 10)
    assert place.back == 3
    assert place.press("?", [], 0, 0, 10) and place.page == 4 and not place.press("q", [], 0, 0, 10)


def test_what_is_no_run_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "watch", str(tmp_path)], capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 2 and "holds no run: it has no config.yaml" in done.stderr


@pytest.mark.parametrize("name", ["damaged", "old_version"])
def test_folders_that_are_damaged_or_old_are_watched(name: str, tmp_path: Path) -> None:
    out = io.StringIO()
    follow(RunSource(plant(tmp_path / "run", name)), out, stay=False)
    assert "step 149/150" in out.getvalue()
