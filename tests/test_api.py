"""Trimtab from Python: rows, functions and lists of them, in a few lines."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import trimtab
from trimtab.base.errors import ConfigError, DataError
from trimtab.config.load import load_config
from trimtab.record.sinks import read_metrics
from trimtab.run import build

ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(8)]
LEARN = {"steps": 2, "prompts_per_step": 2, "samples_per_prompt": 4, "max_new_tokens": 6, "lr": 1e-3}
RUN = {"device": "cpu", "threads": 1, "reward_workers": 1}
SUMMARY = {"run_dir", "steps", "reward_first", "reward_last", "eval", "tokens_per_s", "peak_gib", "seconds"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_six_lines(here: Path, model_folder: Path) -> None:
    summary = trimtab.train(
        model=model_folder,
        data=ROWS,
        reward=lambda completions, **_: [float(len(set(text))) for text in completions],
        learn=LEARN,
        run=RUN,
        callbacks=None,
    )
    assert set(summary) == SUMMARY
    assert summary["steps"] == 2
    assert summary["eval"] == {"before": None, "after": None}
    run = Path(summary["run_dir"])
    assert run.parent == here / "runs"
    assert {"reward/mean", "reward/lambda"} <= set(read_metrics(run)[-1])
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(run / "final"), AutoTokenizer.from_pretrained(run / "final")
    prompt = tokenizer("1+1=", return_tensors="pt")
    written = model.generate(prompt.input_ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert written.shape == (1, prompt.input_ids.shape[1] + 4)
    assert model.config._attn_implementation != "trimtab"


def test_lists_async_weights_and_held_out_rows(here: Path, model_folder: Path) -> None:
    async def long(completions: list[str], **_: Any) -> list[float]:
        return [float(len(text)) for text in completions]

    def right(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [None if gold == "0" else float(text == gold) for text, gold in zip(completions, answer)]

    summary = trimtab.train(
        model=str(model_folder),
        data=ROWS,
        eval_data=iter(ROWS[:3]),
        reward=[{"fn": right, "weight": 3.0}, long, {"fn": "number_match", "weight": 0.5}],
        learn=LEARN,
        run=RUN,
        eval={"part": "right", "limit": 2},
        observe={"dir": "out", "eval_every": 1},
    )
    rows = read_metrics(here / "out")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["eval/prompts"] == 1.0 and row["eval/not_applicable"] == 1.0 for row in rows)
    assert summary["eval"] == {"before": 0.0, "after": 0.0}
    last = rows[-1]
    expected = 3 * last["reward/right"] + last["reward/long"] + 0.5 * last["reward/number_match"]
    assert last["reward/mean"] == pytest.approx(expected)


def test_keywords_go_over_a_config_file(here: Path, model_folder: Path) -> None:
    """Also over one that could not run by itself: here the model, the rows and the reward come from Python."""
    (here / "base.yaml").write_text(yaml.safe_dump({"learn": LEARN, "run": RUN, "data": {"prompt": "question"}}))
    rows = [{"question": row["prompt"]} for row in ROWS]
    summary = trimtab.train(
        here / "base.yaml",
        model=model_folder,
        data=rows,
        reward=lambda completions, **_: [1.0] * len(completions),
        overrides=["learn.steps=1"],
    )
    run = Path(summary["run_dir"])
    assert run.name.startswith("base-")
    assert summary["steps"] == 1
    saved = yaml.safe_load((run / "config.yaml").read_text())
    assert saved["data"]["train"] == "object:rows"
    assert saved["learn"]["max_new_tokens"] == LEARN["max_new_tokens"]
    with pytest.raises(DataError, match=r"data\.train: this config was made in Python with rows"):
        trimtab.train(run / "config.yaml", reward=lambda completions, **_: [0.0], overrides=["observe.dir=again"])
    assert not (here / "again").exists()


def test_a_data_section_may_hold_rows(here: Path, model_folder: Path) -> None:
    data = {"train": ROWS, "eval": ROWS[:2], "suffix": " ", "limit": 3}
    reward = "exact_match"
    summary = trimtab.train(model=model_folder, data=data, reward=reward, learn=LEARN, run=RUN, observe={"dir": "r"})
    assert summary["eval"]["after"] is not None
    prompts = {json.loads(line)["prompt"] for line in (here / "r/samples/step-1.jsonl").read_text().splitlines()}
    assert prompts <= {f"{row['prompt']} " for row in ROWS[:3]}


def test_a_finished_run_resumed_exports_again_and_reports(here: Path, model_folder: Path, capsys) -> None:
    settings: dict[str, Any] = {"model": str(model_folder), "data": ROWS, "reward": "exact_match", "run": RUN}
    settings |= {"observe": {"dir": "r"}}
    first = trimtab.train(**settings, learn=LEARN, resume=True)  # nothing there: starts
    assert "has no checkpoint to resume" in capsys.readouterr().out
    kept = (here / "r/config.yaml").read_text()
    weights = (here / "r/final/model.safetensors").read_bytes()
    (here / "r/final/model.safetensors").unlink()
    capsys.readouterr()
    second = trimtab.train(**settings, learn=LEARN, resume=True)
    shown = capsys.readouterr().out
    assert "all 2 steps are done already; exporting the model again" in shown
    assert "warning" not in shown
    trimtab.train(**settings, learn=LEARN | {"lr": 0.25}, resume=True)
    assert (here / "r/config.yaml").read_text() == kept, "nothing was learned with another rate"
    capsys.readouterr()
    assert (here / "r/final/model.safetensors").read_bytes() == weights
    assert {key: first[key] for key in ("run_dir", "steps", "reward_last")} == {
        key: second[key] for key in ("run_dir", "steps", "reward_last")
    }
    third = trimtab.train(**settings, learn=LEARN | {"steps": 3, "lr": 0.5}, resume=True)
    shown = capsys.readouterr().out
    assert "the run continues with the new ones: learn.lr 0.5 (was 0.001)" in shown
    assert third["steps"] == 3
    assert [row["step"] for row in read_metrics(here / "r")] == [1, 2, 3]
    with pytest.raises(ConfigError, match=r"model\.dtype: .* was trained in float32 and cannot continue in bfloat16"):
        trimtab.train(
            **settings | {"model": {"path": str(model_folder), "dtype": "bfloat16"}}, learn=LEARN, resume=True
        )


def test_evaluate_writes_nothing_and_keeps_no_optimizer(here: Path, model_folder: Path, monkeypatch) -> None:
    from trimtab.update import optimizer

    monkeypatch.setattr(optimizer.MasterAdamW, "__init__", lambda *_: pytest.fail("an evaluation trains nothing"))
    result = trimtab.evaluate(
        model=model_folder,
        data=ROWS,
        reward=lambda completions, **_: [float(len(text) % 2) for text in completions],
        learn={"max_new_tokens": 5},
        eval={"samples_per_prompt": 4, "sampling": {"temperature": 1.0}},
        run=RUN,
    )
    assert {"eval/pass@1", "eval/pass@2", "eval/pass@4", "eval/prompts"} <= set(result)
    assert result["eval/prompts"] == len(ROWS)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("form", ["section", "file"])
def test_what_to_evaluate_on_may_be_a_section(here: Path, model_folder: Path, form: str) -> None:
    """A config's own task for training is left alone, with its options."""
    config: dict[str, Any] = {"data": {"train": "task:sort", "options": {"size": 8}}} if form == "file" else {}
    (here / "c.yaml").write_text(yaml.safe_dump(config | {"model": {"path": str(model_folder)}}))
    result = trimtab.evaluate(
        here / "c.yaml", data={"eval": ROWS[:2]}, reward="exact_match", learn={"max_new_tokens": 2}, run=RUN
    )
    assert result["eval/prompts"] == 2


