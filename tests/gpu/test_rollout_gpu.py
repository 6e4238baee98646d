"""The engine on a CUDA device: the same tokens with and without graphs, at any size and schedule, after lending its memory."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rollout.test_engine import assert_same, engine, generate, prompts
from tiny import tiny_model

from trimtab.config.learn import Sampling
from trimtab.model.memory import free
from trimtab.model.policy import Policy
from trimtab.rollout.native import cuda
from trimtab.rollout.native.arena import ArenaMemoryError
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Trajectory

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module", autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy(tiny_model("qwen2", num_hidden_layers=2).cuda())


@pytest.fixture(scope="module")
def expected() -> dict:
    """What the CPU samples, from the same weights."""
    return generate(engine(Policy(tiny_model("qwen2", num_hidden_layers=2))), prompts(12), samples=5, new=40)


def sample(native: NativeEngine, **changes) -> dict[tuple[int, int], Trajectory]:
    return generate(native, prompts(12), samples=5, new=40, **changes)


def test_the_device_samples_what_the_cpu_samples(policy: Policy, expected: dict) -> None:
    native = engine(policy)
    assert native.description == "fused layers in CUDA graphs"
    assert_same(expected, sample(native))
    assert native.stats.graph_share == 1.0
    assert_same(expected, sample(native))  # the graphs again, on rows that have been used


def test_graph_equals_eager(policy: Policy, expected: dict) -> None:
    native = engine(policy)
    native._decoder._capturable = False
    assert_same(expected, sample(native))
    assert native.stats.graph_steps == 0


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 17, 40])
def test_stops_and_limits_are_honoured_at_any_batch_size(policy: Policy, expected: dict, size: int) -> None:
    assert_same(expected, sample(engine(policy, max_sequences=size)))


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_tokens": 7},
        {"page_tokens": 1},
        {"page_tokens": 64},
        {"prefix_cache": False},
        {"kv_bytes": 30 * 4 * 256},
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_schedule(policy: Policy, expected: dict, changes: dict) -> None:
    native = engine(policy, **changes)
    assert_same(expected, sample(native))
    if "kv_bytes" in changes:
        assert native.stats.preempted > 0


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3_moe", "gpt_oss", "olmo2"])
def test_shared_pages_are_read_once_with_the_same_result(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Policy(tiny_model(architecture).cuda())
    asked = prompts(4, shared=13)
    apart = generate(engine(policy), asked, samples=6)
    monkeypatch.setattr(cuda, "MIN_SAVED_BYTES_TO_SHARE", 1)
    native = engine(policy)
    assert_same(apart, generate(native, asked, samples=6))
    assert native._decoder._sharing or native._decoder._items.any()


def test_lent_memory_is_free_and_graphs_go_on(policy: Policy, expected: dict) -> None:
    native = engine(policy, lend_memory=True, kv_bytes=2**30)
    assert_same(expected, sample(native))
    graphs = dict(native._decoder._graphs)
    before, held = torch.cuda.mem_get_info()[0], native.non_torch_bytes
    native.lend()
    assert native.non_torch_bytes == 0
    assert torch.cuda.mem_get_info()[0] - before > 0.9 * held > 2**29
    other = torch.full((2**28,), float("nan"), device="cuda")  # what comes back is not what was there
    del other
    assert_same(expected, sample(native))
    assert native.non_torch_bytes == held
    assert all(native._decoder._graphs[key] is graph for key, graph in graphs.items())


def test_memory_that_is_not_there_is_said_and_awaited(policy: Policy, expected: dict) -> None:
    native = engine(policy, lend_memory=True, kv_bytes=2**30)
    native.lend()
    free(torch.device("cuda"))  # what is left of earlier tests would be taken first
    hoard = torch.empty(torch.cuda.mem_get_info()[0] - 2**29, dtype=torch.uint8, device="cuda")
    with pytest.raises(ArenaMemoryError, match=r"the rollout needs 1\.\d+ GiB, but the device has 0"):
        sample(native)
    del hoard
    assert_same(expected, sample(native))


def test_large_batches_sample_what_the_cpu_samples(policy: Policy) -> None:
    """As many rows as no kernel of few rows serves, down to one."""
    asked = prompts(40, seed=3)
    reference = engine(Policy(tiny_model("qwen2", num_hidden_layers=2)), max_sequences=200)
    native = engine(policy, max_sequences=200)
    assert_same(generate(reference, asked, samples=5), generate(native, asked, samples=5))
    assert max(size for size, _, _ in native._decoder._graphs) > 128


def test_a_failed_capture_leaves_an_engine_that_works(policy: Policy, expected: dict) -> None:
    native = engine(policy)
    draw = native._decoder._sample

    def wait_for_the_host(*arguments) -> None:
        draw(*arguments)
        if torch.cuda.is_current_stream_capturing():
            native._decoder._sample = draw
            native._decoder._index.sum().item()

    native._decoder._sample = wait_for_the_host
    with pytest.raises(RuntimeError):
        sample(native)
    assert_same(expected, sample(native))


def test_parameters_put_elsewhere_are_sampled_from() -> None:
    policy = Policy(tiny_model("qwen2", num_hidden_layers=2).cuda())
    native = engine(policy)
    before = sample(native)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.data = parameter.data * 1.5
    native.publish(1)
    after = sample(native)
    assert any(before[key].tokens.tolist() != after[key].tokens.tolist() for key in before)
    assert_same(sample(engine(policy)), after)


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.05}, {"temperature": 0.6, "top_k": 20}])
def test_filters_sample_what_the_cpu_samples(policy: Policy, filters: dict) -> None:
    sampling = Sampling(**filters)
    reference = engine(Policy(tiny_model("qwen2", num_hidden_layers=2)))
    assert_same(sample(reference, sampling=sampling), sample(engine(policy), sampling=sampling))


@pytest.mark.parametrize("merge", [False, True])
def test_adapters_are_sampled_from_and_followed(merge: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are captured once; a publish after the adapters changed is enough."""

    def adapted() -> Policy:
        model = get_peft_model(tiny_model("qwen2"), LoraConfig(r=4, target_modules="all-linear"))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(
                        0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
                    )
        return Policy(model)

    on_cpu, on_gpu = adapted(), adapted()
    on_gpu = Policy(on_gpu.model.cuda())
    natives = [engine(on_cpu), engine(on_gpu)]
    times = {False: 1.0, True: 0.0} if merge else {False: 0.0, True: 1.0}
    decoder = natives[1]._decoder
    monkeypatch.setattr(decoder, "_time_step", lambda size: times[decoder._body.products[0]._merged is not None])
    assert_same(*(generate(native, prompts(6)) for native in natives))
    assert (decoder._copies is not None) is merge
    assert ("merged into a copy" in natives[1].description) is merge
    for native in natives:
        with torch.no_grad():
            for name, parameter in native.policy.model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
        native.publish(2)
    assert_same(*(generate(native, prompts(6)) for native in natives))


