"""A view in a Jupyter notebook: one block of HTML that is replaced once a second, where a terminal would redraw its panel.

It goes through IPython's display, so no widget has to be installed. IPython is never imported here: in a notebook it is there. A
thread replaces the block, so no step waits for it, and no failure of it ends a run.
"""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.console import RenderableType

from trimtab.observe.format import get
from trimtab.observe.history import History, offline_loss
from trimtab.observe.run_html import live_html
from trimtab.observe.watch.view import RunView
from trimtab.record.columns import MetricTable

WIDTH = 110
UPDATE_S = 1.0
END_WITHIN_S = 10.0
"""How long `close` waits for a front end that takes nothing any more."""
STAGES = {"sft/loss": "sft", "rm/loss": "reward_model"}


def notebook_display(file: IO[str] | None) -> Any:
    """IPython's `display` where `file` is a notebook's standard output, else None. In IPython on a terminal there is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell" or file is not sys.stdout:
        return None
    assert ipython is not None
    return ipython.display.display


class NotebookView:
    """One output of a cell, and what it shows now. `panel`: the same as plain text, for whoever shows no HTML."""

    def __init__(
        self, display: Any, history: History, panel: RenderableType, clock: Callable[[], float] = time.time
    ) -> None:
        self._display, self._history, self._panel, self._clock = display, history, panel, clock
        self._handle: Any = None
        self._table = MetricTable()
        self._last: dict[str, float] = {}
        """The newest value of each metric."""
        self._phase, self._since = "starting", clock()
        self._shown = ""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._ended = False
        self.name = "run"

    def working(self, phase: str) -> None:
        with self._lock:
            self._phase, self._since = phase, self._clock()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """A step is done. The first is shown at once, later ones within a second."""
        with self._lock:
            self._table.extend([{"step": step, **metrics}])
            known = {name: get(metrics, name) for name in metrics}
            self._last |= {name: value for name, value in known.items() if value is not None}
        if self._thread is None:
            self._show()
            self._thread = threading.Thread(target=self._update_forever, name="trimtab-notebook", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Show how it ended; nothing is shown any more after that."""
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(END_WITHIN_S)
        self._thread = None
        self._ended = True
        self._show()

    def _update_forever(self) -> None:
        while not self._stop.wait(UPDATE_S):
            self._show()

    def _show(self) -> None:
        with suppress(Exception):  # kernels and front ends raise errors of their own, and none of them may end a run
            with self._lock:
                html = live_html(self._view())
            if html == self._shown:
                return
            self._shown = html
            bundle = {"text/plain": as_text(self._panel), "text/html": html}
            if self._handle is None:
                self._handle = self._display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)

    def _view(self) -> RunView:
        history = self._history
        rows = [{"name": name, "seconds": seconds} for name, seconds in history.step_phases.items()]
        state: dict[str, Any] = {"kind": "running", "phase": self._phase, "since": self._since, "left_s": history.eta_s}
        if self._ended:
            state = {"kind": "stopped", "text": "nothing: the run has ended"}
        run = {
            "name": self.name,
            "stage": STAGES.get(offline_loss(history.metrics), "rl"),
            "state": state,
            "facts": {"step": history.step, "steps": history.total_steps, "seconds": history.elapsed_s},
            "phases": {"rows": rows},
        }
        return RunView(run, self._table, self._last, self._clock())


def as_text(thing: RenderableType) -> str:
    """Without colours, which Rich would write as escape sequences: kernels set FORCE_COLOR."""
    out = io.StringIO()
    RichConsole(
        file=out, width=WIDTH, markup=False, emoji=False, highlight=False, force_jupyter=False, force_terminal=False
    ).print(thing)
    return out.getvalue()
