"""Learning from worked answers: the loss and its gradient by hand, what a run leaves behind, and that `run` changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

import trimtab
from tests import running
from trimtab.base.errors import ConfigError, DataError, TrainingError
from trimtab.config.sft import SftData, SftLearn
from trimtab.data.examples import Example, ExampleEncoder
from trimtab.model.policy import Policy
from trimtab.run.export import export_run
from trimtab.run.sft import to_samples
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.updater import Updater

ROWS = [{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a in range(8) for b in range(8)]


def sft(model: Path | dict[str, Any], tmp_path: Path, name: str = "run", **changes: Any) -> tuple[dict[str, Any], list]:
    usual = {
        "data": ROWS[:48],
        "eval_data": ROWS[48:],
        "learn": {"steps": 4, "sequences_per_step": 8, "lr": 1e-2},
        "observe": {"eval_every": 2},
    }
    run = running.train(model, tmp_path / name, usual, changes, "sft")
    return run.summary, run.metrics


def weights(run: dict[str, Any]) -> dict[str, torch.Tensor]:
    return load_file(Path(run["run_dir"]) / "final" / "model.safetensors")


def by_hand(model: Any, examples: list[Example], aggregate: str) -> torch.Tensor:
    """Padded, through the model's own forward, one sequence at a time."""
    losses = []
    for example in examples:
        tokens = torch.tensor([example.tokens])
        logp = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
        picked = -logp.gather(1, tokens[0, 1:, None])[:, 0]
        losses.append(picked[torch.tensor(example.learned[1:])])
    if aggregate == "token_mean":
        return torch.cat(losses).mean()
    return torch.stack([loss.mean() for loss in losses]).mean()


@pytest.mark.parametrize("aggregate", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("loss_on", ["assistant", "all"])
@pytest.mark.parametrize("budget", [24, 4096])
def test_loss_and_gradient_are_those_worked_by_hand(aggregate: str, loss_on: str, budget: int) -> None:
    template = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}<eos>{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"  # noqa: E501
    encoder = ExampleEncoder(SftData(train="x.jsonl"), loss_on, tiny_tokenizer(template), "data.train")
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "bcd"},
        {"role": "user", "content": "e"},
        {"role": "assistant", "content": "f"},
    ]
    rows = [{"messages": talk}, {"messages": talk[:2]}, {"prompt": "1+1=", "completion": "2"}]
    examples = encoder.encode(range(3), rows)
    reference = tiny_model("qwen2", torch.float64)
    expected = by_hand(reference, examples, aggregate)
    expected.backward()
    policy = Policy(tiny_model("qwen2", torch.float64))
    updater = Updater(
        policy, Likelihood(), SftLearn(steps=1, max_grad_norm=None), token_budget=budget, score_token_budget=budget,
        logprob_chunk=7, checkpoint_activations=False,
    )  # fmt: skip
    found: dict[str, torch.Tensor] = {}
    lay_out = updater.optimizer._lay_out_gradients

    def capture() -> None:
        for (name, _), grad in zip(policy.model.named_parameters(), updater.optimizer.grads()):
            found[name] = grad.clone()
        lay_out()

    updater.optimizer._lay_out_gradients = capture
    stats = updater.step(to_samples(examples, aggregate), 1e-3, 0.0)
    assert float(stats.sums["loss"]) == pytest.approx(expected.item(), rel=1e-5)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


def test_a_run_leaves_what_a_run_leaves(model_folder: Path, tmp_path: Path) -> None:
    summary, metrics = sft(model_folder, tmp_path)
    folder = Path(summary["run_dir"])
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "trace.json", "checkpoints/step-4", "final"):
        assert (folder / name).exists(), name
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert "eval/loss" in metrics[0] and "eval/loss" in metrics[2] and "eval/loss" not in metrics[1]
    for name in (
        "sft/loss",
        "sft/tokens",
        "policy/grad_norm",
        "policy/lr",
        "run/token_budget",
        "time/update",
        "memory/host_gib",
    ):
        assert isinstance(metrics[1][name], float | int), name
    assert metrics[1]["run/max_microbatch_tokens"] <= metrics[1]["run/token_budget"]
    phases = {phase["name"] for phase in json.loads((folder / "plan.json").read_text())["phases"]}
    assert "update" in phases and "rollout" not in phases