def test_a_merged_copy_is_lent_with_the_rest() -> None:
    """And is as the adapters are when it is back."""
    model = get_peft_model(tiny_model("qwen2", hidden_size=512), LoraConfig(r=4, target_modules="all-linear")).cuda()

    def merging(policy: Policy, lend: bool) -> NativeEngine:
        native = engine(policy, lend_memory=lend)
        decoder = native._decoder
        decoder._time_step = lambda size: 0.0 if decoder._copies else 1.0
        return native

    native = merging(Policy(model), lend=True)
    decoder = native._decoder
    before = generate(native, prompts(6))
    held = native.non_torch_bytes
    assert decoder._copies is not None and held == decoder.arena.nbytes + decoder._body.adapted_bytes
    native.lend()
    assert native.non_torch_bytes == 0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.3)
    native.publish(1)
    after = generate(native, prompts(6))
    assert native.non_torch_bytes == held
    assert any(before[key].tokens.tolist() != after[key].tokens.tolist() for key in before)
    assert_same(generate(merging(native.policy, lend=False), prompts(6)), after)


def test_what_a_model_cannot_do_fused_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine(Policy(tiny_model("olmo2").cuda())).description.endswith(
        "fused layers were not tested with the architecture olmo2"
    )

    def wrong(self, tokens: torch.Tensor, positions: torch.Tensor, plan: object) -> torch.Tensor:
        return torch.zeros(len(tokens), 32, device="cuda")

    monkeypatch.setattr(cuda.FusedBody, "prefill", wrong)
    native = engine(Policy(tiny_model("llama").cuda()))
    assert native.description.endswith("fused layers compute different log-probs")
    monkeypatch.undo()
    assert_same(generate(engine(Policy(tiny_model("llama"))), prompts(4)), generate(native, prompts(4)))
