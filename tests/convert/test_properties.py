"""Whatever is given: each setting has one row, nothing but a clear error is raised, and the config loads once it is filled in."""

from __future__ import annotations

import json
import string
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.base.errors import ConfigError
from trimtab.config.load import load_as
from trimtab.convert import FRAMEWORKS, Conversion, convert
from trimtab.convert.shell import Script

KINDS = st.sampled_from(sorted(FRAMEWORKS))
VALUES = st.one_of(
    st.integers(-2, 4096).map(str),
    st.floats(-1, 10, allow_nan=False).map(str),
    st.sampled_from(["true", "false", "null", "Qwen/Qwen2.5-0.5B", "rewards.py", "[1, 2]", "[a, b]", "''", "k1", "none"]),
    st.sampled_from(["gae", "rloo", "group_norm", "dr_grpo", "cispo", "gspo", "cosine", "wandb", "steps", "no", "token"]),
)  # fmt: skip


def names(kind: str) -> st.SearchStrategy[str]:
    framework = FRAMEWORKS[kind]
    return st.sampled_from(
        sorted({framework.in_full(name).replace("*", "x") for rule in framework.rules for name in rule.names})
    )


PAIRS = KINDS.flatmap(
    lambda kind: st.tuples(st.just(kind), st.lists(st.tuples(names(kind), VALUES), min_size=1, max_size=12))
)


ALGORITHMS = (
    "estimator", "policy_loss_type", "loss_mode", "loss_agg_mode", "loss_type", "importance_sampling_level",
    "no_std_norm", "scale_rewards", "norm_adv_by_std_in_grpo", "normalize_advantages",
)  # fmt: skip
"""How flags end that name an algorithm or a part of one: what is not known of them refuses the whole conversion."""


def converted(kind: str, words: list[str] | None = None, text: str | None = None) -> Conversion | None:
    """The conversion, or nothing where it is refused for the name of an algorithm."""
    try:
        return convert(kind, words=words, text=text)
    except ConfigError as error:
        if not all(problem.where.partition("=")[0].endswith(ALGORITHMS) and problem.fix for problem in error.problems):
            raise
        return None


def check(found: Conversion | None, given: list[str]) -> None:
    if found is None:
        return
    assert [line.setting.name for line in found.lines] == given
    assert all(line.outcome in ("mapped", "automatic", "dead", "unsupported") for line in found.lines)
    assert all(line.key for line in found.lines if line.outcome == "mapped")
    assert all(line.notes for line in found.lines if line.outcome in ("dead", "unsupported"))
    json.dumps(found.as_dict())
    load_as(found.framework.schema, None, base=found.sheet.filled_in())


@settings(max_examples=300, deadline=None)
@given(PAIRS)
def test_pairs(case: tuple[str, list[tuple[str, str]]]) -> None:
    kind, pairs = case
    check(converted(kind, words=[f"{name}={value}" for name, value in pairs]), [name for name, _ in pairs])


@settings(max_examples=150, deadline=None)
@given(PAIRS)
def test_flags_in_a_script(case: tuple[str, list[tuple[str, str]]]) -> None:
    kind, pairs = case
    text = "python3 -m train.it \\\n" + " \\\n".join(f"  --{name} '{value}'" for name, value in pairs if value != "''")
    given_ = [f"--{name}" for name, value in pairs if value != "''"]
    if given_:
        check(converted(kind, text=text), given_)


@settings(max_examples=100, deadline=None)
@given(PAIRS)
def test_the_yaml_loads_to_the_same_config(case: tuple[str, list[tuple[str, str]]]) -> None:
    kind, pairs = case
    found = converted(kind, words=[f"{name}={value}" for name, value in pairs])
    if found is None:
        return
    fill = {"model.path": "m", "data.train": "t.jsonl", "data.eval": "e.jsonl", "reward": "[{fn: task}]"}
    more = [f"{item.key}={fill[item.key]}" for item in found.sheet.missing if item.required]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(found.yaml, encoding="utf-8")
        schema = found.framework.schema
        assert load_as(schema, file, more) == load_as(schema, None, more, found.sheet.tree())


@settings(max_examples=300, deadline=None)
@given(KINDS, st.text(alphabet=string.printable, max_size=60))
def test_any_text_is_converted_or_refused_in_words(kind: str, text: str) -> None:
    try:
        found = convert(kind, text=text)
    except ConfigError:
        return
    load_as(found.framework.schema, None, base=found.sheet.filled_in())
    json.dumps(found.as_dict())


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab $(){}'\"\\#\n;&|=-", max_size=40))
def test_a_shell_text_is_read_to_its_end(text: str) -> None:
    script = Script(text, "it")
    try:
        list(script.commands())
    except ConfigError:
        return
    assert script.at >= len(script.text)
