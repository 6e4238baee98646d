"""What every command shares: errors without tracebacks, and `--json`.

With --json everything meant for people goes to standard error, and the last line of standard output is one JSON object.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import typer

from trimtab.errors import TrimtabError


def console_file(as_json: bool) -> IO[str]:
    return sys.stderr if as_json else sys.stdout


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result), flush=True)


@contextmanager
def user_errors(as_json: bool) -> Iterator[None]:
    """Print an error that is meant for the user, and exit with status 2; anything else is a bug and keeps its traceback."""
    try:
        yield
    except TrimtabError as error:
        print(f"error: {error}", file=sys.stderr)
        if as_json:
            print_json({"error": str(error), "kind": type(error).__name__})
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("stopped; go on with --resume", file=sys.stderr)
        raise typer.Exit(130) from None
