"""Published runs of other systems: the page of predictions is what its script writes, and predictions are of the right size."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[2] / "bench" / "predictions.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("predictions", FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["predictions"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_script_writes_and_every_figure_is_of_the_right_size(bench: ModuleType) -> None:
    page = bench.page()
    assert bench.PAGE.read_text() == page, "run python bench/predictions.py"
    rows = [line.split("|")[1:-1] for line in page.splitlines() if line.startswith("| ") and "---" not in line][1:]
    ratios = [(figure.strip(), float(ratio)) for _, figure, _, _, ratio in rows]
    assert len(ratios) > 20
    assert all(0.95 <= ratio <= 1.1 for figure, ratio in ratios if "GiB" in figure), "memory is counted"
    assert all(0.5 <= ratio <= 1.5 for figure, ratio in ratios if figure == "s a step"), "time is estimated"
