"""Law 1 for `run.engine`, law 9 when an engine is killed: whichever generates, whatever happens to it, the same is learned.

Both engines draw the same tokens from the same random numbers; their forward passes round differently, so weights agree to
float32's last digits and not bit by bit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_tokenizer

import trimtab
from tests.quick_rewards import variety
from tests.rollout.contract.engines import OUTSIDE, kill_now, small_model, vllm_python, warm_python
from trimtab.base.errors import ConfigError, EngineError
from trimtab.config.run import Run
from trimtab.model.load import save_model
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import Plan
from trimtab.record.jsonl import read_jsonl
from trimtab.rollout.external.engine import ExternalEngine
from trimtab.rollout.external.kinds import KINDS
from trimtab.rollout.external.messages import Done
from trimtab.run import assemble, engines, models

WORDS = ["12+34=", "7+8=", "reverse abcdef=", "sort 40213=", "9+99="]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    save_model(small_model(), tiny_tokenizer(), found)
    return found


def run(
    folder: Path, out: Path, lora: dict[str, Any] | None = None, **run: Any
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Metrics of three steps, with an evaluation, and the weights that they end with."""
    trimtab.train(
        model={"path": str(folder), **({} if lora is None else {"lora": lora})},
        data=[{"prompt": word} for word in WORDS],
        eval_data=[{"prompt": word} for word in WORDS[:2]],
        reward=variety,
        learn={"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 16, "lr": 1e-3, "seed": 3},
        run={"device": "cpu", "threads": 1, **run},
        observe={"dir": str(out), "tensorboard": False},
    )
    return list(read_jsonl(out / "metrics.jsonl")), load_file(out / "final" / "model.safetensors")


@pytest.fixture(scope="module")
def native(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    return run(folder, tmp_path_factory.mktemp("native") / "run")


def assert_same_learned(one: tuple[list[dict], dict], two: tuple[list[dict], dict], first: Path) -> None:
    same = ("reward/mean", "reward/std", "response/length_mean", "rollout/tokens", "run/samples", "run/samples_trained")
    assert [[row.get(key) for key in same] for row in one[0]] == [[row.get(key) for key in same] for row in two[0]]
    start = load_file(first / "model.safetensors")
    for name, weight in one[1].items():
        moved = (weight - start[name]).abs().max()
        assert (two[1][name] - weight).abs().max() <= 1e-2 * moved + 1e-7, name


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang needs a GPU, but for tests, where its kernels are interpreted (rollout/external/sglang/on_cpu.py)."""
    monkeypatch.setitem(KINDS, "sglang", replace(KINDS["sglang"], needs_gpu=False))


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.slow)])  # two: also test_engine_fleet.py
@pytest.mark.parametrize("kind", OUTSIDE)
def test_another_engine_learns_what_the_native_engine_learns(
    folder: Path, tmp_path: Path, native, anywhere: None, monkeypatch: pytest.MonkeyPatch, kind: str, parts: int
) -> None:
    if kind == "sglang" and parts > 1:
        pytest.skip("SGLang runs on one device")
    close, paths = ExternalEngine.close, []
    monkeypatch.setattr(ExternalEngine, "close", lambda self: (paths.append(self.description), close(self)))
    found = run(folder, tmp_path / "run", engine=kind, rollout={"python": warm_python(kind), "tensor_parallel": parts})
    assert_same_learned(native, found, folder)
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in found[0] if "rollout/logprob_gap" in row)
    assert paths and ("the model split over 2 devices" in paths[0]) is (parts == 2)


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_run_whose_engine_is_killed_learns_the_same_from_everything_once(
    folder: Path, tmp_path: Path, native, anywhere: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """SIGKILL in the second step's rollout."""
    whole, killed = ExternalEngine._next_done, []

    def interrupted(self: ExternalEngine) -> Done:
        if self.version == 1 and self.stats.sequences == 1 and not killed:  # one of them has come
            killed.append(self.pids[0])
            kill_now(self)
        return whole(self)

    monkeypatch.setattr(ExternalEngine, "_next_done", interrupted)
    found = run(folder, tmp_path / "run", engine=kind, rollout={"python": warm_python(kind)})
    assert killed
    assert sum(row.get("rollout/restarts", 0) for row in found[0]) == 1
    assert_same_learned(native, found, folder)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"engine": "vllm", "rollout": {"python": "/nowhere/python"}}, "there is no interpreter '/nowhere/python'"),
        ({"engine": "vllm", "rollout": {"python": "/bin/true"}}, "does not run Python"),
        ({"rollout": {"eager": True}}, "has no effect on the native engine"),
        ({"engine": "native", "rollout": {"tensor_parallel": 2}}, "a native engine is cut over the run's own devices"),
        ({"engine": "native", "devices": 1, "rollout": {"tensor_parallel": 2}}, "Write run.devices: 2 or a multiple"),
        ({"engine": "native", "devices": 4, "rollout": {"tensor_parallel": 3}}, "cannot be divided into engines of 3"),
        ({"rollout": {"tensor_parallel": 2, "python": "/nowhere/python"}}, "there is no interpreter '/nowhere/python'"),
        ({"engine": "sglang", "rollout": {"tensor_parallel": 2}}, "sglang runs on one device"),
        ({"engine": "vllm", "rollout": {"tensor_parallel": 2, "processes": 2}}, "splits one engine over 2 devices"),
        ({"engine": "vllm", "devices": 4, "rollout": {"tensor_parallel": 3}}, "cannot be divided into engines of 3"),
        ({"engine": "sglang"}, r"SGLang needs a CUDA device(.|\n)*run.engine: native"),
        ({"engine": "native", "rollout": {"python": "/bin/true"}}, "has no effect on the native engine"),
    ],
    ids=str,
)
def test_an_engine_that_is_not_there_is_told_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path, settings: dict, words: str
) -> None:
    monkeypatch.setattr("trimtab.run.models.load_policy", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=words):
        run(folder, tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_an_engine_that_nobody_asked_for_gives_way_where_it_cannot_start(
    folder: Path, tmp_path: Path, native, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made to want vLLM; that cannot start; the run is the native engine's, and its card says why."""
    plain = assemble.planned

    def wanting(run: Run, job: Job, machine: Machine) -> Plan:
        return plain(run.model_copy(update={"engine": "vllm"}) if run.engine == "auto" else run, job, machine)

    def failing(*_: object, **__: object) -> ExternalEngine:
        raise EngineError("vLLM failed: its process ended.\nand more")

    monkeypatch.setattr(assemble, "planned", wanting)
    monkeypatch.setattr(engines, "ExternalEngine", failing)
    found = run(folder, tmp_path / "run")
    assert_same_learned(native, found, folder)
    choices = {c["key"]: c for c in json.loads((tmp_path / "run" / "plan.json").read_text())["choices"]}
    assert choices["run.engine"]["value"] == "native"
    assert choices["run.engine"]["why"] == "vllm was planned but did not start: vLLM failed: its process ended."
    with pytest.raises(EngineError, match="its process ended"):
        run(folder, tmp_path / "asked", engine="vllm", rollout={"python": vllm_python() or fake_vllm(tmp_path)})


def fake_vllm(folder: Path) -> str:
    """An interpreter that says it has one."""
    python = folder / "with-vllm"
    python.write_text("""#!/bin/sh\necho '{"there": true, "version": "0.32.0"}'\n""")
    python.chmod(0o755)
    return str(python)


def test_versions_outside_of_what_was_tested_are_refused(tmp_path: Path, folder: Path) -> None:
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"there": true, "version": "0.9.1"}'\n""")
    python.chmod(0o755)
    with pytest.raises(ConfigError, match=r"vLLM 0.9.1 is not a version(.|\n)*Install a version from 0.25"):
        run(folder, tmp_path / "run", engine="vllm", rollout={"python": str(python)})
    python.write_text("""#!/bin/sh\necho '{"there": false, "version": null}'\n""")
    with pytest.raises(ConfigError, match=r"not installed for(.|\n)*trimtab\[vllm\]"):
        run(folder, tmp_path / "run", engine="vllm", rollout={"python": str(python)})


def test_a_reference_that_waits_on_the_host_is_there_before_an_engine_takes_its_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    away, make = models.FromHost, engines.make_engine
    monkeypatch.setattr(models, "FromHost", lambda policy: (order.append("reference"), away(policy))[1])
    monkeypatch.setattr(engines, "make_engine", lambda *given: (order.append("engine"), make(*given))[1])
    trimtab.train(
        model=str(folder),
        data=[{"prompt": word} for word in WORDS],
        reward=variety,
        learn={"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "kl": {"coef": 0.1}},
        run={"device": "cpu", "threads": 1, "offload": {"reference": True}},
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )
    assert order == ["reference", "engine"]
