"""RUN/run.json: facts of a run and of its starts, and what became of it. Replaced whole, so it is the old one or the new one.

A process that was killed cannot say so: its run stays `running` here, and now.json shows that nothing moves.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from trimtab.base.files import write_file
from trimtab.base.package import VERSION, installed_version
from trimtab.record.layout import RUN_FILE

FORMAT = 1
State = Literal["starting", "running", "finished", "stopped", "failed"]
PACKAGES = (
    "numpy", "safetensors", "tokenizers", "datasets", "peft", "triton", "vllm", "sglang", "liger-kernel", "flash-attn",
    "nvidia-ml-py",
)  # fmt: skip
"""Packages beside torch and transformers whose versions are of interest."""


class RunFile:
    """The facts, and the file that has them."""

    def __init__(self, folder: Path, resumed: bool) -> None:
        """Earlier starts are those that the folder knows of. `resumed`: there was one, whether it is known or not."""
        self._path = folder / RUN_FILE
        found = read_run_file(self._path)
        starts = found.get("starts")
        self._starts: list[Any] = list(starts) if isinstance(starts, list) else []
        if not self._starts and resumed:
            self._starts = [{"number": 1}]  # of a version that did not count
        self._before = found
        self._facts: dict[str, Any] = {}

    @property
    def start(self) -> int:
        """The number of this start, from 1."""
        return len(self._starts) + (0 if self._facts else 1)

    @property
    def set_before(self) -> Any:
        """What an earlier start says that the user set."""
        return self._before.get("set")

    def begin(self, at: float, step: int, facts: Mapping[str, Any]) -> None:
        """A start whose first step is `step`."""
        command = facts.get("command")
        entry = {"number": self.start, "at": round(at, 3), "step": step, "pid": os.getpid(), "command": command}
        self._starts.append(entry)
        self._facts = {
            "version": FORMAT,
            "state": "starting",
            "error": None,
            "ended_at": None,
            **facts,
            "starts": self._starts,
        }
        self._write()

    def change(self, **facts: Any) -> None:
        """Some facts are others from now on."""
        self._facts |= facts
        self._write()

    def _write(self) -> None:
        write_file(self._path, [json.dumps(self._facts, indent=2, default=str).encode() + b"\n"])


def read_run_file(path: Path) -> dict[str, Any]:
    """What the file says; nothing where it cannot be read."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def machine_facts() -> dict[str, Any]:
    """Where a run runs, and with which versions."""
    found = {name: installed_version(name) for name in PACKAGES}
    return {
        "trimtab": VERSION,
        "python": sys.version.split()[0],
        "torch": installed_version("torch"),
        "transformers": installed_version("transformers"),
        "packages": {name: version for name, version in found.items() if version is not None},
        "host": socket.gethostname(),
    }


def commands(resume_with: str) -> dict[str, str | None]:
    """The command that started a run, and what resumes it. `resume_with`: in words, or a command between backticks."""
    if not resume_with.startswith("`"):
        return {"command": None, "resume": resume_with}
    resume = resume_with.strip("`")
    words = [word for word in shlex.split(resume) if word != "--resume"]
    return {"command": shlex.join(words), "resume": resume}


def keys_set(config: BaseModel, prefix: str = "") -> list[str]:
    """The keys that were given, and not left to their defaults, in the order of the schema."""
    found: list[str] = []
    for name in type(config).model_fields:
        if name not in config.model_fields_set:
            continue
        value, key = getattr(config, name), f"{prefix}{name}"
        if isinstance(value, BaseModel):
            found += keys_set(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, BaseModel) for item in value):
            for place, item in enumerate(value):
                found += keys_set(item, f"{key}.{place}.")
        else:
            found.append(key)
    return found


def git_commit(folder: Path) -> str | None:
    """The commit that is checked out around a folder, read without running git; None where there is none."""
    try:
        for place in (folder.absolute(), *folder.absolute().parents):
            if (place / ".git").exists():
                return _commit_of(place / ".git")
    except (OSError, ValueError):
        pass
    return None


def _commit_of(git: Path) -> str | None:
    if git.is_file():  # a worktree: `gitdir: PATH`
        git = (git.parent / git.read_text().removeprefix("gitdir:").strip()).resolve()
    head = (git / "HEAD").read_text().strip()
    if not head.startswith("ref:"):
        return head or None
    name = head.removeprefix("ref:").strip()
    shared = git / (git / "commondir").read_text().strip() if (git / "commondir").exists() else git
    for home in (git, shared):
        if (home / name).is_file():
            return (home / name).read_text().strip() or None
    packed = shared / "packed-refs"
    lines = packed.read_text().splitlines() if packed.is_file() else []
    return next((line.split()[0] for line in lines if line.endswith(f" {name}")), None)
