"""Whole runs with an environment or tools: through a chat template, from Python, dry, and refused before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model

import trimtab
from tests import running
from tests.rollout.conversations.templates import DEAF, QWEN, chat_tokenizer
from tests.rollout.conversations.worlds import Echo, add
from trimtab.base.errors import ConfigError, DataError, EnvError, TrimtabError
from trimtab.config.load import config_from_dict, load_config
from trimtab.model.load import save_model
from trimtab.record.jsonl import read_jsonl
from trimtab.record.sinks import read_metrics
from trimtab.run.dry_run import dry_run
from trimtab.run.inputs import Inputs

HERE = Path(__file__).parent
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'


class Forced:
    """Stands between the engine and the conversation: the model's turns are written here, so that tools are called at all."""

    def __init__(self, turns: list[str], tokenizer: Any) -> None:
        self.turns, self.tokenizer = turns, tokenizer

    def __call__(self, generate: Any) -> Any:
        import torch

        from trimtab.rollout.trajectory import Group, Trajectory

        asked = {"round": 0}

        def scripted(engine: Any, requests: Any) -> Any:
            list(generate(engine, requests))
            first = all(request.first_position == 0 for request in requests)
            asked["round"] = 0 if first else asked["round"] + 1
            for index, request in enumerate(requests):
                text = self.turns[min(asked["round"], len(self.turns) - 1)]
                ids = [*self.tokenizer(text, add_special_tokens=False).input_ids, self.tokenizer.eos_token_id]
                made = [
                    Trajectory(
                        request.prompt, place, torch.tensor(ids), torch.full((len(ids),), -4.0),
                        torch.zeros(len(ids), dtype=torch.int32), "stop",
                    )
                    for place in range(request.samples)
                ]  # fmt: skip
                yield Group(request.prompt, made, index)

        return scripted


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = chat_tokenizer(QWEN)
    folder = tmp_path_factory.mktemp("chat")
    model = tiny_model(
        "llama", vocab_size=len(tokenizer), max_position_embeddings=1024, eos_token_id=tokenizer.eos_token_id
    )
    save_model(model, tokenizer, folder)
    return folder


def run(model: Path, folder: Path, **sections: Any) -> dict[str, Any]:
    learn = {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 200}
    usual = {"data": ROWS, "reward": {"fn": "number_match"}, "learn": learn, "observe": {"samples_every": 1}}
    return running.train(model, folder, usual, sections).summary


