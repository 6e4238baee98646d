"""Whole runs on a CUDA device against the same runs on the CPU: the same tokens, the same weights.

Where there is no device the CPU plays one (tests/emulated_cuda): its rules are kept, graphs are recorded and replayed, kernels
are interpreted, memory is lent, overwritten and runs out. On a device the same tests run on it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import emulated_cuda
import pytest
import torch
from emulated_cuda.memory import DeviceMemory
from safetensors.torch import load_file
from tiny import tiny_hybrid, tiny_model, tiny_tokenizer

import trimtab
from tests import running
from tests.running import Trained, letters
from trimtab.model import kernel_choice, policy
from trimtab.model.load import save_model
from trimtab.observe import stall_watch
from trimtab.rollout.native import cuda, engine
from trimtab.rollout.native.cuda import CudaDecoder
from trimtab.rollout.native.kernels import attention
from trimtab.run import calibrate
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.updater import Updater

REAL = torch.cuda.is_available() and emulated_cuda.current is None
APART = 1e-3
"""How far weights may be from the CPU's, of the way that training has moved them."""
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]
WORKED = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(3) for b in range(3)]
PAIRS = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1)} for a in range(3) for b in range(3)]
USUAL: dict[str, Any] = {
    "data": ROWS[:6],
    "reward": letters,
    "learn": {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4, "lr": 1e-2},
    "run": {"token_budget": 64, "score_token_budget": 64},
    "observe": {"samples_every": 1},
}
SHORT = {"learn": {"steps": 2, "sequences_per_step": 4, "lr": 1e-2}, "run": USUAL["run"]}
STAGES = {"train": USUAL, "sft": {"data": WORKED, **SHORT}, "reward_model": {"data": PAIRS, **SHORT}}
STAGES["reward_model"] = {**STAGES["reward_model"], "learn": {"steps": 2, "pairs_per_step": 2, "lr": 1e-2}}
LORA = {"lora": {"r": 4}}


@dataclass(frozen=True)
class Case:
    """A run. `fused`: through the fused layers of the update, too, which otherwise serve half precision only."""

    architecture: str = "llama"
    shape: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    stage: str = "train"
    fused: bool = False
    hybrid: bool = False


