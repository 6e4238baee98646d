"""Law 1 over `run.sequence_parallel`: ranks that share micro-batches learn what one process learns, to the bit of the tokens.

The tiny model has 4 heads and 2 key/value heads. By counted bytes 2 and 3 ranks gather keys, and 4 exchange heads; with 4
key/value heads 2 ranks exchange heads too, and with 1 all gather keys (tests/model/test_sequence.py holds the rule).
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from running import train
from safetensors.torch import load_file
from tiny import tiny_model

from tests.forked_ranks import fork_ranks
from tests.invariants.test_ranks import Case, assert_same, run
from trimtab.base.errors import ConfigError
from trimtab.model.load import save_model

COVER = [
    Case("grpo", 2, "none", sequence=2),
    Case("grpo", 4, "full", shard_devices=2, tied=True, token_budget=45, sequence={"policy": 2, "reference": 4}),
    Case("gspo", 4, "optimizer", shard_devices=2, tied=True, sequence=4),
    Case("gspo", 2, "gradients", lora=True, offload=True, sequence=2, kv_heads=4),
    Case("ppo", 4, "gradients", shard_devices=2, token_budget=45, sequence={"policy": 4, "critic": 2}),
    Case("sft", 3, "none", lora=True, token_budget=60, sequence=3),
    Case("sft", 4, "optimizer", sequence=4, kv_heads=1),
    Case("reward_model", 2, "full", token_budget=60, sequence=2, kv_heads=4),
]
PRODUCT = [
    Case(stage, devices, shard, lora=lora, token_budget=budget, sequence=sequence, kv_heads=kv_heads)
    for stage, (devices, sequence), shard, lora, budget, kv_heads in itertools.product(
        ("grpo", "gspo", "ppo", "sft", "reward_model"), ((2, 2), (3, 3), (4, 2), (4, 4)),
        ("none", "optimizer", "gradients", "full"), (False, True), ("auto", 60), (1, 2, 4),
    )
]  # fmt: skip


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_ranks(monkeypatch)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> dict[tuple[bool, int], Path]:
    """Tiny models, by whether the head is tied to the embedding, and by key/value heads."""
    found = {}
    for tied, kv_heads in itertools.product((False, True), (1, 2, 4)):
        found[tied, kv_heads] = tmp_path_factory.mktemp(f"tied-{tied}-{kv_heads}")
        changes = {"tie_word_embeddings": tied, "num_key_value_heads": kv_heads}
        save_model(tiny_model("qwen3", **changes), tokenizer, found[tied, kv_heads])
    return found


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", COVER, ids=lambda case: "-".join(map(str, case)))
def test_ranks_that_share_rows_learn_what_one_process_learns(
    case: Case, models: dict[tuple[bool, int], Path], tmp_path: Path
) -> None:
    model = models[case.tied, case.kv_heads]
    one, many = (run(each, model, tmp_path / str(each.devices)) for each in (case.alone, case))
    assert_same(case, one, many, model)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", PRODUCT[::11], ids=lambda case: "-".join(map(str, case)))
def test_all_settings_together(case: Case, models: dict[tuple[bool, int], Path], tmp_path: Path) -> None:
    """Every eleventh of all combinations: a prime, so that each setting meets each other."""
    model = models[case.tied, case.kv_heads]
    one, many = (run(each, model, tmp_path / str(each.devices)) for each in (case.alone, case))
    assert_same(case, one, many, model)


LONG = 65_536


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kv_heads", [4, 1], ids=["heads", "keys"])
def test_a_sequence_of_64k_tokens_that_fits_no_single_budget(kv_heads: int, tmp_path: Path, tokenizer) -> None:
    """Four processes with room for 16k tokens each learn from it what one with room for all learns."""
    changes = {"num_hidden_layers": 1, "num_key_value_heads": kv_heads, "max_position_embeddings": LONG}
    save_model(tiny_model("qwen3", **changes), tokenizer, tmp_path / "model")
    numbers = torch.Generator().manual_seed(0)
    letters = torch.randint(ord("a"), ord("z"), (LONG - 10,), generator=numbers).tolist()
    usual = {
        "data": [{"prompt": "say=", "completion": "".join(map(chr, letters))}],
        "learn": {"steps": 1, "lr": 1e-2, "sequences_per_step": 1, "optimizer": {"eps": 1e-3}},
        "run": {"device": "cpu", "threads": 1, "token_budget": LONG // 4},
        "observe": {"checkpoint_every": 0},
    }
    model = {"path": str(tmp_path / "model"), "dtype": "float32"}
    with pytest.raises(ConfigError, match="cannot hold the longest"):
        train(model, tmp_path / "refused", usual, stage="sft")
    found = []
    for name, how in {"one": {"token_budget": LONG}, "four": {"devices": 4, "sequence_parallel": 4}}.items():
        done = train(model, tmp_path / name, usual, {"run": how}, stage="sft")
        found.append(load_file(done.folder / "final/model.safetensors"))
    began = load_file(tmp_path / "model/model.safetensors")
    went = max(float((found[0][name] - began[name]).abs().max()) for name in began)
    assert went > 1e-3
    for name, weight in found[0].items():
        torch.testing.assert_close(found[1][name], weight, atol=0.01 * went, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