def test_it_learns(model_folder: Path, tmp_path: Path) -> None:
    summary, _ = sft(model_folder, tmp_path, learn={"steps": 40, "sequences_per_step": 16})
    assert summary["loss_last"] < 0.5 * summary["loss_first"]
    assert summary["eval"]["loss after"] < 0.7 * summary["eval"]["loss before"]


def test_epochs_are_steps(model_folder: Path, tmp_path: Path) -> None:
    summary, _ = sft(model_folder, tmp_path, learn={"steps": None, "epochs": 1.5, "sequences_per_step": 10})
    assert summary["steps"] == 8  # 1.5 x 48 / 10, rounded up


@pytest.mark.parametrize("run", [{"token_budget": 16}, {"checkpoint_activations": True, "logprob_chunk": 3}])
def test_how_it_runs_does_not_change_what_is_learned(tmp_path: Path, run: dict[str, Any], model_folder: Path) -> None:
    model = {"path": str(model_folder), "dtype": "float64"}
    plain, _ = sft(model, tmp_path, "plain")
    other, _ = sft(model, tmp_path, "other", run=run)
    for name, tensor in weights(plain).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=1e-5, atol=1e-7)


def test_a_resumed_run_ends_with_the_same_weights(model_folder: Path, tmp_path: Path) -> None:
    schedule = {"schedule": {"kind": "constant"}}
    whole, _ = sft(model_folder, tmp_path, "whole", learn=schedule)
    sft(model_folder, tmp_path, "part", learn={"steps": 2, **schedule})
    rest, metrics = sft(model_folder, tmp_path, "part", resume=True, learn=schedule)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4]
    assert all(torch.equal(tensor, weights(rest)[name]) for name, tensor in weights(whole).items())


def test_a_run_killed_in_its_very_last_moments_is_tidied_by_the_resume(model_folder: Path, tmp_path: Path) -> None:
    whole, _ = sft(model_folder, tmp_path, observe={"checkpoint_every": 1})
    folder = Path(whole["run_dir"])
    (folder / "checkpoints/.deleting-step-2").mkdir()
    (folder / ".writing-final").mkdir()
    sft(model_folder, tmp_path, observe={"checkpoint_every": 1, "keep_checkpoints": 1}, resume=True)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-4"]
    assert not [*folder.glob(".writing*")]


def test_adapters_are_trained_saved_and_merged(model_folder: Path, tmp_path: Path) -> None:
    summary, _ = sft({"path": str(model_folder), "lora": {"r": 4}}, tmp_path, learn={"steps": 10})
    folder = Path(summary["run_dir"])
    tokens = torch.arange(3, 20)[None]
    merged = AutoModelForCausalLM.from_pretrained(folder / "final")(tokens).logits
    base = AutoModelForCausalLM.from_pretrained(model_folder)
    beside = PeftModel.from_pretrained(base, folder / "final" / "adapter")(tokens).logits
    torch.testing.assert_close(merged, beside, rtol=1e-4, atol=1e-4)
    assert (merged - AutoModelForCausalLM.from_pretrained(model_folder)(tokens).logits).abs().max() > 0.05


