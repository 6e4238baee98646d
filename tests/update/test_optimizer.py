"""AdamW on float32 masters: the textbook formula, whole-step clipping, all or nothing."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from transformers import get_scheduler

from trimtab.config.learn import Learn
from trimtab.model.sizes import BLOCK
from trimtab.model.weights import WeightStore
from trimtab.update import optimizer as optimizers
from trimtab.update.optimizer import MasterAdamW
from trimtab.update.schedule import learning_rate


def parameters(dtype: torch.dtype) -> list[tuple[str, torch.nn.Parameter]]:
    g = torch.Generator().manual_seed(0)
    return [
        ("matrix", torch.nn.Parameter(torch.randn(3, 4, generator=g).to(dtype))),
        ("vector", torch.nn.Parameter(torch.randn(4, generator=g).to(dtype))),
    ]


def larger(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(13, 10, generator=torch.Generator().manual_seed(1)).to(dtype))


def backward(named: list[tuple[str, torch.nn.Parameter]], scale: float = 1.0) -> None:
    """A gradient that differs from element to element."""
    total = sum((p.float() * torch.linspace(-1, 2, p.numel()).view(p.shape)).sum() for _, p in named)
    (total * scale).backward()


def by_hand(start: torch.Tensor, grads: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Loshchilov & Hutter's AdamW with the default betas, in float64."""
    x, m, v = start.double(), torch.zeros_like(start, dtype=torch.float64), torch.zeros_like(start, dtype=torch.float64)
    for t, g in enumerate(grads, 1):
        g = g.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = x * (1 - lr * decay) - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    return x


def test_equals_the_formula_with_decay_on_matrices_only() -> None:
    learn = Learn(lr=0.1, max_grad_norm=None, optimizer={"weight_decay": 0.1})
    named = parameters(torch.float32)
    start = {name: p.detach().clone() for name, p in named}
    optimizer = MasterAdamW(WeightStore(named), learn)
    grads: dict[str, list[torch.Tensor]] = {"matrix": [], "vector": []}
    for scale in (1.0, -0.5, 2.0):
        backward(named, scale)
        for name, p in named:
            grads[name].append(p.grad.clone())
        optimizer.step(0.1)
    for name, p in named:
        expected = by_hand(start[name], grads[name], 0.1, 0.1 if name == "matrix" else 0.0)
        torch.testing.assert_close(p.detach().double(), expected, atol=1e-6, rtol=0)


def test_the_norm_is_of_the_whole_step_and_clips_it() -> None:
    named = parameters(torch.float32)
    optimizer = MasterAdamW(WeightStore(named), Learn(max_grad_norm=0.5))
    backward(named)
    backward(named)
    expected = math.sqrt(sum(float((p.grad**2).sum()) for _, p in named))
    seen = {}
    original = optimizer._step_whole

    def spy(*arguments) -> None:
        seen["norm"] = math.sqrt(sum(float((p.grad**2).sum()) for _, p in named))
        original(*arguments)

    optimizer._step_whole = spy
    assert optimizer.step(0.01).grad_norm == pytest.approx(expected, rel=1e-5)
    assert seen["norm"] == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float, dtype: torch.dtype) -> None:
    named = parameters(dtype)
    optimizer = MasterAdamW(WeightStore(named), Learn())
    backward(named)
    assert optimizer.step(0.01).applied
    before = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    weights = [p.detach().clone() for _, p in named]
    backward(named)
    backward([named[1]], bad)
    outcome = optimizer.step(0.01)
    assert not outcome.applied
    assert not math.isfinite(outcome.grad_norm)
    assert all(torch.equal(a, p) for a, (_, p) in zip(weights, named))
    after = optimizer.state_tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.grad is None for _, p in named)
    backward(named)
    assert optimizer.step(0.01).applied


