"""The guard: what it takes for running out of memory, that it frees first, what it lowers in which order, when it gives up."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.base.errors import MemoryExhausted
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.keep import Keep
from trimtab.model.memory import Shortage, attempt, host_memory, in_parts, is_out_of_memory
from trimtab.model.policy import Policy
from trimtab.update import guard as guards
from trimtab.update import ladder
from trimtab.update.batch import Sample
from trimtab.update.guard import Guard
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater


class FakeEngine:
    """An engine as far as the guard knows one."""

    def __init__(self, pages: int = 1) -> None:
        self.pages = pages
        self.lowered: dict[str, int] = {}

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        if self.pages <= 1:
            return None
        before, self.pages = self.pages, self.pages // 2
        return before * 2**30, self.pages * 2**30

    def lower(self, limits: dict[str, int], least_tokens: int) -> None:
        self.lowered = dict(limits)


def batch(lengths: list[int], seed: int = 0) -> list[Sample]:
    """Completions of such lengths, of prompts of their own."""
    g = torch.Generator().manual_seed(seed)
    return [
        Sample(
            [3 + number % 40] * 3,
            torch.randint(3, VOCABULARY, (length,), generator=g),
            advantages=torch.randn((), generator=g).expand(length),
            weights=torch.full((length,), 1 / sum(lengths)),
            engine_logprobs=torch.full((length,), -4.5),
        )
        for number, length in enumerate(lengths)
    ]


def guarded(dtype: torch.dtype = torch.float64, engine: FakeEngine | None = None, **changes: Any) -> Guard:
    values = {"token_budget": 64, "score_token_budget": 64, "logprob_chunk": 8, "checkpoint_activations": False}
    retries, learn = (
        changes.pop("alloc_retries", None),
        resolve(Learn(optimizer={"states": changes.pop("states", "full")})),
    )
    updater = Updater(
        Policy(tiny_model("llama", dtype), check=False), PolicyGradient(learn), learn, **{**values, **changes}
    )
    said: list[str] = []
    guard = Guard(
        updater,
        engine or FakeEngine(),
        least_kv_tokens=32,
        report=lambda recovery: said.append(str(recovery)),
        alloc_retries=retries,
    )
    guard.said = said
    return guard


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def failing_forward(policy: Policy, fails: Callable[[int, int], bool]) -> list[int]:
    """Make `hidden` run out of memory where `fails(call, tokens)`; the tokens of all calls are returned as they come."""
    run, seen = policy.hidden, []

    def hidden(tokens_T, positions_T, plan):
        seen.append(tokens_T.shape[0])
        if fails(len(seen), tokens_T.shape[0]):
            out_of_memory()
        return run(tokens_T, positions_T, plan)

    policy.hidden = hidden
    return seen


def captured(guard: Guard, samples: list[Sample]) -> dict[str, torch.Tensor]:
    """The gradient of a guarded step as it is applied."""
    found: dict[str, torch.Tensor] = {}
    optimizer = guard.updater.optimizer
    original = optimizer._lay_out_gradients

    def capture() -> None:
        for (name, _), grad in zip(guard.updater.policy.model.named_parameters(), optimizer.grads()):
            found[name] = grad.clone()
        original()

    optimizer._lay_out_gradients = capture
    guard.step(samples, 1e-3, 0.0)
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-6) -> None:
    scale = max(float(g.abs().max()) for g in expected.values())
    assert found.keys() == expected.keys() and scale > 0
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], atol=tolerance * scale, rtol=0)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("of any device"), True),
        (MemoryError("CUDA cannot pin 1.0 GiB of host memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("HIP out of memory. Tried to allocate 2.00 GiB"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144, Hardware limit: 232448"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (MemoryExhausted("out of memory in backward"), False),
    ],
)
def test_what_counts_as_running_out(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_allocation_that_fails_is_recognised() -> None:
    assert isinstance(attempt(lambda: torch.empty(2**60, dtype=torch.uint8)), Shortage)


def test_other_errors_propagate() -> None:
    with pytest.raises(ZeroDivisionError):
        attempt(lambda: 1 // 0)


def test_nothing_of_failed_work_is_alive_after_an_attempt() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def work() -> None:
        held = torch.zeros(1000)
        seen.append(weakref.ref(held))
        out_of_memory(held)

    assert isinstance(attempt(work), Shortage)
    assert seen[0]() is None


def test_work_on_items_goes_on_in_halves_and_gives_up_on_one() -> None:
    done: list[int] = []

    def three_at_a_time(part: slice) -> None:
        if part.stop - part.start > 3:
            out_of_memory()
        done.extend(range(part.start, part.stop))

    assert in_parts(three_at_a_time, 10, torch.device("cpu")) is None
    assert done == list(range(10))
    assert isinstance(in_parts(out_of_memory, 10, torch.device("cpu")), Shortage)


def test_the_failed_attempt_is_gone_before_the_next_begins() -> None:
    """Activations, gradients and the graph: a weak reference to a tensor of the failed micro-batch is dead at the replay."""
    guard = guarded()
    policy = guard.updater.policy
    held: list[weakref.ref[torch.Tensor]] = []
    run = policy.hidden

    def hidden(tokens_T, positions_T, plan):
        assert all(reference() is None for reference in held[:1]), "the failed attempt is still in memory"
        out = run(tokens_T, positions_T, plan)
        if not held:
            held.append(weakref.ref(out))
            out.register_hook(out_of_memory)  # in the backward pass
        return out

    policy.hidden = hidden
    guard.step(batch([20, 20, 9]), 1e-3, 0.0)
    assert guard.said == [
        "out of memory in backward at micro-batch 1 of 1 (58 tokens); token_budget 64 -> 40, replayed"
    ]


@pytest.mark.parametrize("call", range(1, 5))
def test_a_failure_in_any_micro_batch_lowers_the_budget_and_keeps_the_gradient(call: int) -> None:
    samples = batch([20, 18, 9, 30, 4, 12] * 2)
    expected = captured(guarded(token_budget=60), samples)
    guard = guarded(token_budget=60)
    failing_forward(guard.updater.policy, lambda number, _: number == call)
    assert_same(captured(guard, samples), expected)
    assert guard.said[0].startswith(f"out of memory in forward at micro-batch {call} of 4 (")
    assert guard.said[0].endswith("); token_budget 60 -> 39, replayed")
    assert 39 < guard.ceiling["token_budget"] <= 60


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 12),
    st.booleans(),
    st.integers(40, 200),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_any_lengths_and_any_failure_give_the_undisturbed_gradient(
    lengths: list[int], call: int, backwards: bool, budget: int, dtype: torch.dtype
) -> None:
    samples = batch(lengths)
    expected = captured(guarded(dtype, token_budget=budget), samples)
    guard = guarded(dtype, FakeEngine(2), token_budget=budget)
    run, calls, dead = guard.updater.policy.hidden, [0], []

    def hidden(tokens_T, positions_T, plan):
        assert not dead or dead[0]() is None
        calls[0] += 1
        out = run(tokens_T, positions_T, plan)
        if calls[0] == call:
            dead.append(weakref.ref(out))
            out.register_hook(out_of_memory) if backwards else out_of_memory(out)
        return out

    guard.updater.policy.hidden = hidden
    # In bfloat16 the forward pass of a token rounds otherwise in another row.
    assert_same(captured(guard, samples), expected, 1e-6 if dtype == torch.float64 else 0.2)
    assert len(guard.said) == len(dead)


def test_memory_that_holds_so_many_tokens_is_found_and_never_exceeded_again() -> None:
    samples = batch([10] * 12)  # 13 tokens a row
    guard = guarded(token_budget=200)
    seen = failing_forward(guard.updater.policy, lambda _, tokens: tokens > 50)
    stats = guard.step(samples, 1e-3, 0.0)
    assert stats.token_budget == guard.updater.token_budget == 54
    assert stats.largest <= 50
    failed = len(guard.said)
    assert guard.ceiling["token_budget"] <= 78
    seen.clear()
    guard.step(samples, 1e-3, 0.0)
    assert len(guard.said) == failed, "the second step knows"
    assert max(seen) <= 50


def test_a_longer_sequence_than_the_lowered_budget_is_trained_on_alone() -> None:
    guard = guarded(token_budget=64)
    guard.updater.token_budget = 20
    stats = guard.step(batch([30, 5, 5]), 1e-3, 0.0)
    assert stats.token_budget == 33
    assert stats.largest <= 33


def test_rungs_come_in_order_and_the_end_says_what_binds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "MIN_CHUNK_TOKENS", 4)
    guard = guarded(torch.float32, FakeEngine(4), token_budget=400, logprob_chunk=1000)
    guard.ladder.own_memory = True
    policy, out = guard.updater.policy, out_of_memory
    monkeypatch.setattr(policy, "fused_forward", object())  # fused layers can keep a part
    policy.hidden = lambda *_: out()
    with pytest.raises(MemoryExhausted) as caught:
        guard.step(batch([20] * 8), 1e-3, 0.0)
    changes = [line.split("; ")[1].removesuffix(", replayed") for line in guard.said]
    assert changes == [
        "logprob_chunk 1,000 -> 46",  # no more tokens than there are
        "logprob_chunk 46 -> 11",
        "logprob_chunk 11 -> 4",
        "token_budget 400 -> 128",  # likewise
        "token_budget 128 -> 64",
        "checkpoint_activations false -> some",
        "checkpoint_activations some -> true",
        "token_budget 64 -> 32",  # one sequence a micro-batch
        "offload.activations false -> true",
        "offload.optimizer false -> true",
        "rollout.kv_memory 4.00 GiB -> 2.00 GiB",
        "rollout.kv_memory 2.00 GiB -> 1.00 GiB",
    ]
    message = str(caught.value)
    assert "one sequence of 23 tokens has to fit" in message
    assert message.index("learn.max_new_tokens") < message.index("model.lora") < message.index("a smaller model")
    assert "Tried to allocate" in message
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    assert policy.keep is Keep.INPUT and policy.activation_offload is not None and guard.updater.optimizer.offloaded


def test_scoring_is_replayed_with_its_own_budget() -> None:
    samples, again = batch([20, 18, 9, 30]), batch([20, 18, 9, 30])
    guard = guarded(score_token_budget=90)
    guard.updater.score(again, guard.updater.policy, "old_logprobs")
    failing_forward(guard.updater.policy, lambda number, _: number in (1, 3))
    guard.score(samples, guard.updater.policy, "old_logprobs")
    assert guard.said == [
        "out of memory in scoring old_logprobs at micro-batch 1 of 1 (89 tokens); score_token_budget 90 -> 62, replayed",
        "out of memory in scoring old_logprobs at micro-batch 2 of 2 (44 tokens); score_token_budget 62 -> 33, replayed",
    ]
    assert guard.updater.token_budget == 64
    for one, two in zip(samples, again):
        torch.testing.assert_close(one.old_logprobs, two.old_logprobs, atol=1e-6, rtol=0)


def test_the_optimizer_step_is_replayed_only_before_it_changes_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = batch([20, 18])
    guard, plain = guarded(), guarded()
    plain.step(samples, 1e-3, 0.0)
    norm = torch.nn.utils.get_total_norm
    calls: list[int] = []

    def short(grads):
        calls.append(1)
        return out_of_memory() if len(calls) == 1 else norm(grads)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", short)
    guard.step(samples, 1e-3, 0.0)
    assert guard.said == ["out of memory in the optimizer step; freed cached memory, replayed"]
    for one, two in zip(guard.updater.policy.parameters(), plain.updater.policy.parameters()):
        assert torch.equal(one, two)
    monkeypatch.setattr(guard.updater.optimizer, "_adamw", out_of_memory)
    with pytest.raises(MemoryExhausted, match=r"does not repeat the step\. Resume from the last checkpoint"):
        guard.step(samples, 1e-3, 0.0)
    assert len(guard.said) == 1


def test_an_optimizer_step_allocates_nothing_once_it_has_begun_to_apply() -> None:
    """Tensors made by torch between the first change and the last: none with storage of their own."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in tree_leaves(out):
                made_here = isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in given
                if watched.applying and made_here:
                    made.append(str(func))
            return out

    for offload, states in product((False, True), ("full", "8bit")):
        made: list[str] = []
        guard = guarded(torch.bfloat16, offload_optimizer=offload, states=states)
        watched = guard.updater.optimizer
        with Watch():
            guard.step(batch([20, 18]), 1e-3, 0.0)
        assert made == [], (offload, states)
        watched.applying = True
        with Watch():
            torch._foreach_add([torch.ones(2)], 1.0)
        assert made, "the watch sees what is made"


