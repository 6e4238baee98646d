"""Whatever is waited for is said: at once on a terminal, and in a log once for each wait that is long."""

from __future__ import annotations

import io
import threading

import pytest

from trimtab.observe.console import Console
from trimtab.observe.waiting import CLEAR_LINE, TELL_AFTER_S, Waiting, waiting


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_log_has_a_line_for_each_long_wait_and_none_for_a_short_one(clock: Clock) -> None:
    out = io.StringIO()
    line = Waiting(out, clock=clock)
    line.on("reading data")
    line.tell()
    assert out.getvalue() == ""
    clock.now += TELL_AFTER_S
    line.tell()
    line.tell()
    line.on("loading the model")
    line.on("starting the engine")
    clock.now += 60
    line.tell()
    line.close()
    assert out.getvalue() == "reading data ...\nstarting the engine ...\n"
    assert TELL_AFTER_S < 1.5, "within two seconds there is something on the screen"


def test_a_terminal_shows_it_at_once_and_has_its_line_back(clock: Clock) -> None:
    out = Terminal()
    line = Waiting(out, clock=clock)
    line.on("reading data")
    assert out.getvalue().endswith(f"{CLEAR_LINE}reading data ...")
    clock.now += 3
    line.tell()
    assert out.getvalue().endswith(f"{CLEAR_LINE}reading data ... (3 s)")
    with line.free_line():
        assert out.getvalue().endswith(CLEAR_LINE)
        out.write("a note\n")
    line.tell()
    assert out.getvalue().endswith("reading data ... (3 s)"), "the wait goes on"
    line.done()
    line.tell()
    assert out.getvalue().endswith(CLEAR_LINE)
    line.close()


def test_the_thread_tells_without_being_asked_and_ends() -> None:
    said = threading.Event()

    class Heard(io.StringIO):
        def write(self, text: str) -> int:
            said.set()
            return super().write(text)

    out = Heard()
    with waiting(out, "importing"):
        assert said.wait(60)
    assert out.getvalue() == "importing ...\n"
    assert not [thread for thread in threading.enumerate() if thread.name == "waiting"]


def test_a_line_can_be_used_again_after_it_was_closed(clock: Clock) -> None:
    out = io.StringIO()
    line = Waiting(out, clock=clock)
    for what in ("one", "two"):
        line.on(what)
        clock.now += 5
        line.tell()
        line.close()
    assert out.getvalue() == "one ...\ntwo ...\n"


def told(console: Console) -> str | None:
    return console._waiting._what


def test_in_a_log_the_first_step_and_evaluations_are_announced() -> None:
    with Console(9, file=io.StringIO()) as console:
        console.waiting("loading")
        assert told(console) == "loading"
        console.working("rollout")
        assert told(console) == "step 1: sampling completions"
        console.step(1, {})
        assert told(console) is None
        console.working("rollout")
        assert told(console) is None, "steps come regularly now"
        console.working("eval")
        assert told(console) == "evaluating"
        console.eval(1, {})
        assert told(console) is None


def test_the_live_panel_says_it_itself() -> None:
    out = Terminal()
    with Console(9, file=out) as console:
        console.waiting("loading the model")
        assert told(console) == "loading the model"
        console.working("rollout")
        assert told(console) is None
        console.waiting("writing the final model")
        assert told(console) is None
    assert "loading the model ..." in out.getvalue()
