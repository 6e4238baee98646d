"""The server of judge_server.py as tests see it: started, asked what it saw, told to change, killed."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

SCRIPT = Path(__file__).with_name("judge_server.py")
MODEL = "judge-1"
PROMPT = 'Rate from 0 to 10. Answer with {"score": N}.\nQuestion: {prompt}\nAnswer: {completion}'


class LocalJudge:
    def __init__(self, mode: str = "good", port: int = 0) -> None:
        command = [sys.executable, str(SCRIPT), mode, str(port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())
        self.url = f"http://127.0.0.1:{self.port}/v1"

    def args(self, **changes: Any) -> dict[str, Any]:
        """Of the reward part."""
        return {"url": self.url, "model": MODEL, "prompt": PROMPT, **changes}

    def seen(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/seen", timeout=30) as reply:
            return json.loads(reply.read())

    def become(self, mode: str) -> None:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/mode/{quote(mode)}", data=b"", method="POST")
        urllib.request.urlopen(request, timeout=30).read()

    def stop(self) -> None:
        self._process.kill()
        self._process.wait(timeout=30)
        if self._process.stdout:
            self._process.stdout.close()
