"""A rank that is lost is named, and all start again from the newest checkpoint, three times at most. Nothing hangs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forked_ranks import this_rank
from tests.running import wait_for
from trimtab.base.errors import ConfigError, TrainingError
from trimtab.cluster import ranks
from trimtab.cluster.ranks import RankLost
from trimtab.model.versions import collective_trace
from trimtab.record.checkpoint import load_state, newest_checkpoint
from trimtab.run import restarts, same_ranks
from trimtab.run.rank import Rank

pytestmark = pytest.mark.timeout(120)


def weights(folder: Path) -> bytes:
    return (folder / "final/model.safetensors").read_bytes()


def at_order(
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    number: int,
    act: Callable[[], Any],
    rank: int = 1,
    once: Path | None = None,
) -> None:
    """Let a rank do something when it is given its number-th order of that name; once, if a file says that it was."""
    original, calls = getattr(Rank, method), [0]

    def acting(self: Rank, *args: Any) -> Any:
        calls[0] += 1
        if this_rank() == rank and calls[0] == number and not (once and once.exists()):
            if once:
                once.touch()
            act()
        return original(self, *args)

    monkeypatch.setattr(Rank, method, acting)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ValueError("a fault of a kernel")


def hang() -> None:
    time.sleep(1000)


def test_a_lost_rank_is_named_and_the_run_goes_on_as_if_it_had_not_been(
    run, whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """In the collective of `apply`, where the other one waits for it: the other one is not blamed. With a checkpoint every
    second step, a step is done twice, and told once."""
    at_order(monkeypatch, "apply", 2, die, once=tmp_path / "died")
    told: list[int] = []
    found = run("run", callbacks=[lambda step, metrics: told.append(step)], observe={"checkpoint_every": 2})
    assert weights(found.folder) == weights(whole.folder)
    assert told == [row["step"] for row in found.metrics] == [1, 2, 3]
    assert [row.get("run/rank_restarts") for row in found.metrics] == [1.0] * 3
    said = capsys.readouterr().out
    assert "step 2: rank 1 is lost: its process ended: killed by SIGKILL" in said.replace("\n", " ")
    assert "All ranks start again from the beginning (restart 1 of at most 3)" in said.replace("\n", " ")
    assert "cannot save" not in said


def test_ranks_that_are_lost_too_often_end_the_run_and_say_how_to_resume_it(run, monkeypatch, capsys) -> None:
    assert restarts.MAX_RANK_RESTARTS == 3
    monkeypatch.setattr(restarts, "MAX_RANK_RESTARTS", 1)
    at_order(monkeypatch, "apply", 2, die, rank=0)
    with pytest.raises(RankLost) as caught:
        run()
    said = str(caught.value)
    assert "rank 0 is lost" in said
    assert "started again 1 times" in said
    assert said.endswith("Continue from the newest checkpoint with the same call and resume=True")
    assert capsys.readouterr().out.count("All ranks start again") == 1


def test_an_unexpected_error_while_others_wait_for_the_rank(run, whole, tmp_path, monkeypatch, capsys) -> None:
    at_order(monkeypatch, "apply", 3, fail, once=tmp_path / "failed")
    assert weights(run().folder) == weights(whole.folder)
    said = capsys.readouterr().out
    assert "rank 1 is lost: ValueError: a fault of a kernel" in said
    assert "All ranks start again from step-2" in said.replace("\n", " ")


def test_a_rank_that_hangs_is_found_and_writes_its_stacks(run, whole, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ranks, "MIN_STALL_S", 1.5)
    monkeypatch.setattr("trimtab.run.assemble_ranks.STALL_STEPS", 0)
    at_order(monkeypatch, "accumulate", 2, hang, once=tmp_path / "hung")
    found = run()
    assert weights(found.folder) == weights(whole.folder)
    assert "rank 1 is lost: no progress for 2 s" in capsys.readouterr().out
    assert "in hang" in (found.folder / "ranks/rank-1.log").read_text()
    if collective_trace("gloo") is not None:
        begun = [json.loads((found.folder / f"ranks/rank-{rank}.json").read_text())["entries"] for rank in (0, 1)]
        assert len(begun[0]) > len(begun[1]) > 0, "the other rank waits in a collective that this one has not begun"


def test_a_rank_that_cannot_start_ends_the_run_at_once(run, monkeypatch, tmp_path) -> None:
    build = Rank._build

    def broken(self, setup, device):
        if setup.rank == 1:
            raise ImportError("libcudart.so.13: cannot open shared object file")
        return build(self, setup, device)

    monkeypatch.setattr(Rank, "_build", broken)
    started = time.monotonic()
    with pytest.raises(RankLost, match=r"rank 1 is lost: ImportError: libcudart\.so\.13: cannot open"):
        run()
    assert time.monotonic() - started < 20
    assert not (tmp_path / "run/config.yaml").exists()
    assert "ImportError" in (tmp_path / "run/ranks/rank-1.log").read_text(), "its log stays"


def test_ranks_with_other_software_are_refused_by_name(run, monkeypatch) -> None:
    monkeypatch.setattr(
        "trimtab.run.rank.software_here", lambda: {"torch": "2.11.0" if this_rank() == 1 else "2.13.0", "NCCL": "2.29"}
    )
    with pytest.raises(
        TrainingError, match=r"different versions of torch: 2\.13\.0 on rank 0; 2\.11\.0 on rank 1\. Install"
    ):
        run()


def test_a_folder_that_a_rank_does_not_see_is_refused(run, monkeypatch, tmp_path: Path) -> None:
    refuse = same_ranks.refuse_folder_of_rank
    monkeypatch.setattr(
        "trimtab.run.rank.refuse_folder_of_rank",
        lambda folder, rank: refuse(tmp_path / "elsewhere" if rank == 1 else folder, rank),
    )
    with pytest.raises(ConfigError, match=r"observe\.dir: rank 1 does not see .*elsewhere\. Write a folder that all"):
        run()
    assert not (tmp_path / "run").exists()


def test_a_stop_during_a_rollout_saves_the_last_whole_step(run, tmp_path: Path, monkeypatch) -> None:
    """What ranks still say of the rollout that was given up is not taken for answers about the checkpoint."""
    at_order(monkeypatch, "generate", 2, lambda: ((tmp_path / "generating").touch(), time.sleep(1)))

    def stop() -> None:
        assert wait_for((tmp_path / "generating").exists)
        os.kill(os.getpid(), signal.SIGINT)

    stopping = threading.Thread(target=stop)
    stopping.start()
    with pytest.raises(KeyboardInterrupt):
        run(observe={"checkpoint_every": 100})
    stopping.join()
    newest = newest_checkpoint(tmp_path / "run")
    assert newest is not None
    assert newest.name == "step-1"
    assert load_state(newest).step == 1
