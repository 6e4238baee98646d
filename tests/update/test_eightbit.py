"""Moments of 8 bits: how far off they are, block by block, and an optimizer that keeps them so."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from safetensors.torch import load_file, save_file

from tests.update.test_optimizer import backward, larger, parameters
from trimtab.config.learn import Learn
from trimtab.model.weights import WeightStore
from trimtab.update import optimizer as optimizers
from trimtab.update.eightbit import BLOCK, Room, signed_map, unsigned_map
from trimtab.update.optimizer import MasterAdamW

SMALL = Learn(max_grad_norm=0.5, optimizer={"states": "8bit"})


def stored(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, and what is read back, of whole blocks of both moments."""
    room = Room(first.numel(), first.dtype, first.device)
    codes, scales = torch.zeros(2, first.numel(), dtype=torch.uint8), torch.zeros(2, first.numel() // BLOCK)
    room.load(codes, scales)[:] = torch.stack([first, second])
    room.store(codes, scales)
    return codes, scales, room.load(codes, scales).clone()


def bnb_map(signed: bool) -> list[float]:
    """The map of the paper's own code, written down once more from its description."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if signed else 2 ** (decade + 1)
        for part in range(parts):
            middle = 0.1 + 0.9 * (part + 0.5) / parts
            values += [sign * 10.0 ** (decade - 6) * middle for sign in ((1, -1) if signed else (1,))]
    return sorted(values)


def test_the_maps_are_the_papers_but_for_a_signed_one_that_ends_at_1_on_both_sides() -> None:
    assert unsigned_map().tolist() == pytest.approx(bnb_map(signed=False), rel=1e-6)
    paper = bnb_map(signed=True)
    assert len(paper) == 256 and paper[0] == pytest.approx(-0.99297, abs=1e-5) and paper[-2:] == [-paper[0], 1.0]
    assert signed_map().tolist() == pytest.approx([-1.0, *paper[1:-2], 1.0], rel=1e-6)
    for values in (signed_map(), unsigned_map()):
        assert (values.diff() > 0).all() and len(values) <= 256


@st.composite
def blocks(draw: st.DrawFn) -> np.ndarray:
    """Two blocks, of any size and spread."""
    shares = draw(arrays.arrays(np.float32, BLOCK * 2, elements=st.floats(-1, 1, width=32, allow_subnormal=False)))
    power = draw(st.sampled_from([1, 3, 7]))
    scales = draw(st.tuples(*[st.integers(-60, 60)] * 2))
    return (shares**power * np.repeat(2.0 ** np.array(scales), BLOCK)).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(first=blocks(), second=blocks())
def test_round_trip_is_within_its_bounds(first: np.ndarray, second: np.ndarray) -> None:
    """Half a step of the map, of what a block's largest is, in every decade; and one scale a block."""
    first, second = torch.from_numpy(first), torch.from_numpy(np.abs(second))
    _, scales, (found, squared) = stored(first, second)
    for values, read, table, own in (
        (first, found, signed_map(), scales[0]),
        (second, squared, unsigned_map(), scales[1]),
    ):
        peaks = values.view(-1, BLOCK).abs().amax(1)
        assert torch.equal(own, peaks)
        scale = peaks.repeat_interleave(BLOCK).double()
        share = (values.double() / scale.clamp(min=1e-37)).abs()
        for decade in range(7):
            parts = 2**decade if table[0] < 0 else 2 ** (decade + 1)
            half = 10.0 ** (decade - 6) * 0.9 / parts  # a step; half of one but where decades meet and at the ends
            inside = (share <= 10.0 ** (decade - 6)) & (share > 10.0 ** (decade - 7))
            worst = ((read - values).double().abs() - half * scale * 1.001).clamp(min=0)[inside]
            assert not worst.any(), f"decade {decade}"
    assert torch.equal(found == 0, found.abs() == 0) and (squared >= 0).all()
    assert ((second > 0) == (squared > 0)).all(), "a second moment that is not zero stays so"


def test_the_error_that_the_docstring_states() -> None:
    share = torch.logspace(-2, 0, 100 * BLOCK, dtype=torch.float64).float()
    blocks_of = torch.cat(
        [torch.cat([torch.ones(1), part]) for part in share.split(BLOCK - 1) if len(part) == BLOCK - 1]
    )
    _, _, (found, squared) = stored(blocks_of, blocks_of)
    off = [(read - blocks_of).abs() for read in (found, squared)]
    assert [float(o.max()) < most for o, most in zip(off, (0.0071, 0.0036))] == [True, True]
    near = blocks_of > 0.1
    worst = [float((o / blocks_of)[near].max()) for o in off]
    assert 0.06 < worst[0] < 0.071 and 0.03 < worst[1] < 0.036


@settings(max_examples=30, deadline=None)
@given(first=blocks(), second=blocks())
def test_read_and_stored_again_nothing_changes(first: np.ndarray, second: np.ndarray) -> None:
    codes, scales, found = stored(torch.from_numpy(first), torch.from_numpy(np.abs(second)))
    again = stored(*found)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scales) and torch.equal(again[2], found)