def test_bfloat16_accumulates_and_steps_in_float32() -> None:
    """Updates far smaller than bfloat16's spacing add up in the masters, and many small gradients add up exactly."""
    named = parameters(torch.bfloat16)
    optimizer = MasterAdamW(WeightStore(named), Learn(max_grad_norm=None))
    start = [m.clone() for m in optimizer.masters()]
    for _ in range(256):
        backward(named, 1 / 256)
    assert named[0][1].grad is None
    slope = (torch.linspace(-1, 2, 12).bfloat16() / 256).bfloat16().float().view(3, 4)
    assert optimizer.grads()[0] is not None
    torch.testing.assert_close(optimizer.grads()[0], slope * 256, rtol=1e-2, atol=1e-2)
    for _ in range(10):
        backward(named)
        optimizer.step(1e-5)
    assert optimizer.masters()[0].dtype == torch.float32
    moved = (optimizer.masters()[0] - start[0]).abs().max()
    assert 5e-5 < moved < 2e-4
    assert torch.equal(named[0][1].detach(), optimizer.masters()[0].bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_goes_on_bit_for_bit(dtype: torch.dtype) -> None:
    one, two = parameters(dtype), parameters(dtype)
    first, second = MasterAdamW(WeightStore(one), Learn()), MasterAdamW(WeightStore(two), Learn())
    for _ in range(3):
        backward(one)
        first.step(0.01)
    with torch.no_grad():
        for (_, a), (_, b) in zip(one, two):
            b.copy_(a)
    second.load_state_tensors({k: v.clone() for k, v in first.state_tensors().items()}, first.table())
    for _ in range(3):
        for named, optimizer in ((one, first), (two, second)):
            backward(named)
            optimizer.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_offloaded_is_the_same_bit_for_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces that cut parameters, through steps, a step that is refused, and a checkpoint."""
    monkeypatch.setattr(optimizers, "MAX_PIECE_ELEMENTS", BLOCK)
    one, two = ([*parameters(dtype), ("large", larger(dtype))] for _ in range(2))
    here, there = (
        MasterAdamW(WeightStore(one), Learn(max_grad_norm=0.5)),
        MasterAdamW(WeightStore(two), Learn(max_grad_norm=0.5), offload=True),
    )
    assert [unit.unit.size for unit in there._units] == [BLOCK, BLOCK, BLOCK]
    for scale in (1.0, -0.5, float("nan"), 2.0):
        for named, optimizer in ((one, here), (two, there)):
            backward(named, scale)
            optimizer.step(0.01)
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two))
    states = here.state_tensors(), there.state_tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    there.load_state_tensors({key: value.clone() for key, value in states[0].items()}, here.table())
    for named, optimizer in ((one, here), (two, there)):
        backward(named)
        optimizer.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_that_moves_to_the_host_in_a_run_is_the_same_bit_for_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "MAX_PIECE_ELEMENTS", BLOCK)
    one, two = ([*parameters(dtype), ("large", larger(dtype))] for _ in range(2))
    here, moved = (MasterAdamW(WeightStore(named), Learn(max_grad_norm=0.5)) for named in (one, two))
    for step in range(5):
        if step == 2:
            moved.offload()
        if step == 4:
            moved.piece = BLOCK
        for named, optimizer in ((one, here), (two, moved)):
            backward(named, 1.0 - step / 3)
            optimizer.step(0.01)
    assert moved.offloaded and not here.offloaded
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two))
    states = here.state_tensors(), moved.state_tensors()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_a_host_without_room_leaves_the_state_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    named = parameters(torch.bfloat16)
    optimizer = MasterAdamW(WeightStore(named), Learn())
    made = optimizers.HostMemory
    calls: list[int] = []

    def full(size: int, device: torch.device):
        calls.append(size)
        if len(calls) == 2:
            raise MemoryError("could not be pinned")
        return made(size, device)

    monkeypatch.setattr(optimizers, "HostMemory", full)
    with pytest.raises(MemoryError):
        optimizer.offload()
    assert not optimizer.offloaded
    backward(named)
    assert optimizer.step(0.01).applied


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_without_memory_for_itself_changes_nothing_and_can_be_repeated(
    offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither weights nor state nor gradients, whichever allocation it is that fails."""
    one, two = ([("large", larger(torch.float32))] for _ in range(2))
    plain, short = (MasterAdamW(WeightStore(named), Learn(max_grad_norm=0.5), offload=offload) for named in (one, two))
    for named in (one, two):
        backward(named)
        named[0][1].grad = named[0][1].grad.t().contiguous().t()  # a copy has to be made
    plain.step(0.01)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("no room")

    before, grad = two[0][1].detach().clone(), two[0][1].grad.clone()
    targets = [(torch, "empty_strided"), (torch.nn.utils, "get_total_norm"), (optimizers, "_clip_factor")]
    if offload:
        targets.append((optimizers.StateStreamer, "slots"))
    for owner, name in targets:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, full)
            with pytest.raises(torch.OutOfMemoryError):
                short.step(0.01)
        assert not short.applying
        assert torch.equal(two[0][1], before) and torch.equal(two[0][1].grad, grad)
    short.step(0.01)
    assert torch.equal(one[0][1], two[0][1])


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    """Neither its step counts nor its weight decays."""
    named = parameters(torch.bfloat16)
    optimizer = MasterAdamW(WeightStore(named), Learn(optimizer={"weight_decay": 0.1}))
    before = named[0][1].detach().clone()
    backward([named[1]])
    assert optimizer.step(0.01).applied
    assert torch.equal(named[0][1], before)
    assert optimizer.state_tensors()["step/matrix"] == 0
    assert optimizer.state_tensors()["step/vectors"] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_the_layout_of_a_parameter_does_not_matter(dtype: torch.dtype, offload: bool) -> None:
    """Transposed in memory, and with gaps between its rows."""
    plain = larger(dtype)
    turned = torch.nn.Parameter(plain.detach().clone().t().contiguous().t())
    spread = torch.nn.Parameter(torch.zeros(13, 20, dtype=dtype)[:, ::2].copy_(plain.detach()))
    assert not turned.is_contiguous() and not spread.is_contiguous()
    found = []
    for parameter in (plain, turned, spread):
        optimizer = MasterAdamW(WeightStore([("weight", parameter)]), Learn(max_grad_norm=None), offload=offload)
        for scale in (1.0, -0.3):
            backward([("weight", parameter)], scale)
            optimizer.step(0.01)
        found.append((parameter.detach(), {k: v.clone() for k, v in optimizer.state_of_parameters().items()}))
    for weight, state in found[1:]:
        torch.testing.assert_close(weight, found[0][0], atol=1e-6, rtol=0)
        for key, value in state.items():
            torch.testing.assert_close(value, found[0][1][key], atol=1e-6, rtol=1e-6)


