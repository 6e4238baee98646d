"""Hostile settings: refused in words, in bounded time and memory. Each of these took minutes or gigabytes, or was a traceback."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.suggestions import _alike, _may_reach, nearest
from trimtab.config import advice
from trimtab.config import load as loading
from trimtab.config.load import MAX_PROBLEMS, config_from_dict, load_as, load_config
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.sft import SftConfig
from trimtab.config.text import MAX_CHARACTERS, MAX_VALUES
from trimtab.convert.read import MAX_SETTINGS, read_file, read_text

TEXT = "model: {path: m}\ndata: {train: a.jsonl}\nreward: [{fn: exact_match}]\n"
LEAST = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "reward": [{"fn": "exact_match"}]}


def refused(tmp_path: Path, text: str, *overrides: str) -> str:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml", overrides)
    return str(caught.value)


def not_converted(text: str, source: str = "it.sh") -> str:
    with pytest.raises(ConfigError) as caught:
        read_text(text, source)
    return str(caught.value)


def nested(first: str, form: str, times: int = 9, deep: int = 8) -> str:
    """`a0: &a0 ...`, and then each of nine of the one before: a few hundred bytes that stand for millions of values."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * times))}" for n in range(1, deep)]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("first", "form"), [("[x, x]", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")])
def test_aliases_of_aliases(tmp_path: Path, first: str, form: str) -> None:
    text = nested(first, form)
    assert len(text) < 1000
    assert f"has more than {MAX_VALUES:,} keys and values" in refused(tmp_path, TEXT + text)
    assert f"has more than {MAX_VALUES:,} keys and values" in not_converted("beta: 0.1\n" + text, "it.yaml")
    listed = ", ".join(f"&a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 8))
    assert f"has more than {MAX_VALUES:,}" in not_converted(f"trl grpo --report_to '[&a0 [x, x], {listed}]'")


def test_values_without_end(tmp_path: Path) -> None:
    assert f"has more than {MAX_VALUES:,} keys and values" in refused(tmp_path, TEXT + f"x: [{'1,' * MAX_VALUES}1]\n")
    long = TEXT + "# " + "x" * MAX_CHARACTERS
    assert f"is longer than {MAX_CHARACTERS:,} characters" in refused(tmp_path, long)
    assert f"is longer than {MAX_CHARACTERS:,} characters" in not_converted(long)
    assert "nested too deeply" in refused(tmp_path, TEXT + "x: " + "[" * 3000 + "]" * 3000)


def test_thousands_of_unknown_keys_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[str] = []

    def explain(where: str) -> Problem:
        explained.append(where)
        return advice.unknown_key(where)

    monkeypatch.setattr(loading, "unknown_key", explain)
    message = refused(tmp_path, TEXT + "".join(f"key{n}: 1\n" for n in range(5000)))
    assert message.startswith("5,000 problems in the configuration:\n  key0: unknown key.")
    assert message.endswith(f"\n  and {5000 - MAX_PROBLEMS:,} more")
    assert len(explained) == MAX_PROBLEMS
    message = refused(tmp_path, TEXT, *(f"key{n}=1" for n in range(5000)))
    assert message.startswith(f"{MAX_PROBLEMS} problems")


def test_thousands_of_wrong_values_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained: list[str] = []

    def explain(where: str, value: object) -> Problem:
        explained.append(where)
        return advice.wrong_value(where, value)

    monkeypatch.setattr(loading, "wrong_value", explain)
    parts = ", ".join(["{fn: [], weight: true}"] * 1000)
    message = refused(tmp_path, f"model: {{path: m}}\ndata: {{train: a.jsonl}}\nreward: [{parts}]\n")
    assert message.startswith("2,000 problems")
    assert len(explained) == MAX_PROBLEMS


def test_a_key_of_100_kb(tmp_path: Path) -> None:
    message = refused(tmp_path, TEXT + "? " + "k" * 100_000 + "\n: 1\n")
    assert message == "k" * 57 + "...: unknown key, of 100,000 characters. Remove it"
    assert "unknown key, of 100,012 characters" in refused(tmp_path, TEXT, "data.options" + ".a" * 50_000 + "=1")


def test_words_are_compared_only_where_they_can_be_near() -> None:
    assert nearest("k" * 100_000, ["keep_checkpoints"], 0.5) == ""
    words = ["lr", "rl", "learn.lr", "learning_rate", "max_new_tokens", "max_tokens", "l", "", "seed", "sead", "steps"]
    for cutoff in (0.5, 0.6, 0.75, 1.0):
        for one in words:
            for other in words:
                assert _may_reach(one, other, cutoff) or _alike(one, other) < cutoff, (one, other)


@pytest.mark.parametrize("value", [2**64, 10**5000, 1e300], ids=["65 bits", "5,001 digits", "float"])
def test_numbers_that_nothing_can_count_to(value: float) -> None:
    with pytest.raises(ConfigError, match=r"learn\.steps: got .*, which is more than 18,446,744,073,709,551,615"):
        config_from_dict(LEAST | {"learn": {"steps": value}})


@pytest.mark.parametrize(
    ("learn", "key"),
    [
        ({"samples_per_prompt": 1e9}, "learn.samples_per_prompt"),
        ({"prompts_per_step": 10**9}, "learn.prompts_per_step"),
        ({"prompts_per_step": 10_000, "samples_per_prompt": 1000}, "learn.prompts_per_step"),
    ],
)
def test_steps_that_no_machine_can_hold(learn: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .* sequences a step; .* holds 1,000,000 .*at most"):
        config_from_dict(LEAST | {"learn": learn})


def test_an_evaluation_that_no_machine_can_hold() -> None:
    with pytest.raises(ConfigError, match=r"eval\.samples_per_prompt: is 1,000,000,000; .* holds 1,000,000 .*at most"):
        config_from_dict(LEAST | {"eval": {"samples_per_prompt": 1e9, "sampling": {"temperature": 1.0}}})


def test_a_pipe_that_nobody_writes_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml: is a named pipe, not a file"):
        load_config(tmp_path / "pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml: is a named pipe, not a file"):
        read_file(tmp_path / "pipe.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("A=xxxxxxxxxx\n" + "A=$A$A\n" * 40, "variables expand to more than 1,000,000 characters"),
        ("A=xxxxxxxxxx\n" + 'A="${A}${A}"\n' * 40, "variables expand to more than 1,000,000 characters"),
        ("A=(x x x)\n" + "A+=(${A[@]} ${A[@]})\n" * 40, "variables expand to more than 1,000,000 characters"),
        (
            f"trl grpo --max_steps $(({'+'.join('1' * 20_000)}))\n",
            "line 1: $((...)) has 39,999 characters; the limit is 1,000",
        ),
        ("A=999999\n" + "A=$((A*A))\n" * 60, "$((...)) has"),
        (f"trl grpo --max_steps {'${A:-' * 5000}1{'}' * 5000}\n", "defaults are nested more than 20 levels deep"),
    ],
)
def test_shell_text_that_grows(text: str, message: str) -> None:
    assert message in not_converted(text)


def test_an_expression_of_20_000_terms() -> None:
    assert "an expression is nested too deeply" in not_converted(f"max_steps = {'+'.join('1' * 20_000)}\n", "it.py")
    assert "an expression is nested too deeply" in not_converted(f"max_steps = {'-' * 20_000}1\n", "it.py")


def test_more_settings_than_any_framework_has() -> None:
    flags = " ".join(f"--flag{n} 1" for n in range(MAX_SETTINGS + 1))
    assert "settings; Trimtab converts 2,000 at most" in not_converted(f"trl grpo {flags}\n")


@pytest.mark.parametrize(("schema", "key"), [(SftConfig, "sequences_per_step"), (RewardModelConfig, "pairs_per_step")])
def test_steps_of_given_data_that_no_machine_can_hold(schema: Any, key: str) -> None:
    base = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "learn": {key: 1e9}}
    with pytest.raises(ConfigError, match=rf"learn\.{key}: is 1,000,000,000; .* holds 1,000,000 .*at most"):
        load_as(schema, None, base=base)
