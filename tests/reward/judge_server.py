"""An OpenAI-compatible endpoint to test against: `python judge_server.py MODE [PORT]`, a process of its own.

Its first line of output is the port, a free one if none is given. GET /seen tells what it saw: requests, the most at a time, keys
and bodies. POST /mode/NAME changes what it does. A completion `score 7` is given a 7; the modes say what is answered instead.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

MODEL = "judge-1"


class State:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.lock = threading.Lock()
        self.requests = self.now = self.most = 0
        self.keys: list[str | None] = []
        self.bodies: list[dict[str, Any]] = []
        self.times: list[float] = []


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def do_GET(self) -> None:
        state = self.state
        if self.path == "/seen":
            seen = {"requests": state.requests, "most": state.most, "keys": state.keys, "bodies": state.bodies}
            self.reply(200, {**seen, "times": state.times})
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": MODEL}, {"id": "other"}]})
        else:
            self.reply(404, {"error": {"message": "not found"}})

    def do_POST(self) -> None:
        state = self.state
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.startswith("/mode/"):
            state.mode = unquote(self.path.removeprefix("/mode/"))
            self.reply(200, {})
            return
        if self.path != "/v1/chat/completions":
            self.reply(404, {"detail": "Not Found"})
            return
        asked = json.loads(body)
        with state.lock:
            state.requests += 1
            number = state.requests
            state.now += 1
            state.most = max(state.most, state.now)
            state.keys.append(self.headers.get("Authorization"))
            state.bodies.append(asked)
            state.times.append(time.monotonic())
        try:
            self.answer(asked, number)
        finally:
            with state.lock:
                state.now -= 1

    def answer(self, asked: dict[str, Any], number: int) -> None:
        mode, _, argument = self.state.mode.partition(":")
        if mode == "flaky":
            troubles = (
                "good",
                "status:500",
                "good",
                "closes",
                "429:0",
                "nonsense",
                "good",
                "garbage",
                "slow:0.2",
                "hang",
            )
            mode, _, argument = troubles[number % len(troubles)].partition(":")
        if asked["model"] != MODEL:
            self.reply(404, {"object": "error", "message": f"The model `{asked['model']}` does not exist."})
            return
        if mode == "slow":
            time.sleep(float(argument))
        elif mode == "hang":
            time.sleep(600)
        elif mode == "busy" and number <= int(argument):  # 429 for so many requests, then good
            self.reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "1"})
            return
        elif mode == "429":
            self.reply(429, {"error": {"message": "slow down"}}, {"Retry-After": argument} if argument else {})
            return
        elif mode == "status":
            self.reply(int(argument), {"error": {"message": f"no; your key is {self.headers.get('Authorization')}"}})
            return
        elif mode == "closes":  # the connection, without an answer
            self.close_connection = True
            self.connection.close()
            return
        text = asked["messages"][-1]["content"]
        found = re.findall(r"score (-?[0-9.]+)", text)
        score = found[-1] if found else "5"
        if mode == "garbage":
            self.reply(200, None, raw=b"<html>gateway</html>")
        elif mode == "nonsense" or (mode == "half" and found and float(score) % 2):
            self.complete("I would say that it is quite good, 9 out of 10 people agree.")
        elif mode == "picky" and number == 1:
            self.complete("I would rather not.")
        elif mode == "varied":
            self.complete(str(sum(map(ord, text)) % 11))
        elif mode == "say":
            self.complete(argument)
        else:
            self.complete(f'{{"score": {score}}}')

    def complete(self, text: str) -> None:
        self.reply(200, {"choices": [{"message": {"role": "assistant", "content": text}}]})

    def reply(self, status: int, body: Any, headers: dict[str, str] | None = None, raw: bytes | None = None) -> None:
        data = json.dumps(body).encode() if raw is None else raw
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has given up is no news."""


if __name__ == "__main__":
    mode, port = (*sys.argv[1:], "0")[:2]
    Handler.state = State(mode)
    server = Server(("127.0.0.1", int(port)), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()
