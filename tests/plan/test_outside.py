"""Plans with another library's engine: what it needs, how many processes it gets, when it is chosen, what it is refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.plan.test_planner import engine_of, h, qwen
from trimtab.base.errors import ConfigError
from trimtab.config.run import Rollout, Run
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.kv import kv_bytes
from trimtab.plan.ledger import (
    ALLOCATOR_SLACK_SHARE,
    ASLEEP,
    AWAKE,
    CUDA_PROCESS_HOST_BYTES,
    ENGINE,
    GIB,
    build_ledger,
)
from trimtab.plan.place import place_over
from trimtab.plan.placement import Placement, device_counts
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.refusal import plan_here, refuse_uneven_cut
from trimtab.plan.refuse_devices import refuse_devices
from trimtab.plan.shape import read_shape
from trimtab.plan.source import WELL_KNOWN
from trimtab.plan.times import outside_step
from trimtab.rollout.external.messages import EngineSetup
from trimtab.rollout.external.sglang.arguments import least_kv_tokens


def test_vllm_has_weights_and_a_context_of_its_own() -> None:
    job, machine = qwen(), Machine(find_device("h200"), 1, 256 * GIB, 16)
    one = Rollout(processes=1, page_tokens=16, kv_memory=8 * GIB)
    native, vllm = (make_plan(Run(engine=engine, rollout=one), job, machine) for engine in ("native", "vllm"))
    weights = job.shape.parameters * job.itemsize
    kv = vllm.run.rollout.kv_memory
    for phase, more in (
        ("rollout", ASLEEP + AWAKE + weights),
        ("update", ASLEEP),
        *((phase, ASLEEP + weights + kv) for phase in ("publish", "checkpoint", "export")),
    ):
        found = vllm.ledger[phase].device_bytes - native.ledger[phase].device_bytes
        assert found == pytest.approx(more, rel=0.1), phase
    assert vllm.ledger["rollout"].host_bytes >= native.ledger["rollout"].host_bytes + CUDA_PROCESS_HOST_BYTES
    assert vllm.ledger["rollout"].allocated < weights * 10, "another process is not what torch's meter sees"
    kept = make_plan(Run(engine="vllm", rollout=Rollout(lend_memory=False)), job, machine)
    assert kept.ledger["update"].device[ENGINE] >= weights + kept.run.rollout.kv_memory
    assert vllm.times.publish > 0 == native.times.publish
    untied = replace(job, shape=read_shape(WELL_KNOWN["llama-3.1-8b"]))
    assert "published weights" not in make_plan(Run(engine="vllm"), untied, machine).ledger["rollout"].host
    experts = replace(job, shape=read_shape(EXPERTS), fused=False, rank=16, adapters=10**7)
    held = make_plan(Run(engine="vllm"), experts, machine).ledger["rollout"].host["published weights"]
    assert held == experts.shape.parameters * experts.itemsize, "experts go through host memory"


def with_lending(run: Run) -> Run:
    return run.model_copy(update={"rollout": run.rollout.model_copy(update={"lend_memory": True})})


def test_of_a_model_in_two_parts_the_trainers_device_has_one() -> None:
    machine = Machine(find_device("h200"), 1, 256 * GIB, 16)
    job = Job(read_shape(WELL_KNOWN["qwen2.5-7b"]), 2, 32, 16, 256, 256, 512, rank=16, adapters=10**7)
    pinned = {"page_tokens": 16, "kv_memory": 8 * GIB, "lend_memory": False, "max_sequences": 256}
    whole, half, small = (
        make_plan(Run(engine="vllm", rollout=Rollout(**pinned, processes=one, tensor_parallel=parts)), job, machine)
        for one, parts in ((1, 1), ("auto", 2), (1, 8))
    )
    weights = job.shape.parameters * job.itemsize
    assert half.run.rollout.processes == 1
    for phase in ("rollout", "update"):
        saved = whole.ledger[phase].device_bytes - half.ledger[phase].device_bytes
        assert saved == pytest.approx((weights + 8 * GIB) / 2, rel=0.1), phase
    assert half.ledger["rollout"].host["published weights"] == weights, "they go through host memory"
    ready = [build_ledger(job, machine, with_lending(plan.run)) for plan in (whole, small)]
    saved = ready[0]["publish"].device_bytes - ready[1]["publish"].device_bytes
    assert saved == pytest.approx(1.02 * weights * 7 / 8 + 8 * GIB * 3 / 4, rel=0.001), (
        "each of 8 has one of 4 KV heads"
    )
    assert half.times.rollout < whole.times.rollout and half.times.publish > whole.times.publish


@pytest.mark.parametrize(("parts", "most"), [(1, 0), (2, 0), (4, 0), (3, 2), (5, 4), (7, 4), (8, 4), (14, 4), (28, 4)])
def test_what_cannot_be_cut_evenly_is_refused(parts: int, most: int) -> None:
    """28 heads, 4 of keys, 18,944 columns: 7 and 14 have heads to share out, and no keys."""
    run, job = Run(engine="vllm", rollout=Rollout(tensor_parallel=parts)), qwen("qwen2.5-7b", rank=16, adapters=10**7)
    with pytest.raises(ConfigError, match=rf"vLLM cannot split(.|\n)*Write {most}\.") if most else nullcontext():
        plan_here(run, job, Machine(find_device("h200"), 1, 256 * GIB, 16))


@pytest.mark.parametrize(("parts", "most"), [(6, 4), (4, 0), (12, 0)])
def test_heads_of_keys_are_shared_out_evenly_or_repeated_evenly(parts: int, most: int) -> None:
    """Twelve heads and columns enough for all of them, and four heads of keys."""
    shape = {"model_type": "llama", "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 2,
             "num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 512, "tie_word_embeddings": True}  # fmt: skip
    run, job = Run(engine="vllm", rollout=Rollout(tensor_parallel=parts)), replace(qwen(), shape=read_shape(shape))
    with pytest.raises(ConfigError, match=rf"vLLM cannot split(.|\n)*Write {most}\.") if most else nullcontext():
        plan_here(run, job, Machine(find_device("h200"), 1, 256 * GIB, 16))


@pytest.mark.parametrize(
    ("engine", "itemsize", "rank", "cpu", "words"),
    [
        ("vllm", 4, 16, False, "on a GPU vLLM computes adapters only in half precision"),
        ("vllm", 2, 16, False, None),
        ("vllm", 4, 0, False, None),
        ("vllm", 4, 16, True, None),
        ("sglang", 4, 16, False, None),
        ("native", 4, 16, False, None),
    ],
)
def test_types_that_an_engine_does_not_compute_in_are_refused(
    engine: Literal["native", "vllm", "sglang"], itemsize: int, rank: int, cpu: bool, words: str | None
) -> None:
    job = qwen(itemsize=itemsize, rank=rank, adapters=rank * 10**5)
    plan_here(Run(engine=engine), replace(job, generates=False), h(140))  # nothing of it is asked for
    with pytest.raises(ConfigError, match=rf"model.dtype: {words}") if words else nullcontext():
        plan_here(Run(engine=engine), job, Machine(find_device("h200"), 1, 256 * GIB, 16, cpu=cpu))


@pytest.mark.parametrize(("rank", "refused"), [(512, False), (513, True)])
def test_adapters_larger_than_vllm_serves_are_refused(rank: int, refused: bool) -> None:
    words = r"model\.lora\.r: vLLM serves adapters up to rank 512, not 513"
    with pytest.raises(ConfigError, match=words) if refused else nullcontext():
        plan_here(Run(engine="vllm"), qwen(rank=rank, adapters=10**7), Machine(find_device("h200"), 1, 256 * GIB, 16))


def test_engines_over_several_devices_divide_them_and_stay_on_a_host() -> None:
    job = qwen("qwen2.5-7b", rank=16, adapters=10**7)
    run = Run(engine="vllm", rollout=Rollout(tensor_parallel=4))
    assert device_counts(run, Machine(find_device("h200"), 12, 256 * GIB, 16, per_host=12)) == [12, 8, 4, 1]
    words = r"run.rollout.tensor_parallel: is 4, but a host has 6 devices(.|\n)*Write 3"
    with pytest.raises(ConfigError, match=words):
        refuse_devices(run, job, Machine(find_device("h200"), 12, 256 * GIB, 16, per_host=6))
    refuse_devices(run, job, Machine(find_device("h200"), 16, 256 * GIB, 16))
    uneven = Run(engine="vllm", devices=6, rollout=Rollout(tensor_parallel=6))
    with pytest.raises(
        ConfigError, match=r"vLLM cannot split(.|\n)*Write 2\."
    ):  # 4 would fit the heads, not the devices
        refuse_uneven_cut(uneven, job.shape)


@pytest.mark.parametrize(("devices", "parts", "engines"), [(8, 1, 8), (8, 2, 4), (8, 4, 2)])
def test_a_fleet_has_as_many_engines_as_sets_of_devices(devices: int, parts: int, engines: int) -> None:
    job = qwen("qwen2.5-7b", rank=16, adapters=10**7)
    machine = Machine(find_device("h200"), devices, 2048 * GIB, 128)
    run = Run(engine="vllm", devices=devices, rollout=Rollout(tensor_parallel=parts))
    plan = place_over(run, job, machine)
    assert (plan.place.engines, plan.engine_devices, plan.run.rollout.tensor_parallel) == (engines, parts, parts)
    weights = job.shape.parameters * job.itemsize
    assert plan.ledger["rollout"].host.get("published weights", 0) == (0 if parts == 1 else engines * weights)
    cut = place_over(run.with_values({"shard": "full"}), job, machine)
    assert cut.ledger["rollout"].host["published weights"] == weights, "all engines of a host read one copy"
    assert cut.times.publish > plan.times.publish or parts > 1


def test_a_prefill_and_a_decode_step_are_compared_by_time() -> None:
    """A step that reads more takes as long as more prompt tokens."""
    machine = Machine(find_device("h200"), 2, 2048 * GIB, 128)
    found = [
        place_over(Run(engine="native", devices=2), replace(qwen(), completion=new), machine).prefill_tokens_per_step
        for new in (256, 8192)
    ]
    assert 50 < found[0] < found[1]


def test_a_model_is_not_cut_twice() -> None:
    """Where the plan lays a copy over two devices, that is what vLLM is told."""
    machine = Machine(find_device("h200"), 8, 1024 * GIB, 16)
    job = qwen(rank=16, adapters=10**7)
    engines = [
        make_plan(Run(engine="vllm", rollout=Rollout(processes=1, tensor_parallel=parts)), job, machine, place=place)
        .ledger["rollout"].device[ENGINE]
        for parts, place in ((2, Placement(tensor=2)), (1, Placement(tensor=2)))
    ]  # fmt: skip
    assert engines[0] == engines[1]


@pytest.mark.parametrize(
    ("model", "least", "most"), [("qwen2.5-0.5b", 3, 6), ("qwen2.5-1.5b", 2, 6), ("qwen2.5-7b", 1, 2)]
)
def test_small_models_get_several_processes_of_vllm(model: str, least: int, most: int) -> None:
    """Each with its weights and its context, of which the plan knows."""
    machine = Machine(find_device("h200"), 1, 256 * GIB, 16)
    job = Job(read_shape(WELL_KNOWN[model]), 2, 32, 16, 256, 256, 512)
    plan = make_plan(Run(engine="vllm"), job, machine)
    count = plan.run.rollout.processes
    assert isinstance(count, int) and least <= count <= most and plan.fits
    alone = make_plan(Run(engine="vllm", rollout=Rollout(processes=1)), job, machine)
    more = plan.ledger["rollout"].device[ENGINE] - alone.ledger["rollout"].device[ENGINE]
    assert more >= (count - 1) * (job.shape.parameters * job.itemsize + ASLEEP + AWAKE)
    assert plan.times.rollout <= alone.times.rollout
    small = replace(machine, device=find_device("t4"), cores=4)
    assert make_plan(Run(engine="vllm"), job, small).run.rollout.processes == 1


EXPERTS = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 32, "num_experts_per_tok": 8,
    "decoder_sparse_step": 1, "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip


def test_the_engine_is_chosen_by_what_is_here_and_what_a_step_would_take() -> None:
    here = Machine(find_device("h200"), 1, 256 * GIB, 16, engines=("vllm",))
    dense = make_plan(Run(), qwen(), here)
    assert engine_of(dense).value == dense.run.engine == "native" and "vllm" in engine_of(dense).why
    assert engine_of(make_plan(Run(), qwen(), replace(here, engines=()))).why == "shares the trainer's weights"
    assert make_plan(Run(), qwen(), replace(here, cpu=True)).run.engine == "native"
    chosen = make_plan(Run(), experts(), here)
    assert chosen.run.engine == "vllm" and re.search(r"native [\d.]+ s, vllm [\d.]+ s", engine_of(chosen).why)
    assert make_plan(Run(), experts(), replace(here, engines=())).run.engine == "native"
    assert make_plan(Run(engine="native"), experts(), here).run.engine == "native"


def experts(**settings: Any) -> Job:
    """Few sequences of a model that the native engine runs through its own modules, layer by layer: there it is slower."""
    few = {"prompts": 1, **settings}
    return replace(qwen(), shape=read_shape(EXPERTS), fused=False, rank=16, adapters=10**7, **few)


def test_another_engine_has_to_be_clearly_faster_by_the_whole_step() -> None:
    """Short rollouts: vLLM's take much less time, but weights have to be copied for them."""
    here = Machine(find_device("h200"), 1, 256 * GIB, 16, engines=("vllm",))
    job = experts(completion=160)
    native, vllm = (make_plan(Run(engine=engine), job, here).times for engine in ("native", "vllm"))
    assert 1.25 * vllm.rollout < native.rollout and vllm.total < native.total < 1.25 * vllm.total
    assert make_plan(Run(), job, here).run.engine == "native"


