"""What every command shares: errors without tracebacks, a clean end on Ctrl-C, SIGTERM and SIGHUP, and `--json`.

With --json everything meant for people goes to standard error, and the last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import typer

from trimtab.base.errors import TrimtabError, is_no_space
from trimtab.base.signals import Terminated, take_signals
from trimtab.base.streams import hold_standard_streams, let_go, outlet
from trimtab.observe.waiting import waiting


def console_file(as_json: bool) -> IO[str]:
    return outlet(sys.stderr if as_json else sys.stdout)


@contextmanager
def loading(as_json: bool, what: str = "loading torch and transformers", aside: bool = False) -> Iterator[None]:
    """Says what the body waits for. `aside`: on standard error, where standard output is somebody's input."""
    with waiting(console_file(as_json or aside), what):
        yield


def resume_command(command: str, config: Path, overrides: Sequence[str] | None) -> str:
    """What resumes a run, as it stands in a message."""
    return f"`{shlex.join(['trimtab', command, str(config), *(overrides or ()), '--resume'])}`"


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result), file=outlet(sys.stdout), flush=True)


@contextmanager
def user_errors(as_json: bool) -> Iterator[None]:
    """Print an error that is meant for the user, and exit with status 2; anything else is a bug and keeps its traceback."""
    hold_standard_streams()
    try:
        with take_signals():
            try:
                yield
            except (Exception, KeyboardInterrupt) as error:
                _tell(error, as_json)
    finally:
        let_go(sys.stdout)
        let_go(sys.stderr)


def _tell(error: Exception | KeyboardInterrupt, as_json: bool) -> None:
    """Report what ended the command, and exit. Errors that are not the user's are raised again."""
    kind = type(error).__name__
    if isinstance(error, KeyboardInterrupt):
        by, status = "Ctrl-C", 130
        if isinstance(error, Terminated):
            by, status = error.signum.name, 128 + error.signum
        _end(f"stopped by {by}", {"error": f"stopped by {by}", "kind": kind}, status, as_json)
    if isinstance(error, TrimtabError):
        _end(f"error: {error}", {"error": str(error), "kind": kind}, 2, as_json)
    if is_no_space(error):
        said = f"the disk is full: {error}. Free some space, or set observe.dir to another disk"
        _end(f"error: {said}", {"error": said, "kind": kind}, 2, as_json)
    raise error


def _end(message: str, result: dict[str, Any], status: int, as_json: bool) -> NoReturn:
    print(message, file=outlet(sys.stderr), flush=True)
    if as_json:
        print_json(result)
    raise typer.Exit(status) from None
