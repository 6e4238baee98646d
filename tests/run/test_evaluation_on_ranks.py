"""Evaluation on several devices: ranks that only generate give the scores of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import VOCABULARY, tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

import trimtab
from tests.forked_ranks import fork_ranks
from tests.quick_rewards import double, few_letters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("llama")
    model.save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    model.config.num_labels = 1
    torch.manual_seed(0)
    judge = AutoModelForSequenceClassification.from_config(model.config)
    assert judge.config.vocab_size == VOCABULARY
    judge.save_pretrained(folder / "judge")
    tiny_tokenizer().save_pretrained(folder / "judge")
    return folder


def test_two_ranks_score_as_one_device_with_tools_and_a_reward_model(folder: Path, monkeypatch) -> None:
    fork_ranks(monkeypatch)

    def scores(devices: int) -> dict[str, float]:
        return trimtab.evaluate(
            model=str(folder / "model"),
            data=[{"prompt": text} for text in ("12+34=", "7+8=", "abc", "9+99=")],
            reward=[{"fn": f"model:{folder}/judge", "name": "judge"}, few_letters],
            environment={"tools": [double], "max_turns": 2},
            learn={"max_new_tokens": 10},
            eval={"samples_per_prompt": 3, "sampling": {"temperature": 1.0}},
            run={"device": "cpu", "devices": devices, "reward_workers": 1},
        )

    one, two = scores(1), scores(2)
    names = [name for name in one if "wait" not in name and "seconds" not in name]
    assert {name: two[name] for name in names} == pytest.approx({name: one[name] for name in names})