def test_other_work_is_repeated_and_gives_up_without_a_traceback_of_its_own() -> None:
    guard, calls = guarded(), []

    def work() -> int:
        calls.append(1)
        return out_of_memory() if len(calls) == 1 else 7

    assert guard.run("publish", work) == 7
    assert guard.said == ["out of memory in publish; freed cached memory, replayed"]
    with pytest.raises(MemoryExhausted, match=r"in checkpoint.*the weights have to fit.*model\.lora") as caught:
        guard.run("checkpoint", out_of_memory)
    assert caught.value.__context__ is None


def test_an_allocator_that_asks_again_two_steps_in_a_row_lowers_the_budget() -> None:
    counts = iter([5, 5, 6, 6, 7, 9, 9])
    guard = guarded(token_budget=200, alloc_retries=lambda: next(counts))
    samples = batch([10] * 12)
    found = []
    for _ in range(6):
        guard.step(samples, 1e-3, 0.0)
        found.append((guard.end_step()["run/alloc_retries"], guard.updater.token_budget))
    assert found == [(0, 200), (1, 200), (0, 200), (1, 200), (2, 109), (0, 109)]
    assert guard.said == ["the allocator ran short and retried in 2 steps in a row; token_budget 200 -> 109"]


def test_retries_of_a_step_that_ran_out_are_not_counted_twice() -> None:
    counts = iter([0, 3, 4, 4])
    guard = guarded(token_budget=200, alloc_retries=lambda: next(counts))
    samples = batch([10] * 12)
    failing_forward(guard.updater.policy, lambda number, _: number == 1)
    for _ in range(3):
        guard.step(samples, 1e-3, 0.0)
        guard.end_step()
    assert len(guard.said) == 1
    assert guarded().end_step() == {}, "where nobody counts there is no metric"


