"""Fused layers with `run.shard: full`: two ranks that hold weights in parts have the gradient of one process's own modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes

from tests.cluster.sharded_steps import Case, steps_alone, updater
from tests.cluster.sharded_steps import samples as one_step
from tests.cluster.test_full import assert_close

pytest.importorskip("triton", reason="Triton is not installed")

from tests.cluster import fused_sharded_steps
from tests.cluster.fused_sharded_steps import ADAPTED, CASES, Fused, adapted
from trimtab.cluster.mesh import open_store
from trimtab.model import policy as policies
from trimtab.model.fused import FusedForward
from trimtab.model.policy import Policy

pytestmark = pytest.mark.timeout(400)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1e-2}
"""Of the largest value: other kernels; in half precision rows are packed otherwise."""


def fuse(policy: Policy) -> None:
    policy.fused_forward = FusedForward(policy)


def on_ranks(folder: Path, *names: str) -> list[Any]:
    """What two ranks find."""
    store = open_store()
    arguments = (store.port, folder, list(names))
    processes.start_processes(fused_sharded_steps.run_rank, arguments, nprocs=2, start_method="fork")
    return [torch.load(folder / f"{name}.pt", weights_only=False) for name in names]


def compare(case: Case, two: dict[str, Any]) -> None:
    """In half precision with fused layers of one process: the model's own modules round elsewhere."""
    half = case.dtype == torch.bfloat16
    one = steps_alone(case, Fused.count, fuse if half else lambda policy: None, more=0)
    assert two["said"] == "fused layers"
    assert_close(one["gradient"], two["gradient"], TOLERANCE[case.dtype])
    assert two["norms"] == pytest.approx(one["norms"], rel=10 * TOLERANCE[case.dtype])
    # Whole gradients of all layers would be what no device has room for.
    products = 4 * 2 + 1
    assert two["handed"] >= 2 * products and two["alive"] == 0


def test_gradient_and_norm_are_those_of_one_processes_own_modules(tmp_path: Path) -> None:
    """And its own modules serve where torch does not take what is handed over."""
    tied, lost = on_ranks(tmp_path, "tied", "lost")
    compare(CASES[0], tied)
    assert "fused layers hand over another gradient" in lost["said"] and not lost["fused"]
    assert_close(steps_alone(CASES[1], Fused.count)["gradient"], lost["gradient"], 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[1:], ids=lambda case: case.name)
def test_other_types_and_units_too(case: Case, tmp_path: Path) -> None:
    (two,) = on_ranks(tmp_path, case.name)
    compare(case, two)


@pytest.mark.slow
def test_adapters_have_the_gradient_and_can_be_switched_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (two,) = on_ranks(tmp_path, "adapters")
    policy = Policy(adapted(ADAPTED))
    alone = updater(policy)
    alone.accumulate(one_step(Fused.count))
    named = dict(policy.model.named_parameters())
    assert two["said"] == "fused layers"
    assert two["gradient"].keys() == {name for name in named if "lora" in name}
    assert_close({name: named[name].grad for name in two["gradient"]}, two["gradient"], TOLERANCE[torch.float32])
    with torch.no_grad(), policy.model.disable_adapter():
        monkeypatch.setattr(policies, "PROBE_LENGTHS", [3, 2])
        torch.testing.assert_close(two["without"], policy.probe(), atol=1e-4, rtol=0)
