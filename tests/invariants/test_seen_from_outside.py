"""Law 1, seen from outside: `trimtab train` with other `run` settings samples the same tokens and ends with the same weights.

Three steps in float32, six updates. Weights move by 6e-3 and differ by about 1e-7.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import trimtab
from trimtab.record.sinks import read_metrics

STEPS = 3
TOLERANCE = 1e-5
REWARD = """
def digits(completions, **_):
    return [sum(character.isdigit() for character in text) / 12 for text in completions]
"""
SCARCE = "scarce cache, sequences are parked"
# The longest prompt has 22 tokens, so a sequence has 34 at most; a token takes 192 bytes of KV cache for each of 3 layers.
VARIANTS: dict[str, dict[str, Any]] = {
    "one sequence a micro-batch": {"token_budget": 34, "score_token_budget": 34},
    "a few sequences a micro-batch": {"token_budget": 100, "score_token_budget": 57},
    "recomputed activations, small chunks": {"checkpoint_activations": True, "logprob_chunk": 7},
    "one sequence at a time": {"rollout": {"max_sequences": 1}},
    "three sequences at a time": {"rollout": {"max_sequences": 3}},
    SCARCE: {"rollout": {"kv_memory": 14 * 4 * 192 * 3 * 2, "page_tokens": 4}},
    "tiny pages, tiny prefill": {"rollout": {"page_tokens": 1, "prefill_tokens": 3}},
    "large pages, no prefix cache": {"rollout": {"page_tokens": 64, "prefix_cache": False}},
    "all at once": {
        "token_budget": 61,
        "logprob_chunk": 16,
        "reward_workers": 3,
        "rollout": {"max_sequences": 5, "page_tokens": 8, "prefill_tokens": 10},
    },
}


def settings(folder: Path, model_folder: Path, name: str, run: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"path": str(model_folder), "dtype": "float32"},
        "data": {"train": str(folder / "rows.jsonl")},
        "reward": [{"fn": f"{folder}/rewards.py:digits"}],
        "learn": {
            "steps": STEPS,
            "prompts_per_step": 4,
            "samples_per_prompt": 4,
            "updates_per_step": 2,
            "max_new_tokens": 12,
            "lr": 1e-3,
            "sampling": {"temperature": 0.9, "top_p": 0.95},
            "kl": {"coef": 0.05},
        },
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1} | run,
        "observe": {"dir": str(folder / name.replace(" ", "-")), "samples_every": 1, "tensorboard": False},
    }


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outside")
    (folder / "rewards.py").write_text(REWARD)
    prompts = [f"say {'abcdefghijklmnop'[: 2 + n]} {n} digits="[:22] for n in range(10)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    return folder


@pytest.fixture(scope="module")
def plain(workplace: Path, model_folder: Path) -> Path:
    """The run with nothing pinned."""
    return Path(trimtab.train(settings(workplace, model_folder, "plain", {}))["run_dir"])


def samples(run: Path) -> list[dict[str, Any]]:
    files = [run / f"samples/step-{step}.jsonl" for step in range(1, STEPS + 1)]
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def assert_same(run: Path, plain: Path) -> None:
    assert len(samples(run)) == STEPS * 16
    assert samples(run) == samples(plain)
    weights, expected = (load_file(folder / "final/model.safetensors") for folder in (run, plain))
    assert weights.keys() == expected.keys()
    worst = max((weights[name] - expected[name]).abs().max().item() for name in weights)
    assert worst <= TOLERANCE


def test_the_run_learns_enough_to_tell_a_difference(plain: Path, model_folder: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (model_folder, plain / "final"))
    assert max((before[name] - after[name]).abs().max().item() for name in before) > 100 * TOLERANCE
    assert len({row["tokens"] for row in samples(plain)}) > 1, "all completions have one length: too easy"


@pytest.mark.parametrize("name", VARIANTS)
def test_same_tokens_and_weights(name: str, workplace: Path, model_folder: Path, plain: Path) -> None:
    result = trimtab.train(settings(workplace, model_folder, name, VARIANTS[name]))
    run = Path(result["run_dir"])
    assert_same(run, plain)
    parked = sum(row["rollout/parked"] for row in read_metrics(run))
    assert (parked > 0) == (name == SCARCE)


def test_same_through_the_command_line(workplace: Path, model_folder: Path, plain: Path, warm_python: str) -> None:
    config = settings(workplace, model_folder, "command line", {})
    (workplace / "config.yaml").write_text(yaml.safe_dump(config))
    pinned = ["token_budget=47", "rollout.max_sequences=2", "rollout.kv_memory=64KiB", "rollout.page_tokens=4"]
    pinned = [f"run.{pin}" for pin in pinned]
    done = subprocess.run(
        [warm_python, "-m", "trimtab", "train", workplace / "config.yaml", "--json", *pinned],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    summary = json.loads(line)
    assert set(summary) == {
        "run_dir", "steps", "reward_first", "reward_last", "eval", "tokens_per_s", "peak_gib", "seconds",
    }  # fmt: skip
    assert_same(Path(summary["run_dir"]), plain)
    assert "it/s" not in done.stderr, "progress bars of other libraries clutter the output"


@pytest.fixture(autouse=True)
def one_thread_after() -> Any:
    yield
    torch.set_num_threads(1)
