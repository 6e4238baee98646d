"""Picks how to watch: one run or a folder of them, on a terminal or as lines."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import IO

from rich.console import Console, Group
from rich.live import Live

from trimtab.observe.watch.app import LOOK_S, WatchScreen
from trimtab.observe.watch.keys import terminal_keys
from trimtab.observe.watch.overview import overview
from trimtab.observe.watch.plain import follow
from trimtab.observe.watch.runs import RunsSource, find_runs, runs_lines
from trimtab.observe.watch.source import RunSource
from trimtab.record.layout import CONFIG

PLAIN_SIZE = (120, 1000)
END_LINES = 40
"""Of the last overview, which stays on the terminal when the screen closes."""


def watch(folder: Path, stay: bool, out: IO[str]) -> None:
    """Show a run until it ends, or a folder of runs until the reader leaves."""
    console = Console(file=out, markup=False, emoji=False, highlight=False)
    terminal = out.isatty() and not console.is_dumb_terminal
    if folder.is_dir() and not (folder / CONFIG).exists() and find_runs(folder):
        watch_runs(RunsSource(folder), console, terminal)
        return
    source = RunSource(folder)
    if not terminal:
        follow(source, out, stay)
        return
    with terminal_keys(sys.stdin) as keys:
        screen = WatchScreen(source, console, keys, stay)
        screen.run()
    for line in overview(source.view, console.size.width, min(END_LINES, console.size.height - 1)):
        console.print(line, no_wrap=True, overflow="crop", crop=True)


def watch_runs(source: RunsSource, console: Console, terminal: bool) -> None:
    """The table once, or live on a terminal."""
    if not terminal:
        for line in runs_lines(source.rows, time.time(), *PLAIN_SIZE):
            print(line.plain.rstrip(), file=console.file)
        return
    with terminal_keys(sys.stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        drawn: object = None
        while True:
            size = console.size
            lines = runs_lines(source.rows, time.time(), size.width, size.height - 1)
            for line in lines:
                line.no_wrap, line.overflow = True, "crop"
            shown = (size, [line.plain for line in lines])
            if shown != drawn:
                drawn = shown
                live.update(Group(*lines), refresh=True)
            if keys.wait(LOOK_S) == "q":
                return
            source.refresh()