def test_a_negative_largest_is_exact_and_zeros_are_zeros() -> None:
    first = torch.zeros(2 * BLOCK)
    first[3], first[5] = -2.5, 1.0
    _, scales, (found, squared) = stored(first, first.square())
    assert found[3] == -2.5 and squared[3] == 6.25 and scales[0].tolist() == [2.5, 0.0]
    assert (found[BLOCK:] == 0).all() and (found[:3] == 0).all()


def test_an_outlier_costs_its_own_block_alone() -> None:
    torch.manual_seed(0)
    plain = torch.randn(4 * BLOCK)
    spoiled = plain.clone()
    spoiled[BLOCK + 7] = 1e6
    clean, other = (stored(values, values.square())[2] for values in (plain, spoiled))
    outside = torch.ones(4 * BLOCK, dtype=torch.bool)
    outside[BLOCK : 2 * BLOCK] = False
    assert torch.equal(clean[:, outside], other[:, outside]) and not torch.equal(clean[0], other[0])


def adam_by_hand(start: np.ndarray, grads: list[np.ndarray], lr: float) -> np.ndarray:
    """AdamW whose moments go through codes after each step, in numpy: nearest value of the map, block by block."""
    tables = signed_map().double().numpy(), unsigned_map().double().numpy()
    x, moments = start.astype(np.float64), [np.zeros_like(start, dtype=np.float64) for _ in range(2)]
    for t, g in enumerate(grads, 1):
        moments = [0.9 * moments[0] + 0.1 * g, 0.999 * moments[1] + 0.001 * g * g]
        x = x - lr * (moments[0] / (1 - 0.9**t)) / (np.sqrt(moments[1] / (1 - 0.999**t)) + 1e-8)
        for which, table in enumerate(tables):
            for at in range(0, len(x), BLOCK):
                part = moments[which][at : at + BLOCK]
                peak = np.abs(part).max()
                nearest = np.abs(part[:, None] / peak - table[None, :]).argmin(1)
                if which == 1:
                    nearest = np.where(part > 0, np.maximum(nearest, 1), 0)
                moments[which][at : at + BLOCK] = table[nearest] * peak
    return x


def test_steps_equal_the_same_written_down_in_numpy() -> None:
    rng = np.random.default_rng(0)
    size, lr = 3 * BLOCK - 56, 0.01
    start = rng.normal(size=size).astype(np.float32)
    grads = [(rng.normal(size=size) * np.exp(rng.normal(size=size) * 2)).astype(np.float32) for _ in range(6)]
    weight = torch.nn.Parameter(torch.from_numpy(start.copy()).view(8, -1))
    optimizer = MasterAdamW(WeightStore([("weight", weight)]), Learn(max_grad_norm=None, optimizer={"states": "8bit"}))
    for grad in grads:
        weight.grad = torch.from_numpy(grad.copy()).view(8, -1)
        optimizer.step(lr)
    expected = adam_by_hand(start, [g.astype(np.float64) for g in grads], lr)
    off = np.abs(weight.detach().numpy().ravel() - expected)
    # A quotient within float32's rounding of the middle between two codes may go either way: a few elements, by a code.
    assert np.mean(off > 1e-5) < 0.01 and off.max() < 2e-3
    full = torch.nn.Parameter(torch.from_numpy(start.copy()).view(8, -1))
    wide = MasterAdamW(WeightStore([("weight", full)]), Learn(max_grad_norm=None))
    for grad in grads:
        full.grad = torch.from_numpy(grad.copy()).view(8, -1)
        wide.step(lr)
    apart = (full - weight).detach().abs()
    assert 1e-5 < float(apart.mean()) < 0.05 * 6 * lr, "not what full moments give, but near"