GRPO = Case()
KL = {"learn": {"kl": {"coef": 0.1}}}
COVER = {
    "grpo, fused": Case(fused=True),
    "adapters on qwen2, fused, a reference": Case("qwen2", model=LORA, changes=KL, fused=True),
    "sft": Case(stage="sft", changes={"run": {"checkpoint_activations": True}}),
}
FULL = {
    "ppo": Case(changes={"learn": {"algorithm": "ppo", "samples_per_prompt": 1, "prompts_per_step": 4}}),
    "grpo, plain": GRPO,
    "reference in host memory": Case(changes={**KL, "run": {"offload": {"reference": True}}}),
    "states of 8 bits": Case(changes={"learn": {"optimizer": {"states": "8bit"}}}),
    "states in host memory": Case(changes={"run": {"offload": {"optimizer": True}}}),
    "8 bits in host memory": Case(
        changes={"learn": {"optimizer": {"states": "8bit"}}, "run": {"offload": {"optimizer": True}}}
    ),
    "activations in host memory": Case(
        changes={"run": {"offload": {"activations": True}, "checkpoint_activations": True}}, fused=True
    ),
    "activations of plain modules in host memory": Case(
        changes={"run": {"offload": {"activations": True}, "checkpoint_activations": True}}
    ),
    "some activations": Case(changes={"run": {"checkpoint_activations": "some"}}, fused=True),
    "recomputed": Case(changes={"run": {"checkpoint_activations": True}}, fused=True),
    "windows": Case("mistral", fused=True, changes={"learn": {"max_new_tokens": 7}}),
    "soft caps": Case("gemma2", fused=True, changes={"learn": {"max_new_tokens": 7}}),
    "sinks and experts": Case("gpt_oss"),
    "two norms": Case("gemma3_text", fused=True),
    "head norms": Case("qwen3", fused=True),
    "experts": Case("qwen3_moe", changes={"learn": {"max_new_tokens": 8}}),
    "mixtral": Case("mixtral"),
    "experts, balanced and replayed": Case(
        "qwen3_moe",
        changes={"learn": {"router_aux_coef": 0.1, "router_replay": True}, "run": {"engine": "native"}},
        fused=True,
    ),
    "plain modules": Case("olmo2"),
    "joined projections": Case("phi3"),
    "granite": Case("granite"),
    "shared experts": Case("qwen2_moe", fused=True),
    "latent attention": Case("deepseek_v3"),
    "gated delta": Case("qwen3_next", hybrid=True),
    "convolutions": Case("lfm2", hybrid=True),
    "mamba": Case("falcon_h1", hybrid=True),
    "base of 8 bits": Case(model={**LORA, "base": "fp8"}),
    "base of 4 bits": Case(model={**LORA, "base": "4bit"}),
    "keys and values of 8 bits": Case(model={"kv_dtype": "fp8"}),
    "tied": Case(shape={"tie_word_embeddings": True}, fused=True),
    "adapters, plain": Case(model=LORA),
    "adapters with 8 bits": Case(model=LORA, changes={"learn": {"optimizer": {"states": "8bit"}}}, fused=True),
    "several updates, scores before": Case(changes={"learn": {"updates_per_step": 2}}),
    "short of cache": Case(changes={"run": {"rollout": {"kv_memory": 12 * 2 * 2 * 8 * 4 * 2, "page_tokens": 2}}}),
    "few at once": Case(changes={"run": {"rollout": {"max_sequences": 2, "prefill_tokens": 3}}}),
    "memory not lent": Case(changes={"run": {"rollout": {"lend_memory": False}}}),
    "filters": Case(changes={"learn": {"sampling": {"top_k": 20, "top_p": 0.9}}}),
    "evaluation": Case(changes={"eval_data": ROWS[6:8], "observe": {"eval_every": 1}}),
    "gspo": Case(changes={"learn": {"algorithm": "gspo"}}, fused=True),
    "dapo": Case(changes={"learn": {"algorithm": "dapo"}}),
    "reinforce++": Case(changes={"learn": {"algorithm": "reinforce_pp"}}),
    "ppo with a reference and adapters": Case(
        model=LORA, changes={"learn": {"algorithm": "ppo", "samples_per_prompt": 1, "kl": {"coef": 0.1}}}
    ),
    "staleness": Case(changes={"learn": {"staleness": 1}}),
    "sft with adapters": Case(stage="sft", model=LORA, fused=True),
    "reward model": Case(stage="reward_model", fused=True),
    "reward model with adapters": Case(stage="reward_model", model=LORA),
}


