"""A command line in an empty folder, with a config that works until a test breaks it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from trimtab.cli import app

REWARDS = """
import time

def bad(ids):
    return ids[0] % 2 == 0

def fine(completions, **_):
    return [float(len(set(text))) for text in completions]

def raises(completions, completion_ids, **_):
    if any(map(bad, completion_ids)):
        raise ValueError("cannot parse this")
    return fine(completions)

def hangs(completions, completion_ids, **_):
    if any(map(bad, completion_ids)):
        time.sleep(1000)
    return fine(completions)

def wrong_length(completions, completion_ids, **_):
    return [1.0] * (len(completions) + any(map(bad, completion_ids)))

def nan(completion_ids, **_):
    return [float("nan") if bad(ids) else 1.0 for ids in completion_ids]

def none(completion_ids, **_):
    return [None if bad(ids) else 1.0 for ids in completion_ids]

def text(completion_ids, **_):
    return ["good" if bad(ids) else 1.0 for ids in completion_ids]

def needs_gold(completions, gold, **_):
    return fine(completions)
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    exception: BaseException | None

    @property
    def json(self) -> dict[str, Any]:
        """The last line of stdout, which with --json is also the only one."""
        (line,) = self.out.splitlines()
        found: dict[str, Any] = json.loads(line)
        return found


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def config(here: Path, model_folder: Path) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder)},
        "data": {"train": "rows.jsonl"},
        "reward": [{"fn": "rewards.py:fine"}],
        "learn": {"steps": 1, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "lr": 1e-3},
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1},
        "observe": {"dir": "runs/it", "tensorboard": False},
    }


@pytest.fixture
def trimtab(here: Path, config: dict[str, Any]) -> Callable[..., Outcome]:
    """`trimtab("train", "learn.lr=1")` writes the config and runs a command on it; a path is given as it is."""

    def command(name: str, *arguments: str, on: str = "config.yaml") -> Outcome:
        (here / "config.yaml").write_text(yaml.safe_dump(config))
        result = CliRunner().invoke(app, [name, on, *arguments])
        expected = isinstance(result.exception, SystemExit) or result.exception is None
        return Outcome(result.exit_code, result.stdout, result.stderr, None if expected else result.exception)

    return command