@pytest.mark.parametrize("prompt", ["text", "messages"])
def test_a_tool_is_called_through_the_chat_template(chat_folder, tmp_path, monkeypatch, prompt: str) -> None:
    from trimtab.rollout.native.engine import NativeEngine

    tokenizer = chat_tokenizer(QWEN)
    forced = Forced([f"I add. {CALL}", "It is 23."], tokenizer)
    monkeypatch.setattr(NativeEngine, "generate", forced(NativeEngine.generate))
    rows = [
        {"prompt": f"{n}?" if prompt == "text" else [{"role": "user", "content": f"{n}?"}], "answer": 23}
        for n in range(4)
    ]
    seen_by: list[Any] = []

    def last_message(completions: list[Any], **_: Any) -> list[float]:
        if prompt == "text":
            return [float("<tool_response>" in c and c.endswith("It is 23.")) for c in completions]
        return [float([m["role"] for m in c] == ["assistant", "tool", "assistant"]) for c in completions]

    summary = trimtab.train(
        model=str(chat_folder), data=rows, environment=[add],
        reward=[{"fn": "number_match"}, {"fn": "exact_match", "args": {"column": "answer"}}, last_message],
        learn={"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 300},
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )  # fmt: skip
    (row,) = [row for row in read_metrics(Path(summary["run_dir"])) if row["step"] == 1]
    assert row["reward/number_match"] == 1.0
    assert row["reward/exact_match"] == 0.0
    assert row["reward/last_message"] == 1.0, seen_by
    assert row["environment/turns_mean"] == 2.0
    assert row["environment/tool_calls"] == 1.0
    assert row["environment/tool_error_share"] == 0.0
    sample = read_jsonl(tmp_path / "run/samples/step-1.jsonl")[0]
    assert sample["turns"][1] == {"role": "tool", "name": "add", "content": "23"}
    assert sample["completion"].count("<tool_response>") == 1
    own = len(tokenizer(f"I add. {CALL}It is 23.").input_ids) + 2
    assert sample["tokens"] == own


def test_a_tool_is_called_in_plain_text(model_folder, tmp_path, monkeypatch) -> None:
    """The end of a call ends the turn: the stop string is added where nothing else would end it."""
    from trimtab.rollout.native.engine import NativeEngine

    tokenizer = chat_tokenizer(None)
    stops: list[list[str]] = []
    forced = Forced([CALL, "23"], tokenizer)(NativeEngine.generate)

    def watched(engine: Any, requests: Any) -> Any:
        stops.append(requests[0].sampling.stop)
        return forced(engine, requests)

    monkeypatch.setattr(NativeEngine, "generate", watched)
    folder = tmp_path / "plain"
    save_model(tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer, folder)
    run(folder, tmp_path / "run", environment=[add])
    assert stops[0] == ["</tool_call>"]
    sample = read_jsonl(tmp_path / "run/samples/step-1.jsonl")[0]
    assert sample["turns"][1] == {"role": "environment", "content": "\n<tool_response>\n23\n</tool_response>\n"}


def test_evaluation_talks_too(model_folder) -> None:
    found = trimtab.evaluate(
        model=str(model_folder), data=ROWS, reward={"fn": "environment"}, environment={"fn": Echo, "args": {"turns": 2}},
        learn={"max_new_tokens": 40}, eval={"sampling": {"temperature": 1.0, "stop_token_ids": list(range(3, 40))}},
    )  # fmt: skip
    assert found["eval/environment/turns_mean"] > 1
    assert found["eval/failed"] == 0


def test_max_turns_ends_a_conversation_after_the_environment_has_judged(model_folder, tmp_path) -> None:
    sampling = {"stop_token_ids": list(range(3, 60))}
    run(
        model_folder, tmp_path / "run", environment={"fn": Echo, "max_turns": 2, "args": {"turns": 9}},
        reward={"fn": "environment"}, learn={"sampling": sampling},
    )  # fmt: skip
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["step"] == 1]
    assert row["environment/turn_limit"] > 0
    for sample in read_jsonl(tmp_path / "run/samples/step-1.jsonl"):
        if sample["finish"] == "turns":
            said = [turn["content"] for turn in sample["turns"] if turn["role"] == "assistant"]
            assert len(said) == 2
            assert sample["earned"] == sum(text.count("a") for text in said)
            assert sample["turns"][-1]["role"] == "assistant"


def config(model: Path, tmp_path: Path, **sections: Any) -> dict[str, Any]:
    return {
        "model": {"path": str(model)},
        "data": {"train": "object:rows"},
        "reward": [{"fn": "number_match"}],
        "learn": {"steps": 1, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 20},
        "observe": {"dir": str(tmp_path / "run")},
        **sections,
    }


