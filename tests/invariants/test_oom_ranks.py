"""Law 8 with several ranks: memory that runs out on one of them, anywhere before weights change, changes nothing that is learned.

All ranks give the step up, one setting is lowered for all, and the step is done again. Nothing hangs: the others do not wait in a
collective for the one that ran out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.forked_ranks import fork_ranks, this_rank
from tests.running import letters
from trimtab.model.policy import Policy
from trimtab.record.host_copy import HostCopy
from trimtab.rollout.native.cache import DecodePlan
from trimtab.run.rank import Rank
from trimtab.update import export
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.updater import Updater

pytestmark = pytest.mark.timeout(120)
USUAL: dict[str, Any] = {
    "data": [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(4)],
    "reward": letters,
    "learn": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-3},
    "run": {"device": "cpu", "devices": 2, "shard": "optimizer", "token_budget": 64, "reward_workers": 1, "threads": 1},
    "observe": {"checkpoint_every": 1},
}


def train(model: Path, folder: Path, **changes: Any) -> running.Trained:
    return running.train({"path": str(model), "dtype": "float64"}, folder, USUAL, changes)


def short(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def at_call(
    owner: Any, name: str, rank: int, number: int, counts: Callable[..., bool] = lambda *_: True
) -> Callable[[pytest.MonkeyPatch], None]:
    """The number-th call that counts runs out of memory on that rank."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        run, calls = getattr(owner, name), [0]

        def failing(*arguments: Any, **named: Any) -> Any:
            if this_rank() == rank and counts(*arguments):
                calls[0] += 1
                if calls[0] == number:
                    short()
            return run(*arguments, **named)

        patch.setattr(owner, name, failing)

    return inject


def in_backward(rank: int, number: int) -> Callable[[pytest.MonkeyPatch], None]:
    def inject(patch: pytest.MonkeyPatch) -> None:
        forward, calls = Policy.hidden, [0]

        def hidden(*arguments: Any) -> torch.Tensor:
            out: torch.Tensor = forward(*arguments)
            calls[0] += out.requires_grad
            if this_rank() == rank and out.requires_grad and calls[0] == number:
                out.register_hook(short)
            return out

        patch.setattr(Policy, "hidden", hidden)

    return inject


def at_sums(rank: int, *numbers: int) -> Callable[[pytest.MonkeyPatch], None]:
    """These of the sums over ranks that are begun beside a backward pass run out of memory on that rank."""

    def inject(patch: pytest.MonkeyPatch) -> None:
        begin, calls = MasterAdamW.begin_sum, [0]

        def failing(optimizer: MasterAdamW, name: str) -> None:
            calls[0] += 1
            if this_rank() == rank and calls[0] in numbers:
                short()
            begin(optimizer, name)

        patch.setattr(MasterAdamW, "begin_sum", failing)

    return inject


def with_gradient(*_: Any) -> bool:
    return torch.is_grad_enabled()


FAULTS = {
    "forward": at_call(Policy, "hidden", 1, 2, with_gradient),
    "backward": in_backward(0, 1),
    "backward of the second step": in_backward(1, 3),
    "prepare": at_call(Updater, "prepare", 1, 2),
    "generate": at_call(Policy, "hidden", 1, 3, lambda *given: isinstance(given[3], DecodePlan)),
    "publish": at_call(Rank, "publish", 0, 3),
    "copy of a checkpoint": at_call(HostCopy, "take", 1, 1),
    "checkpoint": at_call(Rank, "capture", 1, 2),
    "export": at_call(export, "save_model", 0, 1),
}
SHARDS = ("none", "optimizer", "gradients", "full")
QUICK = {
    ("optimizer", "forward"), ("optimizer", "backward of the second step"), ("optimizer", "prepare"),
    ("optimizer", "checkpoint"), ("gradients", "backward of the second step"), ("full", "forward"), ("full", "prepare"),
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        fork_ranks(patch)
        found = train(model_folder, tmp_path_factory.mktemp("whole") / "run")
    return load_file(found.folder / "final/model.safetensors")


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        pytest.param(shard, name, marks=() if (shard, name) in QUICK else pytest.mark.slow)
        for shard in SHARDS
        for name in FAULTS
    ],
)
def test_memory_that_runs_out_on_one_rank(
    model_folder: Path,
    tmp_path: Path,
    whole: dict[str, torch.Tensor],
    shard: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys,
) -> None:
    fork_ranks(monkeypatch)
    FAULTS[name](monkeypatch)
    found = train(model_folder, tmp_path / "run", run={"shard": shard})
    weights = load_file(found.folder / "final/model.safetensors")
    for key, expected in whole.items():
        torch.testing.assert_close(weights[key], expected, atol=1e-7, rtol=0)
    assert "out of memory" in capsys.readouterr().out
    assert "run/rank_restarts" not in found.metrics[-1], "survived, not started again"


SUMS = {
    "the last backward pass, with sums under way": at_sums(1, 3),
    "nor can it be given up": at_sums(1, 3, 4),
    "of both ranks": lambda patch: (at_sums(0, 2)(patch), at_sums(1, 4)(patch)),
}


@pytest.mark.parametrize(
    ("shard", "name"),
    [
        pytest.param(shard, name, marks=() if shard == "optimizer" else pytest.mark.slow)
        for shard in ("none", "optimizer")
        for name in SUMS
    ],
)
def test_memory_that_runs_out_while_gradients_are_summed(
    model_folder: Path, tmp_path: Path, whole: dict[str, torch.Tensor], shard: str, name: str, monkeypatch, capsys
) -> None:
    """Others have begun sums that this rank has not, and have ended their own passes."""
    fork_ranks(monkeypatch)
    SUMS[name](monkeypatch)
    found = train(model_folder, tmp_path / "run", run={"shard": shard})
    weights = load_file(found.folder / "final/model.safetensors")
    for key, expected in whole.items():
        torch.testing.assert_close(weights[key], expected, atol=1e-7, rtol=0)
    assert "out of memory in backward" in capsys.readouterr().out
    assert "run/rank_restarts" not in found.metrics[-1], "survived, not started again"


def test_a_step_that_was_applied_in_part_is_not_repeated_but_done_again_from_the_checkpoint(
    model_folder: Path, tmp_path: Path, whole: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Weights of some ranks are new then. The rank cannot go on, for the others wait in a collective."""
    fork_ranks(monkeypatch)
    run, once = MasterAdamW._adamw, tmp_path / "once"

    def failing(*arguments: Any) -> None:
        run(*arguments)
        if this_rank() == 1 and not once.exists():
            once.touch()
            short()

    monkeypatch.setattr(MasterAdamW, "_adamw", failing)
    found = train(model_folder, tmp_path / "run")
    weights = load_file(found.folder / "final/model.safetensors")
    for key, expected in whole.items():
        torch.testing.assert_close(weights[key], expected, atol=0, rtol=0)
    assert (
        "rank 1 is lost: trimtab.run.rank.HalfApplied: the optimizer step was applied in part"
        in capsys.readouterr().out
    )
    assert found.metrics[-1]["run/rank_restarts"] == 1