def test_a_resumed_run_starts_where_this_one_has_come_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first = guarded(torch.float32, FakeEngine(2), token_budget=100)
    first.ladder.own_memory = True
    failing_forward(first.updater.policy, lambda number, _: number < 7)
    first.step(batch([20] * 4), 1e-3, 0.0)
    first.ladder.engine.lowered = {"prefill_tokens": 64}
    state = json.loads(json.dumps(first.memory()))
    second = guarded(torch.float32, token_budget=100)
    second.ladder.own_memory = True
    lowered = second.restore(state)
    assert lowered == {
        "token_budget": 32,
        "checkpoint_activations": True,
        "offload_activations": True,
        "offload_optimizer": True,
        "prefill_tokens": 64,
    }
    assert second.ceiling == first.ceiling
    assert second.updater.token_budget == 32 and second.updater.optimizer.offloaded
    assert second.memory()["update"] == first.memory()["update"], "and the one after that"
    monkeypatch.setattr(guards, "machine", lambda device: "another")
    assert guarded().restore(state) == {}
    assert guarded().restore({}) == {}


def test_a_container_s_limit_is_the_host_s(tmp_path) -> None:
    total, available = host_memory(tmp_path, tmp_path / "none")
    assert total > available > 0
    own = tmp_path / "own"
    own.write_text("12:pids:/x\n4:cpu,memory:/job/step\n0::/box\n")
    box = tmp_path / "box"
    box.mkdir()
    (box / "memory.max").write_text("max\n")
    (box / "memory.current").write_text("1000\n")
    assert host_memory(tmp_path, own)[0] == total
    (box / "memory.max").write_text("9000\n")
    (box / "memory.current").write_text("5000\n")
    (box / "memory.stat").write_text("anon 3000\ninactive_file 2000\n")
    assert host_memory(tmp_path, own) == (9000, 6000)
    job = tmp_path / "memory/job"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("8000\n")
    (job / "memory.usage_in_bytes").write_text("7000\n")
    (job / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 500\n")
    assert host_memory(tmp_path, own) == (8000, 1500)


def test_gradients_of_a_failed_attempt_are_gone_before_anything_is_lowered() -> None:
    """A rung may need the memory: the optimizer's state is moved while they would still be there."""
    guard, left = guarded(), []
    failing_forward(guard.updater.policy, lambda call, tokens: call == 2)
    guard.report = lambda recovery: left.append([grad for grad in guard.updater.optimizer.grads() if grad is not None])
    guard.step(batch([20, 30, 25, 40]), 1e-3, 0.0)
    assert left == [[]]


def test_a_session_that_learned_nothing_of_memory_keeps_what_it_was_told() -> None:
    """Also what was found on another machine: the run may go back there."""
    guard, told = guarded(), {"machine": "another", "ceiling": {"token_budget": 7}, "update": {}, "rollout": {}}
    assert guard.memory() == {}
    guard.restore(told)
    guard.step(batch([20, 20]), 1e-3, 0.0)
    assert guard.memory() == told
    failing_forward(guard.updater.policy, lambda number, _: number == 1)
    guard.step(batch([20, 20]), 1e-3, 0.0)
    assert guard.memory()["machine"] != "another" and "token_budget" in guard.memory()["update"]


def test_an_engine_that_gave_something_up_by_itself_is_remembered() -> None:
    engine = FakeEngine()
    guard = guarded(engine=engine)
    engine.lowered = {"max_sequences": 3}
    assert guard.memory()["rollout"] == {"max_sequences": 3}


def test_a_gradient_that_was_used_up_is_accumulated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the halves of a step others may wait; the second half alone repeats the first where it has to."""
    guard, plain, samples = guarded(), guarded(), batch([20, 20, 9])
    plain.step(samples, 1e-3, 0.0)
    lay_out, calls = guard.updater.optimizer._lay_out_gradients, []

    def short_once() -> None:
        calls.append(1)
        if len(calls) == 1:
            out_of_memory()
        lay_out()

    monkeypatch.setattr(guard.updater.optimizer, "_lay_out_gradients", short_once)
    guard.accumulate(samples)
    assert guard.apply(1e-3).applied and len(calls) == 2
    for one, two in zip(guard.updater.policy.parameters(), plain.updater.policy.parameters()):
        assert torch.equal(one, two)
