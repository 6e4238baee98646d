"""Every auto is filled, nothing pinned is touched, whatever is chosen holds the work, and a plan that fits does. No device is
needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import ConfigError
from trimtab.config.learn import Learn
from trimtab.config.run import Offload, Rollout, Run
from trimtab.model.sizes import MAX_PIECE_ELEMENTS
from trimtab.model.weights import WeightStore
from trimtab.plan.devices import CATALOGUE, find_device, nearest, of_size
from trimtab.plan.job import NO_CORRECTION, Correction, Job, Machine
from trimtab.plan.kv import kv_bytes
from trimtab.plan.ledger import GIB, MIB, NOT_METERED, build_ledger
from trimtab.plan.place import place_over
from trimtab.plan.planner import PROFILES, Choice, Plan, make_plan
from trimtab.plan.refusal import changes_that_fit, plan_here, refuse
from trimtab.plan.shape import Block, ModelShape, read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.times import predict
from trimtab.run.calibrate import corrected
from trimtab.run.machine import pick_device, pick_reward_workers
from trimtab.update.optimizer import MasterAdamW


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    kv_heads, size = draw(st.sampled_from([1, 2, 8])), draw(st.sampled_from([16, 64, 128]))
    hidden, width = 8 * draw(st.integers(1, 1024)), draw(st.integers(8, 32768))
    heads = kv_heads * draw(st.sampled_from([1, 4, 8]))
    count = hidden * size * (2 * heads + 2 * kv_heads) + 3 * hidden * width
    block = Block(
        heads, kv_heads, size, size, width, count, count, head_norm=draw(st.booleans()), sandwich=draw(st.booleans())
    )
    shape = ModelShape(
        "llama", hidden, draw(st.integers(10, 300_000)), draw(st.booleans()), (block,) * draw(st.integers(1, 100))
    )
    prompt = draw(st.integers(1, 100_000))
    rank = draw(st.sampled_from([0, 16]))
    reference = draw(st.booleans()) and not rank
    return Job(
        shape=shape,
        itemsize=draw(st.sampled_from([2, 4])),
        prompts=draw(st.integers(1, 1024)),
        samples=draw(st.integers(1, 64)),
        longest_prompt=prompt,
        typical_prompt=draw(st.integers(1, prompt)),
        completion=draw(st.integers(1, 32_000)),
        eval_sequences=draw(st.sampled_from([0, 500])),
        eval_completion=draw(st.integers(1, 32_000)),
        rank=rank,
        adapters=shape.lora_parameters(rank) if rank else 0,
        reference=reference,
        eight_bit=draw(st.booleans()),
        compared=reference or draw(st.booleans()),
        fused=draw(st.booleans()),
        tiled_head=draw(st.booleans()),
    )


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    device = replace(of_size(draw(st.integers(GIB, 200 * GIB))), lends=draw(st.booleans()))
    return Machine(device, 1, draw(st.integers(GIB, 2000 * GIB)), draw(st.integers(1, 128)), cpu=draw(st.booleans()))


def pins() -> st.SearchStrategy[Run]:
    """Any set of pinned keys, large enough to hold every sequence."""

    def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.just("auto") | strategy

    sizes = st.integers(200_000, 10**6)
    switches = optional(st.booleans())
    return st.builds(
        Run,
        threads=optional(st.integers(1, 64)),
        engine=st.sampled_from(["auto", "native", "vllm", "sglang"]),
        token_budget=optional(sizes),
        score_token_budget=optional(sizes),
        logprob_chunk=optional(st.integers(1, 10**5)),
        checkpoint_activations=optional(st.sampled_from([True, False, "some"])),
        reward_workers=optional(st.integers(1, 64)),
        offload=st.builds(Offload, optimizer=switches, reference=switches, activations=switches),
        rollout=st.builds(
            Rollout,
            max_sequences=optional(st.integers(1, 4096)),
            kv_memory=optional(st.integers(2**50, 2**51)),
            prefill_tokens=optional(st.integers(1, 10**5)),
            page_tokens=optional(st.integers(1, 512)),
            lend_memory=switches,
        ),
    )


def flat(run: Run) -> dict[str, Any]:
    values = run.model_dump()
    for section in ("rollout", "offload"):
        values |= {f"{section}.{key}": value for key, value in values.pop(section).items()}
    return values


def test_every_profile_of_the_schema_has_a_share() -> None:
    assert set(get_args(Run.model_fields["profile"].annotation)) == set(PROFILES)


@given(pins(), jobs(), machines(), st.sampled_from(list(PROFILES)))
def test_every_auto_is_filled_and_explained_and_every_pin_stays(
    run: Run, job: Job, machine: Machine, profile: str
) -> None:
    plan = make_plan(run, job, machine, profile)
    asked, got = flat(run), flat(plan.run)
    assert "auto" not in got.values()
    explained = {choice.key.removeprefix("run."): choice.value for choice in plan.choices}
    for key, value in asked.items():
        if key in ("device", "cluster"):  # known before there is a plan
            continue
        if value == "auto":
            assert explained[key] == got[key]
        else:
            assert got[key] == value and key not in explained
    assert all(choice.why for choice in plan.choices)


@given(jobs(), machines(), st.sampled_from(list(PROFILES)))
def test_what_is_chosen_holds_the_longest_sequence(job: Job, machine: Machine, profile: str) -> None:
    run = make_plan(Run(), job, machine, profile).run
    assert run.token_budget >= job.longest_trained <= run.score_token_budget
    assert run.rollout.kv_memory >= kv_bytes(job, 1, job.longest_sequence, run.rollout.page_tokens)


@given(jobs(), machines(), st.sampled_from(list(PROFILES)))
def test_a_plan_that_fits_is_within_its_share_in_every_phase(job: Job, machine: Machine, profile: str) -> None:
    plan = make_plan(Run(), job, machine, profile)
    share = PROFILES[profile]
    within = all(
        phase.host_bytes <= (share if machine.cpu else 0.9) * machine.host_memory
        and phase.device_bytes <= share * machine.device.memory
        for phase in plan.ledger.phases
    )
    assert plan.fits == within


@given(jobs(), machines())
def test_sums_are_those_of_their_parts_and_nothing_is_negative(job: Job, machine: Machine) -> None:
    plan = make_plan(Run(), job, machine)
    for phase in plan.ledger.phases:
        assert all(size > 0 for size in phase.device.values()) and all(size >= 0 for size in phase.host.values())
        assert phase.allocated == phase.device_bytes - sum(phase.device.get(name, 0) for name in NOT_METERED)
    assert plan.times.total > 0 and min(plan.times.as_dict().values()) >= 0


@given(jobs(), st.integers(1, 200), st.integers(0, 100))
def test_more_memory_is_never_slower(job: Job, gib: int, more: int) -> None:
    small, large = (Machine(replace(find_device("h200"), memory=n * GIB), 1, 256 * GIB, 16) for n in (gib, gib + more))
    before, after = make_plan(Run(), job, small), make_plan(Run(), job, large)
    assert after.fits or not before.fits
    if before.fits:
        assert after.times.total <= 1.02 * before.times.total


def test_a_merged_copy_never_takes_the_room_of_sequences() -> None:
    """A model with adapters whose copy would just fit got half the KV cache that a smaller device had."""
    block = Block(32, 8, 64, 64, 29487, 456675280, 456675280)
    shape = ModelShape("llama", 4880, 50892, False, (block,) * 27)
    job = Job(shape, 4, 397, 52, 3381, 825, 10847, rank=16, adapters=shape.lora_parameters(16), compared=True)
    caches = []
    for gib in (139, 150, 156, 170, 200):
        plan = make_plan(Run(), job, Machine(replace(find_device("h200"), memory=gib * GIB), 1, 256 * GIB, 16))
        assert plan.fits
        caches.append(plan.run.rollout.kv_memory)
    assert caches == sorted(caches)


def engine_of(plan: Plan) -> Choice:
    return next(choice for choice in plan.choices if choice.key == "run.engine")


def qwen(name: str = "qwen2.5-0.5b", **settings: Any) -> Job:
    usual = {
        "itemsize": 2,
        "prompts": 32,
        "samples": 16,
        "longest_prompt": 256,
        "typical_prompt": 256,
        "completion": 512,
    }
    return Job(read_shape(WELL_KNOWN[name]), **usual | settings)


def h(gib: float, **settings: Any) -> Machine:
    return Machine(replace(find_device("h200"), memory=int(gib * GIB)), 1, 256 * GIB, 16, **settings)


def test_states_are_counted_to_the_byte() -> None:
    """Full training in bfloat16: 2 bytes of weights, 4 of masters, 8 of moments, 4 of gradients for each parameter."""
    plan = make_plan(Run(), qwen(), h(140))
    count = read_shape(WELL_KNOWN["qwen2.5-0.5b"]).parameters
    update = plan.ledger["update"].device
    assert [update[k] for k in ("weights", "masters", "optimizer state", "gradients")] == [
        2 * count,
        4 * count,
        8 * count,
        4 * count,
    ]
    assert "gradients" not in plan.ledger["rollout"].device and "KV cache" not in update
    adapters = qwen().shape.lora_parameters(16)
    light = make_plan(Run(), qwen(rank=16, adapters=adapters), h(140)).ledger["update"].device
    assert light["gradients"] == 4 * adapters and light["optimizer state"] == 8 * adapters and "masters" not in light


def test_a_gpu_gets_micro_batches_that_outlast_their_launches() -> None:
    """Budgets that the H200 was measured with: 32k tokens for SmolLM2-135M, 16k for wider models."""
    assert make_plan(Run(), qwen("smollm2-135m"), h(140)).run.token_budget == 32768
    assert make_plan(Run(), qwen("qwen2.5-1.5b"), h(140)).run.token_budget == 16384


def test_memory_is_saved_only_where_room_is_short() -> None:
    """As memory shrinks: nothing, then recomputing or waiting on the host, then refusal; and a step never gets faster."""
    plans = [make_plan(Run(), qwen("qwen2.5-1.5b"), h(gib)) for gib in (140, 80, 40, 24, 16, 12, 6)]
    first = plans[0].run
    assert first.checkpoint_activations is False and not first.offload.optimizer
    savings = [
        plan.run.checkpoint_activations is not False or plan.run.offload.optimizer for plan in plans if plan.fits
    ]
    assert savings == sorted(savings) and savings[-1]
    times = [plan.times.total for plan in plans if plan.fits]
    assert times == sorted(times)
    assert not plans[-1].fits


def test_memory_is_lent_where_it_can_be() -> None:
    plan = make_plan(Run(), qwen(), h(40))
    assert plan.run.rollout.lend_memory is True
    fixed = replace(h(40), device=replace(h(40).device, lends=False))
    kept = make_plan(Run(), qwen(), fixed)
    assert (
        kept.run.rollout.lend_memory is False and kept.ledger["update"].device["KV cache"] == kept.run.rollout.kv_memory
    )


def test_what_is_pinned_has_to_fit() -> None:
    plan = make_plan(Run(token_budget=10**6), qwen(), h(24))
    assert not plan.fits and plan.ledger.fullest.name == "update"


def test_refusals_name_the_binding_term_and_changes_that_fit() -> None:
    run = Run(token_budget=10**6, checkpoint_activations=False)
    message = str(refuse(make_plan(run, qwen(), h(24)), run, "balanced"))
    assert "update does not fit" in message and "activations" in message and "leave run.token_budget to auto" in message
    machine = h(40)
    plan = make_plan(Run(), qwen("qwen2.5-7b"), machine)
    assert not plan.fits
    message = str(refuse(plan, Run(), "balanced"))
    assert "model.lora: {r: 16}" in message and "gradients" in message
    for words, _ in changes_that_fit(qwen("qwen2.5-7b"), machine, Run(), "balanced"):
        assert "max_new_tokens" not in words  # shorter completions would not help here
    long = qwen("qwen2.5-7b", completion=400_000, rank=16, adapters=qwen("qwen2.5-7b").shape.lora_parameters(16))
    assert any("max_new_tokens" in words for words, _ in changes_that_fit(long, h(40), Run(), "balanced"))


def test_a_run_that_cannot_fit_does_not_start() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 46\.6 GiB, and the limit is 23\.0 GiB \(96 % of 24\.0 GiB; run\.profile max\)"
    ):
        plan_here(Run(), qwen("qwen2.5-7b"), h(24))
    tight = next(gib for gib in range(8, 40) if make_plan(Run(), qwen("qwen2.5-1.5b"), h(gib), "max").fits)
    assert plan_here(Run(profile="safe"), qwen("qwen2.5-1.5b"), h(tight)).fits


def test_a_pinned_cache_that_holds_no_sequence_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot hold one sequence of 768 tokens"):
        plan_here(Run(rollout=Rollout(kv_memory=1000)), qwen(), h(80))


def test_devices_share_states() -> None:
    one, eight = (place_over(Run(), qwen("qwen2.5-7b"), replace(h(40), devices=n)) for n in (1, 8))
    assert not one.fits and eight.fits
    state = eight.ledger["optimizer"].device["optimizer state"]
    assert state == pytest.approx(8 * qwen("qwen2.5-7b").shape.parameters / 8, rel=1e-6)
    assert predict(qwen("qwen2.5-7b"), eight.machine, eight.run, eight.place).communication > 0


def test_pieces_on_the_way_of_a_small_model_are_of_its_largest_unit() -> None:
    job = qwen()
    small = replace(job, shape=replace(job.shape, vocabulary=1000, blocks=job.shape.blocks[:2]))
    found = build_ledger(small, h(140), make_plan(Run(offload=Offload(optimizer=True)), small, h(140)).run)
    largest = max(small.shape.table, small.shape.blocks[0].parameters)
    assert largest < MAX_PIECE_ELEMENTS
    assert found["optimizer"].device["pieces on the way"] == 3 * largest * (8 + 4)


def test_what_waits_on_the_host_is_counted_there() -> None:
    job = qwen("qwen2.5-7b", fused=True)
    run = make_plan(Run(offload=Offload(optimizer=True)), job, h(140)).run
    ledger = build_ledger(job, h(140), run)
    assert ledger["update"].host["optimizer state"] == 12 * job.shape.parameters
    assert "optimizer state" not in ledger["update"].device and ledger["optimizer"].device["pieces on the way"] > 0


@pytest.mark.parametrize("itemsize", [2, 4])
def test_moments_of_8_bits_are_counted_with_their_scales(itemsize: int) -> None:
    """A byte each and four for every 256, against the optimizer itself; on the host where they wait there."""
    job, one = qwen("qwen2.5-0.5b", itemsize=itemsize, eight_bit=True), 2 + 8 / 256
    count = job.shape.parameters
    found = build_ledger(job, h(140), make_plan(Run(), job, h(140)).run)
    assert found["optimizer"].device["optimizer state"] == pytest.approx(one * count, rel=1e-6)
    assert found["optimizer"].device.get("masters", 0) == (4 * count if itemsize == 2 else 0)
    assert found["optimizer"].device["moments in full"] == 2**22 * 16
    away = build_ledger(job, h(140), make_plan(Run(offload=Offload(optimizer=True)), job, h(140)).run)
    assert away["update"].host["optimizer state"] == pytest.approx(
        (one + (4 if itemsize == 2 else 0)) * count, rel=1e-6
    )
    assert away["optimizer"].device["pieces on the way"] == 3 * 2**26 * (6 + 8 / 256)
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    named = [("a", torch.nn.Parameter(torch.zeros(300, 1000, dtype=dtype)))]
    small = MasterAdamW(WeightStore(named), Learn(optimizer={"states": "8bit"}))
    assert small.state_bytes == pytest.approx(300_000 * (one + (4 if itemsize == 2 else 0)), rel=1e-3)


def test_moments_of_8_bits_are_offered_where_nothing_else_of_run_is_left() -> None:
    """In float32 on a CPU, where nothing can wait elsewhere."""
    job = qwen("qwen2.5-0.5b", itemsize=4, fused=False, tiled_head=False)
    roomy = Machine(nearest("CPU", 512 * GIB), 1, 512 * GIB, 1, cpu=True)
    tight = Run(token_budget=768, score_token_budget=768, logprob_chunk=1, checkpoint_activations=True)
    need = make_plan(tight, job, roomy).ledger["optimizer"].host_bytes
    short = replace(roomy, host_memory=need)
    words = [change for change, _ in changes_that_fit(job, short, Run(), "balanced")]
    assert "learn.optimizer.states: 8bit" in words


@pytest.mark.parametrize(
    "name",
    [
        "H200",
        "h200",
        "NVIDIA H200",
        "RTX 4090",
        "4090",
        "A100 40GB",
        "a100-80",
        "MI300X",
        "NVIDIA A100-SXM4-80GB",
        "H100 80GB",
    ],
)
def test_devices_are_found_by_their_letters(name: str) -> None:
    assert find_device(name).memory > 10 * GIB


def test_unknown_devices_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean h100"):
        find_device("h10")
    assert find_device("a100-40", 20 * GIB).memory == 20 * GIB
    assert nearest("NVIDIA A100-SXM4-40GB", 39 * GIB).flops == CATALOGUE["a100-40"].flops
    assert nearest("Some new card", 100 * GIB).name == "Some new card"


@pytest.mark.parametrize(
    ("name", "total", "entry"),
    [
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 79, "a100-80"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40"),
        ("NVIDIA A10G", 22, "a10"),
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA L4", 22, "l4"),
        ("Tesla T4", 15, "t4"),
        ("Tesla V100-SXM2-32GB", 32, "v100"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA GH200 480GB", 95, "h200"),
        ("NVIDIA B200", 178, "b200"),
        ("AMD Instinct MI300X", 192, "mi300x"),
    ],
)
def test_a_device_has_its_own_rates_however_little_of_it_is_free(name: str, total: int, entry: str) -> None:
    for memory in (total, 12):
        found = nearest(name, memory * GIB, total * GIB)
        assert (found.flops, found.bandwidth) == (CATALOGUE[entry].flops, CATALOGUE[entry].bandwidth)
        assert (found.name, found.memory) == (name, memory * GIB)


@pytest.mark.parametrize("name", ["NVIDIA L40", "NVIDIA T400 4GB", "NVIDIA H2000", "NVIDIA A1000"])
def test_a_device_is_not_taken_for_one_whose_name_begins_alike(name: str) -> None:
    assert nearest(name, 12 * GIB, 40 * GIB).flops == of_size(40 * GIB).flops


def test_a_missing_device_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert pick_device(Run()).type == "cpu"
    with pytest.raises(ConfigError, match="torch sees no CUDA device"):
        pick_device(Run(device="cuda"))


def test_reward_workers_are_the_number_that_is_reported() -> None:
    from trimtab.run.machine import physical_cores

    machine = replace(h(80), cores=physical_cores())
    assert make_plan(Run(), qwen(), machine).run.reward_workers == pick_reward_workers(Run())


def test_a_cpu_is_one_memory() -> None:
    tiny = ModelShape("llama", 64, 100, True, (Block(4, 2, 16, 16, 128, 40_000, 40_000),) * 2)
    job = Job(tiny, 4, 8, 4, 20, 20, 16, fused=False, tiled_head=False)
    machine = Machine(of_size(16 * GIB), 1, 8 * GIB, 2, cpu=True)
    plan = make_plan(Run(), job, machine)
    assert plan.fits and plan.ledger.fullest.device_bytes == 0 and not plan.run.rollout.lend_memory
    assert plan.run.rollout.page_tokens == 36  # one page a sequence
    assert plan.ledger["update"].host["gradients"] == 4 * tiny.parameters
    assert plan.run.rollout.kv_memory < 100 * MIB


@given(jobs(), st.integers(1, 100_000), st.integers(0, 100_000))
def test_a_larger_micro_batch_has_more_of_everything(job: Job, budget: int, more: int) -> None:
    small, large = job.row(budget), job.row(2 * budget + more)
    assert small.tokens >= budget and small.pairs > 0
    assert all(getattr(small, name) <= getattr(large, name) for name in ("tokens", "predicted", "seen", "pairs"))


def test_scores_of_attention_without_a_kernel_are_planned_for() -> None:
    """Soft-capped attention keeps them for every pair of a query and a key."""
    plain = qwen("qwen2.5-1.5b", samples=8)
    capped = replace(
        plain, shape=replace(plain.shape, blocks=tuple(replace(b, dense=True) for b in plain.shape.blocks))
    )
    run = make_plan(Run(checkpoint_activations=False), plain, h(80)).run
    kept = [build_ledger(job, h(80), run)["update"].device["activations"] for job in (plain, capped)]
    assert kept[1] > 1.1 * kept[0]


def test_long_evaluations_do_not_make_the_update_larger() -> None:
    usual, long = (
        make_plan(Run(), qwen("qwen2.5-1.5b", eval_sequences=8, eval_completion=n), h(24)) for n in (512, 32768)
    )
    assert usual.fits and long.fits and long.run.token_budget == usual.run.token_budget
    assert long.run.rollout.kv_memory >= kv_bytes(long.job, 1, long.job.longest_sequence, 64)


def test_a_short_host_is_named_and_more_of_it_offered() -> None:
    machine = replace(h(80), host_memory=8 * GIB)
    plan = make_plan(Run(), qwen("qwen2.5-7b", rank=16, adapters=qwen("qwen2.5-7b").shape.lora_parameters(16)), machine)
    message = str(refuse(plan, Run(), "balanced"))
    what, fixes = message.split("Any one of these changes would fit")
    assert (
        not plan.fits
        and "of host memory, and the limit is 7.2 GiB (90 % of 8.0 GiB). Bottleneck: " in what
        and "GiB of host memory" in fixes
    )


def test_a_critic_is_counted_with_its_own_gradients_and_passes() -> None:
    alone = make_plan(Run(token_budget=8192), qwen("qwen2.5-0.5b"), h(140))
    shape = qwen("qwen2.5-0.5b").shape
    with_one = make_plan(Run(token_budget=8192), replace(qwen("qwen2.5-0.5b"), critic=shape), h(140))
    more = with_one.ledger["update"].allocated - alone.ledger["update"].allocated
    assert more == pytest.approx(
        14 * shape.parameters, rel=0.02
    )  # weights, masters and moments; one set of gradients at a time
    assert with_one.ledger["load"].device["critic"] == 2 * shape.parameters
    assert "activations" in with_one.ledger["score"].device and with_one.times.update > 1.9 * alone.times.update
    large = replace(qwen("qwen2.5-0.5b"), critic=qwen("qwen2.5-7b").shape)
    assert not make_plan(Run(), large, h(40)).fits
    assert make_plan(Run(), large, h(180)).ledger["update"].device["gradients"] == 4 * large.critic.parameters


def test_a_run_that_generates_nothing_has_no_cache() -> None:
    job = replace(qwen("qwen2.5-0.5b"), generates=False)
    pinned = Run(rollout={"kv_memory": "100GiB"})
    assert (
        make_plan(pinned, job, h(140)).ledger.fullest.device_bytes
        == make_plan(Run(), job, h(140)).ledger.fullest.device_bytes
    )


def test_the_engine_is_told_after_what_it_runs_with() -> None:
    keys = [choice.key for choice in make_plan(Run(), qwen(), h(140)).choices]
    assert keys[:9] == [
        *(
            "run.devices",
            "run.shard",
            "run.shard_devices",
            "run.sequence_parallel",
            "run.tensor_parallel",
            "run.prefetch",
            "run.overlap",
            "run.placement",
            "run.rollout.tensor_parallel",
        ),
    ]
    at = keys.index("run.engine")
    rollout = [key.startswith("run.rollout.") for key in keys]
    assert rollout == [*[False] * 8, *[True] * (at - 8), *[False] * (len(keys) - at)]


def test_the_native_engine_has_no_processes_whatever_is_pinned() -> None:
    one, four = (
        make_plan(Run(engine="native", rollout=Rollout(processes=count)), qwen(), h(140)).ledger for count in (1, 4)
    )
    assert one == four
    kv = kv_bytes(qwen(), 1, qwen().longest_sequence, 64)
    assert plan_here(Run(engine="native", rollout=Rollout(processes=4, kv_memory=kv)), qwen(), h(140)).fits


def test_an_engine_is_chosen_where_everything_else_is_pinned() -> None:
    pinned = Rollout(
        max_sequences=64, kv_memory=4 * GIB, prefill_tokens=4096, page_tokens=64, lend_memory=True, processes=1
    )
    plan = make_plan(Run(rollout=pinned), qwen(), Machine(find_device("h200"), 1, 256 * GIB, 16))
    assert engine_of(plan).value == "native"


def test_the_cache_holds_as_many_sequences_as_run_at_once() -> None:
    whole, few = (
        make_plan(Run(rollout=Rollout(max_sequences=count)), qwen(), h(140)) for count in (qwen().in_flight, 32)
    )
    assert few.run.rollout.kv_memory == pytest.approx(whole.run.rollout.kv_memory * 32 / qwen().in_flight, rel=0.02)
    why = [next(c.why for c in plan.choices if c.key == "run.rollout.kv_memory") for plan in (whole, few)]
    assert why == ["holds all sequences of a step", "holds all sequences that run at once"]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("pinned", [Run(offload=Offload(activations=True)), Run()])
def test_activations_wait_on_the_host_only_where_layers_keep_their_inputs_alone(fused: bool, pinned: Run) -> None:
    """Also after a plan was corrected, which then has its offloading as if it were pinned."""
    job = qwen("qwen2.5-7b", rank=16, adapters=10**7, fused=fused, prompts=16, samples=8, completion=30000)
    seen = set()
    for gib in (24, 32, 40, 140):
        plan = make_plan(pinned, job, h(gib))
        for found in (plan, corrected(plan, pinned, NO_CORRECTION), corrected(plan, pinned, Correction(0.6, 0))):
            away = found.run.offload.activations
            seen.add(away)
            assert not away or found.run.checkpoint_activations is True
    assert True in seen
