"""A line through two measured micro-batches, and what a plan makes of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_model

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.run import Run
from trimtab.model.policy import Policy
from trimtab.plan.activations import MicroBatchSize, update_peak
from trimtab.plan.devices import find_device
from trimtab.plan.job import NO_CORRECTION, Correction, Job, Machine
from trimtab.plan.ledger import GIB, MIB, update_path
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.run import calibrate as probing
from trimtab.run.calibrate import corrected, probe
from trimtab.run.shapes import shape_of_model
from trimtab.update.batch import MicroBatch
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater


def plan_of(run: Run, device: str = "a100-40") -> Plan:
    job = Job(read_shape(WELL_KNOWN["qwen2.5-1.5b"]), 2, 64, 8, 512, 512, 1024)
    return make_plan(run, job, Machine(find_device(device), 1, 256 * GIB, 16))


def test_more_than_counted_makes_micro_batches_smaller_or_recomputes() -> None:
    before = plan_of(Run())
    after = corrected(before, Run(), Correction(1.6, 512 * MIB))
    assert after.fits and after.job.correction.factor == 1.6
    assert after.ledger["update"].device_bytes <= after.limits.device
    assert after.run.token_budget < before.run.token_budget or after.run.checkpoint_activations is True
    said = {choice.key: choice for choice in after.choices}
    assert "measured" in said["run.token_budget"].why and said["run.token_budget"].value == after.run.token_budget


def test_what_is_built_stays() -> None:
    before = plan_of(Run())
    after = corrected(before, Run(), Correction(1.3, 0))
    assert (after.run.rollout, after.run.offload) == (before.run.rollout, before.run.offload)


def test_pinned_keys_stay() -> None:
    pinned = Run(token_budget=4096, checkpoint_activations=True)
    assert corrected(plan_of(pinned), pinned, Correction(1.2, 0)).run == plan_of(pinned).run


def test_a_line_that_was_counted_right_changes_nothing() -> None:
    before = plan_of(Run())
    assert corrected(before, Run(), NO_CORRECTION).run == before.run


def test_where_nothing_would_fit_the_plan_stays_and_the_guard_has_its_turn() -> None:
    before = plan_of(Run())
    after = corrected(before, Run(), Correction(2.9, 30 * GIB))
    assert after.run == before.run and after.job.correction.rest == 30 * GIB


def updater_of(budget: int) -> tuple[Updater, Job]:
    policy = Policy(tiny_model("llama", torch.float32, max_position_embeddings=8192))
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=budget,
        score_token_budget=budget,
        logprob_chunk=512,
        checkpoint_activations=False,
    )
    return updater, Job(shape_of_model(policy.model), 4, 4, 4, 64, 64, 256, fused=False, tiled_head=False)


RESOLVED = Run(token_budget=8192, logprob_chunk=512, checkpoint_activations=False)


def test_the_line_goes_through_both_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    updater, job = updater_of(8192)
    path = update_path(job, RESOLVED)

    def measured(updater: Updater, samples: list, device: torch.device) -> int:
        row = MicroBatchSize(*MicroBatch.build(samples, device).sizes)
        return int(1.25 * sum(update_peak(job.shape, row, path).values())) + 7 * MIB

    monkeypatch.setattr(probing, "_peak", measured)
    monkeypatch.setattr(probing, "_host_seconds", lambda *_: 0.05 * job.shape.layers)
    found = probe(updater, job, RESOLVED)
    assert found.launch_s == pytest.approx(0.05)
    assert found.factor == pytest.approx(1.25, rel=1e-6) and found.rest == pytest.approx(7 * MIB, abs=4)


@pytest.mark.parametrize("peaks", [[1, 1], [10**9, 1], [1, 10**12]])
def test_a_line_that_makes_no_sense_is_not_believed(monkeypatch: pytest.MonkeyPatch, peaks: list[int]) -> None:
    updater, job = updater_of(8192)
    monkeypatch.setattr(probing, "_peak", lambda *_: peaks.pop(0))
    found = probe(updater, job, RESOLVED)
    assert replace(found, launch_s=None) == NO_CORRECTION and found.launch_s is not None and found.launch_s > 0


@pytest.mark.parametrize("host", [1e-3, 2.6e-3, 3.3e-3, 6e-3])
def test_micro_batches_outlast_the_launching_that_was_measured(host: float) -> None:
    job = Job(read_shape(WELL_KNOWN["smollm2-135m"]), 2, 32, 16, 256, 256, 512)
    before = make_plan(Run(), job, Machine(find_device("h200"), 1, 256 * GIB, 16))
    after = corrected(before, Run(), Correction(launch_s=host))
    assert after.run.token_budget == (16384 if host < 2e-3 else 32768 if host < 3e-3 else 65536)
    assert after.times.update == pytest.approx(before.times.update, rel=0.35)
    grown = after.run.token_budget > before.run.token_budget
    assert after.run.checkpoint_activations == ("some" if grown else False)
    if grown:
        assert after.ledger.fullest.device_bytes < 1.1 * before.ledger.fullest.device_bytes
        why = {choice.key: (choice.value, choice.why) for choice in after.choices}
        assert why["run.checkpoint_activations"] == ("some", "measured with two micro-batches")
    pinned = Run(checkpoint_activations=False)
    alone = corrected(make_plan(pinned, job, before.machine), pinned, Correction(launch_s=host))
    assert alone.run.checkpoint_activations is False and alone.run.token_budget == after.run.token_budget


def test_memory_that_runs_out_on_the_way_is_no_reason_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    updater, job = updater_of(8192)

    def short(*_: object) -> int:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(probing, "_peak", short)
    assert probe(updater, job, RESOLVED) == NO_CORRECTION
    assert all(p.grad is None for p in updater.policy.parameters())


def test_too_small_a_budget_is_not_probed() -> None:
    updater, job = updater_of(200)
    assert probe(updater, job, RESOLVED.model_copy(update={"token_budget": 200})) == NO_CORRECTION


@pytest.mark.parametrize("prompt", [1024, 2048, pytest.param(5000, marks=pytest.mark.slow)])
def test_prompts_may_be_longer_than_the_probe(monkeypatch: pytest.MonkeyPatch, prompt: int) -> None:
    updater, job = updater_of(16384)
    job = replace(job, typical_prompt=prompt, longest_prompt=prompt)
    run = RESOLVED.model_copy(update={"token_budget": 16384})
    path = update_path(job, run)

    def measured(updater: Updater, samples: list, device: torch.device) -> int:
        return int(
            1.5 * sum(update_peak(job.shape, MicroBatchSize(*MicroBatch.build(samples, device).sizes), path).values())
        )

    monkeypatch.setattr(probing, "_peak", measured)
    assert probe(updater, job, run).factor == pytest.approx(1.5, rel=1e-6)
    assert probe(updater, job, run.model_copy(update={"token_budget": prompt + 50})) == NO_CORRECTION
