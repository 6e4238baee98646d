"""What every command shares: errors without tracebacks, a clean end on Ctrl-C, SIGTERM and SIGHUP, and `--json`.

With --json everything meant for people goes to standard error, and the last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO, Any

import typer

from trimtab.errors import TrimtabError, is_no_space
from trimtab.observe.waiting import waiting
from trimtab.streams import hold_standard_streams, let_go, outlet

STOPS = (signal.SIGTERM, signal.SIGHUP)
"""A scheduler sends the first, a terminal that goes away the second; `nohup` has that ignored, and so it stays."""


class Terminated(KeyboardInterrupt):
    """Everything is closed as after Ctrl-C."""

    def __init__(self, signum: int) -> None:
        self.signum = signal.Signals(signum)


def console_file(as_json: bool) -> IO[str]:
    return outlet(sys.stderr if as_json else sys.stdout)


@contextmanager
def loading(as_json: bool, what: str = "loading torch and transformers", aside: bool = False) -> Iterator[None]:
    """Says what the body waits for. `aside`: on standard error, where standard output is somebody's input."""
    with waiting(console_file(as_json or aside), what):
        yield


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result), file=outlet(sys.stdout), flush=True)


@contextmanager
def user_errors(as_json: bool) -> Iterator[None]:
    """Print an error that is meant for the user, and exit with status 2; anything else is a bug and keeps its traceback."""
    hold_standard_streams()
    before = {stop: signal.getsignal(stop) for stop in STOPS}
    for stop, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(stop, _terminate)
    try:
        yield
    except TrimtabError as error:
        _end(f"error: {error}", {"error": str(error), "kind": type(error).__name__}, 2, as_json)
    except Exception as error:
        if not is_no_space(error):
            raise
        said = f"there is no space left to write to: {error}. Free some, or set observe.dir to another disk"
        _end(f"error: {said}", {"error": said, "kind": type(error).__name__}, 2, as_json)
    except KeyboardInterrupt as stopped:
        by, status = "Ctrl-C", 130
        if isinstance(stopped, Terminated):
            by, status = stopped.signum.name, 128 + stopped.signum
        _end(f"stopped by {by}", {"error": f"stopped by {by}", "kind": type(stopped).__name__}, status, as_json)
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)
        let_go(sys.stdout)
        let_go(sys.stderr)


def _end(message: str, result: dict[str, Any], status: int, as_json: bool) -> None:
    print(message, file=outlet(sys.stderr), flush=True)
    if as_json:
        print_json(result)
    raise typer.Exit(status) from None


def _terminate(signum: int, frame: FrameType | None) -> None:
    if signum == signal.SIGHUP:
        signal.signal(signum, signal.SIG_IGN)  # shell and kernel may both send it
    raise Terminated(signum)
