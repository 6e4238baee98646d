"""Every auto is filled, nothing pinned is touched, and whatever is chosen can hold the work. No device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.config.run import Offload, Rollout, Run
from trimtab.errors import ConfigError
from trimtab.plan.auto import Facts, pick_device, pick_reward_workers, resolve_run

MIB, GIB = 2**20, 2**30


@st.composite
def facts(draw: st.DrawFn) -> Facts:
    longest = draw(st.integers(2, 200_000))
    return Facts(
        device=torch.device(draw(st.sampled_from(["cpu", "cuda"]))),
        free_bytes=draw(st.integers(-100 * GIB, 200 * GIB)),
        cores=draw(st.integers(1, 128)),
        hidden=draw(st.integers(8, 16384)),
        intermediate=draw(st.integers(8, 65536)),
        layers=draw(st.integers(1, 128)),
        vocabulary=draw(st.integers(10, 300_000)),
        itemsize=draw(st.sampled_from([2, 4, 8])),
        kv_bytes_per_token=draw(st.integers(16, 2**21)),
        longest_sequence=longest,
        typical_sequence=draw(st.integers(2, longest)),
        sequences=draw(st.integers(1, 65536)),
        optimizer_bytes=draw(st.integers(0, 100 * GIB)),
        reference_bytes=draw(st.integers(0, 20 * GIB)),
        host_bytes=draw(st.integers(0, 200 * GIB)),
        fused=draw(st.booleans()),
        lendable=draw(st.booleans()),
    )


def pins() -> st.SearchStrategy[Run]:
    """Any set of pinned keys, large enough to hold every sequence."""

    def optional(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.just("auto") | strategy

    sizes = st.integers(200_000, 10**6)
    return st.builds(
        Run,
        threads=optional(st.integers(1, 64)),
        token_budget=optional(sizes),
        score_token_budget=optional(sizes),
        logprob_chunk=optional(st.integers(1, 10**5)),
        checkpoint_activations=optional(st.sampled_from([True, False, "some"])),
        reward_workers=optional(st.integers(1, 64)),
        offload=st.builds(Offload, optimizer=optional(st.booleans()), reference=optional(st.booleans())),
        rollout=st.builds(
            Rollout,
            max_sequences=optional(st.integers(1, 4096)),
            kv_memory=optional(st.integers(2**40, 2**41)),
            prefill_tokens=optional(st.integers(1, 10**5)),
            page_tokens=optional(st.integers(1, 512)),
            prefix_cache=st.booleans(),
        ),
    )


def flat(run: Run) -> dict[str, Any]:
    tree = run.model_dump()
    parts = {f"run.{name}.{key}": value for name in ("rollout", "offload") for key, value in tree.pop(name).items()}
    return parts | {f"run.{key}": value for key, value in tree.items()}


@given(pins(), facts())
def test_every_auto_is_filled_and_explained_and_every_pin_stays(run: Run, facts: Facts) -> None:
    resolved, choices = resolve_run(run, facts)
    before, after = flat(run), flat(resolved)
    assert "auto" not in after.values()
    assert after["run.device"] == facts.device.type
    autos = {key for key, value in before.items() if value == "auto"} - {"run.device"}
    assert {choice.key for choice in choices} == autos
    assert all(after[choice.key] == choice.value and choice.why for choice in choices)
    assert all(after[key] == value for key, value in before.items() if key not in autos | {"run.device"})


@given(pins(), facts())
def test_what_is_chosen_holds_the_longest_sequence(run: Run, facts: Facts) -> None:
    resolved, _ = resolve_run(run, facts)
    assert resolved.token_budget >= facts.longest_sequence
    assert resolved.score_token_budget >= facts.longest_sequence
    page = resolved.rollout.page_tokens
    pages = resolved.rollout.kv_memory // (page * facts.kv_bytes_per_token)
    assert pages >= -(-facts.longest_sequence // page) + 1, "the engine needs a page more than the sequence"
    assert resolved.rollout.max_sequences >= 1
    assert Run.model_validate(resolved.model_dump()) == resolved


@given(facts())
def test_automatic_cache_stays_within_its_share_unless_one_sequence_needs_more(facts: Facts) -> None:
    rollout = resolve_run(Run(), facts)[0].rollout
    share = 4 if rollout.lend_memory else 2
    least = 2 * (facts.longest_sequence + 2 * rollout.page_tokens) * facts.kv_bytes_per_token
    assert rollout.kv_memory <= max(room(facts) * share // 5, least)


def room(facts: Facts) -> int:
    """What is free once all that may leave the device has left it."""
    return max(GIB // 4, facts.free_bytes + facts.optimizer_bytes + facts.reference_bytes)


def test_what_leaves_the_device_leaves_it_only_where_room_is_short() -> None:
    """8B parameters in bfloat16: 96 GB of masters and moments."""
    state = {
        "device": torch.device("cuda"),
        "optimizer_bytes": 96 * GIB,
        "reference_bytes": 16 * GIB,
        "host_bytes": 500 * GIB,
    }

    def choose(**changes: Any) -> tuple[Any, ...]:
        offload = resolve_run(Run(), small(**state | changes))[0].offload
        return offload.optimizer, offload.reference, offload.activations

    assert choose(free_bytes=40 * GIB) == (False, False, False)
    assert choose(free_bytes=24 * GIB) == (False, True, False)
    assert choose(free_bytes=10 * GIB) == (True, False, False)
    assert choose(free_bytes=-80 * GIB) == (True, True, False)
    assert choose(free_bytes=10 * GIB, host_bytes=50 * GIB) == (False, True, False)
    assert choose(free_bytes=-80 * GIB, device=torch.device("cpu")) == (False, False, False)
    long = {"free_bytes": -90 * GIB, "longest_sequence": 10**6, "hidden": 4096, "intermediate": 16384, "layers": 32}
    assert choose(**long) == (True, True, True)
    resolved = resolve_run(Run(), small(**state | long))[0]
    assert resolved.checkpoint_activations is True and resolved.token_budget == 10**6
    kept = resolve_run(Run(checkpoint_activations="some"), small(**state | long))[0]
    assert kept.offload.activations is False and kept.checkpoint_activations == "some"


def test_memory_is_lent_where_it_can_be() -> None:
    """2 GiB of KV cache for the whole step, of 16, 4 and 2 GiB free."""
    wants = {"device": torch.device("cuda"), "kv_bytes_per_token": 2**14, "sequences": 1024, "lendable": True}

    def choose(**changes: Any) -> tuple[bool, int, str]:
        known = small(**wants | changes)
        rollout = resolve_run(Run(), known)[0].rollout
        return rollout.lend_memory, rollout.kv_memory // MIB, why(known, "run.rollout.lend_memory")

    in_turn = "rollout and update use the same memory in turn"
    assert choose(free_bytes=16 * GIB) == (True, 3226, in_turn)
    assert choose(free_bytes=2 * GIB) == (True, 1638, in_turn)
    assert choose(free_bytes=4 * GIB, lendable=False) == (False, 1638, "this device's memory cannot be lent")
    assert choose(free_bytes=4 * GIB, device=torch.device("cpu"))[0] is False


def small(**changes: Any) -> Facts:
    values: dict[str, Any] = {
        "device": torch.device("cpu"), "free_bytes": 8 * GIB, "cores": 4, "hidden": 64, "intermediate": 128, "layers": 2,
        "vocabulary": 1000, "itemsize": 4, "kv_bytes_per_token": 1024, "longest_sequence": 100, "typical_sequence": 80,
        "sequences": 32,
    }  # fmt: skip
    return Facts(**values | changes)


def why(facts: Facts, key: str, run: Run | None = None) -> str:
    return next(choice.why for choice in resolve_run(run or Run(), facts)[1] if choice.key == key)


def test_a_gpu_gets_micro_batches_that_outlast_their_launches() -> None:
    def tokens(hidden: int, intermediate: int, layers: int) -> int:
        model = {"hidden": hidden, "intermediate": intermediate, "layers": layers, "itemsize": 2}
        return resolve_run(Run(), small(device=torch.device("cuda"), free_bytes=120 * GIB, **model))[0].token_budget

    assert tokens(576, 1536, 30) == 32768  # SmolLM2-135M
    assert tokens(896, 4864, 24) == tokens(1536, 8960, 28) == 16384
    assert tokens(64, 128, 2) == 65536


def test_reasons_are_the_true_ones() -> None:
    assert why(small(), "run.token_budget") == "larger micro-batches gain nothing"
    assert why(small(longest_sequence=9000), "run.token_budget") == "the longest sequence has to fit"
    assert why(small(hidden=16384, intermediate=65536, layers=80), "run.token_budget") == "half of the free memory"
    assert why(small(), "run.rollout.kv_memory") == "the whole step at once"
    assert why(small(sequences=10**5), "run.rollout.kv_memory") == "two fifths of the free memory"
    assert why(small(longest_sequence=10**7), "run.rollout.kv_memory") == "two of the longest sequences"


def test_activations_are_recomputed_where_keeping_them_would_not_fit() -> None:
    assert resolve_run(Run(), small())[0].checkpoint_activations is False
    assert resolve_run(Run(), small(layers=400, hidden=4096, intermediate=16384))[0].checkpoint_activations is True
    middling = {"layers": 12, "hidden": 2048, "intermediate": 8192}
    assert resolve_run(Run(), small(**middling))[0].checkpoint_activations is True
    assert resolve_run(Run(), small(**middling, fused=True))[0].checkpoint_activations == "some"


def test_a_pinned_cache_that_holds_no_sequence_is_refused() -> None:
    run = Run(rollout=Rollout(kv_memory=50 * 1024))
    with pytest.raises(
        ConfigError, match=r"run\.rollout\.kv_memory: 51,200 bytes cannot hold one sequence of 100 tokens"
    ):
        resolve_run(run, small())
    enough = Run(rollout=Rollout(kv_memory=128 * 1024))
    assert resolve_run(enough, small())[0].rollout.kv_memory == 128 * 1024


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_device_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"run\.device: torch sees no CUDA device"):
        pick_device(Run(device="cuda"))
    assert pick_device(Run()).type == "cpu"


def test_reward_workers_are_the_number_that_is_reported() -> None:
    assert pick_reward_workers(Run(reward_workers=3)) == 3
    assert resolve_run(Run(), small())[0].reward_workers == pick_reward_workers(Run())
