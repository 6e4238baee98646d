"""What README and docs show is true: configs validate, Python runs, tables name what there is. Links: test_site.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml
from transformers.utils import get_json_schema

from tests.examples.pages import PAGES, ROOT, blocks, page_id
from trimtab.config.algorithms import RECIPES
from trimtab.config.load import config_from_dict, load_as
from trimtab.config.reference import STAGES, slot, use_schema
from trimtab.config.run import Rollout, Run
from trimtab.data.tasks import TASKS, Task
from trimtab.learn import losses
from trimtab.observe.doctor.rule import DoctorRule
from trimtab.reward import builtins
from trimtab.reward.builtins import BUILTINS
from trimtab.rollout.conversations.tools import BUILTINS as TOOLS

SMALLEST = {"model": {"path": "m"}, "data": {"train": "task:arithmetic"}, "reward": [{"fn": "task"}]}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_configs_validate(page: Path) -> None:
    for text in blocks(page, "yaml"):
        tree = yaml.safe_load(text)
        if tree.get("stage") in STAGES:
            load_as(STAGES[tree["stage"]], None, base={"model": SMALLEST["model"], "data": SMALLEST["data"], **tree})
        else:
            config_from_dict({**SMALLEST, **tree})


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_dotted_keys_exist(page: Path) -> None:
    sections = "model|data|reward|environment|learn|run|eval|observe"
    own = re.sub(r"<!-- tables:start -->.*<!-- tables:end -->", "", page.read_text(), flags=re.DOTALL)  # others' names
    for key in re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)[=`:]", own):
        found = []
        for schema in STAGES.values():
            with use_schema(schema):
                found.append(slot(key.split(".")))
        assert any(found), key


def test_the_python_of_the_readme_runs(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    small, count = re.subn(r'"steps": \d+', '"steps": 1', code.replace("HuggingFaceTB/SmolLM2-135M", str(model_folder)))
    assert count == 1
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "__main__"}
    exec(compile(small, "README.md", "exec"), scope)
    assert (Path(scope["result"]["run_dir"]) / "final" / "config.json").exists()


def test_the_python_of_the_reward_page_runs() -> None:
    scope: dict = {}
    for code in blocks(ROOT / "docs" / "rewards.md", "python"):
        exec(compile(code, "rewards.md", "exec"), scope)
    assert scope["correct"](completions=["82", "81"], answer=["82", "82"]) == [1.0, 0.0]


def test_the_python_of_the_environment_page_runs() -> None:
    scope: dict = {}
    for code in blocks(ROOT / "docs" / "environments.md", "python"):
        exec(compile(code, "environments.md", "exec"), scope)
    game = scope["Guess"]()
    game.reset(number=7)
    assert game.step("3").reply == "higher"
    assert game.step("7").reward == 1.0
    assert get_json_schema(scope["weather"])["function"]["name"] == "weather"


def test_the_examples_of_contributing_run() -> None:
    loss, reward, task, rule = blocks(ROOT / "CONTRIBUTING.md", "python")
    scope = dict(vars(losses))
    exec(compile(loss, "CONTRIBUTING.md", "exec"), scope)
    found = scope["plain_ratio_loss"](torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -2.0]), 0.2, 0.2)
    assert found.loss.tolist() == [-1.0, 2.0]
    scope = dict(vars(builtins))
    exec(compile(reward, "CONTRIBUTING.md", "exec"), scope)
    assert scope["starts_with"](["Answer: 4", "4"]) == [1.0, 0.0]
    rows = eval(compile(task, "CONTRIBUTING.md", "eval"), {"Task": Task}).generate(3)
    assert all(int(row["answer"]) == 2 * int(row["prompt"].removeprefix("double ").rstrip("=")) for row in rows)
    assert (
        eval(compile(rule, "CONTRIBUTING.md", "eval"), {"DoctorRule": DoctorRule, "reward_constant": None}).steps == 20
    )


def test_pages_name_everything_there_is() -> None:
    named = {
        "algorithms.md": RECIPES,
        "rewards.md": BUILTINS,
        "environments.md": TOOLS,
        "data.md": TASKS,
        "planning.md": [*Run.model_fields.keys() - {"rollout"}, *Rollout.model_fields],
    }
    for page, names in named.items():
        text = (ROOT / "docs" / page).read_text()
        assert not [name for name in names if f"`{name}`" not in text and f".{name}`" not in text], page


def test_the_algorithm_table_is_the_registry() -> None:
    lines = (ROOT / "docs" / "algorithms.md").read_text().splitlines()
    for name, recipe in RECIPES.items():
        row = f"| `{name}` | `{recipe.advantage}` | `{recipe.loss}` | `{recipe.aggregate}` |"
        assert any(line.startswith(row) for line in lines), row


def test_the_page_of_metrics_names_all_that_are_written() -> None:
    page = (ROOT / "docs" / "metrics.md").read_text()
    groups = "run|memory|time|throughput|policy|rollout|reward|response|value|eval|sft|rm"
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src" / "trimtab").rglob("*.py")))
    beginnings, folders = (
        {"eval/environment", "eval/pass", "eval/pass@", "run/dropped_"},
        {"eval/samples", "eval/results"},
    )
    written = set(re.findall(rf'"((?:{groups})/[a-z0-9_@]+)"', source)) - beginnings - folders
    peaks = {name for name in written if re.fullmatch(r"memory/[a-z]+_peak_gib", name)}
    assert len(written) > 60
    assert [name for name in sorted(written - peaks) if f"`{name}`" not in page] == []
