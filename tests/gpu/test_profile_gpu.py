"""A profile on a GPU: kernels by phase, and the allocator's record by component."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trimtab.observe.profiling.profiler import ProcessProfiler, ProfileWindow
from trimtab.observe.profiling.request import ProfileRequest

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_kernels_and_memory_are_reduced(tmp_path: Path) -> None:
    device = torch.device("cuda")
    asked = ProfileRequest(1, 2)
    window = ProfileWindow(asked, ProcessProfiler(tmp_path, device, asked), 0, lambda text: None)
    for step in (1, 2):
        with window.phase("update"):
            held = torch.randn(4096, 4096, device=device)
            product = held @ held
        window.step_ended(step)
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {
        "kernels.json", "memory.json", "memory.pickle", "trace-rank-0.json.gz",
    }  # fmt: skip
    kernels = json.loads((tmp_path / "profile/kernels.json").read_text())
    assert {row["phase"] for row in kernels["kernels"]} == {"update"}
    assert sum(row["share"] for row in kernels["kernels"]) == pytest.approx(1, abs=1e-6)
    memory = json.loads((tmp_path / "profile/memory.json").read_text())
    assert memory["peak_bytes"] >= 2 * held.nbytes and memory["largest"][0]["bytes"] >= product.nbytes
    assert "test_profile_gpu.py" in memory["largest"][0]["where"]
