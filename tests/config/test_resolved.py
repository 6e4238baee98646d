"""Evaluation draws tokens its own way and ends completions as training does, unless `eval` says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.config.learn import Sampling
from trimtab.config.load import config_from_dict, load_config, resolved_yaml
from trimtab.config.resolved import eval_in_words, eval_sampling, resolve_config
from trimtab.config.schema import Config, EvalSampling

STOPS = {"learn.sampling.stop": '["\\n", END]', "learn.sampling.stop_token_ids": "[5, 7]"}


def build(held_out: bool = True, **overrides: str) -> Config:
    data = {"train": "a.jsonl", "eval": "b.jsonl"} if held_out else {"train": "a.jsonl"}
    least = {"model": {"path": "m"}, "data": data, "reward": [{"fn": "exact_match"}]}
    return config_from_dict(least, [f"{key}={value}" for key, value in overrides.items()])


def test_stops_are_inherited_one_by_one() -> None:
    both = {"stop": ["\n", "END"], "stop_token_ids": [5, 7]}
    assert eval_sampling(build(**STOPS)) == Sampling(temperature=0.0, **both)
    assert eval_sampling(build(**STOPS, **{"eval.sampling.stop": "[x]"})) == Sampling(
        temperature=0.0, stop=["x"], stop_token_ids=[5, 7]
    )
    assert eval_sampling(build(**STOPS, **{"eval.sampling.stop_token_ids": "[]"})) == Sampling(
        temperature=0.0, stop=["\n", "END"]
    )


def test_how_tokens_are_drawn_is_not_inherited() -> None:
    trained = {"learn.sampling.temperature": "0.7", "learn.sampling.top_k": "9", "learn.sampling.top_p": "0.9"}
    assert eval_sampling(build(**trained, **{"learn.sampling.min_p": "0.1"})) == Sampling(temperature=0.0)
    asked = {"eval.sampling.temperature": "0.5", "eval.sampling.top_p": "0.8"}
    assert eval_sampling(build(**trained, **asked)) == Sampling(temperature=0.5, top_p=0.8)


@pytest.mark.parametrize("held_out", [True, False])
def test_a_resolved_config_has_the_stops_written_out_and_loads_again(held_out: bool, tmp_path: Path) -> None:
    config = resolve_config(build(held_out, **STOPS))
    inherited = EvalSampling(stop=["\n", "END"], stop_token_ids=[5, 7])
    assert config.eval.sampling == (inherited if held_out else EvalSampling(stop=[], stop_token_ids=[]))
    (tmp_path / "c.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "c.yaml").model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({}, "greedy (training: temperature 1), 1 sample a prompt (training: 16), at most 512 new tokens"),
        (
            STOPS,
            "greedy (training: temperature 1), 1 sample a prompt (training: 16), at most 512 new tokens, "
            "stop '\\n' 'END', stop_token_ids 5 7",
        ),
        (
            {
                **STOPS,
                "eval.sampling.temperature": "0.6",
                "eval.sampling.stop": "[]",
                "eval.sampling.stop_token_ids": "[5]",
                "eval.max_new_tokens": "64",
                "eval.samples_per_prompt": "16",
                "learn.max_new_tokens": "2048",
                "learn.sampling.top_p": "0.9",
            },
            "temperature 0.6 (training: temperature 1), top_p 1 (training: 0.9), 16 samples a prompt, "
            "at most 64 new tokens (training: 2,048), stop none (training: '\\n' 'END'), stop_token_ids 5 (training: 5 7)",
        ),
        (
            {"eval.sampling.temperature": "1", "eval.samples_per_prompt": "16"},
            "temperature 1, 16 samples a prompt, at most 512 new tokens",
        ),
    ],
)
def test_what_differs_from_training_is_told(overrides: dict[str, str], words: str) -> None:
    config = build(**overrides)
    assert eval_in_words(config) == words
    assert eval_in_words(resolve_config(config)) == words
