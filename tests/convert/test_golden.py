"""Every command and settings block of the guides: what is said of each flag, and a config that loads and can be planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.convert.golden import CASES, FOLDER, as_json, converted
from trimtab.base.errors import ConfigError
from trimtab.config.load import config_from_dict, load_config
from trimtab.run.plan_command import PlanOptions, look

REWARD_MODELS = {"OpenRLHF/Llama-3-8b-rm-700k": "llama-3.1-8b"}
"""Of the guides, and a model of the same shape that is known without the hub."""
FILLED_IN = {
    "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data.train": "task:arithmetic",
    "data.eval": "task:arithmetic",
    "reward": "[{fn: task}]",
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def overrides(case: str) -> list[str]:
    missing = converted(case).sheet.missing
    return [f"{item.key}={FILLED_IN[item.key]}" for item in missing if item.required]


def test_it_is_what_was_reviewed(case: str) -> None:
    again = "read the difference, then python -m tests.convert.golden"
    assert as_json(case) == (FOLDER / f"{case}.json").read_text(encoding="utf-8"), again
    assert converted(case).yaml == (FOLDER / f"{case}.yaml").read_text(encoding="utf-8"), again


def test_the_yaml_and_the_tree_load_to_the_same_config(case: str) -> None:
    more = overrides(case)
    from_yaml = load_config(FOLDER / f"{case}.yaml", more)
    assert from_yaml == config_from_dict(converted(case).sheet.tree(), more)


def test_what_is_missing_is_what_the_loader_asks_for(case: str) -> None:
    required = {item.key for item in converted(case).sheet.missing if item.required}
    if not required:
        load_config(FOLDER / f"{case}.yaml")
        return
    with pytest.raises(ConfigError) as error:
        load_config(FOLDER / f"{case}.yaml")
    text = str(error.value)
    assert all(key in text for key in required)


def test_it_can_be_planned(case: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    text = converted(case).yaml
    for hub, known in REWARD_MODELS.items():
        text = text.replace(hub, known)
    file.write_text(text, encoding="utf-8")
    found = look(file, overrides(case), PlanOptions(device="b200"))
    assert found.plan.fits
