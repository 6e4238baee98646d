"""Standard streams that may be closed, or whose reader may go away: the run continues, and only its output is lost."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import IO, cast


def hold_standard_streams() -> None:
    """Have descriptors 0 to 2 open. Where a daemon has closed them, the next files and sockets would take their numbers, and what
    anybody prints would be written there."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one


def let_go(stream: IO[str] | None) -> None:
    """Write what is left. If the reader has gone, drop it silently when the interpreter ends."""
    if stream is None:
        return
    try:
        stream.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def outlet(file: IO[str] | None) -> IO[str]:
    """A stream to write to while it has a reader; None if it has none."""
    return file if isinstance(file, _Outlet) else cast("IO[str]", _Outlet(file))


class _Outlet(io.TextIOBase):
    def __init__(self, file: IO[str] | None) -> None:
        self._file = file
        if isinstance(file, io.TextIOWrapper):
            with contextlib.suppress(OSError, ValueError):
                file.reconfigure(errors="backslashreplace")  # a terminal that cannot show '±' must not end a run

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._file, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        try:
            return self._file is not None and self._file.isatty()
        except (AttributeError, OSError, ValueError):
            return False

    def fileno(self) -> int:
        if self._file is None:
            raise io.UnsupportedOperation("fileno")
        return self._file.fileno()

    def write(self, text: str) -> int:
        if self._file is not None:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self._file.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (AttributeError, OSError, ValueError) as error:  # ValueError: it was closed
                self._gone(error)
        return len(text)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except (AttributeError, OSError, ValueError) as error:
                self._gone(error)

    def close(self) -> None:
        """The stream is somebody else's."""

    def _gone(self, error: Exception) -> None:
        gone, self._file = self._file, None
        if sys.stderr is not None and sys.stderr is not gone:
            with contextlib.suppress(OSError, ValueError):
                print(f"warning: output closed ({error}); the run continues", file=sys.stderr)
