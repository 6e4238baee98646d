"""Plans of several ranks: what each mode holds is what arithmetic says, what is chosen fits, and every choice has a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.test_planner import h, jobs, qwen
from trimtab.base.errors import ConfigError
from trimtab.config.run import Offload, Rollout, Run, Shard
from trimtab.plan.communication import BACKWARD_SHARE
from trimtab.plan.devices import find_device, nearest
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB, NCCL, NCCL_BYTES, build_ledger
from trimtab.plan.place import place_over
from trimtab.plan.placement import SHARDS, SHARDS_BUILT, Placement, device_counts, placements, unblocked_row
from trimtab.plan.planner import make_plan
from trimtab.plan.refusal import changes_that_fit, plan_devices
from trimtab.plan.report import as_dict
from trimtab.plan.shape import Block, ModelShape
from trimtab.plan.states import state_bytes
from trimtab.plan.times import _Clock, predict

EIGHT = Machine(find_device("h200"), 8, 2000 * GIB, 64)


def placed(shard: Shard, devices: int = 8, group: int | None = None) -> Placement:
    return Placement(devices, -(-devices // 8), shard, 1 if shard == "none" else group or min(devices, 8))


def why(plan: Any, key: str) -> str:
    return next(choice.why for choice in plan.choices if choice.key == key)


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("qwen2.5-7b", (137, 57, 30, 15)), ("qwen2.5-32b", (590, 246, 131, 66))]
)
def test_modes_hold_what_was_worked_out_by_hand(name: str, gigabytes: tuple[int, ...]) -> None:
    """Bytes a parameter on 8 devices: 18, 6 + 12/8, 2 + 16/8 and 16/8."""
    found = [state_bytes(qwen(name), placed(shard)) / 1e9 for shard in SHARDS]
    assert found == pytest.approx(gigabytes, abs=0.6)


@pytest.mark.parametrize("shard", SHARDS)
def test_the_ledger_has_what_a_mode_holds(shard: Shard) -> None:
    job = qwen("qwen2.5-7b")
    run = make_plan(Run(offload=Offload(optimizer=False)), job, EIGHT, place=placed("full")).run
    phase = build_ledger(job, EIGHT, run, placed(shard))["optimizer"]
    states = sum(phase.device.get(name, 0) for name in ("weights", "masters", "optimizer state", "gradients"))
    assert states == pytest.approx(state_bytes(job, placed(shard)), rel=1e-6)
    update = build_ledger(job, EIGHT, run, placed(shard))["update"].device
    assert ("gathered layers" in update) == (shard == "full")
    assert ("gradient buffers" in update) == (shard == "gradients")
    if shard == "gradients":
        assert update["gradient buffers"] == 2 * 4 * job.shape.table, "the embedding is the largest unit"
    assert update[NCCL] == NCCL_BYTES and NCCL not in make_plan(Run(), job, h(140)).ledger["update"].device
    rollout = build_ledger(job, EIGHT, run, placed(shard))["rollout"].device
    assert rollout.get("rollout weights", 0) == (2 * job.shape.parameters if shard == "full" else 0)


def test_adapters_stay_whole_and_only_full_cuts_what_is_frozen() -> None:
    job = qwen("qwen2.5-7b", rank=16, adapters=40_000_000)
    held = {shard: state_bytes(job, placed(shard)) for shard in SHARDS}
    assert held["none"] == held["optimizer"] == held["gradients"] == 2 * job.shape.parameters + 12 * job.adapters
    assert held["full"] == pytest.approx(2 * job.shape.parameters / 8 + 12 * job.adapters, rel=1e-6)
    assert {place.shard for place in placements(Run(), job, EIGHT, 8)} == {"none", "full"}
    plan = place_over(Run(), job, EIGHT)
    assert plan.place.shard == "none" and why(plan, "run.shard") == "adapters are small: each rank holds them whole"


@settings(max_examples=30)
@given(jobs(), st.sampled_from([2, 4, 8, 16]), st.sampled_from([0, 16]))
def test_modes_are_in_order_and_more_devices_hold_no_more_each(job: Job, devices: int, rank: int) -> None:
    job = replace(job, rank=rank, adapters=job.shape.lora_parameters(rank) if rank else 0, reference=False)
    held = [state_bytes(job, placed(shard, devices)) for shard in SHARDS]
    assert held == sorted(held, reverse=True)
    for shard in SHARDS:
        fewer, more = placed(shard, devices, devices), placed(shard, 2 * devices, 2 * devices)
        assert state_bytes(job, more) <= state_bytes(job, fewer)


@settings(max_examples=10, deadline=None)
@given(jobs(), st.sampled_from([2, 4, 8]), st.sampled_from(["auto", *SHARDS]), st.integers(8, 180), st.booleans())
def test_what_fits_is_within_its_limit_and_every_choice_has_a_reason(
    job: Job, devices: int, shard: Any, gib: int, cpu: bool
) -> None:
    machine = Machine(replace(find_device("h200"), memory=gib * GIB), devices, 512 * GIB, 16, cpu=cpu)
    run = Run(devices=devices, shard=shard)
    plan = place_over(run, job, machine)
    within = all(
        phase.required_bytes <= plan.limits.device and phase.host_bytes <= plan.limits.host
        for phase in plan.ledger.phases
    )
    assert plan.fits == within and all(choice.why for choice in plan.choices)
    assert plan.run.devices == devices and (shard == "auto" or plan.run.shard == shard)
    assert devices % plan.run.shard_devices == 0 and plan.run.threads == max(1, 16 // devices)
    assert min(plan.times.as_dict().values()) >= 0
    assert plan.times.total == pytest.approx(
        sum(plan.times.as_dict().values()) - plan.times.as_dict()["total"], rel=1e-3
    )


def test_the_fastest_that_fits_is_chosen_and_the_simplest_of_those_near_it() -> None:
    small = place_over(Run(), qwen("qwen2.5-0.5b", prompts=256, completion=1024), EIGHT)
    assert small.place.shard == "none" and why(small, "run.shard") == "it fits whole: no gather needed"
    short = replace(EIGHT, device=find_device("a100-80"), host_memory=256 * GIB)
    seven = place_over(Run(), qwen("qwen2.5-7b"), short)
    assert seven.fits and seven.place.shard == "optimizer" and seven.run.shard_devices == 8
    assert why(seven, "run.shard") == "optimizer state of 7.6B parameters fits only in parts"
    large = place_over(Run(), qwen("qwen2.5-32b"), EIGHT)
    assert large.fits and large.place.shard == "full"
    assert place_over(Run(), qwen("qwen2.5-32b"), replace(EIGHT, here=True)).place.shard in SHARDS_BUILT


def test_numbers_of_devices() -> None:
    busy = place_over(Run(), qwen("qwen2.5-7b", prompts=128), EIGHT)
    assert busy.run.devices == 8 and "with 4 it would take" in why(busy, "run.devices")
    tiny = place_over(Run(), qwen("qwen2.5-0.5b", prompts=1, samples=2, completion=64), EIGHT)
    assert tiny.run.devices < 8 and why(tiny, "run.devices").startswith("8 would")
    assert device_counts(Run(), EIGHT) == [8, 4, 2, 1]
    assert device_counts(Run(), EIGHT.on(6)) == [6, 4, 3, 2, 1]
    assert device_counts(Run(devices=3), EIGHT) == [3]
    assert device_counts(Run(), replace(EIGHT, cpu=True)) == [1]
    assert device_counts(Run(shard="optimizer", shard_devices=4), EIGHT) == [8, 4]
    assert device_counts(Run(), EIGHT.on(32)) == [32, 16, 8, 4, 2, 1]


def test_ranks_of_a_cpu_share_its_memory_and_its_cores() -> None:
    machine = Machine(nearest("CPU", 64 * GIB), 1, 64 * GIB, 8, cpu=True)
    job = qwen("qwen2.5-0.5b", itemsize=4, fused=False)
    plans = [place_over(Run(devices=count, rollout=Rollout(max_sequences=4)), job, machine) for count in (1, 2, 4)]
    held = [plan.ledger["optimizer"].host["weights"] for plan in plans]
    assert held == [4 * job.shape.parameters * count for count in (1, 2, 4)]
    assert [plan.run.threads for plan in plans] == [8, 4, 2]
    assert plans[1].times.communication > 0 == plans[0].times.communication
    cut = place_over(Run(devices=4, shard="optimizer"), job, machine).ledger["optimizer"].host
    assert cut["optimizer state"] == pytest.approx(8 * job.shape.parameters, rel=1e-6), "a quarter on each of four"


def test_state_that_waits_on_the_host_is_counted_for_every_rank_of_it() -> None:
    job = qwen("qwen2.5-7b")
    away = Run(devices=8, offload=Offload(optimizer=True))
    whole, cut = (make_plan(away, job, EIGHT, place=placed(shard)) for shard in ("none", "optimizer"))
    assert whole.ledger["update"].host["optimizer state"] == 8 * 12 * job.shape.parameters
    assert cut.ledger["update"].host["optimizer state"] == pytest.approx(12 * job.shape.parameters, rel=1e-6)
    full = make_plan(away, job, EIGHT, place=placed("full"))
    assert full.ledger["update"].host["optimizer state"] == pytest.approx(8 * job.shape.parameters, rel=1e-6)
    assert full.ledger["update"].device["masters"] == pytest.approx(4 * job.shape.parameters / 8, rel=1e-6)


def test_slow_links_and_more_exchanges_take_longer() -> None:
    job = qwen("qwen2.5-7b")
    run = make_plan(Run(token_budget=4096, overlap=False), job, EIGHT, place=placed("gradients")).run
    waits = [predict(job, EIGHT, run, placed(shard)).communication for shard in SHARDS]
    assert waits[1] < waits[0] and waits[1] < waits[2] and waits[1] < waits[3]
    slow = replace(EIGHT, device=replace(EIGHT.device, link=32e9, link_kind="PCIe"))
    assert predict(job, slow, run, placed("optimizer")).communication > 5 * waits[1]
    card = nearest("NVIDIA A100 80GB PCIe", 79 * GIB)
    assert card.link_kind == "PCIe" and nearest("NVIDIA A100-SXM4-80GB", 79 * GIB).link_kind == "NVLink"


def test_a_backward_pass_hides_what_is_summed_beside_it() -> None:
    """Layers and head, as far as the pass is long enough; neither the embedding nor the gather of stepped weights."""
    job = qwen("qwen2.5-7b")
    plan = make_plan(Run(token_budget=4096), job, EIGHT, place=placed("optimizer"))
    run, apart = plan.run, plan.run.with_values({"overlap": False})
    assert (
        run.overlap is True and make_plan(Run(), replace(job, rank=8), EIGHT, place=placed("none")).run.overlap is False
    )
    for shard in ("none", "optimizer", "gradients"):
        hidden, whole = (predict(job, EIGHT, each, placed(shard)).communication for each in (run, apart))
        assert 0.25 * whole < hidden < 0.9 * whole, shard
    slow = replace(EIGHT, device=replace(EIGHT.device, link=1e9, link_kind="PCIe"))
    passes = job.epochs * BACKWARD_SHARE * _Clock(job, slow, run, placed("none"))._one_update().seconds
    hidden, whole = (predict(job, slow, each, placed("none")).communication for each in (run, apart))
    assert whole - hidden == pytest.approx(passes), "no more than the last pass takes"


REFUSED = {
    "more than there are": (Run(devices=9), EIGHT, {}, r"run\.devices: is 9, but the planned machine has 8 GPUs"),
    "parts of one": (Run(shard="optimizer"), EIGHT.on(1), {}, r"run\.shard: optimizer has no effect on one device"),
    "too many processes": (Run(devices=65), replace(EIGHT, cpu=True, cores=16), {}, r"16 cores: at most 4 processes each"),
    "sets that do not fit": (Run(shard_devices=3), EIGHT, {}, r"run\.shard_devices: 3 ranks hold one set"),
    "blocks": (Run(shard="full"), EIGHT, {"eight_bit": True}, r"model\.embed_tokens\.weight have 896"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(case: str) -> None:
    run, machine, more, words = REFUSED[case]
    with pytest.raises(ConfigError, match=words):
        plan_devices(run, qwen("qwen2.5-0.5b", **more), machine)


def test_8_bit_states_need_whole_blocks_under_full_and_auto_knows_it() -> None:
    assert unblocked_row(qwen("qwen2.5-7b", eight_bit=True)) is None and unblocked_row(qwen()) is None
    block = Block(32, 8, 128, 128, 27000, 10**9, 10**9)
    shape = ModelShape("llama", 4096, 32000, False, (block,) * 60)
    job = replace(qwen("qwen2.5-7b"), shape=shape, eight_bit=True)
    assert unblocked_row(job) == ("model.layers.0.mlp.down_proj.weight", 27000)
    assert "full" not in {place.shard for place in placements(Run(), job, EIGHT, 8)}


def test_a_refusal_offers_more_parts_and_says_what_they_save() -> None:
    machine = replace(EIGHT, device=find_device("a100-40"), host_memory=256 * GIB)
    job = qwen("qwen2.5-7b")
    words = [change for change, _ in changes_that_fit(job, machine, Run(devices=8, shard="optimizer"), "balanced")]
    assert any(word.startswith("run.shard: gradients, which saves 24.8 GiB on each device") for word in words)


def test_json_tells_of_devices(tmp_path: Any) -> None:
    found = as_dict(place_over(Run(), qwen("qwen2.5-7b", prompts=128), EIGHT))
    assert found["devices"] == 8 and found["shard"] in SHARDS and found["shard_devices"] in (1, 8)
    assert found["step_seconds"]["communication"] == pytest.approx(
        sum(found["communication_seconds"].values()), abs=1e-5
    )
