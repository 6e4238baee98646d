"""The arena: whatever the driver refuses, nothing leaks, nothing is unmapped twice, and addresses never change."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimtab.base.errors import EngineError
from trimtab.rollout.native.arena import Arena, ArenaMemoryError, piece_bytes

CPU = torch.device("cpu")
GRANULE, CHUNK, CHUNKS = 4096, 3 * 4096, 3
NBYTES = CHUNKS * CHUNK - GRANULE - 100
"""Two whole chunks and one that is shorter, not a multiple of the granule."""
WHOLE = CHUNKS * CHUNK - GRANULE


class FakeDriver:
    """The driver's own rules: memory lives while it has a handle or a mapping, and nothing is done twice.

    Every call can be made to fail, except release: a driver that will not take a handle back cannot be made not to leak.
    """

    granule, chunk_bytes = GRANULE, CHUNK

    def __init__(self, memory: int = 10 * WHOLE, cached: int = 0) -> None:
        self.memory = memory
        self.cached = cached
        """Of the memory, what torch holds without using it."""
        self.fail: dict[str, int] = {}
        """Calls that fail, once each, after having worked so many times."""
        self.reserved: dict[int, np.ndarray] = {}
        self.handles: dict[int, int] = {}
        self.mappings: dict[int, int] = {}
        self.accessible = 0
        self.syncs = 0
        self._next_handle = 0

    def _may_fail(self, call: str) -> None:
        left = self.fail.pop(call, None)
        if left:
            self.fail[call] = left - 1
        elif left == 0:
            raise EngineError(f"{call} was made to fail")

    def free_bytes(self) -> int:
        return self.memory - self.cached - sum(self.handles.values()) - sum(self.mappings.values())

    def empty_cache(self) -> None:
        self.cached = 0

    def synchronize(self) -> None:
        self._may_fail("synchronize")
        self.syncs += 1

    def reserve(self, nbytes: int) -> int:
        self._may_fail("reserve")
        assert nbytes % GRANULE == 0
        range_ = np.zeros(nbytes, np.uint8)
        self.reserved[range_.ctypes.data] = range_
        return range_.ctypes.data

    def free(self, address: int, nbytes: int) -> None:
        self._may_fail("free")
        assert not self.mappings
        assert len(self.reserved.pop(address)) == nbytes

    def create(self, nbytes: int) -> int:
        self._may_fail("create")
        assert nbytes % GRANULE == 0
        if nbytes > self.free_bytes():
            raise ArenaMemoryError("create: out of memory")
        self._next_handle += 1
        self.handles[self._next_handle] = nbytes
        return self._next_handle

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._may_fail("map")
        assert self.handles[handle] == nbytes
        (start,) = self.reserved
        assert start <= address and address + nbytes <= start + len(self.reserved[start])
        assert all(address + nbytes <= a or a + n <= address for a, n in self.mappings.items()), "mapped over a mapping"
        self.mappings[address] = nbytes
        self.handles[handle] = 0  # counted with the mapping from here on

    def release(self, handle: int) -> None:
        del self.handles[handle]

    def set_access(self, address: int, nbytes: int) -> None:
        self._may_fail("set_access")
        assert nbytes == sum(self.mappings.values()), "access to a range that is not mapped throughout"
        self.accessible = nbytes

    def unmap(self, address: int, nbytes: int) -> None:
        self._may_fail("unmap")
        assert self.mappings.pop(address) == nbytes, "not a whole mapping"
        self.accessible = 0

    def view(self, source) -> torch.Tensor:
        class OnTheHost:
            keeps = source
            __array_interface__ = source.__cuda_array_interface__

        return torch.from_numpy(np.asarray(OnTheHost()))

    @property
    def empty(self) -> bool:
        return not (self.handles or self.mappings or self.reserved)


FAILURES = st.dictionaries(
    st.sampled_from(["reserve", "create", "map", "set_access", "unmap", "free", "synchronize"]),
    st.integers(0, CHUNKS - 1),
    max_size=2,
)


class ArenaMachine(RuleBasedStateMachine):
    """Random lends, reclaims, closes, shortages and failures against what the driver itself holds."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = FakeDriver()
        self.make()

    def make(self) -> None:
        self.driver.memory, self.driver.cached = 2 * WHOLE, 0
        self.arena = Arena(NBYTES, CPU, self.driver)
        self.whole = self.arena.tensor((NBYTES,), torch.uint8)
        self.address = self.whole.data_ptr()
        assert self.arena.mapped and self.arena.lendable

    @property
    def held(self) -> int:
        return sum(self.driver.mappings.values())

    def enough(self) -> bool:
        """Whether a reclaim that starts now has all the memory it needs, torch's unused memory counted in."""
        return WHOLE - self.held <= self.driver.free_bytes() + self.driver.cached

    @rule(share=st.sampled_from([0.0, 0.5, 0.99, 1.0, 5.0]), cached=st.booleans())
    def leave_so_much_memory(self, share: float, cached: bool) -> None:
        left = int(share * WHOLE)
        self.driver.memory, self.driver.cached = self.held + left, left if cached else 0

    @rule(fail=FAILURES)
    def lend(self, fail: dict[str, int]) -> None:
        held, syncs, self.driver.fail = self.held, self.driver.syncs, dict(fail)
        try:
            freed = self.arena.lend()
        except EngineError:
            assert held and {"unmap", "synchronize"} & set(fail)
        else:
            assert freed == held and self.held == 0 and not self.arena.mapped
            assert self.driver.syncs == syncs + bool(held)
            assert self.arena.lend() == 0

    @rule(fail=FAILURES)
    def reclaim(self, fail: dict[str, int]) -> None:
        was_mapped, enough, self.driver.fail = self.arena.mapped, self.enough(), dict(fail)
        allowed = EngineError if fail else ArenaMemoryError
        try:
            self.arena.reclaim()
        except allowed:
            assert not was_mapped and not self.arena.mapped
            assert fail or not enough
            assert fail or not self.driver.cached, "gave up before it emptied torch's cache"
            assert "unmap" in fail or self.held == 0
        else:
            assert self.arena.mapped and (was_mapped or enough)

    @rule(fail=FAILURES)
    def close(self, fail: dict[str, int]) -> None:
        self.driver.fail = dict(fail)
        try:
            self.arena.close()
        except EngineError:
            assert {"unmap", "synchronize", "free"} & set(fail)
            self.driver.fail = {}
            self.arena.close()
        assert self.driver.empty and not self.arena.mapped
        self.driver.fail = {}
        self.arena.close()
        self.make()

    @rule(fail=FAILURES, share=st.sampled_from([0.5, 5.0]))
    def fail_to_make_another(self, fail: dict[str, int], share: float) -> None:
        driver = FakeDriver(int(share * WHOLE))
        driver.fail = dict(fail)
        try:
            arena = Arena(NBYTES, CPU, driver)
        except EngineError:
            assert fail or share < 1
            undoing_failed_too = {"free", "synchronize"} & set(fail)  # and there is no arena to ask again
            assert driver.empty or undoing_failed_too
        else:
            driver.fail = {}
            arena.close()

    @invariant()
    def no_handle_outlives_its_call(self) -> None:
        assert not self.driver.handles

    @invariant()
    def mapped_means_all_of_it_at_the_first_address(self) -> None:
        assert list(self.driver.reserved) == [self.address] == [self.whole.data_ptr()]
        if self.arena.mapped:
            chunks = {self.address + i * CHUNK: min(CHUNK, WHOLE - i * CHUNK) for i in range(CHUNKS)}
            assert self.driver.mappings == chunks and self.driver.accessible == WHOLE

    def teardown(self) -> None:
        self.driver.fail = {}
        self.arena.close()
        assert self.driver.empty


