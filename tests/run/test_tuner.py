"""The tuner finds the fastest size that fits, keeps it, and a later run of the same starts with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import tiny_model
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.run import Rollout, Run
from trimtab.model.policy import Policy
from trimtab.plan import cache
from trimtab.plan.devices import find_device
from trimtab.plan.governor import Governor, Move
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB, build_ledger
from trimtab.plan.planner import make_plan
from trimtab.plan.refusal import plan_here, planned
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.times import predict
from trimtab.plan.trials import Trial, Tuned
from trimtab.run.shapes import shape_of_model
from trimtab.run.tuner import climb, fastest, longest_samples, time_update
from trimtab.update.batch import MicroBatch
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater


@given(st.integers(1, 10**5), st.integers(1, 10**6), st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_single_peak_is_climbed(least: int, above: int, best: int, fits: int) -> None:
    """Rates that rise to one size and fall beyond it, in a memory that holds up to another."""
    start, most = least + above // 2, least + above
    fits = max(fits, least)

    def measure(value: int) -> Trial:
        return Trial("size", value, None if value > fits else min(value, best) / max(value, best))

    tried = climb(start, least, most, measure)
    chosen = fastest(tried)
    assert all(least <= trial.value <= most for trial in tried[1:])
    assert len({trial.value for trial in tried}) == len(tried)
    if any(trial.rate is not None for trial in tried):
        assert chosen <= fits
        rates = {trial.value: trial.rate for trial in tried if trial.rate is not None}
        assert rates[chosen] * 1.01 >= max(rates.values())
        tried_above = {trial.value // 2 for trial in tried if trial.rate is None}
        neighbours = [n for n in (2 * chosen, chosen // 2) if least <= n <= min(most, fits) and n]
        neighbours = [n for n in neighbours if n < chosen or chosen not in tried_above]  # an odd size's half, doubled
        assert all(measure(n).rate <= 1.02 * rates[chosen] for n in neighbours)


def test_of_equals_the_smallest_is_taken() -> None:
    assert fastest([Trial("x", 8, 1.0), Trial("x", 16, 1.005), Trial("x", 32, 1.009), Trial("x", 64, None)]) == 8
    assert fastest([Trial("x", 8, None), Trial("x", 4, None)]) == 4


def job() -> Job:
    return Job(shape_of_model(tiny_model("llama")), 4, 4, 3, 20, 20, 16, fused=False, tiled_head=False)


@given(st.integers(36, 400))
def test_rehearsals_fill_the_micro_batch_and_no_more(budget: int) -> None:
    batch = MicroBatch.build(list(longest_samples(job(), budget, 80)), torch.device("cpu"))
    samples = batch.samples
    prompts = {tuple(s.prompt_tokens) for s in samples}
    packed = sum(map(len, prompts)) + sum(len(s.tokens) for s in samples)
    assert budget - 20 <= packed <= budget


def updater_of_a_tiny_model() -> Updater:
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1))
    return Updater(
        Policy(tiny_model("llama")),
        PolicyGradient(learn),
        learn,
        token_budget=200,
        score_token_budget=200,
        logprob_chunk=32,
        checkpoint_activations=False,
    )


def test_a_try_changes_nothing_and_survives_running_out_of_memory(monkeypatch) -> None:
    updater = updater_of_a_tiny_model()
    before = [p.clone() for p in updater.policy.parameters()]
    trial = time_update(updater, job(), 100)
    assert trial.rate is not None and trial.rate > 0
    assert all(torch.equal(a, b) for a, b in zip(before, updater.policy.parameters()))
    assert all(grad is None for grad in updater.optimizer.grads())

    def fail(*_args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(updater, "rehearse", fail)
    assert time_update(updater, job(), 100).rate is None
    monkeypatch.setattr(updater, "rehearse", lambda samples: (_ for _ in ()).throw(RuntimeError("another error")))
    with pytest.raises(RuntimeError, match="another error"):
        time_update(updater, job(), 100)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch) -> Machine:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    return Machine(find_device("h200"), 1, 64 * GIB, 4)


def test_what_was_found_is_used_and_explained(machine: Machine) -> None:
    assert planned(Run(), job(), machine) == plan_here(Run(), job(), machine)
    cache.keep(Tuned(123, 7, (Trial("token_budget", 123, 1.0),)), job(), machine, Run(), "2026-11-15")
    plan = planned(Run(), job(), machine)
    assert plan.run.token_budget == 123 and plan.run.rollout.max_sequences == 7
    words = {choice.key: choice.why for choice in plan.choices}
    assert words["run.token_budget"] == "measured by trimtab tune on 2026-11-15" == words["run.rollout.max_sequences"]
    pinned = planned(Run(token_budget=99, rollout=Rollout(max_sequences=3)), job(), machine)
    assert pinned.run.token_budget == 99 and pinned.run.rollout.max_sequences == 3


def test_it_is_not_used_for_anything_else(machine: Machine) -> None:
    cache.keep(Tuned(123, 7, ()), job(), machine, Run(), "2026-11-15")
    others = [
        (replace(job(), completion=17), machine),
        (replace(job(), itemsize=2), machine),
        (job(), replace(machine, device=find_device("h100"))),
    ]
    assert all(cache.recall(other, place, Run()) is None for other, place in others)
    assert cache.recall(job(), machine, Run()) is not None
    assert cache.recall(job(), machine, Run(token_budget=99)) is not None  # the sizes themselves are what it is about
    assert cache.recall(job(), machine, Run(checkpoint_activations=True)) is None


def test_it_is_kept_for_runs_with_reward_models_too(machine: Machine) -> None:
    scored = replace(job(), reward_models=(job().shape,))
    cache.keep(Tuned(123, 7, ()), scored, machine, Run(), "2026-11-15")
    assert cache.recall(scored, machine, Run()) is not None and cache.recall(job(), machine, Run()) is None
    larger = replace(scored, reward_models=(read_shape(WELL_KNOWN["qwen2.5-0.5b"]),))
    assert cache.recall(larger, machine, Run()) is None


def test_it_is_used_as_long_as_the_same_engines_could_be_chosen(machine: Machine) -> None:
    """One that is named is the same whatever else is installed."""
    more = replace(machine, engines=("vllm",))
    for run in (Run(), Run(engine="native")):
        cache.keep(Tuned(123, 7, ()), job(), machine, run, "2026-11-15")
    assert cache.recall(job(), more, Run()) is None
    assert cache.recall(job(), more, Run(engine="native")) is not None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"token_budget": 123, "max_sequences": 7}',
        '{"token_budget": 1e999, "max_sequences": 1, "when": ""}',
        '{"token_budget": "x", "max_sequences": 1}',
        '{"token_budget": 1, "max_sequences": 1}',
    ],
)
def test_a_spoilt_file_is_as_none(machine: Machine, content: str) -> None:
    file = cache.keep(Tuned(123, 7, ()), job(), machine, Run(), "2026-11-15")
    file.write_text(content)
    assert planned(Run(), job(), machine).run == plan_here(Run(), job(), machine).run


def governed(gib: float, model: str = "qwen2.5-1.5b", completion: int = 512, **changes: Any) -> Governor:
    device = replace(find_device("h200"), memory=int(gib * GIB))
    work = replace(Job(read_shape(WELL_KNOWN[model]), 2, 32, 16, 256, 256, completion), **changes)
    plan = make_plan(Run(), work, Machine(device, 1, 256 * GIB, 16))
    return Governor(plan, automatic=True, may_recompute=True)


def seen(governor: Governor, peak: float, **changes: float) -> dict[str, float]:
    budget = float(governor.plan.run.token_budget)
    usual = {
        "run/token_budget": budget,
        "run/max_microbatch_tokens": budget,
        "run/microbatches": 9.0,
        "memory/update_peak_gib": peak,
    }
    return usual | changes


def now(governor: Governor) -> Move:
    assert isinstance(governor.plan.run.token_budget, int)
    return Move(governor.plan.run.token_budget, False)


def test_a_budget_is_raised_where_there_is_room_and_lowered_where_there_is_none() -> None:
    governor = governed(40)
    budget = governor.plan.run.token_budget
    assert budget < 16384
    raised = governor.next_move(seen(governor, 30.0), now(governor), None)
    assert raised is not None and budget < raised.budget <= 1.25 * budget and raised.recompute is False
    capped = governor.next_move(seen(governor, 30.0), now(governor), ceiling=int(1.2 * budget))
    assert capped is None or capped.budget <= int(0.9 * 1.2 * budget)
    lowered = governor.next_move(seen(governor, 39.9), now(governor), None)
    assert lowered is not None and lowered.budget < budget


def test_a_budget_stays_where_it_cannot_help() -> None:
    roomy, tight = governed(140), governed(40)
    budget = tight.plan.run.token_budget
    assert roomy.plan.run.token_budget == 16384
    assert roomy.next_move(seen(roomy, 60.0), now(roomy), None) is None  # larger ones gain nothing
    for metrics in (
        seen(tight, 30.0, **{"run/microbatches": 1.0}),  # all in one already
        seen(tight, 30.0, **{"run/max_microbatch_tokens": 100.0}),  # not filled
        {"run/token_budget": float(budget)},  # nothing was measured
    ):
        assert tight.next_move(metrics, now(tight), None) is None
    assert replace(tight, automatic=False).next_move(seen(tight, 30.0), now(tight), None) is None
    assert (
        tight.next_move(seen(tight, 30.0), Move(budget - 1000, False), None) is None
    )  # the guard has lowered it since


def test_a_device_that_waits_for_the_host_gets_larger_micro_batches() -> None:
    """Not after one step, which may have compiled something; and some activations are made again where that costs little."""
    governor = governed(140)
    waits, works = (seen(governor, 40.0, **{"run/device_behind": behind}) for behind in (0.02, 0.6))
    assert governor.next_move(waits, now(governor), None) is None
    assert governor.next_move(works, now(governor), None) is None
    assert governor.next_move(waits, now(governor), None) is None
    moved = governor.next_move(waits, now(governor), None)
    assert moved is not None and moved.budget == 2 * 16384
    at_the_widest = Move(65536, False)
    widest = waits | {"run/token_budget": 65536.0, "run/max_microbatch_tokens": 65536.0}
    assert all(governor.next_move(widest, at_the_widest, None) is None for _ in range(3))


def test_a_device_is_not_taken_to_wait_where_nothing_says_so() -> None:
    """Nor is what it said before the last change, nor where every update is one micro-batch already."""
    governor = governed(140)
    unknown = seen(governor, 40.0)
    waits = unknown | {"run/device_behind": 0.02}
    assert all(governor.next_move(unknown, now(governor), None) is None for _ in range(4))
    several = replace(governor, updates=9)
    assert all(several.next_move(waits, now(several), None) is None for _ in range(4))
    moves = [governor.next_move(waits, now(governor), None) is not None for _ in range(6)]
    assert moves == [False, True, False, True, False, True]


def test_a_device_that_waits_gets_no_more_than_fits() -> None:
    """Twice as much at most; less where a peak was near the limit, or a size has run out of memory."""
    governor = replace(governed(140), may_recompute=False)
    limit, states = governor._limit, governor._states
    near = seen(governor, states + (limit - states) / 1.5, **{"run/device_behind": 0.0})
    first, moved = (governor.next_move(near, now(governor), None) for _ in range(2))
    assert first is None and moved is not None and 1.3 * 16384 < moved.budget < 1.5 * 16384
    below = [governor.next_move(near, now(governor), ceiling=20_000) for _ in range(2)][1]
    assert below is not None and below.budget == 18_000


def test_activations_are_made_again_only_where_they_may_and_where_what_is_left_fits() -> None:
    """Twice as many tokens then take no more memory than so many did."""

    def after_waiting(governor: Governor) -> Move | None:
        peak = governor.plan.ledger["update"].allocated / GIB
        waits = seen(governor, peak, **{"run/device_behind": 0.0})
        return [governor.next_move(waits, now(governor), None) for _ in range(2)][1]

    roomy = governed(24, "smollm2-135m", completion=2048)
    assert now(roomy).budget == 32768 and after_waiting(roomy) == Move(65536, "some")
    wider = governed(24, "qwen2.5-0.5b", completion=8192)
    assert now(wider).budget == 16384 and after_waiting(wider) == Move(32768, "some"), "judged by what is next"
    others = (
        replace(governed(24, "smollm2-135m", completion=2048), may_recompute=False),
        governed(16, "smollm2-135m", completion=2048),
        governed(80, "smollm2-135m", completion=2048, fused=False),
    )
    for governor in others:
        assert governor.plan.run.checkpoint_activations is False
        moved = after_waiting(governor)
        assert moved is None or moved.recompute is False


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"])
def test_recomputing_for_the_sake_of_launching_is_cheap_and_takes_no_more_memory(model: str) -> None:
    governor = governed(140, model)
    plan, start = governor.plan, now(governor)
    waits = seen(governor, plan.ledger["update"].allocated / GIB, **{"run/device_behind": 0.0})
    moves = [governor.next_move(waits, start, None) for _ in range(2)]
    moved = moves[1]
    assert moves[0] is None and moved is not None and moved.budget > start.budget

    def at(kept: bool | str) -> Run:
        return plan.run.model_copy(update={"token_budget": moved.budget, "checkpoint_activations": kept})

    def memory(run: Run) -> int:
        return build_ledger(plan.job, plan.machine, run, plan.place)["update"].device_bytes

    longer = predict(plan.job, plan.machine, at("some")).total / predict(plan.job, plan.machine, at(False)).total
    if moved.recompute == "some":
        assert longer <= 1.05 and memory(at("some")) <= 1.1 * plan.ledger.fullest.device_bytes
    else:
        assert moved.recompute is False and memory(at(False)) <= plan.limits.device
    pinned = replace(governor, may_recompute=False)
    assert [pinned.next_move(waits, start, None) for _ in range(2)][1].recompute is False  # type: ignore[union-attr]
