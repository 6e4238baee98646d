"""Whatever is wrong with the input is told in words, with status 2, before anything is made: no run folder, no traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trimtab = Callable[..., Any]


@pytest.fixture
def refused(trimtab: Trimtab, here: Path) -> Callable[..., str]:
    """Run a command that must be refused; returns its message."""

    def run(*arguments: str, command: str = "train", **options: Any) -> str:
        before = {path.name for path in here.iterdir()} | {"config.yaml"}
        outcome = trimtab(command, *arguments, **options)
        assert outcome.exception is None, outcome.exception
        assert outcome.code == 2
        told = [
            line for line in outcome.err.splitlines(keepends=True) if not line.endswith(" ...\n")
        ]  # what was waited for
        assert told[0].startswith("error: ")
        assert "Traceback" not in outcome.err
        assert {path.name for path in here.iterdir()} == before, "something was left behind"
        return "".join(told).removeprefix("error: ").strip()

    return run


def test_unknown_key(refused) -> None:
    assert "learn.lrr: unknown key. Did you mean learn.lr?" in refused("learn.lrr=1")


def test_several_problems_at_once(refused, config: dict[str, Any]) -> None:
    config["learn"] |= {"lr": -1, "algorithm": "gpro"}
    config["modle"] = {}
    message = refused("observe.dirr=x")
    assert message.startswith("4 problems in the configuration:")
    for part in ("modle: unknown key", "learn.lr: got -1", "Did you mean grpo?", "observe.dirr: unknown key"):
        assert part in message


@pytest.mark.parametrize("command", ["train", "eval"])
def test_missing_config(refused, command: str) -> None:
    assert "there is no such file. Did you mean config.yaml?" in refused(command=command, on="confg.yaml")


def test_missing_data_file(refused) -> None:
    message = refused("data.train=row.jsonl")
    assert "There is no file" in message and "row.jsonl" in message and "rows.jsonl" in message


def test_missing_column(refused) -> None:
    message = refused("data.prompt=promt")
    assert "data.train has no column 'promt'; its columns are 'prompt', 'answer'" in message
    assert "Did you mean 'prompt'?" in message


def test_empty_data_file(refused, here: Path) -> None:
    (here / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused("data.train=empty.jsonl")


def test_broken_json_on_line_7(refused, here: Path) -> None:
    lines = (here / "rows.jsonl").read_text().splitlines()
    lines[6] = '{"prompt": "1+1='
    (here / "broken.jsonl").write_text("\n".join(lines))
    message = refused("data.train=broken.jsonl")
    assert "broken.jsonl" in message and "line 7" in message


def test_every_prompt_longer_than_the_model(refused) -> None:
    message = refused("data.max_prompt_tokens=2")
    assert "data.train: all 12 prompts are longer than 2 tokens (the longest has 6)" in message


def test_an_eval_set_with_no_usable_prompt(refused, here: Path) -> None:
    (here / "long.jsonl").write_text(json.dumps({"prompt": "1" * 300}) + "\n")
    assert "data.eval: all 1 prompts are longer than 250 tokens" in refused("data.eval=long.jsonl")


def test_completions_longer_than_the_model(refused) -> None:
    message = refused("learn.max_new_tokens=256")
    assert "learn.max_new_tokens: 256 leaves no room for a prompt in the model's context of 256 tokens" in message
    assert "data.max_prompt_tokens: 255 prompt tokens and 6 new ones" in refused("data.max_prompt_tokens=255")


def test_small_budgets(refused) -> None:
    message = refused("run.token_budget=8", "run.score_token_budget=11")
    assert message.startswith("2 problems")
    assert (
        "run.token_budget: 8 tokens cannot hold the longest sequence: 6 prompt tokens and 6 new ones. Write at least 12"
        in message
    )
    assert "run.score_token_budget: 11 tokens" in message


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["run.shard=full"], "run.shard: full has no effect on one device"),
        (["run.shard_devices=3"], "run.shard_devices: is 3, which has no effect on one device"),
        (["run.prefetch=2"], "run.prefetch: is 2, which has no effect on one device"),
        (["run.devices=999"], "run.devices: is 999, but this machine has"),
        (["run.rollout.kv_memory=4KiB"], "run.rollout.kv_memory: 4,096 bytes cannot hold one sequence of"),
    ],
)
def test_what_the_plan_refuses_is_told_by_plan_dry_run_and_train(refused, overrides: list[str], message: str) -> None:
    """Before weights are loaded."""
    assert message in refused("--dry-run", *overrides)
    assert message in refused(*overrides)
    assert message in refused(*overrides, command="plan")


def test_memory_that_no_setting_fits_is_refused_in_a_dry_run_too(refused) -> None:
    for arguments in (["--dry-run"], []):
        assert "does not fit, even with all automatic settings at their minimum" in refused(
            "run.memory=64MiB", *arguments
        )


def test_small_cache(refused) -> None:
    """Found once the model's layers are known, and still before the run folder is written."""
    message = refused("run.rollout.kv_memory=4KiB")
    assert "run.rollout.kv_memory: 4,096 bytes cannot hold one sequence of 12 tokens" in message
    assert "Write at least" in message