TestArenaMachine = ArenaMachine.TestCase
TestArenaMachine.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("call", ["create", "map", "set_access"])
def test_a_constructor_that_fails_leaves_nothing_behind(call: str) -> None:
    driver = FakeDriver()
    driver.fail = {call: 0}
    with pytest.raises(EngineError, match=call):
        Arena(NBYTES, CPU, driver)
    assert driver.empty


def test_shortage_says_how_much_and_can_be_retried() -> None:
    gib = 1 << 30

    class Large(FakeDriver):
        granule, chunk_bytes = 1 << 21, 1 << 29

        def reserve(self, nbytes: int) -> int:
            self.reserved[1 << 40] = np.broadcast_to(np.uint8(0), nbytes)
            return 1 << 40

        def view(self, source) -> torch.Tensor:
            tensor = torch.empty(0, dtype=torch.uint8)
            tensor.source = source
            tensor.data_ptr = lambda: 1 << 40
            return tensor

    driver = Large(memory=4 * gib)
    arena = Arena(3 * gib, CPU, driver)
    assert arena.lend() == 3 * gib
    driver.memory = int(1.25 * gib)
    with pytest.raises(torch.OutOfMemoryError, match=r"needs 3\.00 GiB, but the device has 1\.25 GiB free") as caught:
        arena.reclaim()
    assert isinstance(caught.value, EngineError)
    assert not arena.mapped and not driver.mappings
    driver.memory, driver.cached = 3 * gib, 3 * gib
    arena.reclaim()
    assert arena.mapped and driver.cached == 0


def test_memory_goes_with_the_last_tensor_when_nobody_closes() -> None:
    driver = FakeDriver()
    arena = Arena(NBYTES, CPU, driver)
    piece = arena.tensor((4,), torch.float32)[1:]
    del arena
    gc.collect()
    assert driver.accessible == WHOLE
    del piece
    gc.collect()
    assert driver.empty


def test_pieces_are_aligned_apart_and_end_with_the_arena() -> None:
    wanted = [
        ((3, 5), torch.bfloat16),
        ((), torch.float32),
        ((0, 7), torch.int64),
        ((64,), torch.int32),
        ((1,), torch.bool),
    ]
    arena = Arena(sum(piece_bytes(*w) for w in wanted), CPU)
    pieces = [arena.tensor(*w) for w in wanted]
    for index, (piece, (shape, dtype)) in enumerate(zip(pieces, wanted)):
        assert piece.shape == shape and piece.dtype == dtype and piece.is_contiguous()
        assert piece.storage_offset() * dtype.itemsize % 256 == 0
        piece.fill_(index % 2)
    assert all(bool((piece == index % 2).all()) for index, piece in enumerate(pieces))
    with pytest.raises(AssertionError, match="ends at byte"):
        arena.tensor((1,), torch.uint8)


def test_on_the_cpu_it_is_ordinary_memory_that_is_not_lent() -> None:
    arena = Arena(1024, CPU)
    x = arena.tensor((256,), torch.float32).fill_(3)
    assert not arena.lendable and "cpu" in arena.not_lendable
    assert arena.lend() == 0 and arena.mapped
    arena.reclaim()
    assert bool((x == 3).all())
    arena.close()
    arena.close()
    assert not arena.mapped
    for use in (arena.lend, arena.reclaim, lambda: arena.tensor((0,), torch.uint8)):
        with pytest.raises(AssertionError, match="closed"):
            use()


def test_without_cuda_bindings_the_reason_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **{**options, "device": CPU}))
    arena = Arena(1024, torch.device("cuda"))
    assert not arena.lendable and "cuda-bindings" in arena.not_lendable
    assert arena.lend() == 0 and arena.mapped
