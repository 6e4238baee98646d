"""The example notebooks run from their first cell to their last, with a tiny model and two steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.examples.pages import ROOT
from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("ipykernel")
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_runs_and_shows_the_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    small = f"import sys\nsys.path[:0] = {sys.path!r}\nmodel, steps, folder = {str(tmp_path / 'model')!r}, 2, 'run'"
    assert {line.split(" = ")[0] for line in parameters.source.splitlines()} <= {"model", "steps", "folder"}
    parameters.source = small
    nbclient.NotebookClient(
        notebook, timeout=180, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs: list[Any] = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert not any("<script" in page for page in pages)
    assert "\\u001b" not in json.dumps(outputs), "colours of a terminal"
    assert any("step 2/2" in page for page in pages), "the block that is updated while it trains"
    assert sum("step 2/2" not in page and page.count("<img") == 3 for page in pages) >= 1, "the result"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_are_kept_without_outputs_and_are_named_where_one_looks(path: Path) -> None:
    cells = json.loads(path.read_text())["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    for page in ("examples/README.md", "docs/notebooks.md"):
        assert path.name in (ROOT / page).read_text(), page


def test_there_are_two() -> None:
    assert [path.name for path in NOTEBOOKS] == ["first_steps.ipynb", "own_reward.ipynb"]