def test_existing_run(trimtab: Trimtab, refused, here: Path) -> None:
    assert trimtab("train").code == 0
    before = {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")}
    message = refused()
    assert "observe.dir:" in message and "already holds a run. Continue it with --resume, or choose another" in message
    assert message == refused("--dry-run")
    assert {path: path.stat().st_mtime_ns for path in (here / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("reward.py:fine", "reward.fn: there is no file"),
        ("rewards.py:fin", "fin"),
        ("rewards.py:needs_gold", "reward 'needs_gold' needs a column 'gold', which not every row of the data has"),
        ("exact", "there is no built-in reward 'exact'"),
        ("rewards.py", "names a file but no function. Write rewards.py:FUNCTION"),
        ("./plain:fine", "plain does not end in .py. Rename it to plain.py"),
        ("plain:fine", "there is no module 'plain'"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_rewards_that_cannot_load(
    refused, config: dict[str, Any], here: Path, fn: str, message: str, arguments: list[str]
) -> None:
    (here / "plain").write_text("def fine(completions, **_): return [1.0] * len(completions)")
    config["reward"] = [{"fn": fn}]
    assert message in refused(*arguments)


def test_eval_rows_without_a_column_that_the_reward_needs(refused, config: dict[str, Any], here: Path) -> None:
    """Not after the weights are loaded and the first evaluation has run."""
    (here / "gold.jsonl").write_text(json.dumps({"prompt": "1", "gold": "1"}) + "\n")
    config["reward"] = [{"fn": "rewards.py:needs_gold"}]
    assert "needs a column 'gold'" in refused("data.train=gold.jsonl", "data.eval=rows.jsonl")


def test_one_row_without_a_column_that_the_reward_needs(refused, config: dict[str, Any], here: Path) -> None:
    (here / "gold.jsonl").write_text('{"prompt": "1", "gold": "1"}\n{"prompt": "2"}\n')
    config["reward"] = [{"fn": "rewards.py:needs_gold"}]
    assert "needs a column 'gold', which not every row of the data has" in refused("data.train=gold.jsonl")


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/where", "There is no folder {here}/no/where either."), ("./where", "no model folder at {here}/where. Give")],
)
def test_a_reward_model_that_is_not_there(refused, config: dict[str, Any], here: Path, name: str, message: str) -> None:
    config["reward"] = [{"fn": f"model:{name}"}]
    told = refused("--dry-run")
    assert told.startswith(f"reward.fn: cannot read model:{name}: ") and message.format(here=here) in told
    assert "model.path" not in told


def test_missing_wandb(refused, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "wandb" else found(name, *a))
    assert "observe.wandb: the wandb package is not installed" in refused("observe.wandb=project")


def test_nothing_to_evaluate_on(refused) -> None:
    assert "data.eval: there is nothing to evaluate on" in refused(command="eval")


def test_errors_with_json(trimtab: Trimtab) -> None:
    outcome = trimtab("train", "data.prompt=x", "--json")
    assert outcome.code == 2
    assert outcome.json["kind"] == "DataError"
    assert "has no column 'x'" in outcome.json["error"]


def test_a_bug_keeps_its_traceback(trimtab: Trimtab, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("trimtab.api.run_training", broken)
    assert isinstance(trimtab("train").exception, ZeroDivisionError)


# --- models


@pytest.fixture
def broken_model(here: Path, model_folder: Path, config: dict[str, Any]) -> Path:
    """A copy of the model to be damaged."""
    shutil.copytree(model_folder, here / "model")
    config["model"]["path"] = "model"
    return here / "model"


def test_hub_name_without_network(refused) -> None:
    message = refused("model.path=nobody/nothing")
    assert message.startswith("model.path: cannot read the config of 'nobody/nothing'")
    assert message.endswith("nobody/nothing either.")


def test_no_such_folder(refused) -> None:
    assert "no model folder at" in refused("model.path=./modell")


def test_no_tokenizer(refused, broken_model: Path) -> None:
    for file in broken_model.glob("tokenizer*"):
        file.unlink()
    message = refused()
    assert "model.path: cannot load a tokenizer from 'model'" in message
    assert "Set model.tokenizer to a folder or hub repository with tokenizer files" in message


def test_a_tokenizer_with_more_words_than_the_model(refused, broken_model: Path) -> None:
    settings = json.loads((broken_model / "config.json").read_text())
    (broken_model / "config.json").write_text(json.dumps(settings | {"vocab_size": 10}))
    message = refused("--dry-run")
    assert message.startswith("model.path: the tokenizer has ") and "but 'model' has 10. Set model.tokenizer" in message


def test_a_chat_template_with_words_that_have_no_embedding(refused, broken_model: Path) -> None:
    """Added to the tokenizer, while the model's embedding was left as it was."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(broken_model)
    tokenizer.add_tokens(["<|turn|>", "<|unused|>"])
    tokenizer.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(broken_model)
    message = refused("--dry-run")
    assert "prompts would contain '<|turn|>', but 'model' has embeddings for only" in message


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_tokenizer_that_knows_no_words(refused, here: Path, config: dict[str, Any], command: str) -> None:
    """As transformers makes one of the name of an architecture alone, where a GPT-2's folder has no tokenizer files."""
    from transformers import GPT2Config, GPT2LMHeadModel

    small = GPT2Config(vocab_size=64, n_positions=64, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(small).save_pretrained(here / "gpt2")
    config["model"] = {"path": "gpt2"}
    if command == "sft":
        config.pop("reward")
        config |= {"learn": {}, "run": {}, "data": {"train": "rows.jsonl", "completion": "answer"}}
    message = refused(command=command)
    assert "model.tokenizer: the tokenizer has only special tokens" in message
    assert "Set model.tokenizer to a folder or hub repository with tokenizer files" in message


def test_damaged_weights(refused, broken_model: Path) -> None:
    weights = (broken_model / "model.safetensors").read_bytes()
    (broken_model / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "model.path: cannot load 'model': SafetensorError" in refused()


@pytest.mark.parametrize("command", ["train", "sft"])
@pytest.mark.parametrize("arguments", [[], ["--dry-run"]])
def test_a_folder_without_weights(
    refused, broken_model: Path, config: dict[str, Any], command: str, arguments: list[str]
) -> None:
    (broken_model / "model.safetensors").unlink()
    if command == "sft":
        config.pop("reward")
        config |= {"learn": {}, "run": {}, "data": {"train": "rows.jsonl", "completion": "answer"}}
    message = refused(*arguments, command=command)
    assert message.startswith(f"model.path: {broken_model} has no weights: no file *.safetensors or *.bin.")


def test_missing_weights_are_not_made_up(refused, broken_model: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(broken_model / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, broken_model / "model.safetensors", metadata={"format": "pt"})
    assert "'model' lacks 1 weight(s) of a LlamaForCausalLM, such as model.layers.1.mlp.up_proj" in refused()


@pytest.mark.parametrize("text", ["{", "{}", '{"model_type": "frobnicate"}'])
def test_unknown_architecture(refused, broken_model: Path, text: str) -> None:
    (broken_model / "config.json").write_text(text)
    assert "model.path: cannot read the config of 'model'" in refused("--dry-run")


def test_a_model_of_another_kind(refused, broken_model: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM, T5Config

    small = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    BertForMaskedLM(BertConfig(**small, intermediate_size=32, initializer_range=0.5)).save_pretrained(broken_model)
    told = {refused(), refused("--dry-run"), refused(command="plan")}
    assert told == {
        "BertLMHeadModel cannot run through Trimtab's attention: its attention is not causal (tokens see later tokens). The "
        "nearest family that is served: qwen3, llama or gemma3_text (docs/models.md has all)."
    }
    T5Config().save_pretrained(broken_model)
    assert "'model' is a t5 model, not a causal language model" in refused("--dry-run")


def test_verdicts_on_a_known_family_are_the_same_in_a_plan(refused, broken_model: Path) -> None:
    """A text model inside another, layers of another kind, quantised weights: the family alone does not tell."""
    file = broken_model / "config.json"
    plain = json.loads(file.read_text())
    for changed, told in [
        (
            {"model_type": "aya_vision", "text_config": plain},
            "'model' is a aya_vision model, which is more than a language",
        ),
        (
            {"layer_types": ["linear_attention", "full_attention", "full_attention"]},
            "has layers of kind linear_attention",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'model' holds quantised weights"),
    ]:
        file.write_text(json.dumps(plain | changed))
        for arguments, command in ((), "plan"), (("--dry-run",), "train"), ((), "train"):
            assert told in refused(*arguments, command=command)


def test_a_missing_shard_is_told_before_any_is_read(refused, broken_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(broken_model)
    (broken_model / "model.safetensors").unlink()
    model.save_pretrained(broken_model, max_shard_size="20KB")
    lost = sorted(broken_model.glob("*.safetensors"))[1]
    lost.unlink()
    assert f"weight files, such as {lost.name}. Download it again" in refused("--dry-run")
