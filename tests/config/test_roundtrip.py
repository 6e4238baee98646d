"""Properties: a resolved config loads back equal, and a slip in any key is caught and pointed somewhere."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.base.errors import ConfigError
from trimtab.config.algorithms import RECIPES
from trimtab.config.load import config_from_dict, load_config, resolved_yaml
from trimtab.config.reference import entries, slot
from trimtab.config.resolved import resolve_config
from trimtab.config.schema import Config

LEAST = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "reward": [{"fn": "exact_match"}]}
KEYS = [entry.name.replace(".N.", ".0.") for entry in entries()]

numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
trap_words = st.sampled_from(
    ["off", "no", "None", "null", "1e-6", "1_0", "0o7", "012", "1:30", "2024-01-02", "=", "<<"]
)
texts = st.text(st.characters(codec="utf-8"), min_size=1) | trap_words
anything = st.recursive(
    numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def read_back(text: str, folder: Path) -> Config:
    path = folder / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize("algorithm", RECIPES)
def test_a_resolved_config_loads_back_equal(algorithm: str, tmp_path: Path) -> None:
    config = config_from_dict(LEAST, [f"learn.algorithm={algorithm}"])
    again = read_back(resolved_yaml(config), tmp_path)
    assert again.model_dump() == resolve_config(config).model_dump()
    assert resolved_yaml(again) == resolved_yaml(config)


def test_a_full_config_loads_back_equal(tmp_path: Path) -> None:
    overrides = ["data.eval=b.jsonl", "eval.sampling.temperature=0.5", "eval.samples_per_prompt=4", "learn.lr=3e-7"]
    overrides += ['learn.sampling.stop=["\\n", "off"]', "learn.reward_clip=[-1, 1]", "learn.overlong.buffer=9"]
    overrides += [
        "run.rollout.kv_memory=2.5GiB",
        "run.token_budget=4096",
        "observe.dir=runs/{name}",
        "data.suffix=' x '",
    ]
    config = config_from_dict(LEAST, overrides)
    text = resolved_yaml(config)
    assert read_back(text, tmp_path).model_dump() == resolve_config(config).model_dump()
    assert yaml.safe_load(text)["learn"]["importance"]["level"] == "off", "plain YAML 1.1 readers see the same words"
    assert "auto" not in (yaml.safe_load(text)["learn"]["clip"]["low"], yaml.safe_load(text)["learn"]["loss"])


@settings(max_examples=60, deadline=None, database=None)
@given(
    options=st.dictionaries(texts, anything, max_size=3),
    suffix=texts,
    stop=st.lists(texts, max_size=2),
    lr=st.floats(min_value=1e-300, max_value=1e300),
)
def test_any_text_and_number_survives_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], suffix: str, stop: list[str], lr: float
) -> None:
    config = config_from_dict(
        LEAST
        | {
            "data": {"train": "task:t", "options": options, "suffix": suffix},
            "learn": {"lr": lr, "sampling": {"stop": stop}},
        }
    )
    again = read_back(resolved_yaml(config), tmp_path_factory.getbasetemp())
    assert again.model_dump() == resolve_config(config).model_dump()


@st.composite
def slips(draw: st.DrawFn) -> str:
    """A valid key with one character of one part left out, added, changed, or swapped with its neighbour."""
    parts = draw(st.sampled_from(KEYS)).split(".")
    which = draw(st.sampled_from([place for place, part in enumerate(parts) if not part.isdecimal()]))
    word, letter = parts[which], draw(st.sampled_from(string.ascii_lowercase + "_"))
    at = draw(st.integers(0, len(word) - 1))
    parts[which] = draw(
        st.sampled_from(
            [
                word[:at] + word[at + 1 :],
                word[:at] + letter + word[at:],
                word[:at] + letter + word[at + 1 :],
                word[:at] + word[at + 1 : at + 2] + word[at] + word[at + 2 :],
            ]
        )
    )
    return ".".join(parts)


@settings(max_examples=200, deadline=None, database=None)
@given(slips().filter(lambda key: slot(key.split(".")) is None and all(key.split("."))))  # of `r` nothing may be left
def test_any_slip_in_a_key_is_reported_with_a_suggestion(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_dict(LEAST, [f"{key}=1"])
    (problem,) = caught.value.problems
    assert problem.where == key
    assert problem.what == "unknown key"
    meant = problem.fix.removeprefix("Did you mean ").removesuffix("?")
    assert slot(meant.split(".")) is not None, problem


@settings(max_examples=200, deadline=None, database=None)
@given(key=st.sampled_from(KEYS), value=anything)
def test_any_value_at_any_key_is_accepted_or_explained(key: str, value: Any) -> None:
    data: Any = {"model": {"path": "m"}, "data": {"train": "task:t"}, "reward": [{"fn": "exact_match"}]}
    node, (*above, last) = data, key.split(".")
    for part in above:
        node = node[int(part)] if isinstance(node, list) else node.setdefault(part, {})
    node[last] = value
    with contextlib.suppress(ConfigError):
        config_from_dict(data)
