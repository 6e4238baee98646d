from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.reward.local_judge import LocalJudge
from trimtab.config.schema import RewardPart
from trimtab.data.prompt import Prompt
from trimtab.reward.scorer import Scorer
from trimtab.rollout.trajectory import Group, Trajectory

os.environ["TESTED_BY"] = str(os.getpid())
"""For workers: a mark of what they start."""


def made_group(*texts: str, prompt: Any = "question", **columns: Any) -> Group:
    source = Prompt(id=0, prompt=prompt, tokens=[1], columns=columns)

    def trajectory(sample: int, text: str) -> Trajectory:
        tokens = torch.arange(sample + 1)
        versions = torch.zeros(len(tokens), dtype=torch.int32)
        return Trajectory(source, sample, tokens, torch.zeros(len(tokens)), versions, "stop", text)

    return Group(source, [trajectory(i, text) for i, text in enumerate(texts)])


@pytest.fixture
def group() -> Callable[..., Group]:
    return made_group


@pytest.fixture
def scorer() -> Iterator[Callable[..., Scorer]]:
    """Make scorers for parts given as function names of misbehave.py, or as RewardParts; closed after the test, when
    nothing may be left of them, nor of what their functions started."""
    made: list[Scorer] = []

    def make(*parts: str | RewardPart, workers: int = 2, timeout_s: float = 60, **options: Any) -> Scorer:
        chosen = [RewardPart(fn=f"misbehave.py:{p}", timeout_s=timeout_s) if isinstance(p, str) else p for p in parts]
        made.append(Scorer(chosen, workers=workers, base_dir=Path(__file__).parent, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
    psutil.wait_procs(leftovers(), timeout=30)  # a killed process takes a moment to go on a loaded machine
    assert not leftovers()


def leftovers() -> list[psutil.Process]:
    """Workers of this process, their forks, and their marked children; also those that have another parent by now."""
    marks = {
        ("trimtab.reward.worker", str(os.getpid())),
        ("trimtab.reward.judge.process", str(os.getpid())),
        ("misbehave", str(os.getpid())),
    }
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(set(mark) <= set(command) for mark in marks):
            found.append(process)
    return found


@pytest.fixture
def local_judge() -> Iterator[Callable[..., LocalJudge]]:
    """Start servers that answer as a judge does; ended after the test."""
    started: list[LocalJudge] = []

    def start(mode: str = "good") -> LocalJudge:
        started.append(LocalJudge(mode))
        return started[-1]

    yield start
    for one in started:
        one.stop()