def test_a_run_of_few_steps_is_not_worth_the_start_of_another_engine() -> None:
    here = Machine(find_device("h200"), 1, 256 * GIB, 16, engines=("vllm",))
    native, vllm = (make_plan(Run(engine=engine), experts(), here).times for engine in ("native", "vllm"))
    assert (
        native.start == 0
        and vllm.start >= 65
        and vllm.total == sum((vllm.rollout, vllm.score, vllm.update, vllm.publish))
    )
    enough = vllm.start / (native.total - 1.25 * vllm.total)
    chosen = [make_plan(Run(), experts(steps=steps), here) for steps in (int(enough) - 1, int(enough) + 2, None)]
    assert [plan.run.engine for plan in chosen] == ["native", "vllm", "vllm"]
    assert f"vllm takes {vllm.start:.0f} s to start" in engine_of(chosen[0]).why


def test_several_processes_start_after_the_first() -> None:
    one, three = (
        make_plan(Run(engine="sglang", rollout=Rollout(processes=count)), qwen(), h(140)).times.start
        for count in (1, 3)
    )
    assert three == 2 * one > 0


def test_where_no_engine_fits_it_is_the_one_that_lacks_the_least() -> None:
    here = replace(h(10), engines=("vllm",))
    native, vllm = (make_plan(Run(engine=engine), experts(), here) for engine in ("native", "vllm"))
    assert 0 < native.missing_bytes < vllm.missing_bytes
    assert make_plan(Run(), experts(), here).run.engine == "native"


