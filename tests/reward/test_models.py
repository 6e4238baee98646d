"""Reward models as rewards: their scores, what they cannot score, and runs that learn from one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

import trimtab
from tests import running
from trimtab.base.errors import RewardError
from trimtab.model.load import save_model
from trimtab.reward import models
from trimtab.reward.models import Classifier
from trimtab.workers.messages import Failure

CPU = torch.device("cpu")


def reward_model(
    folder: Path, architecture: str = "llama", labels: int = 1, template: str | None = None, **changes: Any
) -> Path:
    """A classifier with random weights, as another tool would have written it."""
    config = tiny_model(architecture, **changes).config
    config.num_labels = labels
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(model.score.weight, std=0.3)
    model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2"])
@pytest.mark.parametrize("tokens", [12, 8192])
def test_scores_are_transformers_own(
    architecture: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "REWARD_ROW_TOKENS", tokens)
    folder = reward_model(tmp_path / "rm", architecture)
    (folder / "reward.json").write_text(json.dumps({"shift": 0.25}))
    prompts, completions = ["1+1=", "2+2=", "a"], ["2", "four", "bcdefgh"]
    found = Classifier(str(folder), CPU, torch.float32).score(prompts, completions)
    plain, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), tiny_tokenizer()
    for prompt, completion, value in zip(prompts, completions, found):
        ids = tokenizer(f"{prompt}{completion}<eos>")["input_ids"]
        with torch.no_grad():
            wanted = float(plain(input_ids=torch.tensor([ids])).logits[0, 0]) + 0.25
        assert value == pytest.approx(wanted, abs=1e-4)


def test_conversations_are_written_by_its_own_template(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    made = Classifier(str(reward_model(tmp_path / "rm", template=template)), CPU, torch.float32)
    asked = [{"role": "user", "content": "hi"}]
    plain, messages = made.score(["hi"], ["yo"]), made.score([asked], [[{"role": "assistant", "content": "yo"}]])
    assert plain == messages and made.score(["hi"], ["no"]) != plain


def test_a_prompt_that_was_continued_is_one_answer(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    made = Classifier(str(reward_model(tmp_path / "rm", template=template)), CPU, torch.float32)
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "y"}]
    assert made.score([begun], ["o"]) == made.score([begun[:1]], ["yo"])


def test_messages_that_it_has_no_template_for_are_told(tmp_path: Path) -> None:
    made = Classifier(str(reward_model(tmp_path / "rm")), CPU, torch.float32)
    (found,) = made.score([[{"role": "user", "content": "hi"}]], ["yo"])
    assert isinstance(found, Failure) and "no chat template to write them" in str(found)


def test_what_cannot_be_scored_is_a_failure_and_no_zero(tmp_path: Path) -> None:
    made = Classifier(str(reward_model(tmp_path / "rm")), CPU, torch.float32)
    empty, good, long = made.score(["a", "a", "a"], ["", "b", "b" * 300])
    assert isinstance(empty, Failure) and isinstance(good, float) and isinstance(long, Failure)
    assert "context of 256" in long.summary


def test_memory_that_runs_out_halves_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Classifier(str(reward_model(tmp_path / "rm")), CPU, torch.float32)
    prompts, completions = ["1"] * 9, [str(n) * (n + 1) for n in range(9)]
    expected, forward = made.score(prompts, completions), made._forward

    def short(rows: list[list[int]]) -> list[float]:
        if len(rows) > 2:
            raise torch.OutOfMemoryError("no")
        return forward(rows)

    monkeypatch.setattr(made, "_forward", short)
    assert made.score(prompts, completions) == pytest.approx(expected, abs=1e-5)


def run_with(model_folder: Path, tmp_path: Path, reward: Any, **learn: Any) -> list[dict[str, Any]]:
    usual = {
        "data": [{"prompt": f"{a}+{b}="} for a in range(5) for b in range(4)],
        "eval_data": [{"prompt": "9+9="}],
        "reward": reward,
        "learn": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "lr": 3e-3},
    }
    return running.train(model_folder, tmp_path / "run", usual, {"learn": learn}).metrics


def test_a_policy_learns_what_a_reward_model_likes(model_folder: Path, tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    metrics = run_with(model_folder, tmp_path, f"model:{folder}", steps=25, prompts_per_step=8)
    assert metrics[-1]["reward/mean"] > metrics[1]["reward/mean"] + 0.1
    assert metrics[-1]["reward/reward_model"] == metrics[-1]["reward/mean"]


def test_an_evaluation_finds_one_beside_the_config_from_any_folder(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward_model(tmp_path / "configs/rm")
    (tmp_path / "configs/rows.jsonl").write_text('{"prompt": "1+1="}\n')
    config = {
        "model": {"path": str(model_folder)},
        "data": {"train": "rows.jsonl", "eval": str(tmp_path / "configs/rows.jsonl")},
        "reward": [{"fn": "model:rm"}],
        "learn": {"max_new_tokens": 4},
        "run": {"device": "cpu"},
    }
    (tmp_path / "configs/run.yaml").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert trimtab.evaluate(tmp_path / "configs/run.yaml")["eval/prompts"] == 1


def test_it_stands_beside_other_parts(model_folder: Path, tmp_path: Path) -> None:
    folder = reward_model(tmp_path / "rm")
    parts = [{"fn": f"model:{folder}", "weight": 0.5, "name": "liked"}, {"fn": "length", "args": {"max_tokens": 4}}]
    row = run_with(model_folder, tmp_path, parts)[-1]
    assert row["reward/mean"] == pytest.approx(0.5 * row["reward/liked"] + row["reward/length"], abs=1e-6)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p, m: f"model:{m}", "LlamaForCausalLM"),
        (lambda p, m: f"model:{reward_model(p / 'two', labels=2)}", "with 2 labels"),
        (lambda p, m: f"model:{p / 'missing'}", "cannot read"),
        (lambda p, m: "model:", "names no model"),
    ],
)
def test_what_is_no_reward_model_is_refused_before_anything_is_written(
    make: Any, says: str, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardError) as error:
        run_with(model_folder, tmp_path, make(tmp_path, model_folder))
    assert says in str(error.value)
    assert not (tmp_path / "run").exists()


def test_what_was_trained_here_is_used_here(model_folder: Path, tmp_path: Path) -> None:
    pairs = [{"prompt": f"{a}=", "chosen": "a" * (1 + a % 3), "rejected": "7" * (1 + a % 3)} for a in range(10)] * 3
    made = trimtab.reward_model(
        model=str(model_folder), data=pairs, learn={"steps": 30, "pairs_per_step": 10, "lr": 5e-3},
        observe={"dir": str(tmp_path / "pairs"), "tensorboard": False},
    )  # fmt: skip
    classifier = Classifier(str(Path(made["run_dir"]) / "final"), CPU, torch.float32)
    good, bad = classifier.score(["3=", "3="], ["aa", "77"])
    assert good > bad
    metrics = run_with(model_folder, tmp_path, f"model:{made['run_dir']}/final", algorithm="ppo", critic={"lr": 1e-3})
    assert "value/loss" in metrics[-1]


def test_memory_of_it_is_planned(tmp_path: Path) -> None:
    from dataclasses import replace

    from plan.test_planner import h, qwen

    from trimtab.config.run import Run
    from trimtab.plan.planner import make_plan

    other = qwen("qwen2.5-1.5b").shape
    alone, beside = (make_plan(Run(), replace(qwen(), reward_models=models), h(140)) for models in ((), (other, other)))
    for phase in ("load", "rollout", "update"):
        assert beside.ledger[phase].device["reward models"] == 2 * 2 * other.parameters
        assert "reward models" not in alone.ledger[phase].device
    assert beside.ledger["rollout"].device["reward models' work"] > 8192 * 2 * other.hidden, "its pass over a row, once"
    assert "reward models' work" not in beside.ledger["update"].device


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_a_pass_takes_is_what_is_counted(tmp_path: Path, kind: str) -> None:
    """Of a model wide enough that its layers decide; counted is never less."""
    from tests.plan.live import Live
    from trimtab.plan.activations import MicroBatchSize, UpdatePath, score_peak
    from trimtab.run.shapes import shape_of

    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "head_dim": 32,
        "num_key_value_heads": 4,
    }
    folder = reward_model(tmp_path / "rm", kind, max_position_embeddings=2048, **sizes)
    model = Classifier(str(folder), torch.device("cpu"), torch.float32)
    rows = [[5 + n % 7 for n in range(200)] for _ in range(5)]
    with Live() as live:
        model._forward(rows)
    counted = sum(
        score_peak(
            shape_of(str(folder)), MicroBatchSize(1000, 5, 1000, 5), UpdatePath(4, False, False, 1, True)
        ).values()
    )
    assert live.peak <= counted <= 2.5 * live.peak, (live.peak, counted)


def test_saving_a_policy_does_not_need_it(model_folder: Path, tmp_path: Path, tokenizer) -> None:
    """The folder of a policy is no reward model, and one of a reward model no policy."""
    folder = reward_model(tmp_path / "rm")
    save_model(tiny_model("llama"), tokenizer, tmp_path / "policy")
    with pytest.raises(trimtab.base.errors.TrimtabError):
        run_with(folder, tmp_path, "length")