@pytest.mark.parametrize("arguments", [{}, {"data": {"train": ROWS}}, {"config": {"data": {"train": "task:sort"}}}])
def test_nothing_to_evaluate_on_is_told_as_that(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^data\.eval: there is nothing to evaluate on: .* Give data=ROWS or"):
        trimtab.evaluate(model="m", reward="exact_match", **arguments)


def test_what_a_run_held_is_free_when_it_returns(here: Path, model_folder: Path, monkeypatch) -> None:
    """Also where Python's collector has no reason to run: the memory is the device's, and Python does not see it fill."""
    models: list[weakref.ref[torch.nn.Module]] = []
    load = build.load_model

    def noting(*arguments: Any) -> Any:
        found = load(*arguments)
        models.append(weakref.ref(found))
        return found

    monkeypatch.setattr(build, "load_model", noting)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    gc.disable()
    try:
        settings = {"model": model_folder, "data": ROWS, "reward": "exact_match", "run": RUN}
        trimtab.train(**settings, learn=LEARN | {"steps": 1}, observe={"dir": "r"})
        assert models and not [model for model in models if model() is not None]
    finally:
        gc.enable()


def test_an_interrupted_run_says_where_it_stands(here: Path, model_folder: Path, monkeypatch, capsys) -> None:
    from trimtab.observe.console import Console

    def interrupt(self: Console, step: int, metrics: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        trimtab.train(
            model=model_folder, data=ROWS, reward="exact_match", learn=LEARN, run=RUN,
            observe={"dir": "r", "checkpoint_every": 1},
        )  # fmt: skip
    assert "stopped after step 2 of 2; resume it to continue from step-2" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"data": ["text"]}, r"data\.train: row 0 is a str, not a mapping"),
        ({"data": 5}, r"data\.train: got a int"),
        ({"data": ROWS, "eval_data": [3]}, r"data\.eval: row 0 is a int"),
        ({"data": [{"prompt": "a", 3: "b"}]}, r"data\.train: row 0 has a column named 3, of type int"),
        ({"config": 5}, r"config: got a int\. Give the name of a YAML file, or a dictionary\."),
        ({"config": [1]}, r"config: got a list"),
        ({"data": ROWS, "overrides": [1]}, r"overrides: holds 1, a int"),
        ({"data": ROWS, "overrides": "learn.lr=1"}, r'overrides: got "learn\.lr=1"\. Give a list of texts'),
        ({"data": ROWS, "overrides": 3}, r"overrides: got 3"),
        ({"data": ROWS, "callbacks": 3}, r"callbacks: got a int\. Give a list of functions"),
        ({"data": ROWS, "learn": {"lrr": 1}}, r"learn\.lrr: unknown key\. Did you mean learn\.lr\?"),
        ({"data": ROWS, "model": {"path": "m", "dtyp": "x"}}, r"model\.dtyp: unknown key"),
    ],
)
def test_wrong_arguments_are_told(here: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trimtab.train(**{"model": "m", "reward": "exact_match"} | arguments)


def test_empty_rows_are_told(here: Path, model_folder: Path) -> None:
    with pytest.raises(DataError, match=r"data\.train holds no rows"):
        trimtab.train(model=model_folder, data=[], reward="exact_match", learn=LEARN)
    with pytest.raises(DataError, match=r"data\.eval holds no rows"):
        trimtab.train(model=model_folder, data=ROWS, eval_data=[], reward="exact_match", learn=LEARN)
    assert not (here / "runs").exists()


@pytest.mark.parametrize("stage", ["train", "sft"])
def test_callbacks_see_every_step_and_may_end_the_run(stage: str, model_folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, dict]] = []

    class Enough(Exception):
        pass

    def stop(step: int, metrics: dict) -> None:
        seen.append((step, dict(metrics)))
        metrics.clear()  # a copy: nothing of the run
        if step == 2:
            raise Enough

    common = {
        "model": str(model_folder),
        "callbacks": [stop],
        "observe": {"dir": str(tmp_path / "run"), "checkpoint_every": 1},
    }
    if stage == "train":
        run = partial(
            trimtab.train,
            data=[{"prompt": "1+1="}, {"prompt": "2+2="}],
            reward=lambda completions, **_: [float(len(c)) for c in completions],
            learn={"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 3},
        )
    else:
        run = partial(trimtab.sft, data=[{"text": "abc"}, {"text": "de"}], learn={"steps": 3, "sequences_per_step": 2})
    with pytest.raises(Enough):
        run(**common)
    assert [step for step, _ in seen] == [1, 2]
    assert seen[1][1]["time/total"] > 0
    assert (tmp_path / "run" / "checkpoints" / "step-2").exists()


def test_a_callback_that_cannot_be_called_is_refused(model_folder: Path) -> None:
    with pytest.raises(ConfigError, match="callbacks: got a int"):
        trimtab.sft(model=str(model_folder), data=[{"text": "abc"}], callbacks=[3])


def test_two_parts_that_were_given_one_name_are_told(here: Path, model_folder: Path) -> None:
    one: dict[str, Any] = {"fn": lambda completions: [0.0] * len(completions), "name": "same"}
    with pytest.raises(ConfigError, match=r"reward\.0 already has the name same"):
        trimtab.train(model=model_folder, data=ROWS, reward=[one, one], learn=LEARN, run=RUN)


@pytest.mark.parametrize("call", [trimtab.train, trimtab.evaluate, trimtab.sft, trimtab.reward_model])
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("lr", 1e-6, "lr: unknown key. Did you mean learn.lr?"),
        ("lr", None, "lr: unknown key. Did you mean learn.lr?"),
        ("learning_rate", 1e-6, "learning_rate: unknown key. Trimtab calls it learn.lr"),
        ("modle", "m", "modle: unknown key. Did you mean model?"),
        ("stage", "sft", "stage: has no effect here. Leave it out"),
    ],
)
def test_a_key_given_as_a_keyword_is_answered_as_the_command_line_answers(
    call: Any, name: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as told:
        call(model="m", data="rows.jsonl", **{name: value})
    assert message in str(told.value)
    if name != "stage":
        with pytest.raises(ConfigError) as cli:
            load_config(None, [f"{name}=1"])
        assert any(message in str(problem) for problem in cli.value.problems)


def test_a_section_that_a_call_has_no_use_for_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^observe: has no effect here"):
        trimtab.evaluate(model="m", data="rows.jsonl", observe={"dir": "x"})
    with pytest.raises(ConfigError, match=r"^reward: has no effect here"):
        trimtab.sft(model="m", data="rows.jsonl", reward="exact_match")
