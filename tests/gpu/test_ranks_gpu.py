"""Two ranks on one GPU (gloo carries what NCCL would between two): fused layers in bfloat16, graphs, lent memory, every mode.
Skipped without a device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import letters, train
from safetensors.torch import load_file
from tiny import tiny_model

from trimtab.model.load import save_model
from trimtab.run import machine

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SIZE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
    "head_dim": 32,
}  # fmt: skip
PAIRS = [{"prompt": f"{a}+{b}=", "completion": f"{a + b} " + "ab" * a} for a in range(8) for b in range(8)]
NOISE = 0.1
"""Of the way that the weights went: bfloat16 rounds to one part in 256, and sums are added in another order."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_model("qwen3", torch.bfloat16, **SIZE), tokenizer, folder)
    return folder


@pytest.fixture
def twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one device, as if there were two of half its memory."""
    (first, *_) = machine.visible_devices()
    half = replace(first, free=first.free // 2, total=first.total // 2)
    monkeypatch.setattr(machine, "visible_devices", lambda: [half, half])


def run(
    model: Path, folder: Path, stage: str, learn: dict[str, Any], devices: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    usual: dict[str, Any] = {
        "data": PAIRS,
        "learn": {"lr": 1e-3, "optimizer": {"eps": 1e-4}, **learn},
        "run": {"device": "cuda", "memory": "6GiB", "token_budget": 1024, **devices},
        "observe": {"checkpoint_every": 0},
    }
    if stage == "train":
        usual |= {"data": [{"prompt": row["prompt"]} for row in PAIRS], "reward": letters}
    done = train(model, folder, usual, stage=stage)
    return load_file(done.folder / "final" / "model.safetensors"), done.metrics


@pytest.mark.parametrize("shard", ["none", "optimizer", "gradients"])
def test_two_ranks_learn_what_one_process_learns(shard: str, model: Path, tmp_path: Path, twice: None) -> None:
    learn = {"steps": 3, "sequences_per_step": 32}
    one, alone = run(model, tmp_path / "one", "sft", learn, {"devices": 1})
    two, both = run(model, tmp_path / "two", "sft", learn, {"devices": 2, "shard": shard})
    began = load_file(model / "model.safetensors")
    went = torch.stack([(one[n].float() - began[n].float()).norm() for n in one]).norm()
    apart = torch.stack([(one[n].float() - two[n].float()).norm() for n in one]).norm()
    assert went > 0 and apart <= NOISE * went, f"{float(apart / went):.3f} of the way"
    norms = [[row["policy/grad_norm"] for row in rows] for rows in (alone, both)]
    assert norms[1] == pytest.approx(norms[0], rel=0.02)
    print(f"{shard}: apart {float(apart / went):.4f} of the way, grad norms {norms}")


@pytest.mark.parametrize("shard", ["optimizer", "gradients"])
def test_engines_follow_the_weights_and_memory_is_as_predicted(
    shard: str, model: Path, tmp_path: Path, twice: None
) -> None:
    """Graphs stay valid after the weights were gathered in place: what engines draw are the trainer's log-probs in every step."""
    learn = {"steps": 4, "prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 48, "lr": 3e-3}
    _, rows = run(model, tmp_path / "rl", "train", learn, {"devices": 2, "shard": shard})
    gaps = [row["rollout/logprob_gap"] for row in rows if "rollout/logprob_gap" in row]
    assert len(gaps) == 4 and max(gaps) < 0.05
    last = rows[-1]
    for rank in range(2):
        assert last[f"memory/rank{rank}/update_peak_gib"] > 0
    found = [row["memory/predicted_over_measured"] for row in rows if "memory/predicted_over_measured" in row]
    print(f"{shard}: gaps {gaps}, predicted over measured {found}, communication {last['time/communication']:.3f} s")
    assert all(0.9 < ratio < 1.3 for ratio in found)


def test_one_rank_of_nccl_makes_the_same_calls(tmp_path: Path) -> None:
    from trimtab.cluster.mesh import Meeting, Mesh, open_store
    from trimtab.model.versions import gather_flat, reduce_flat

    store = open_store()
    mesh = Mesh(Meeting(store.port, "one", 0, 1, "nccl", torch.device("cuda:0")), 1)
    try:
        flat = torch.arange(512, dtype=torch.float32, device="cuda")
        wanted = flat.clone()
        mesh.sum(flat)
        reduce_flat(flat, flat, None)
        gather_flat(flat, flat, None)
        assert torch.equal(flat, wanted) and mesh.take()[1] == flat.nbytes
        mesh.abort()
        mesh.rejoin()
        mesh.sum(flat)
        assert torch.equal(flat, wanted)
    finally:
        mesh.leave()
