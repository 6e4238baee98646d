"""Small runs on ranks that are forked from the test's process, and a deadline for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import running
from tests.forked_ranks import fork_ranks
from tests.running import letters

USUAL: dict[str, Any] = {
    "data": [{"prompt": word} for word in ("12+34=", "7+8=", "reverse abcdef=", "sort 40213=", "9+99=")],
    "reward": letters,
    "learn": {
        "steps": 3,
        "prompts_per_step": 5,
        "samples_per_prompt": 3,
        "max_new_tokens": 8,
        "lr": 1e-2,
        "seed": 3,
        "sampling": {"stop_token_ids": list(range(3, 20))},  # so that lengths differ
    },
    "run": {"device": "cpu", "devices": 2, "shard": "optimizer", "reward_workers": 1, "threads": 1},
    "observe": {"checkpoint_every": 1},
}
Run = Callable[..., running.Trained]


@pytest.fixture(scope="module")
def forked_ranks():
    """Ranks are forked."""
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        yield


@pytest.fixture
def run(forked_ranks, model_folder: Path, tmp_path: Path):
    """Train on two ranks: `run(name, learn={...}, run={...})`. No process is left at the end."""
    before = set(psutil.Process().children(recursive=True))
    yield lambda name="run", model=model_folder, **changes: running.train(model, tmp_path / name, USUAL, changes)
    assert not running.left(set(psutil.Process().children(recursive=True)) - before, 10.0)


@pytest.fixture(scope="module")
def whole(forked_ranks, model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> running.Trained:
    """A run on two ranks that nothing has happened to."""
    return running.train(model_folder, tmp_path_factory.mktemp("whole") / "run", USUAL)
