"""TensorBoard event files in the tensorboard package's own record format; needs neither TensorFlow nor a thread.

Each session writes its own file, which starts by saying which earlier steps are void, so a resumed run shows one line.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from itertools import count
from os import getpid
from pathlib import Path
from typing import IO, Any


class EventFile:
    """Scalars for TensorBoard. On disk when `write` returns."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """`first_step`: points of earlier sessions at this step and after are void."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._file = _create(folder)
        self._records = RecordWriter(self._file)
        self._add(file_version="brain.Event:2")
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(step=step, summary=Summary(value=values))

    def close(self) -> None:
        self._file.close()

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
        self._file.flush()


def _create(folder: Path) -> IO[bytes]:
    """A new file whose name sorts after those of earlier sessions: TensorBoard reads a folder in name order."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{getpid()}.{number}"
        if not (folder / name).exists():
            return (folder / name).open("xb")
    raise AssertionError
