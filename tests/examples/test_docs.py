"""What README and docs show is true: configs validate, Python runs, links lead somewhere, tables name what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from transformers.utils import get_json_schema

from trimtab.config.algorithms import RECIPES
from trimtab.config.load import config_from_dict, load_as
from trimtab.config.reference import STAGES, reading, slot
from trimtab.config.run import Rollout, Run
from trimtab.data.tasks import TASKS
from trimtab.reward.builtins import BUILTINS
from trimtab.rollout.conversations.tools import BUILTINS as TOOLS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALLEST = {"model": {"path": "m"}, "data": {"train": "task:arithmetic"}, "reward": [{"fn": "task"}]}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def page_id(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_configs_validate(page: Path) -> None:
    for text in blocks(page, "yaml"):
        tree = yaml.safe_load(text)
        if tree.get("stage") in STAGES:
            load_as(STAGES[tree["stage"]], None, base={"model": SMALLEST["model"], "data": SMALLEST["data"], **tree})
        else:
            config_from_dict({**SMALLEST, **tree})


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not target.startswith(("http", "#")):
            assert (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_dotted_keys_exist(page: Path) -> None:
    sections = "model|data|reward|environment|learn|run|eval|observe"
    own = re.sub(r"<!-- tables:start -->.*<!-- tables:end -->", "", page.read_text(), flags=re.DOTALL)  # others' names
    for key in re.findall(rf"`((?:{sections})\.[a-z_.0-9]+)[=`]", own):
        found = []
        for schema in STAGES.values():
            with reading(schema):
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


def test_pages_name_everything_there_is() -> None:
    named = {
        "algorithms.md": RECIPES,
        "rewards.md": BUILTINS,
        "environments.md": TOOLS,
        "data.md": TASKS,
        "architecture.md": [*Run.model_fields.keys() - {"rollout"}, *Rollout.model_fields],
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
    written = set(re.findall(rf'"((?:{groups})/[a-z0-9_@]+)"', source)) - {"eval/environment"}  # the beginning of names
    peaks = {name for name in written if re.fullmatch(r"memory/(rollout|update)_peak_gib", name)}
    assert len(written) > 60
    assert [name for name in sorted(written - peaks) if f"`{name}`" not in page] == []
