"""Keys of a terminal, one at a time and without Enter. The terminal is as it was when the block ends, however it ends.

Ctrl-C stays a signal. Without a terminal to read from there are no keys, and waiting is only waiting.
"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

ESCAPES = {"[A": "k", "OA": "k", "[B": "j", "OB": "j", "[C": "l", "OC": "l", "[D": "h", "OD": "h"}
"""Arrow keys, as the letters that mean the same."""


class Keys:
    """Where keys come from; `fd` None: nowhere."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._waiting: list[str] = []

    def wait(self, seconds: float) -> str | None:
        """The next key, or None when the time is over. A terminal that is gone is a `q`."""
        if self._waiting:
            return self._waiting.pop(0)
        if self._fd is None:
            time.sleep(max(0.0, seconds))
            return None
        ready, _, _ = select.select([self._fd], [], [], max(0.0, seconds))
        if not ready:
            return None
        try:
            data = os.read(self._fd, 1024)
        except OSError:
            data = b""
        if not data:
            return "q"
        self._waiting = split_keys(data.decode("utf-8", "replace"))
        return self._waiting.pop(0) if self._waiting else None


def split_keys(text: str) -> list[str]:
    """Single keys; arrows as letters, other escape sequences left out."""
    found = []
    at = 0
    while at < len(text):
        if text[at] != "\x1b":
            found.append(text[at])
            at += 1
            continue
        sequence = text[at + 1 : at + 3]
        if sequence in ESCAPES:
            found.append(ESCAPES[sequence])
        at += 3 if sequence[:1] in ("[", "O") else 1
    return found


@contextmanager
def terminal_keys(stdin: Any = None) -> Iterator[Keys]:
    """Keys of standard input, where it is a terminal."""
    stdin = sys.stdin if stdin is None else stdin
    try:
        import termios
        import tty

        fd = stdin.fileno()
        before = termios.tcgetattr(fd)
    except (ImportError, OSError, ValueError, AttributeError, termios.error):
        yield Keys(None)
        return
    try:
        tty.setcbreak(fd)
        yield Keys(fd)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