def test_state_is_a_quarter_and_is_counted() -> None:
    named = [("weight", torch.nn.Parameter(torch.zeros(64, 4 * BLOCK)))]
    count = named[0][1].numel()
    assert MasterAdamW(WeightStore(named), SMALL).state_bytes == 2 * (count + 4 * count // BLOCK)
    half = [("weight", torch.nn.Parameter(torch.zeros(64, 4 * BLOCK, dtype=torch.bfloat16)))]
    assert MasterAdamW(WeightStore(half), SMALL).state_bytes == 2 * (count + 4 * count // BLOCK) + 4 * count
    assert (
        MasterAdamW(WeightStore([("weight", torch.nn.Parameter(torch.zeros(64, 4 * BLOCK)))]), Learn()).state_bytes
        == 8 * count
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pieces_and_chunks_change_nothing(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device, offloaded from the start, offloaded on the way; in chunks and pieces that cut parameters."""
    runs = []
    for offload, on_the_way, chunk, piece in (
        (False, False, 2**22, 2**26), (False, False, BLOCK, 2**26), (True, False, 2**22, BLOCK), (False, True, BLOCK, 2 * BLOCK),
    ):  # fmt: skip
        monkeypatch.setattr(optimizers, "MOMENT_CHUNK_ELEMENTS", chunk)
        monkeypatch.setattr(optimizers, "MAX_PIECE_ELEMENTS", piece)
        large = torch.nn.Parameter(torch.randn(30, 41, generator=torch.Generator().manual_seed(2)).to(dtype))
        named = [*parameters(dtype), ("mid", larger(dtype)), ("large", large)]
        optimizer = MasterAdamW(WeightStore(named), SMALL, offload=offload)
        for step, scale in enumerate((1.0, -0.5, float("nan"), 2.0)):
            if on_the_way and step == 2:
                optimizer.offload()
            backward(named, scale)
            optimizer.step(0.01)
        runs.append(
            ([p.detach().clone() for _, p in named], {k: v.clone() for k, v in optimizer.state_tensors().items()})
        )
    for weights, state in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights, runs[0][0]))
        assert state.keys() == runs[0][1].keys() and all(torch.equal(state[k], runs[0][1][k]) for k in state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offload", [False, True])
def test_saved_and_loaded_goes_on_bit_for_bit(dtype: torch.dtype, offload: bool, tmp_path: Path) -> None:
    one, two = ([*parameters(dtype), ("large", larger(dtype))] for _ in range(2))
    first, second = MasterAdamW(WeightStore(one), SMALL, offload=offload), MasterAdamW(WeightStore(two), SMALL)
    for scale in (1.0, 0.3, -2.0):
        backward(one, scale)
        first.step(0.01)
    save_file({k: v.contiguous() for k, v in first.state_tensors().items()}, tmp_path / "state.safetensors")
    with torch.no_grad():
        for (_, a), (_, b) in zip(one, two):
            b.copy_(a)
    second.load_state_tensors(load_file(tmp_path / "state.safetensors"), first.table())
    for scale in (1.0, -0.1):
        for named, optimizer in ((one, first), (two, second)):
            backward(named, scale)
            optimizer.step(0.01)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(one, two))
    assert all(torch.equal(first.state_tensors()[k], v) for k, v in second.state_tensors().items())


def test_a_step_that_is_refused_and_a_parameter_without_a_gradient_stay_as_they_are() -> None:
    named = [*parameters(torch.bfloat16), ("large", larger(torch.bfloat16))]
    optimizer = MasterAdamW(WeightStore(named), SMALL)
    backward(named)
    optimizer.step(0.01)
    before = {k: v.clone() for k, v in optimizer.state_tensors().items()}
    backward(named, float("inf"))
    assert not optimizer.step(0.01).applied
    assert all(torch.equal(before[k], v) for k, v in optimizer.state_tensors().items())
    backward([named[0]], -3.0)
    assert optimizer.step(0.01).applied
    for key, value in optimizer.state_tensors().items():
        assert torch.equal(before[key], value) or key.endswith("/matrix"), key
    assert not torch.equal(before["exp_avg_codes/matrix"], optimizer.state_tensors()["exp_avg_codes/matrix"])


@pytest.mark.parametrize("offload", [False, True])
def test_a_step_without_memory_for_itself_changes_nothing(offload: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    named = [("large", larger(torch.float32))]
    optimizer = MasterAdamW(WeightStore(named), SMALL, offload=offload)
    backward(named)
    before = named[0][1].detach().clone()

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "Room", full)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step(0.01)
    assert not optimizer.applying and torch.equal(named[0][1], before)
    assert optimizer.step(0.01).applied


def test_nothing_is_allocated_once_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(4 * BLOCK, torch.float32, torch.device("cpu"))
    codes, scales = torch.zeros(2, 4 * BLOCK, dtype=torch.uint8), torch.zeros(2, 4)
    with torch.profiler.profile(profile_memory=True) as seen:
        room.load(codes, scales)
        room.store(codes, scales)
    grown = sum(max(0, event.self_cpu_memory_usage) for event in seen.key_averages())
    assert grown <= 64, f"{grown} bytes"


def test_a_tiny_second_moment_does_not_make_a_huge_step() -> None:
    """Beside a gradient a million times larger in its block: with a second moment of 0 the step would be the first over eps."""
    weight = torch.nn.Parameter(torch.zeros(2, BLOCK))
    optimizer = MasterAdamW(WeightStore([("weight", weight)]), Learn(max_grad_norm=None, optimizer={"states": "8bit"}))
    for _ in range(5):
        weight.grad = torch.full((2, BLOCK), 1e-4)
        weight.grad[0, 0] = 100.0
        optimizer.step(0.01)
    assert float(weight.detach().abs().max()) <= 5 * 0.01 * 1.01
    assert math.isclose(float(weight.detach()[1, 0]), -0.05, rel_tol=1e-3), "a block without it learns as ever"


def test_the_chunk_that_is_counted_is_the_chunk_there_is() -> None:
    assert optimizers.MOMENT_CHUNK_ELEMENTS % BLOCK == 0 and optimizers.MAX_PIECE_ELEMENTS % BLOCK == 0