def test_what_was_trained_is_what_reinforcement_learning_starts_from(model_folder: Path, tmp_path: Path) -> None:
    summary, _ = sft(model_folder, tmp_path)
    after = trimtab.train(
        model=str(Path(summary["run_dir"]) / "final"),
        data=[{"prompt": row["prompt"]} for row in ROWS[:8]],
        reward=lambda completions, **_: [float(len(c)) for c in completions],
        learn={"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4},
        observe={"dir": str(tmp_path / "rl")},
    )
    assert after["steps"] == 1


def test_the_best_checkpoint_by_held_out_loss_can_be_exported(model_folder: Path, tmp_path: Path) -> None:
    summary, metrics = sft(model_folder, tmp_path, learn={"steps": 6}, observe={"eval_every": 1, "keep_checkpoints": 1})
    best = min((row for row in metrics if row["step"]), key=lambda row: row["eval/loss"])["step"]
    assert export_run(Path(summary["run_dir"]), tmp_path / "out", "best", "same").name == f"step-{best}"


def test_examples_that_are_too_long_are_left_out_and_said(model_folder: Path, tmp_path: Path, capsys) -> None:
    rows = [*ROWS[:20], {"prompt": "1" * 50, "completion": "2"}]
    sft(model_folder, tmp_path, data=rows, learn={"max_tokens": 20})
    assert "1 of 21 examples are longer than 20 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"learn": {"max_tokens": 10_000}}, "exceed the model's context of 256"),
        ({"run": {"token_budget": 3}}, "cannot hold the longest example"),
        ({"data": [{"question": "a"}]}, "has none of the columns"),
        ({"eval_data": [{"prompt": "a"}]}, "data.eval, row 1"),
        ({"learn": {"epochs": 2.0}}, "Keep one of the two"),
        ({"learn": {"lrr": 1}}, "Did you mean learn.lr"),
        ({"data": {"train": "missing.jsonl"}}, "There is no file"),
        ({"data": {"train": "object:rows", "max_prompt_tokens": 5}}, "learn.max_tokens: 5"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    changes: dict[str, Any], says: str, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        sft(model_folder, tmp_path, **changes)
    assert says in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_gradient_that_is_never_finite_ends_the_run(model_folder: Path, tmp_path: Path, monkeypatch) -> None:
    loss = Updater._loss
    monkeypatch.setattr(Updater, "_loss", lambda *arguments: loss(*arguments) * float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        sft(model_folder, tmp_path, learn={"steps": 9}, eval_data=None, observe={"eval_every": 0})


def test_passes_count_what_is_used(model_folder: Path, tmp_path: Path) -> None:
    rows = [*ROWS[:16], *({"prompt": "1" * 60, "completion": "2"} for _ in range(40))]
    summary, _ = sft(model_folder, tmp_path, data=rows, learn={"steps": None, "epochs": 1, "max_tokens": 20})
    assert summary["steps"] == 2


def test_a_warm_up_longer_than_the_run_is_refused_before_it_is_written(model_folder: Path, tmp_path: Path) -> None:
    learn = {"steps": None, "epochs": 1, "schedule": {"warmup_steps": 6}}
    with pytest.raises(ConfigError, match="6 warm-up steps leave none of 6"):
        sft(model_folder, tmp_path, learn=learn)
    assert not (tmp_path / "run").exists()


def test_a_budget_for_scoring_has_to_hold_what_is_scored(model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run.score_token_budget: 8 tokens cannot hold the longest example of 42"):
        sft(model_folder, tmp_path, eval_data=[{"prompt": "1" * 40, "completion": "2"}], run={"score_token_budget": 8})


def test_a_folder_of_another_stage_is_not_gone_on_with(model_folder: Path, tmp_path: Path) -> None:
    sft(model_folder, tmp_path)
    with pytest.raises(ConfigError, match="holds a run of trimtab sft"):
        trimtab.train(
            model=str(model_folder),
            data=[{"prompt": "1"}, {"prompt": "2"}],
            reward=lambda completions, **_: [1.0] * len(completions),
            learn={"steps": 9, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 2},
            observe={"dir": str(tmp_path / "run")},
            resume=True,
        )


def test_more_steps_under_a_falling_rate_are_said(model_folder: Path, tmp_path: Path, capsys) -> None:
    sft(model_folder, tmp_path, learn={"steps": 2})
    sft(model_folder, tmp_path, learn={"steps": 4}, resume=True)
    assert "learn.steps 4 (was 2)" in capsys.readouterr().out