HALF = {
    "llama": Case(),
    "adapters": Case(model=LORA),
    "experts": Case("qwen3_moe", changes={"learn": {"max_new_tokens": 8}}),
    "sinks and experts": Case("gpt_oss"),
    "soft caps": Case("gemma2"),
    "convolutions": Case("lfm2", hybrid=True),
}


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[DeviceMemory | None]:
    with ExitStack() as stack:
        if REAL:
            yield None
        else:
            yield emulated_cuda.current or stack.enter_context(emulated_cuda.installed())


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program costs the interpreter time."""
    if not REAL:
        monkeypatch.setattr(attention, "MAX_SPLITS", 1)
        monkeypatch.setattr(cuda, "REPLAYS_TIMED", 1)
        monkeypatch.setitem(stall_watch.MIN_STALL_S, "cuda", 600.0)
    monkeypatch.setattr(policy, "PROBE_LENGTHS", [3, 2])
    monkeypatch.setattr(policy, "PROBE_CUT", [2, 1, 1, 1])
    torch.backends.cuda.matmul.allow_tf32 = False


def model_of(case: Case, tmp_path: Path, dtype: str = "float32") -> dict[str, Any]:
    folder = tmp_path / "model"
    if not folder.exists():
        found = (
            tiny_hybrid(case.architecture)
            if case.hybrid
            else tiny_model(case.architecture, **{"num_hidden_layers": 2, **case.shape})
        )
        save_model(found, tiny_tokenizer(), folder)
    return {"path": str(folder), "dtype": dtype, **case.model}


def run_on(device: str, case: Case, tmp_path: Path, dtype: str = "float32", **more: Any) -> Trained:
    changes = {**case.changes, "run": {**case.changes.get("run", {}), "device": device}, **more}
    with pytest.MonkeyPatch.context() as patch:
        if case.fused:
            patch.setattr(kernel_choice, "suits", lambda device, dtype: device.type == "cuda")
        return running.train(
            model_of(case, tmp_path, dtype), tmp_path / device, STAGES[case.stage], changes, case.stage
        )


def completions(run: Trained) -> list[list[int]]:
    files = sorted((run.folder / "samples").glob("step-*.jsonl"))
    return [json.loads(line)["completion"] for file in files for line in file.read_text().splitlines()]


def apart(case: Case, tmp_path: Path, one: Trained, two: Trained) -> float:
    """Distance of the weights, of the way that training has moved them."""
    first, second = (load_file(run.folder / "final/model.safetensors") for run in (one, two))
    began = load_file(tmp_path / "model/model.safetensors")
    assert first.keys() == second.keys()
    moved = sum(float((first[name] - began[name]).double().square().sum()) for name in first if name in began)
    gap = sum(float((first[name] - second[name]).double().square().sum()) for name in first)
    if not moved:  # nothing was to be learned from what was sampled, which is compared anyway
        return 0.0 if gap == 0 else float("inf")
    return float((gap / moved) ** 0.5)


def same(case: Case, tmp_path: Path, **more: Any) -> Trained:
    """The run on the device, which is that on the CPU."""
    host, found = run_on("cpu", case, tmp_path, **more), run_on("cuda", case, tmp_path, **more)
    assert completions(host) == completions(found)
    assert apart(case, tmp_path, host, found) < APART
    return found


@pytest.mark.parametrize("name", [*COVER, *(pytest.param(name, marks=pytest.mark.slow) for name in FULL)])
def test_a_run_on_a_device_is_the_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    case = {**COVER, **FULL}[name]
    found = same(case, tmp_path)
    if case.stage == "train" and case.architecture in ("llama", "qwen3_moe", "mixtral", "gpt_oss"):
        assert found.metrics[-1]["rollout/graph_share"] == 1.0
    if case.fused:
        assert "fused layers" in (found.folder / "log.txt").read_text() if (found.folder / "log.txt").exists() else True


class RunsOut:
    """Lets one allocation fail inside a method's first call."""

    def __init__(self, device: DeviceMemory, number: int) -> None:
        self.device, self.number, self.calls = device, number, 0

    def around(self, method: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls == 1:
                self.device.fail_allocation(self.number)
            try:
                return method(*args, **kwargs)
            finally:
                self.device.refuse = None

        return counted


PLACES = {
    "prefill": (CudaDecoder, "prefill", 2),
    "decode": (CudaDecoder, "run", 1),
    "forward": (Updater, "_loss", 9),
    "backward": (Updater, "_backward", 5),
    "optimizer step": (MasterAdamW, "prepare", 2),
    "scores": (Updater, "score_share", 9),
    "taking memory back": (CudaDecoder, "reclaim", 1),
}
NEEDED = {"scores": {"learn": {"updates_per_step": 2}}, "optimizer step": {"run": {"offload": {"optimizer": True}}}}
"""What a run has to do to be there at all."""


@pytest.mark.parametrize("place", [pytest.param(p, marks=[] if p == "backward" else pytest.mark.slow) for p in PLACES])
def test_a_run_that_ran_out_of_memory_is_the_run_that_did_not(
    place: str, device: DeviceMemory | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 8, by the allocator."""
    if device is None:
        pytest.skip("a device's own allocator cannot be told to fail")
    case, before = Case(changes=NEEDED.get(place, {})), device.ooms
    owner, name, number = PLACES[place]
    host = run_on("cpu", case, tmp_path)
    monkeypatch.setattr(engine, "MIN_PREFILL_TOKENS", 2)
    monkeypatch.setattr(owner, name, RunsOut(device, number).around(getattr(owner, name)))
    found = run_on("cuda", case, tmp_path)
    assert device.ooms == before + 1
    assert completions(host) == completions(found)
    assert apart(case, tmp_path, host, found) < APART
    if place != "taking memory back":  # which needs nothing lowered
        assert sum(row.get("run/oom_recoveries", 0) for row in found.metrics) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", HALF)
def test_half_precision_runs(name: str, tmp_path: Path) -> None:
    """Bit by bit nothing can be compared: what is sampled has nearly the log-probs that the trainer computes."""
    case = HALF[name]
    found = run_on("cuda", case, tmp_path, "bfloat16")
    assert found.metrics[-1]["rollout/logprob_gap"] < 0.1
    assert all(value.isfinite().all() for value in load_file(found.folder / "final/model.safetensors").values())


@pytest.mark.slow
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    case, observe = Case(fused=True), {"checkpoint_every": 1, "samples_every": 1}
    whole = run_on("cuda", case, tmp_path, observe=observe)
    (tmp_path / "cuda").rename(tmp_path / "whole")
    run_on("cuda", case, tmp_path, learn={**USUAL["learn"], "steps": 1}, observe=observe)
    again = run_on("cuda", case, tmp_path, observe=observe, resume=True)
    first = load_file(tmp_path / "whole/final/model.safetensors")
    second = load_file(again.folder / "final/model.safetensors")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole.metrics[-1]["policy/loss"] == again.metrics[-1]["policy/loss"]


def few_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured at the start of a run, with little."""
    monkeypatch.setattr(calibrate, "SMALL_PROBE_TOKENS", 24)
    monkeypatch.setattr(calibrate, "MIN_LEARNED_TOKENS", 8)
    monkeypatch.setattr(calibrate, "LAUNCHES_TIMED", 1)


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_a_run_with_nothing_but_defaults(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is chosen and measured, as most users have it."""
    few_probes(monkeypatch)
    steps = {"steps": 1} if dtype == "bfloat16" else {}
    given = {"data": ROWS[:6], "reward": letters, "learn": {**USUAL["learn"], **steps}}
    found = running.train(model_of(Case(), tmp_path, dtype), tmp_path / "cuda", given)
    chosen = json.loads((found.folder / "plan.json").read_text())
    assert chosen["device"] != "cpu"
    assert found.metrics[-1]["rollout/graph_share"] == 1.0
    if dtype == "float32":
        host = running.train(model_of(Case(), tmp_path, dtype), tmp_path / "cpu", {**given, "run": {"device": "cpu"}})
        assert apart(Case(), tmp_path, host, found) < APART


@pytest.mark.slow
def test_a_limit_of_memory_holds_for_torch_and_the_arenas(device: DeviceMemory | None, tmp_path: Path) -> None:
    if device is None:
        pytest.skip("tests/gpu/test_memory_gpu.py does that on a device")
    device.reset_peaks()
    found = run_on("cuda", Case(changes={"run": {"memory": "2GiB"}}), tmp_path)
    assert device.peak_reserved <= 2 * 2**30
    assert found.metrics[-1]["step"] == 2 and device.fraction == 1.0


@pytest.mark.slow
def test_a_model_is_evaluated(tmp_path: Path) -> None:
    given = {"data": ROWS[:4], "reward": letters, "learn": {"max_new_tokens": 4}}
    model = model_of(Case(), tmp_path)
    scores = [trimtab.evaluate(model=model, run={"device": name}, **given) for name in ("cpu", "cuda")]
    assert scores[0] == scores[1]