def test_two_optimizers_do_not_share_parameters_but_may_follow_each_other() -> None:
    named = parameters(torch.bfloat16)
    first = MasterAdamW(WeightStore(named), Learn())
    with pytest.raises(RuntimeError, match="have an optimizer already"):
        MasterAdamW(WeightStore(named), Learn())
    del first
    second = MasterAdamW(WeightStore(named), Learn())
    backward(named)
    assert second.step(0.01).grad_norm > 0


def test_parameters_are_freed_with_their_optimizer() -> None:
    named = parameters(torch.bfloat16)
    seen = weakref.ref(named[0][1])
    optimizer = MasterAdamW(WeightStore(named), Learn())
    backward(named)
    optimizer.step(0.01)
    del named, optimizer
    gc.collect()
    assert seen() is None


def test_learning_rate_by_hand() -> None:
    # Warm-up 0, 1/2, then from 1 towards 0.2 in nine steps: 1 - 0.8 (s - 2) / 9. The last step (10) is above 0.2.
    linear = Learn(steps=11, lr=1.0, schedule={"kind": "linear", "warmup_steps": 2, "final": 0.2})
    assert [round(learning_rate(linear, s), 4) for s in (0, 1, 2, 6, 10)] == [0.0, 0.5, 1.0, 0.6444, 0.2889]
    # 1 + cos(pi s / 4): the last step is not 0.
    cosine = Learn(steps=4, lr=2.0, schedule={"kind": "cosine"})
    assert [round(learning_rate(cosine, s), 4) for s in range(4)] == [2.0, 1.7071, 1.0, 0.2929]
    assert learning_rate(Learn(lr=3e-6), 1234) == 3e-6
    constant = Learn(lr=3.0, schedule={"warmup_steps": 3})
    assert [learning_rate(constant, s) for s in (0, 1, 2, 3, 99)] == [0.0, 1.0, 2.0, 3.0, 3.0]
    assert learning_rate(linear, 6, peak=10.0) == 10 * learning_rate(linear, 6)


@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize(
    ("kind", "final", "theirs", "settings"),
    [
        ("constant", 0.0, "constant_with_warmup", {}),
        ("linear", 0.0, "linear", {}),
        ("cosine", 0.0, "cosine", {}),
        ("cosine", 0.1, "cosine_with_min_lr", {"min_lr_rate": 0.1}),
    ],
)
def test_the_schedule_is_hugging_faces(
    kind: str, final: float, theirs: str, settings: dict[str, float], warmup: int
) -> None:
    """Step by step; with `unit: update`, optimizer step by optimizer step, as its trainer counts."""
    schedule = {"kind": kind, "warmup_steps": warmup, "final": final}
    by_step = Learn(steps=12, lr=0.5, schedule=schedule)
    by_update = Learn(steps=2, updates_per_step=3, epochs_per_step=2, lr=0.5, schedule=schedule | {"unit": "update"})
    one_rate = Learn(steps=12, updates_per_step=3, lr=0.5, schedule=schedule)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = get_scheduler(
        theirs, optimizer, num_warmup_steps=warmup, num_training_steps=12, scheduler_specific_kwargs=settings
    )
    for at in range(12):
        expected = pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12, abs=1e-15)
        assert learning_rate(by_step, at) == expected
        assert learning_rate(by_update, at // 6, at % 6) == expected
        assert [learning_rate(one_rate, at, update) for update in range(3)] == [expected] * 3
        optimizer.step()
        scheduler.step()
