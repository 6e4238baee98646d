"""Whole runs of models whose layers carry a state: they learn, resume exactly, and leave a model that loads anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from invariants.test_gradient_invariance import CASES, assert_same_gradient, step
from safetensors.torch import load_file
from tiny import HYBRIDS, MIXTURE_HYBRIDS, tiny_hybrid, tiny_model
from transformers import AutoModelForCausalLM

from tests import running
from tests.running import Trained, letters
from trimtab.model.load import save_model
from trimtab.model.versions import STATES_ARE_HANDED
from trimtab.run.export import export_run

pytestmark = pytest.mark.skipif(not STATES_ARE_HANDED, reason="transformers before 5.22 hands no states over")
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "completion": str(a + b)} for a in range(6) for b in range(5)]
FLOAT32 = 2e-5
"""What the delta rule and the scan leave of a float64 model's exactness: they compute in float32."""


@pytest.fixture(scope="module")
def hybrid_folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    for name in HYBRIDS:
        save_model(tiny_hybrid(name), tokenizer, root / name)
    return {name: root / name for name in HYBRIDS}


def grpo(model: Path | dict[str, Any], folder: Path, **changes: Any) -> Trained:
    usual = {
        "data": ROWS[:20],
        "eval_data": ROWS[20:],
        "reward": letters,
        "learn": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 3e-3},
    }
    return running.train(model, folder, usual, changes)


def assert_learned(run: Trained) -> None:
    rewards = [row["reward/mean"] for row in run.metrics if "reward/mean" in row]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert max(row["rollout/logprob_gap"] for row in run.metrics[1:]) < 1e-4


def assert_loads_anywhere(folder: Path) -> None:
    """The exported model, loaded by transformers, gives the log-probs that the policy gives."""
    from trimtab.model.packed import PackedPlan
    from trimtab.model.policy import Policy

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    policy = Policy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    tokens, plan = torch.arange(3, 23), PackedPlan([20], "cpu")
    with torch.no_grad():
        theirs = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
        ours = policy.head.logits(policy.hidden(tokens, plan.positions, plan)).log_softmax(-1)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_a_hybrid_learns(hybrid_folders: dict[str, Path], tmp_path: Path) -> None:
    run = grpo(hybrid_folders["qwen3_next"], tmp_path, learn={"steps": 25, "prompts_per_step": 8})
    assert_learned(run)
    assert_loads_anywhere(run.folder / "final")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HYBRIDS if name != "qwen3_next"])
def test_every_family_learns(name: str, hybrid_folders: dict[str, Path], tmp_path: Path) -> None:
    run = grpo(hybrid_folders[name], tmp_path, learn={"steps": 30, "prompts_per_step": 8})
    assert_learned(run)
    assert_loads_anywhere(run.folder / "final")


@pytest.mark.parametrize("name", ["qwen3_next", pytest.param("nemotron_h", marks=pytest.mark.slow)])
def test_adapters_on_a_hybrid_are_merged_into_what_is_exported(
    name: str, hybrid_folders: dict[str, Path], tmp_path: Path
) -> None:
    learn = {"steps": 3, "lr": 1e-2, "kl": {"coef": 1e-3}}
    run = grpo({"path": str(hybrid_folders[name]), "lora": {"r": 4}}, tmp_path / "run", learn=learn)
    assert run.metrics[1]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-5)
    assert run.metrics[3]["rollout/logprob_gap"] < 1e-4
    before, after = (load_file(f / "model.safetensors") for f in (hybrid_folders[name], run.folder / "final"))
    assert before.keys() == after.keys()
    changed = {weight for weight in before if not torch.equal(before[weight], after[weight])}
    assert any("in_proj" in weight for weight in changed) and any("self_attn" in w or "mixer" in w for w in changed)
    assert_loads_anywhere(run.folder / "final")
    export_run(run.folder, tmp_path / "out", "last", "same")
    again = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(again[weight], after[weight]) for weight in after)


@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_a_run_that_was_interrupted_ends_with_the_same_weights(
    name: str, hybrid_folders: dict[str, Path], tmp_path: Path
) -> None:
    observe = {"checkpoint_every": 1}
    whole = grpo(hybrid_folders[name], tmp_path / "whole", learn={"steps": 3}, observe=observe)
    grpo(hybrid_folders[name], tmp_path / "half", learn={"steps": 1}, observe=observe)
    half = grpo(hybrid_folders[name], tmp_path / "half", learn={"steps": 3}, observe=observe, resume=True)
    one, two = (load_file(run.folder / "final/model.safetensors") for run in (whole, half))
    assert all(torch.equal(one[weight], two[weight]) for weight in one)


@pytest.mark.parametrize(
    "name", ["nemotron_h", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3_next", "lfm2"))]
)
def test_a_hybrid_learns_from_worked_answers(name: str, hybrid_folders: dict[str, Path], tmp_path: Path) -> None:
    usual = {
        "data": ROWS[:24], "eval_data": ROWS[24:], "learn": {"steps": 12, "sequences_per_step": 8, "lr": 1e-2},
    }  # fmt: skip
    run = running.train(hybrid_folders[name], tmp_path, usual, {}, "sft")
    losses = [row["sft/loss"] for row in run.metrics if "sft/loss" in row]
    assert losses[-1] < losses[0] - 0.5
    assert_loads_anywhere(run.folder / "final")


@pytest.fixture(scope="module")
def baseline(hybrid_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory):
    return step(hybrid_folders["qwen3_next"], tmp_path_factory.mktemp("baseline"))


COVER = {
    ("token_budget", 64), ("checkpoint_activations", True), ("rollout.max_sequences", 3), ("rollout.kv_memory", "40KiB"),
    ("rollout.prefill_tokens", 1), ("rollout.prefix_cache", True), ("offload.activations", True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param(key, value, marks=[] if (key, value) in COVER else pytest.mark.slow)
        for key, values in CASES.items()
        for value in values
    ],
)
def test_no_key_of_run_changes_what_a_hybrid_learns(
    hybrid_folders: dict[str, Path], tmp_path: Path, baseline: Any, key: str, value: Any
) -> None:
    """Law 1, for every key of `run`."""
    tokens, gradients = step(hybrid_folders["qwen3_next"], tmp_path, key, value)
    assert tokens == baseline[0]
    assert_same_gradient(baseline[1], gradients, FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["whole", "adapters"])
@pytest.mark.parametrize("name", MIXTURE_HYBRIDS)
def test_a_mixture_of_experts_with_states_is_trained(
    name: str, lora: dict[str, Any] | None, tokenizer: Any, tmp_path: Path
) -> None:
    save_model(tiny_model(name, **MIXTURE_HYBRIDS[name]), tokenizer, tmp_path / "model")
    run = grpo({"path": str(tmp_path / "model"), **({"lora": lora} if lora else {})}, tmp_path / "run")
    assert run.metrics[-1]["rollout/logprob_gap"] < 1e-4
    assert_loads_anywhere(run.folder / "final")