def test_dry_run_names_files_by_their_whole_path(chat_folder, tmp_path) -> None:
    tree = config(chat_folder, tmp_path, environment={"tools": ["worlds.py:add", "calculator"]})
    with (tmp_path / "out").open("w") as out:
        told = dry_run(config_from_dict(tree), Inputs(train_rows=ROWS, base_dir=HERE), out)
    assert told["ok"]
    assert f"{HERE / 'worlds.py'}:add" in (tmp_path / "out").read_text()
    assert told["longest_prompt_tokens"] > 200  # the template shows the tools
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sections", "rows", "error"),
    [
        ({"environment": {"fn": "worlds.py:Ecko"}}, ROWS, "Did you mean 'Echo'"),
        ({"environment": {"fn": "world.py:Echo"}}, ROWS, "there is no file"),
        ({"environment": {"fn": "Echo"}}, ROWS, "names no class. For a class of your own write file.py:class"),
        ({"environment": {"fn": "worlds.py:Slow"}}, ROWS, "reset needs the column 'hang'"),
        ({"environment": {"tools": ["worlds.py:undocumented"]}}, ROWS, "cannot be shown to the model"),
        (
            {"environment": {"tools": ["calculator"]}},
            [{**row, "turns": 1} for row in ROWS],
            "the data has a column 'turns'",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_loaded(
    chat_folder, tmp_path, monkeypatch, sections: Any, rows: Any, error: str
) -> None:
    monkeypatch.setattr("trimtab.run.models.load_policy", None)
    with pytest.raises((EnvError, DataError)) as caught, (tmp_path / "out").open("w") as out:
        dry_run(
            config_from_dict(config(chat_folder, tmp_path, **sections)), Inputs(train_rows=rows, base_dir=HERE), out
        )
    assert error in str(caught.value)


def test_a_template_without_tools_is_refused_unless_the_prompt_describes_them(tmp_path) -> None:
    for template in (DEAF, QWEN.replace("if tools", "if false")):
        tokenizer = chat_tokenizer(template)
        folder = tmp_path / str(len(template))
        save_model(tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=512), tokenizer, folder)
        inputs = Inputs(train_rows=ROWS, base_dir=HERE)
        tree = config(folder, tmp_path, environment={"tools": ["calculator"]})
        with (tmp_path / "out").open("w") as out:
            with pytest.raises(EnvError, match=r"leaves out messages of the role tool|would not know 'calculator'"):
                dry_run(config_from_dict(tree), inputs, out)
            if template is not DEAF:
                tree["data"]["system"] = "You have a tool, calculator(expression)."
                assert dry_run(config_from_dict(tree), inputs, out)["ok"]


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"environment": {}}, "the environment has neither a class nor a tool"),
        ({"environment": {"fn": "a.py:B", "tools": ["calculator"]}}, "both would answer the model"),
        ({"environment": {"tools": ["calculator"], "args": {"a": 1}}}, "the model gives tools their arguments"),
        ({"environment": {"tools": ["calculator"]}, "reward": [{"fn": "environment"}]}, "tools give no reward"),
        ({"reward": [{"fn": "environment"}]}, "there is no environment"),
        (
            {"environment": {"fn": "a.py:B"}, "reward": [{"fn": "environment", "args": {"a": 1}}]},
            "the environment computes this reward",
        ),
        ({"environment": {"fn": "a.py:B", "max_turns": 0}}, "max_turns"),
        ({"environment": {"fn": "a.py:B", "max_turn": 3}}, "environment.max_turns"),
        ({"environment": {"tools": [" "]}}, "is empty"),
        ({"environment": "calculator"}, "environment"),
    ],
)
def test_contradictions_are_told(tmp_path, sections: Any, error: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(config(tmp_path, tmp_path, **sections))
    assert error in str(caught.value)


def test_overrides_and_the_resolved_config_know_the_section(tmp_path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(config(tmp_path, tmp_path)))
    made = load_config(file, ["environment.tools=[calculator]", "environment.max_turns=3"])
    assert made.environment is not None
    assert (made.environment.tools, made.environment.max_turns) == (["calculator"], 3)
    assert load_config(file).environment is None


def test_from_python_an_environment_is_a_class_a_path_a_list_of_tools_or_a_section() -> None:
    from trimtab.api import _environment

    assert _environment(Echo) == ({"fn": "object:Echo"}, {"Echo": Echo})
    assert _environment("a.py:B") == ({"fn": "a.py:B"}, {})
    assert _environment(["calculator", add]) == ({"tools": ["calculator", "object:add"]}, {"add": add})
    assert _environment({"fn": Echo, "max_turns": 2}) == ({"fn": "object:Echo", "max_turns": 2}, {"Echo": Echo})


def test_an_object_in_the_place_of_its_class_is_told() -> None:
    from trimtab.api import _environment

    for given in (Echo(), {"fn": Echo()}):
        with pytest.raises(ConfigError, match=r"got an instance of Echo, .* Give the class itself"):
            _environment(given)  # type: ignore[arg-type]


def test_errors_are_for_users() -> None:
    assert issubclass(EnvError, TrimtabError)
