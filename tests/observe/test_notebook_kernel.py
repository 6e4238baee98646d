"""A run in a cell of a real Jupyter kernel: what the notebook then holds. The quick suite runs the example notebooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_model, tiny_tokenizer

pytest.importorskip("ipykernel")
nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")

CELL = """
import sys
sys.path[:0] = {path!r}
import trimtab

def reward(completions, **_):
    return [float(len(set(text))) for text in completions]

rows = [{{"prompt": f"{{a}}+1="}} for a in range(9)]
learn = {{"steps": 3, "prompts_per_step": 2, "samples_per_prompt": 2, "max_new_tokens": 4}}
observe = {{"dir": {folder!r}, "tensorboard": False}}
result = trimtab.train(model={model!r}, data=rows, eval_data=rows[:2], reward=reward, learn=learn, observe=observe)
result
"""


@pytest.mark.slow
def test_a_cell_holds_plain_text_and_one_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    code = CELL.format(path=sys.path, folder=str(tmp_path / "run"), model=str(tmp_path / "model"))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    outputs: list[Any] = notebook.cells[0].outputs
    (panel,) = [output["data"] for output in outputs if output.output_type == "display_data"]
    assert "Trimtab · step 3/3" in panel["text/plain"] and "step 3/3" in panel["text/html"]
    (shown,) = [output["data"] for output in outputs if output.output_type == "execute_result"]
    assert "'run_dir'" in shown["text/plain"] and shown["text/html"].count("<img") == 3
    assert "<script" not in shown["text/html"] + panel["text/html"]
    printed = "".join(output["text"] for output in outputs if output.get("name") == "stdout")
    assert "\x1b" not in printed + panel["text/plain"] + panel["text/html"] and "\r" not in printed
    for words in ("─ Trimtab ─", "eval at step 0 |", "eval at step 3 |", "Where the time went", "run folder"):
        assert printed.count(words) == 1 + (words == "run folder"), words  # the start card has it, and the summary
    assert "step 2/3" not in printed
