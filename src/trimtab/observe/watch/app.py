"""The loop of `trimtab watch` on a terminal: a look at the files once a second, a frame only where something changed.

It ends with `q`, with Ctrl-C, and when the run ends, unless it is told to stay. Whatever happens, the terminal is as it was.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from trimtab.observe.watch.fit import Lines
from trimtab.observe.watch.keys import Keys
from trimtab.observe.watch.overview import overview
from trimtab.observe.watch.pages import PAGES, footer, help_lines, log_lines, sample_lines
from trimtab.observe.watch.source import RunSource

LOOK_S = 1.0
MIN_WIDTH, MIN_HEIGHT = 20, 6


@dataclass
class ReaderPlace:
    """Where the reader is."""

    page: int = 1
    sample: int = 0
    step: int | None = None
    """None: the newest that has samples."""
    skip: int = 0
    """Lines of a sample that are scrolled away."""
    back: int = 0
    """Events of the log that are below the screen."""

    def press(self, key: str, steps: list[int], count: int, events: int, room: int) -> bool:
        """What a key does; False: quit."""
        if key == "q":
            return False
        if key in "1234":
            self.page = int(key)
        elif key == "?":
            self.page = PAGES.index("help") + 1
        elif self.page == 3:
            self.back = min(
                max(0, events - 1), max(0, self.back + {"k": 1, "j": -1, "b": room, " ": -room}.get(key, 0))
            )
        elif self.page == 2:
            self._press_in_samples(key, steps, count, room)
        return True

    def _press_in_samples(self, key: str, steps: list[int], count: int, room: int) -> None:
        if key in "jk":
            self.sample, self.skip = max(0, min(count - 1, self.sample + (1 if key == "j" else -1))), 0
        elif key in "hl" and steps:
            at = steps.index(self.step) if self.step in steps else len(steps) - 1
            at = max(0, min(len(steps) - 1, at + (1 if key == "l" else -1)))
            self.step, self.sample, self.skip = (None if at == len(steps) - 1 else steps[at]), 0, 0
        elif key in " b":
            self.skip = max(0, self.skip + (room if key == " " else -room))


class WatchScreen:
    """A run on a terminal."""

    def __init__(self, source: RunSource, console: Console, keys: Keys, stay: bool) -> None:
        self._source, self._console, self._keys, self._stay = source, console, keys, stay
        self._place = ReaderPlace()
        self._drawn: object = None

    def run(self) -> None:
        """Show the run until the reader leaves, or it ends."""
        with Live(console=self._console, screen=True, auto_refresh=False, transient=True) as live:
            self._draw(live)
            looked = time.monotonic()
            while self._stay or not self._source.view.has_ended:
                key = self._keys.wait(looked + LOOK_S - time.monotonic())
                if key is not None and not self._press(key):
                    return
                if time.monotonic() - looked >= LOOK_S:
                    self._source.refresh()
                    looked = time.monotonic()
                self._draw(live)

    def frame(self, width: int, height: int) -> Lines:
        """The page that is open, and the footer."""
        width, height = max(MIN_WIDTH, width), max(MIN_HEIGHT, height)
        room, place, view = height - 1, self._place, self._source.view
        if place.page == 2:
            steps = self._source.sample_steps()
            step = place.step if place.step in steps else steps[-1] if steps else None
            rows = [] if step is None else self._source.samples(step)
            place.sample = max(0, min(place.sample, len(rows) - 1))
            lines = sample_lines(steps, step, rows, place.sample, place.skip, width, room)
        elif place.page == 3:
            lines = log_lines(view, place.back, width, room)
        elif place.page == 4:
            lines = help_lines(width, room)
        else:
            lines = overview(view, width, room)
        return [*lines[:room], *[Text()] * (room - len(lines)), footer(place.page, width)]

    def _press(self, key: str) -> bool:
        steps = self._source.sample_steps() if self._place.page == 2 else []
        step = self._place.step if self._place.step in steps else steps[-1] if steps else None
        count = len(self._source.samples(step)) if step is not None else 0
        events, room = len(self._source.view.rows("events")), max(1, self._console.size.height - 6)
        return self._place.press(key, steps, count, events, room)

    def _draw(self, live: Live) -> None:
        size = self._console.size
        lines = self.frame(size.width, size.height)
        drawn = (size, [(line.plain, [(span.start, span.end, span.style) for span in line.spans]) for line in lines])
        if drawn != self._drawn:
            self._drawn = drawn
            for line in lines:
                line.no_wrap, line.overflow = True, "crop"
            live.update(Group(*lines), refresh=True)
