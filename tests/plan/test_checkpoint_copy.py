"""The copy of a checkpoint that is written behind the training is in the host's ledger, or is not made."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.plan.test_cases import known
from trimtab.config.run import Run
from trimtab.plan.devices import find_device, nearest
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import CHECKPOINT_COPY, GIB
from trimtab.plan.planner import make_plan

H200 = Machine(find_device("h200"), 1, 512 * GIB, 16)


def cpu(memory: int) -> Machine:
    return Machine(nearest("CPU", memory), 1, memory, 4, cpu=True)


def job(**settings: object) -> Job:
    return replace(known("qwen2.5-0.5b"), checkpoints=True, **settings)


def test_every_phase_of_training_has_it_and_it_is_all_that_is_saved() -> None:
    ledger = make_plan(Run(), job(), H200).ledger
    parameters = job().shape.parameters
    found = {phase.name: phase.host.get(CHECKPOINT_COPY, 0) for phase in ledger.phases}
    assert found.pop("load") == 0
    assert set(found.values()) == {parameters * (2 + 4 + 8)}, "weights, masters, moments"
    assert "staging" not in ledger["checkpoint"].host
    lora = make_plan(Run(), job(rank=16, adapters=10**6), H200).ledger
    assert lora["update"].host[CHECKPOINT_COPY] == 10**6 * (4 + 8)
    whole = make_plan(Run(), job(critic=job().shape), H200).ledger
    assert whole["update"].host[CHECKPOINT_COPY] == 2 * parameters * 14


def test_without_checkpoints_on_the_way_there_is_none() -> None:
    ledger = make_plan(Run(), replace(job(), checkpoints=False), H200).ledger
    assert all(CHECKPOINT_COPY not in phase.host for phase in ledger.phases)
    assert ledger["checkpoint"].host["staging"] == job().shape.parameters * 2, "weights; state passes through a buffer"


@pytest.mark.parametrize("gib", [4, 6, 8, 10, 12, 14, 16, 20, 24, 32, 48, 64])
def test_it_never_keeps_a_run_from_fitting(gib: int) -> None:
    small = job(itemsize=4)
    plan, without = (make_plan(Run(), each, cpu(gib * GIB)) for each in (small, replace(small, checkpoints=False)))
    assert plan.fits == without.fits
    if CHECKPOINT_COPY in plan.ledger["update"].host:
        assert plan.ledger["update"].host[CHECKPOINT_COPY] <= gib * GIB / 3


def test_a_host_without_room_for_it_has_none() -> None:
    plan = make_plan(Run(), job(), replace(H200, host_memory=16 * GIB))
    assert plan.fits and CHECKPOINT_COPY not in plan.ledger["checkpoint"].host
