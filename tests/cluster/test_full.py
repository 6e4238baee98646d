"""`run.shard: full`: two ranks that hold weights in parts compute what one process does, and read and write what it does.

Whole runs are in tests/invariants/test_ranks.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as processes
from transformers import AutoModelForCausalLM

from tests.cluster import sharded_steps
from tests.cluster.sharded_steps import CASES, Case, model_of, samples, steps_alone, updater
from trimtab.cluster.mesh import open_store
from trimtab.model.policy import Policy
from trimtab.record.checkpoint import RunState, load_optimizer
from trimtab.record.saving import save_checkpoint

HALF = CASES[3]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Of the largest value: sums over ranks and micro-batches in another order; in half precision rows are packed otherwise, too."""


@pytest.fixture(scope="module")
def alone_saved() -> Any:
    """One process's policy after one step and after two, and how to save it."""
    policy = Policy(model_of(HALF))
    return updater(policy)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any, alone_saved: Any) -> Path:
    """The folder that ranks wrote into."""
    folder = tmp_path_factory.mktemp("full")
    alone_saved.step(samples(), 1e-2)
    (folder / "alone").mkdir()
    save_checkpoint(
        folder / "alone", RunState(step=1), alone_saved.policy.model, tokenizer, alone_saved.optimizer, keep=1
    )
    store = open_store()
    processes.start_processes(sharded_steps.run_rank, (store.port, folder), nprocs=2, start_method="fork")
    alone_saved.step(samples(), 1e-2)
    return folder


def read(file: Path) -> Any:
    return torch.load(file, weights_only=False)


def assert_close(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys()
    scale = max(float(value.abs().max()) for value in one.values())
    for name, value in one.items():
        apart = float((value.double() - two[name].double()).abs().max())
        assert apart <= tolerance * scale, f"{name}: {apart / scale:.2g}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gradient_norm_and_weights_are_one_processes(case: Case, found: Path) -> None:
    one, two = steps_alone(case), read(found / f"{case.name}.pt")
    assert_close(one["gradient"], two["gradient"], TOLERANCE[case.dtype])
    # A delta rule multiplies: what is rounding in the first step has grown by the third.
    later = 1e-2 if case.name == "states" else 10 * TOLERANCE[case.dtype]
    assert two["norms"] == pytest.approx(one["norms"], rel=later)
    assert {name: w.dtype for name, w in one["weights"].items()} == {n: w.dtype for n, w in two["weights"].items()}
    assert_close(one["weights"], two["weights"], later)


def test_one_process_goes_on_from_a_checkpoint_of_ranks(found: Path) -> None:
    saved = found / "checkpoints" / "step-1"
    alone = updater(Policy(AutoModelForCausalLM.from_pretrained(saved, dtype=HALF.dtype)))
    load_optimizer(saved, alone.optimizer)
    alone.step(samples(), 1e-2)
    weights = {name: p.detach() for name, p in alone.policy.model.named_parameters()}
    assert_close(read(found / "went_on.pt"), weights, TOLERANCE[HALF.dtype])


def test_ranks_go_on_from_a_checkpoint_of_one_process(found: Path, alone_saved: Any) -> None:
    weights = {name: p.detach() for name, p in alone_saved.policy.model.named_parameters()}
    assert_close(weights, read(found / "resumed.pt"), TOLERANCE[HALF.dtype])


def test_a_step_that_one_rank_broke_off_is_repeated_with_the_same_gradient(found: Path) -> None:
    one, two = read(found / "untied.pt")["gradient"], read(found / "broken_off.pt")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_8_bit_state_is_refused_where_a_row_cuts_a_block(found: Path) -> None:
    assert "multiples of 256" in read(found / "refused.pt")
