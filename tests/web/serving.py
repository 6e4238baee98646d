"""A `trimtab serve` for tests: in this process, in a thread, or as a command; and a reader of its event streams."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("uvicorn", reason="the server needs trimtab[serve]")

from trimtab.observe.web.server.access import AccessGuard, known_names
from trimtab.observe.web.server.app import make_app
from trimtab.observe.web.server.command import listen

DEADLINE_S = 20.0
"""How long a test waits for what has to happen."""


def write_run(folder: Path, rows: int = 3) -> Path:
    """The least that is a run."""
    folder.mkdir(parents=True)
    config = {"model": {"path": "Qwen/Qwen3-0.6B"}, "data": {"train": "task:sort"}, "reward": [{"fn": "task"}]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"learn": {"steps": 100}}))
    (folder / "metrics.jsonl").write_bytes(b"")
    append(folder, *range(1, rows + 1))
    return folder


def append(folder: Path, *steps: int, **more: float) -> None:
    with (folder / "metrics.jsonl").open("ab") as file:
        for step in steps:
            row = {"step": step, "time/total": 1.0, "reward/mean": step / 10, **more}
            file.write(json.dumps(row).encode() + b"\n")


def wait_for(what: Any, seconds: float = DEADLINE_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """Asks a server at a port."""

    port: int
    headers: dict[str, str] = field(default_factory=dict)
    patience_s: float = 120.0

    def ask(self, path: str, method: str = "GET", body: Any = None, **headers: str) -> Answer:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=self.patience_s)
        sent = self.headers | {name.replace("_", "-"): value for name, value in headers.items()}
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            sent.setdefault("content-type", "application/json")
        try:
            connection.putrequest(method, path, skip_host="host" in sent)
            for name, value in sent.items():
                connection.putheader(name, value)
            if data is not None:
                connection.putheader("content-length", str(len(data)))
            connection.endheaders(data)
            found = connection.getresponse()
            return Answer(found.status, {k.lower(): v for k, v in found.getheaders()}, found.read())
        finally:
            connection.close()

    def follow(self, path: str, **headers: str) -> EventReader:
        return EventReader(self.port, path, self.headers | {k.replace("_", "-"): v for k, v in headers.items()})


class EventReader:
    """Reads an event stream in a thread."""

    def __init__(self, port: int, path: str, headers: dict[str, str]) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("GET", path, headers=headers)
        self._response = self._connection.getresponse()
        assert self._response.status == 200, self._response.read()
        self._socket = self._connection.sock
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        message: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            for raw in self._response:
                line = raw.decode().rstrip("\n")
                if line:
                    name, _, value = line.partition(": ")
                    message[name] = value
                elif "event" in message:
                    self._messages.put(
                        {"id": message["id"], "event": message["event"], "data": json.loads(message["data"])}
                    )
                    message = {}
                else:
                    message = {}
        self.ended.set()

    def next(self, event: str, seconds: float = DEADLINE_S) -> dict[str, Any]:
        """The next message of this kind; others are passed over."""
        end = time.monotonic() + seconds
        while True:
            message = self._messages.get(timeout=max(0.01, end - time.monotonic()))
            if message["event"] == event:
                return message

    def steps(self, until: int, seconds: float = DEADLINE_S) -> tuple[list[int], str]:
        """Steps of rows until one has come, and the last id."""
        found: list[int] = []
        while not found or found[-1] < until:
            message = self.next("rows", seconds)
            found += [row["step"] for row in message["data"]["rows"]]
        return found, message["id"]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._thread.join(timeout=5)


@dataclass
class Serving(Client):
    app: Any = None


@contextlib.contextmanager
def serving(root: Path, token: str | None = None, names: tuple[str, ...] = ()) -> Iterator[Serving]:
    """A server in a thread of this process."""
    import uvicorn

    holder: dict[str, uvicorn.Server] = {}
    app = make_app(root, lambda: "server" in holder and holder["server"].should_exit)
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        guarded = AccessGuard(app, known_names("127.0.0.1", names), token, port)
        config = uvicorn.Config(guarded, log_level="warning", lifespan="off", timeout_graceful_shutdown=1, ws="none")
        holder["server"] = server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            wait_for(lambda: server.started)
            yield Serving(port, app=app)
        finally:
            server.should_exit = True
            thread.join(timeout=10)
            assert not thread.is_alive()


@dataclass
class Command(Client):
    process: Any = None
    address: str = ""

    def interrupt(self, seconds: float) -> float:
        """Ctrl-C; how long it took to end."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=seconds)
        return time.monotonic() - started


@contextlib.contextmanager
def command(root: Path, *options: str, **environment: str) -> Iterator[Command]:
    """`trimtab serve` as a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", "serve", str(root), "--port", "0", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
    )  # fmt: skip
    try:
        lines = []
        for line in process.stdout or ():
            lines.append(line)
            if found := re.search(r"serving at (http://\S+:(\d+)/\S*)", line):
                break
        else:
            raise AssertionError("".join(lines))
        yield Command(int(found[2]), process=process, address=found[1])
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(timeout=10)
        if process.stdout:
            process.stdout.close()
