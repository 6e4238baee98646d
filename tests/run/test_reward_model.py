"""Reward models: the loss and its gradient by hand, what is written out, and that `run` changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import tiny_model, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests import running
from trimtab.base.errors import ConfigError, DataError
from trimtab.config.reward_model import PairData, PairLearn
from trimtab.data.examples import validate_examples
from trimtab.data.pairs import PairEncoder
from trimtab.learn.preferences import preference_loss
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.run.export import export_run
from trimtab.update.critic import add_value_head
from trimtab.update.objectives.preferences import BradleyTerry, to_samples
from trimtab.update.updater import Updater

CHAT = (
    "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)
ROWS = [
    {"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": str(a + b + 1 + a % 3), "by": 0.5 + a % 2}
    for a in range(8)
    for b in range(8)
]


def encoder(template: str | None = None, **data: Any) -> PairEncoder:
    return PairEncoder(PairData.model_validate({"train": "x.jsonl", **data}), tiny_tokenizer(template), "data.train")


def test_the_loss_by_hand() -> None:
    found = preference_loss(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 2.0]), torch.tensor([0.0, 0.5]), 0.1)
    expected = [-F.logsigmoid(torch.tensor(1.0)) + 0.1, -F.logsigmoid(torch.tensor(-2.5)) + 0.4]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_pair_has_one_prompt_and_two_ends() -> None:
    (pair,) = encoder().encode([0], [{"prompt": "1+1=", "chosen": "2", "rejected": "23"}])
    words = tiny_tokenizer().convert_ids_to_tokens
    assert "".join(words(pair.prompt)) == "1+1="
    assert ("".join(words(pair.better)), "".join(words(pair.worse))) == ("2<eos>", "23<eos>")
    assert pair.row_tokens == 4 + 2 + 3 and len(pair.tokens) == 7


def test_conversations_and_prompts_with_answers_are_the_same_pairs() -> None:
    asked = [{"role": "user", "content": "hi"}]
    answers = [{"role": "assistant", "content": word} for word in ("yes", "no")]
    made = encoder(CHAT)
    rows = [
        {"prompt": "hi", "chosen": "yes", "rejected": "no"},
        {"prompt": asked, "chosen": [answers[0]], "rejected": [answers[1]]},
        {"chosen": [*asked, answers[0]], "rejected": [*asked, answers[1]]},
    ]
    validate_examples(rows, made)
    one, two, three = made.encode(range(3), rows)
    assert (one.prompt, one.better, one.worse) == (two.prompt, two.better, two.worse)
    assert (one.prompt, one.better, one.worse) == (three.prompt, three.better, three.worse)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
        ({"chosen": "a", "rejected": "b"}, "not whole conversations"),
        ({"prompt": "a", "chosen": "b", "rejected": "", "by": 1}, "column 'rejected' is empty"),
        (
            {"prompt": 1, "chosen": "b", "rejected": "c", "by": 1},
            "column 'prompt' must be text or a list of {role, content}",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": None, "by": 1}, "column 'rejected' must be text or a list of"),
        (
            {"chosen": 2, "rejected": None, "by": 1},
            "column 'chosen' must be a list of {role, content} messages, but is 2",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "has no column 'by' (data.margin); its columns are 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": -1}, "must be a finite number of at least 0, but is -1"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": "x"}, "must be a finite number"),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "by": float("nan")}, "must be a finite number"),
        (
            {"chosen": [{"role": "user", "content": "x"}], "rejected": [{"role": "user", "content": "y"}], "by": 1},
            "chat template",
        ),
    ],
)
def test_rows_that_are_no_pairs_are_refused(row: dict, says: str) -> None:
    with pytest.raises(DataError, match=r"row 2 \(from 1\)") as error:
        validate_examples([ROWS[0], row], encoder(margin="by"))
    assert says in str(error.value)


def test_two_answers_that_are_the_same_are_refused() -> None:
    with pytest.raises(DataError, match="both answers are the same"):
        encoder().encode([0], [{"prompt": "a", "chosen": "b", "rejected": "b"}])


def scores_of(budget: int, center: float = 0.0) -> Updater:
    learn = PairLearn(steps=1, max_grad_norm=None)
    policy = Policy(tiny_model("qwen2", torch.float64))
    made = Updater(
        policy, BradleyTerry(add_value_head(policy), center), learn, token_budget=budget, score_token_budget=budget,
        checkpoint_activations=False, logprob_chunk=64,
    )  # fmt: skip
    with torch.no_grad():
        made.objective.head.weight.copy_(
            0.3 * torch.randn(made.objective.head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
        made.objective.head.bias.fill_(0.1)
    return made


@pytest.mark.parametrize("center", [0.0, 0.05])
def test_scores_and_gradient_are_those_worked_by_hand_whatever_the_budget(center: float) -> None:
    pairs = encoder(margin="by").encode(range(12), ROWS[::5][:12])
    reference = scores_of(4096)
    reference.policy.model.set_attn_implementation("eager")

    def score(tokens: list[int]) -> torch.Tensor:
        hidden = reference.policy.model.model(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[
            0, -1
        ]
        return reference.objective.head(hidden)[0]

    losses = []
    for pair in pairs:
        better, worse = score([*pair.prompt, *pair.better]), score([*pair.prompt, *pair.worse])
        losses.append(-F.logsigmoid(better - worse - pair.margin) + center * (better + worse) ** 2)
    torch.stack(losses).mean().backward()
    expected = {name: p.grad for name, p in reference.policy.model.named_parameters() if p.grad is not None}
    for budget in (12, 40, 4096):
        made, found = scores_of(budget, center), {}
        lay_out = made.optimizer._lay_out_gradients

        def capture(made: Updater = made, found: dict = found, lay_out: Any = lay_out) -> None:
            trained = [(name, p) for name, p in made.policy.model.named_parameters() if p.requires_grad]
            found.update({name: g.clone() for (name, _), g in zip(trained, made.optimizer.grads()) if g is not None})
            lay_out()

        made.optimizer._lay_out_gradients = capture
        stats = made.step(to_samples(pairs), 1e-3, 0.0)
        assert float(stats.sums["loss"]) == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
        assert stats.microbatches > 1 or budget == 4096
        assert found.keys() == expected.keys()
        for name, wanted in expected.items():
            torch.testing.assert_close(found[name], wanted, rtol=1e-3, atol=1e-6)


def run_of(model: Path | dict, tmp_path: Path, name: str = "run", **changes: Any) -> tuple[dict[str, Any], list]:
    usual = {
        "data": ROWS[:48],
        "eval_data": ROWS[48:],
        "learn": {"steps": 4, "pairs_per_step": 8, "lr": 3e-3},
        "observe": {"eval_every": 2},
    }
    run = running.train(model, tmp_path / name, usual, changes, "reward_model")
    return run.summary, run.metrics


def outputs(folder: Path, rows: list[dict]) -> list[float]:
    """As another tool would use it: padded batches through transformers."""
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = [row["prompt"] + row[side] + "<eos>" for row in rows for side in ("chosen", "rejected")]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([row])).logits[0, 0]) for row in ids]


@pytest.mark.parametrize("lora", [None, {"r": 4}])
def test_it_learns_and_other_tools_read_its_scores(lora: dict | None, model_folder: Path, tmp_path: Path) -> None:
    model = {"path": str(model_folder), **({"lora": lora} if lora else {})}
    summary, metrics = run_of(model, tmp_path, learn={"steps": 60, "pairs_per_step": 16, "lr": 1e-2 if lora else 3e-3})
    assert metrics[-1]["rm/accuracy"] > 0.8 > 0.7 > metrics[0].get("eval/accuracy", 0.5)
    assert metrics[-1]["rm/loss"] < 0.6 * metrics[1]["rm/loss"]
    folder = Path(summary["run_dir"]) / "final"
    facts = json.loads((folder / "reward.json").read_text())
    scores = torch.tensor([value + facts["shift"] for value in outputs(folder, ROWS[48:])])
    assert scores.mean().abs() < 1e-3 and abs(float(scores.std()) - 1) < 1e-3
    right = (scores[::2] > scores[1::2]).double().mean()
    assert float(right) == pytest.approx(summary["accuracy"])
    assert facts["measured_on"] == "data.eval" and facts["answers"] == 32
    assert (folder / "adapter").exists() is bool(lora)


def test_without_held_out_pairs_scores_are_normalised_on_training_pairs(model_folder: Path, tmp_path: Path) -> None:
    summary, metrics = run_of(model_folder, tmp_path, eval_data=None, observe={"eval_every": 0})
    facts = json.loads((Path(summary["run_dir"]) / "final" / "reward.json").read_text())
    assert facts["measured_on"] == "data.train" and facts["answers"] == 96 and "eval/loss" not in metrics[-1]
    plain, _ = run_of(model_folder, tmp_path, "plain", learn={"normalize": False})
    assert json.loads((Path(plain["run_dir"]) / "final" / "reward.json").read_text())["std"] == 1.0


def test_pairs_that_are_too_long_are_not_measured_on_either(model_folder: Path, tmp_path: Path) -> None:
    rows = [*ROWS[:20], {"prompt": "1" * 400, "chosen": "2", "rejected": "3"}]  # longer than the model's context
    summary, _ = run_of(model_folder, tmp_path, data=rows, eval_data=None, observe={"eval_every": 0})
    assert json.loads((Path(summary["run_dir"]) / "final" / "reward.json").read_text())["answers"] == 40


def test_a_resumed_run_ends_with_the_same_model(model_folder: Path, tmp_path: Path) -> None:
    schedule = {"schedule": {"kind": "constant"}}
    whole, _ = run_of(model_folder, tmp_path, "whole", learn=schedule)
    run_of(model_folder, tmp_path, "part", learn={"steps": 2, **schedule})
    rest, _ = run_of(model_folder, tmp_path, "part", learn=schedule, resume=True)
    one, two = (load_file(Path(run["run_dir"]) / "final" / "model.safetensors") for run in (whole, rest))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("run", [{"token_budget": 24}, {"checkpoint_activations": True}])
def test_how_it_runs_does_not_change_what_is_learned(run: dict, model_folder: Path, tmp_path: Path) -> None:
    model = {"path": str(model_folder), "dtype": "float64"}
    one, _ = run_of(model, tmp_path, "one")
    two, metrics = run_of(model, tmp_path, "two", run=run)
    first, second = (load_file(Path(r["run_dir"]) / "final" / "model.safetensors") for r in (one, two))
    for name in first:
        torch.testing.assert_close(second[name], first[name], rtol=1e-4, atol=1e-6)
    assert all(
        row["run/max_microbatch_tokens"] <= row["run/token_budget"] for row in metrics if "run/token_budget" in row
    )


def test_a_margin_asks_for_more(model_folder: Path, tmp_path: Path) -> None:
    _, plain = run_of(model_folder, tmp_path, "plain")
    _, asked = run_of(model_folder, tmp_path, "asked", data={"train": ROWS[:48], "margin": "by"})
    assert asked[1]["rm/loss"] > plain[1]["rm/loss"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"data": [{"prompt": "a", "chosen": "b"}]}, "has no column 'rejected'"),
        ({"learn": {"sequences_per_step": 3}}, "unknown key"),
        ({"learn": {"epochs": 3.0}}, "Keep one of the two"),
        ({"run": {"token_budget": 5}}, "cannot hold the longest"),
        ({"data": {"train": "object:rows", "chosen": "prompt"}}, "two of these keys name the same column"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    changes: dict[str, Any], says: str, model_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigError, DataError)) as error:
        run_of(model_folder, tmp_path, **changes)
    assert says in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_without_a_classifier_is_refused(tmp_path: Path, tokenizer) -> None:
    save_model(tiny_model("granite"), tokenizer, tmp_path / "granite")
    with pytest.raises(ConfigError, match="no sequence-classification model for granite"):
        run_of(tmp_path / "granite", tmp_path)


def test_export_points_to_what_there_is(model_folder: Path, tmp_path: Path) -> None:
    summary, _ = run_of(model_folder, tmp_path)
    with pytest.raises(ConfigError, match=r"Use .*final"):
        export_run(Path(summary["run_dir"]), tmp_path / "out", "last", "same")
