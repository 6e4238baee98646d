"""Law 1 where another library's engines are members of a fleet: real vLLM on several ranks learns what one process learns.

Engines round differently from each other, so weights agree to float32's last digits and not bit by bit; sampled tokens are the
same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import left

import trimtab
from tests.forked_ranks import fork_ranks, this_rank
from tests.invariants.test_engines import WORDS, assert_same_learned, folder, native, run
from tests.quick_rewards import variety
from tests.rollout.contract.engines import NO_VLLM, kill_now, vllm_python, warm_python
from trimtab.base.errors import EngineError
from trimtab.cluster.fleet import Fleet
from trimtab.config.run import Run
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import Plan
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.external.messages import Done
from trimtab.run import assemble_ranks, engines

__all__ = ["folder", "native"]
pytestmark = [pytest.mark.skipif(vllm_python() is None, reason=NO_VLLM), pytest.mark.timeout(300)]
slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No process is left."""
    before = set(psutil.Process().children(recursive=True))
    yield
    assert not left(set(psutil.Process().children(recursive=True)) - before)


def on_ranks(folder: Path, out: Path, devices: int, shard: str = "none", **rollout: Any) -> Any:
    rollout = {"python": warm_python("vllm"), **rollout}
    return run(folder, out, engine="vllm", devices=devices, shard=shard, rollout=rollout)


@pytest.mark.parametrize(
    ("devices", "shard", "rollout"),
    [
        (2, "full", {"tensor_parallel": 2}),
        pytest.param(2, "optimizer", {}, marks=slow),
        pytest.param(2, "full", {}, marks=slow),
        pytest.param(2, "none", {"processes": 2}, marks=slow),
        pytest.param(2, "gradients", {"max_sequences": 2}, marks=slow),
        pytest.param(2, "none", {"tensor_parallel": 2}, marks=slow),
        pytest.param(4, "optimizer", {"tensor_parallel": 2}, marks=slow),
        pytest.param(4, "full", {"tensor_parallel": 2}, marks=slow),
    ],
    ids=str,
)
def test_engines_of_ranks_learn_what_one_process_learns(
    folder: Path, tmp_path: Path, native, monkeypatch: pytest.MonkeyPatch, devices: int, shard: str, rollout: dict
) -> None:
    made: list[Fleet] = []
    whole = Fleet.generate
    monkeypatch.setattr(Fleet, "generate", lambda self, asked: (made.append(self), whole(self, asked))[1])
    found = on_ranks(folder, tmp_path / "run", devices, shard, **rollout)
    assert_same_learned(native, found, folder)
    gaps = [row["rollout/logprob_gap"] for row in found[0] if "rollout/logprob_gap" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4, "engines have the weights of the step"
    parts = rollout.get("tensor_parallel", 1)
    assert made[0]._owners == list(range(0, devices, parts))
    assert ("the model split over 2 devices" in made[0].description) is (parts == 2)


@slow
@pytest.mark.parametrize(("shard", "parts"), [("none", 1), ("full", 1), ("full", 2)])
def test_adapters_reach_the_engines_of_ranks(folder: Path, tmp_path: Path, shard: str, parts: int) -> None:
    lora = {"r": 8}
    alone = run(folder, tmp_path / "alone", lora)
    rollout = {"python": warm_python("vllm"), "tensor_parallel": parts}
    found = run(folder, tmp_path / "run", lora, engine="vllm", devices=2, shard=shard, rollout=rollout)
    assert_same_learned(alone, found, folder)
    gaps = [row["rollout/logprob_gap"] for row in found[0] if "rollout/logprob_gap" in row]
    assert len(gaps) == 3 and max(gaps) < 1e-4


@pytest.mark.parametrize("shard", ["full", pytest.param("none", marks=slow)])
def test_an_engine_that_is_killed_on_one_rank_draws_the_same_again(
    folder: Path, tmp_path: Path, native, monkeypatch: pytest.MonkeyPatch, shard: str
) -> None:
    """SIGKILL on rank 1 in the second step's rollout, while the other rank goes on: under `full` it gets the weights that were
    published, without a gather."""
    whole, killed = ExternalEngine._next_done, []

    def interrupted(self: ExternalEngine, wait: bool = True) -> Done | None:
        if this_rank() == 1 and self.version == 1 and self.stats.sequences == 1 and not killed:
            killed.append(self.pids[0])
            kill_now(self)
        return whole(self, wait)

    monkeypatch.setattr(ExternalEngine, "_next_done", interrupted)
    found = on_ranks(folder, tmp_path / "run", 2, shard)
    assert sum(row.get("rollout/restarts", 0) for row in found[0]) == 1
    assert_same_learned(native, found, folder)
    assert [file.name for file in (tmp_path / "run" / "engines").rglob("*.log")] == ["vllm-1.log"], (
        "what it wrote is kept"
    )
    assert "restarting it" in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=slow)])
def test_an_evaluation_over_the_fleet_scores_as_one_engine_does(folder: Path, parts: int) -> None:
    arguments: dict[str, Any] = {
        "model": str(folder),
        "data": [{"prompt": word} for word in WORDS],
        "reward": variety,
        "learn": {"max_new_tokens": 8},
        "eval": {"samples_per_prompt": 3, "sampling": {"temperature": 1.0}},
    }
    alone = trimtab.evaluate(**arguments, run={"device": "cpu", "engine": "native"})
    rollout = {"python": warm_python("vllm"), "tensor_parallel": parts}
    fleet = trimtab.evaluate(**arguments, run={"device": "cpu", "engine": "vllm", "devices": 2, "rollout": rollout})
    assert fleet == alone and alone["eval/length_mean"] > 1


def test_a_fleet_that_nobody_asked_for_gives_way_where_it_cannot_start(
    folder: Path, tmp_path: Path, native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made to want vLLM; that cannot start; all ranks start again with the native engine."""
    plain = assemble_ranks.plan_devices

    def wanting(run: Run, job: Job, machine: Machine) -> Plan:
        return plain(run.model_copy(update={"engine": "vllm"}) if run.engine == "auto" else run, job, machine)

    def failing(*given: Any, **settings: Any) -> ExternalEngine:
        raise EngineError("vLLM failed: its process ended.\nand more")

    monkeypatch.setattr(assemble_ranks, "plan_devices", wanting)
    monkeypatch.setattr(engines, "ExternalEngine", failing)
    assert_same_learned(native, run(folder, tmp_path / "run", devices=2), folder)
    choices = {c["key"]: c for c in json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]}
    assert choices["run.engine"]["value"] == "native"
    assert choices["run.engine"]["why"] == "vllm was planned but did not start: vLLM failed: its process ended."
