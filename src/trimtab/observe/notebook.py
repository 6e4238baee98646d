"""A view in a Jupyter notebook that is replaced at every step, where a terminal would redraw its panel.

Text goes through IPython's display, so no widget has to be installed. IPython is never imported here: in a notebook it is there.
"""

from __future__ import annotations

import html
import io
import sys
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.console import RenderableType

WIDTH = 110


def notebook_display(file: IO[str] | None) -> Any:
    """IPython's `display` where `file` is a notebook's standard output, else None. In IPython on a terminal there is none."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None and hasattr(ipython, "get_ipython") else None
    if shell is None or type(shell).__name__ != "ZMQInteractiveShell" or file is not sys.stdout:
        return None
    assert ipython is not None
    return ipython.display.display


class NotebookView:
    """One output of a cell, and what it shows now."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None

    def show(self, thing: RenderableType) -> None:
        text = as_text(thing)
        bundle = {"text/plain": text, "text/html": f"<pre style='line-height: 1.2'>{html.escape(text)}</pre>"}
        if self._handle is None:
            self._handle = self._display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def as_text(thing: RenderableType) -> str:
    """Without colours, which Rich would write as escape sequences: kernels set FORCE_COLOR."""
    out = io.StringIO()
    RichConsole(
        file=out, width=WIDTH, markup=False, emoji=False, highlight=False, force_jupyter=False, force_terminal=False
    ).print(thing)
    return out.getvalue()
