"""In a notebook one output is replaced once a second; elsewhere nothing changes."""

from __future__ import annotations

import io
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from tests.running import wait_for
from trimtab.observe import notebook
from trimtab.observe.console import Console
from trimtab.observe.notebook import notebook_display
from trimtab.observe.run_html import LIVE_HEIGHT


class Handle:
    def __init__(self, first: dict[str, str]) -> None:
        self.shown = [first]

    def update(self, bundle: dict[str, str], raw: bool) -> None:
        assert raw
        self.shown.append(bundle)


class ZMQInteractiveShell:
    """What a kernel runs; a terminal's has another name."""


class TerminalInteractiveShell:
    pass


@pytest.fixture
def displayed(monkeypatch: pytest.MonkeyPatch) -> list[Handle]:
    """What is displayed in a cell besides its standard output."""
    handles = list[Handle]()

    def display(bundle: dict[str, str], raw: bool, display_id: bool) -> Handle:
        assert raw and display_id
        handles.append(Handle(bundle))
        return handles[-1]

    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = ZMQInteractiveShell
    ipython.display = ModuleType("IPython.display")
    ipython.display.display = display
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    return handles


def test_a_cell_has_one_output_that_is_replaced(displayed: list[Handle], capsys: pytest.CaptureFixture[str]) -> None:
    with Console(9) as console:
        for step in (1, 2, 3):
            console.step(step, {"reward/mean": 0.5, "time/total": 1.0})
        console.note("a note")
    (handle,) = displayed
    assert "step 1/9" in handle.shown[0]["text/plain"] and "step 1/9" in handle.shown[0]["text/html"]
    assert "step 3/9" in handle.shown[-1]["text/plain"] and "step 3/9" in handle.shown[-1]["text/html"]
    assert "now: nothing: the run has ended" in handle.shown[-1]["text/html"]
    assert capsys.readouterr().out == "a note\n"


def test_a_thread_replaces_it_and_the_height_stays(displayed: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notebook, "UPDATE_S", 0.01)
    with Console(9) as console:
        console.step(1, {"reward/mean": 0.5, "time/total": 1.0})
        console.working("rollout")
        assert wait_for(lambda: "now: rollout" in displayed[0].shown[-1]["text/html"], 10)
        console.step(2, {"reward/mean": 0.6, "time/total": 1.0})
        assert wait_for(lambda: "step 2/9" in displayed[0].shown[-1]["text/html"], 10)
    (handle,) = displayed
    assert all(f"height:{LIVE_HEIGHT}px;overflow:hidden" in bundle["text/html"] for bundle in handle.shown)
    ended = len(handle.shown)
    assert "trimtab-notebook" not in {thread.name for thread in threading.enumerate()}
    assert len(handle.shown) == ended


def test_a_front_end_that_is_gone_does_not_end_the_run(
    displayed: list[Handle], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("gone")

    monkeypatch.setattr(Handle, "update", fail)
    with Console(2) as console:
        console.step(1, {"reward/mean": 0.5})
        console.step(2, {"reward/mean": 0.5})


def test_only_a_notebooks_own_output_is_replaced(displayed: list[Handle], monkeypatch: pytest.MonkeyPatch) -> None:
    log = io.StringIO()
    with Console(9, file=log) as console:
        console.step(1, {})
    assert "step 1/9" in log.getvalue() and not displayed
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", TerminalInteractiveShell)
    assert notebook_display(sys.stdout) is None
    monkeypatch.delitem(sys.modules, "IPython")
    assert notebook_display(sys.stdout) is None


def test_there_are_no_escape_sequences_though_kernels_force_colours(
    displayed: list[Handle], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Console(9) as console:
        console.step(1, {"reward/mean": 0.5, "time/total": 1.0})
        console.warn("look")
        console.finish({"steps": 1})
    (handle,) = displayed
    shown = capsys.readouterr().out + "".join(part for bundle in handle.shown for part in bundle.values())
    assert "warning: look" in shown and "Trimtab · step 1/9" in shown and "\x1b" not in shown