def test_a_cpu_has_no_choice_of_engines() -> None:
    plan = make_plan(Run(), qwen(), Machine(find_device("h200"), 1, 64 * GIB, 16, cpu=True, engines=("vllm",)))
    assert engine_of(plan).value == "native" and engine_of(plan).why == "shares the trainer's weights"


@pytest.mark.parametrize("lend", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_every_process_of_an_engine_is_counted_to_the_byte(count: int, lend: bool) -> None:
    """With its weights, its prompts and its context; pages and sequences are shared out. Memory that is lent leaves a context,
    and is back from new weights on; what is not lent is kept whole."""
    job, machine = qwen(reference=True, compared=True), h(140)
    pinned = Rollout(kv_memory=4 * GIB, page_tokens=16, lend_memory=lend, processes=count)
    run = make_plan(Run(engine="vllm", rollout=pinned), job, machine).run
    alone, outside = (
        build_ledger(job, machine, run.model_copy(update={"engine": engine})) for engine in ("native", "vllm")
    )
    weights = count * job.shape.parameters * job.itemsize
    own, sequences = alone["rollout"].device, min(run.rollout.max_sequences, job.in_flight)
    tables = sequences * (
        12 * job.longest_sequence - 16 * job.new_tokens
    )  # those of log-probs are as long as sequences
    work = weights + own["decode step"] + tables + count * own["prefill"]
    whole = 4 * GIB + work + int(ALLOCATOR_SLACK_SHARE * work) + count * (ASLEEP + AWAKE)
    assert outside["rollout"].device[ENGINE] == whole
    asleep = count * ASLEEP if lend else whole
    awake = 4 * GIB + weights + int(ALLOCATOR_SLACK_SHARE * weights) + count * ASLEEP if lend else whole
    for phase, wanted in (
        *((phase, asleep) for phase in ("score", "update", "optimizer")),
        *((phase, awake) for phase in ("publish", "checkpoint", "export")),
    ):
        assert outside[phase].device[ENGINE] == wanted, phase
        slack = "allocator slack"
        assert outside[phase].device[slack] == alone[phase].device[slack], "that of other processes is theirs"
    assert outside["rollout"].host[ENGINE] == count * CUDA_PROCESS_HOST_BYTES


def test_adapters_are_merged_by_the_native_engine_alone() -> None:
    job = qwen(rank=16, adapters=qwen().shape.lora_parameters(16))
    native, vllm = (make_plan(Run(engine=engine), job, h(140)).ledger for engine in ("native", "vllm"))
    assert "merged copy" in native["rollout"].device and "merged copy" not in vllm["rollout"].device


def processes(model: str, gib: int, **settings: Any) -> int:
    cores = settings.pop("cores", 16)
    plan = make_plan(Run(engine="vllm"), qwen(model, **settings), replace(h(gib), cores=cores))
    assert isinstance(plan.run.rollout.processes, int)
    return plan.run.rollout.processes


def test_processes_are_as_many_as_gain_something() -> None:
    """The fewest that come near the fastest, with three cores each, and a quarter of the device for weights."""
    steps = [outside_step(qwen("qwen2.5-1.5b"), h(400), Run(engine="vllm"), n, 384, 512) for n in (1, 2, 3)]
    assert steps[2] < steps[1] < 1.1 * steps[2] < steps[0] and processes("qwen2.5-1.5b", 400, prompts=24) == 2
    assert [processes("qwen2.5-0.5b", 140, prompts=64, cores=cores) for cores in (2, 6, 11, 16)] == [1, 2, 3, 4]
    assert [processes("qwen2.5-0.5b", 140, prompts=prompts) for prompts in (1, 6, 16, 32, 64)] == [1, 1, 2, 3, 4]
    assert [processes("qwen2.5-1.5b", gib) for gib in (24, 36)] == [2, 3]
    cpu = make_plan(Run(engine="vllm"), qwen(), Machine(find_device("h200"), 1, 64 * GIB, 16, cpu=True))
    assert cpu.run.rollout.processes == 1
    assert "one process uses all cores" in [
        choice.why for choice in cpu.choices if choice.key == "run.rollout.processes"
    ]


@pytest.mark.parametrize(("gib", "most"), [(21, 2), (24, 3), (140, 4)])
def test_an_engine_has_as_many_processes_as_fit(gib: int, most: int) -> None:
    """And the plan says so once."""

    def plan(count: int | str) -> Plan:
        job = qwen(prompts=64)
        return make_plan(Run(engine="vllm", rollout=Rollout(kv_memory=8 * GIB, processes=count)), job, h(gib))

    found = plan("auto")
    assert found.fits and found.run.rollout.processes == most and plan(most).fits
    why = [choice.why for choice in found.choices if choice.key == "run.rollout.processes"]
    if gib == 140:
        assert why == ["a single process would leave the GPU idle"]
    else:  # more would fit, but could not run as many sequences at once
        more = plan(most + 1)
        assert why == ["more processes do not fit"] and more.run.rollout.max_sequences < found.run.rollout.max_sequences
        assert not more.fits or more.times.total > found.times.total


def test_an_engine_has_fewer_processes_where_more_would_not_fit() -> None:
    machine = Machine(find_device("h200"), 1, 256 * GIB, 16)
    job = Job(read_shape(WELL_KNOWN["llama-3.1-8b"]), 2, 128, 8, 128, 128, 512)
    plan, one = (make_plan(Run(engine="vllm", rollout=r), job, machine) for r in (Rollout(), Rollout(processes=1)))
    assert one.fits and plan.fits
    small = Machine(find_device("a100-40"), 1, 256 * GIB, 16)
    job = Job(read_shape(WELL_KNOWN["qwen2.5-1.5b"]), 2, 128, 8, 128, 128, 512)
    for card in (small, replace(small, device=replace(small.device, memory=30 * GIB))):
        plan, one = (make_plan(Run(engine="vllm", rollout=r), job, card) for r in (Rollout(), Rollout(processes=1)))
        assert plan.fits == one.fits
        found = [choice.value for choice in plan.choices if choice.key == "run.rollout.processes"]
        assert found == [plan.run.rollout.processes]


def test_every_process_of_an_engine_holds_the_longest_sequence() -> None:
    machine = Machine(find_device("h200"), 1, 256 * GIB, 16)
    job = qwen(prompts=16, samples=8, longest_prompt=32_000, typical_prompt=150)
    one = kv_bytes(job, 1, job.longest_sequence, 16)
    assert 3 * one > kv_bytes(job, job.in_flight, job.typical_sequence, 16), "or any cache would do"
    for kv in ("auto", one, 3 * one):
        rollout = make_plan(Run(engine="vllm", rollout=Rollout(kv_memory=kv)), job, machine).run.rollout
        assert isinstance(rollout.kv_memory, int) and isinstance(rollout.processes, int)
        assert rollout.kv_memory // rollout.processes >= one
    with pytest.raises(ConfigError, match="in each of 4 processes"):
        plan_here(Run(engine="vllm", rollout=Rollout(kv_memory=3 * one, processes=4)), job, machine)


def test_a_model_that_is_cut_over_devices_is_not_the_native_engines() -> None:
    job = Job(read_shape(WELL_KNOWN["llama-3.1-70b"]), 2, 32, 16, 256, 256, 512)
    machine = Machine(find_device("a100-80"), 64, 1024 * GIB, 64)
    plan = place_over(Run(), job, machine)
    assert plan.place.tensor > 1 and plan.run.engine == "vllm"
    assert engine_of(plan).why == f"the model is split over {plan.place.tensor} devices"
    here = replace(machine, engines=("sglang",))
    assert place_over(Run(), job, here).run.engine == "vllm", "SGLang has one device here"


def test_vllm_on_a_cpu_counts_its_copy_in_the_host() -> None:
    job, machine = qwen(), Machine(find_device("h200"), 1, 64 * GIB, 16, cpu=True)
    vllm = make_plan(Run(engine="vllm"), job, machine)
    host, weights = vllm.ledger["rollout"].host, job.shape.parameters * job.itemsize
    assert host["rollout weights"] == host["published weights"] == weights and host[ENGINE] > 0
    assert vllm.run.rollout.page_tokens == 128


@pytest.mark.parametrize(
    ("engine", "model", "asleep", "generating"),
    [
        ("vllm", "qwen2.5-0.5b", 1.41, 5.15),
        ("vllm", "qwen2.5-7b", 1.69, 26.83),
        ("sglang", "qwen2.5-0.5b", 1.34, 4.84),
    ],
)
def test_an_engine_outside_has_no_more_than_is_counted(
    engine: Literal["vllm", "sglang"], model: str, asleep: float, generating: float
) -> None:
    """512 sequences of 128 + 128 tokens, one process (bench/results/engines-2026-11-16.md); and not much less."""
    job = Job(read_shape(WELL_KNOWN[model]), 2, 64, 8, 128, 128, 128)
    token = job.shape.kv_elements * job.itemsize
    pinned = Rollout(
        kv_memory=int(1.1 * 512 * 288 * token) + 2**26,
        page_tokens=16,
        processes=1,
        max_sequences=512,
        prefill_tokens=16384,
    )
    ledger = make_plan(Run(engine=engine, rollout=pinned), job, h(140)).ledger
    assert asleep <= ledger["update"].device[ENGINE] / GIB < asleep + 0.5
    assert generating <= ledger["rollout"].device[ENGINE] / GIB < 1.15 * generating


@pytest.mark.parametrize("engine", ["native", "vllm", "sglang"])
def test_the_cache_that_is_recommended_is_one_that_the_engine_starts_with(
    engine: Literal["native", "vllm", "sglang"],
) -> None:
    job = qwen(longest_prompt=1536)
    small = Run(engine=engine, rollout=Rollout(kv_memory=2**20, processes=1))
    with pytest.raises(ConfigError, match="Write at least") as refused:
        plan_here(small, job, h(140))
    advised = int(re.findall(r"at least (\d+)KiB", str(refused.value))[0]) * 1024
    plan = plan_here(Run(engine=engine, rollout=Rollout(kv_memory=advised, processes=1)), job, h(140))
    assert plan.run.rollout.page_tokens != "auto"
    setup = EngineSetup(
        folder="", dtype="bfloat16", cuda=True, kv_bytes=advised, page_tokens=plan.run.rollout.page_tokens, prefill_tokens=1,
        longest=job.longest_sequence, prefix_cache=True, eager=False, sleeps=False, max_sequences=1,
    )  # fmt: skip
    token = job.shape.kv_elements * job.itemsize
    assert engine != "sglang" or advised >= least_kv_tokens(setup) * token


@pytest.mark.parametrize(
    ("device", "dtype", "page", "cpu", "words"),
    [
        ("t4", 2, "auto", False, r"bfloat16 on a T4(.|\n)*float32"),
        ("v100", 2, "auto", False, "bfloat16 on a V100"),
        ("t4", 4, "auto", False, None),
        ("l4", 2, 48, False, None),
        ("l4", 2, 17, False, r"vLLM needs a multiple of 16 tokens, not 17(.|\n)*Write 16"),
        ("l4", 4, 48, True, r"a multiple of 32 tokens(.|\n)*Write 64"),
        ("l4", 4, 64, True, None),
    ],
)
def test_what_vllm_would_refuse_when_it_starts_is_told_before(
    device: str, dtype: int, page: int | Literal["auto"], cpu: bool, words: str | None
) -> None:
    job = Job(read_shape(WELL_KNOWN["smollm2-135m"]), dtype, 4, 4, 64, 64, 64)
    run = Run(engine="vllm", rollout=Rollout(page_tokens=page))
    machine = Machine(find_device(device), 1, 256 * GIB, 16, cpu=cpu)
    with pytest.raises(ConfigError, match=words) if words else nullcontext():
        plan_here(run, job, machine)


def test_an_engine_that_has_most_of_the_memory_decides_it() -> None:
    job = qwen("qwen2.5-7b", rank=16, adapters=10**7)
    assert make_plan(Run(engine="vllm", rollout=Rollout(processes=2)), job, h(80)).ledger.binding == ENGINE
