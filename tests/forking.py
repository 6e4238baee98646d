"""Interpreters that have imported already what takes long: torch, transformers and peft take ten seconds, vLLM thirteen.

`Warm(python, modules).python` is a program to be called in place of an interpreter: `-m MODULE ARGUMENT...` or `-c CODE`. A
process forked from one that has imported the modules runs that, with the caller's arguments, folder, variables and open files;
streams are made as the interpreter makes them, and it ends as an interpreter does. The program ends when that process does and in
the same way; if the program is killed, so is the process.

For tests of what a process does. What a test says about starting an interpreter or about the tree of processes needs a real one.
Modules stay frozen for the collector: some say at the end that they leak.
Run as a script this file is the server; the program that is called is warm.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import multiprocessing.spawn
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from itertools import dropwhile
from pathlib import Path
from typing import Any

IMPORT_TIMEOUT_S = 240.0
END_TIMEOUT_S = 20.0
HIGH = 512
"""Descriptors from here on are nobody's."""
STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}
STARTED: list[Warm] = []


class Warm:
    """A server, until `close` or until this process ends."""

    def __init__(self, python: str, modules: list[str], variables: dict[str, str] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="trimtab-warm-"))
        self.python = str(self.folder / "python")
        address = self.folder / "socket"
        caller = Path(__file__).with_name("warm.py")
        Path(self.python).write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{caller}" "{address}" "$@"\n')
        Path(self.python).chmod(0o755)
        self.log = self.folder / "log"
        with self.log.open("wb") as out:
            self._process = subprocess.Popen(
                [python, __file__, address, self.python, *modules], env={**os.environ, **(variables or {})},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out, start_new_session=True,
            )  # fmt: skip
        STARTED.append(self)
        ready = selectors.DefaultSelector()
        ready.register(self._out, selectors.EVENT_READ)
        self._process.wait(IMPORT_TIMEOUT_S)  # the server is its child, and none of this process's: tests count those
        said = self._out.readline().split() if ready.select(IMPORT_TIMEOUT_S) else []
        self._server = int(said[0]) if said else None
        if self._server is None:
            self.close()
            raise RuntimeError(f"{python} has not imported {modules}")

    @property
    def _out(self) -> Any:
        return self._process.stdout

    def close(self) -> None:
        """No process is left, whatever it does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        ended = selectors.DefaultSelector()
        ended.register(self._out, selectors.EVENT_READ)
        if not ended.select(END_TIMEOUT_S) and self._server is not None:  # its stdout is open as long as it runs
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._server, signal.SIGKILL)
        self._out.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        STARTED.remove(self)


def close_all() -> None:
    for one in list(STARTED):
        one.close()


def serve(address: str) -> tuple[dict[str, Any], list[int]]:
    """Fork for everyone who asks, until stdin ends. Returns in the forked processes only: what was asked for, and open files."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print(os.getpid(), flush=True)
    running: dict[int, tuple[int, socket.socket]] = {}
    events = selectors.DefaultSelector()
    events.register(listener, selectors.EVENT_READ, "call")
    events.register(0, selectors.EVENT_READ, "end")
    while True:
        for key, _ in events.select():
            if key.data == "end":
                for child, _link in running.values():
                    os.kill(child, signal.SIGKILL)
                os._exit(0)
            elif key.data == "call":
                link = listener.accept()[0]
                asked, fds = receive(link)
                child = os.fork()
                if not child:
                    os.setsid()
                    return asked, fds
                for number in fds:
                    os.close(number)
                handle = os.pidfd_open(child)
                running[handle] = child, link
                events.register(handle, selectors.EVENT_READ, "ended")
                events.register(link, selectors.EVENT_READ, child)
            elif key.data == "ended":
                child, link = running.pop(key.fd)
                events.unregister(key.fd)
                os.close(key.fd)
                with contextlib.suppress(KeyError):
                    events.unregister(link)
                with contextlib.suppress(OSError):
                    link.sendall(os.waitpid(child, 0)[1].to_bytes(4, "little"))
                link.close()
            elif any(child == key.data for child, _ in running.values()):
                assert isinstance(key.fileobj, socket.socket)
                numbers = key.fileobj.recv(16) or bytes([signal.SIGKILL])  # nobody is there any more
                for number in numbers:
                    os.kill(key.data, number)
                if signal.SIGKILL in numbers:
                    events.unregister(key.fileobj)


def receive(link: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size, fds, _, _ = socket.recv_fds(link, 8, HIGH // 2)
    with link.makefile("rb") as body:
        return json.loads(body.read(int.from_bytes(size, "little"))), fds


def become(asked: dict[str, Any], fds: list[int]) -> None:
    """Take over files, variables and folder of the caller, and nothing else's."""
    kept = [fcntl_dup(number) for number in fds]
    os.closerange(0, HIGH)
    for number, target in zip(kept, asked["fds"], strict=True):
        os.dup2(number, target)
    os.closerange(HIGH, HIGH + len(kept))
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for number, (name, mode) in enumerate(STREAMS.items()):
        opened = stream(number, mode)
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)


def fcntl_dup(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD, HIGH)


def stream(number: int, mode: str) -> io.TextIOWrapper | None:
    """As the interpreter opens its own: None where there is no file."""
    try:
        os.fstat(number)
    except OSError:
        return None
    raw = open(number, f"{mode}b", closefd=False)  # noqa: SIM115 - it lives as long as the process
    errors = "backslashreplace" if number == 2 else "strict"
    return io.TextIOWrapper(raw, errors=errors, line_buffering=number == 2 or raw.isatty())


def execute(arguments: list[str]) -> None:
    """`-m MODULE ARGUMENT...` or `-c CODE ARGUMENT...`, as the main program; options before that are an interpreter's."""
    path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:0] = [os.getcwd(), *path]
    kind, what, *rest = dropwhile(lambda argument: argument not in ("-m", "-c"), arguments)
    if kind == "-m":
        sys.argv = ["-m", *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(what, main.__dict__)


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    sys.path.pop(0)  # this file's folder
    multiprocessing.spawn.set_executable(sys.argv[2])  # what is spawned from here is warm, too
    for module in sys.argv[3:]:
        with contextlib.suppress(ModuleNotFoundError):  # of another version: it only takes longer
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    asked, fds = serve(sys.argv[1])
    gc.collect()  # the server's sockets are closed now, not later, when their numbers are the caller's files
    become(asked, fds)
    execute(asked["arguments"])
