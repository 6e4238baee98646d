"""`torch.cuda` over the played device. Work is done when it is launched, so streams and events only have to be named rightly."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from emulated_cuda.graphs import Graph
from emulated_cuda.operations import CUDA, State
from emulated_cuda.patches import Patches

MULTIPROCESSORS = 4
"""Few: every program costs the interpreter time."""


def properties(state: State, capability: tuple[int, int]) -> SimpleNamespace:
    return SimpleNamespace(
        name="NVIDIA H200" if capability >= (9, 0) else "NVIDIA A100-SXM4-80GB",
        major=capability[0],
        minor=capability[1],
        total_memory=state.memory.total,
        multi_processor_count=MULTIPROCESSORS,
        max_threads_per_multi_processor=2048,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=227 * 1024 if capability >= (9, 0) else 163 * 1024,
        shared_memory_per_multiprocessor=228 * 1024,
        L2_cache_size=50 * 2**20,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=1,
        pci_device_id=0,
        pci_domain_id=0,
    )


def install(patches: Patches, state: State, capability: tuple[int, int]) -> None:
    found = properties(state, capability)
    values = {
        **_devices(state, capability, found),
        **_memory(state),
        **_streams(state),
        "CUDAGraph": _graph_class(state),
        "graph": _captured,
        "is_current_stream_capturing": lambda: state.graph_here() is not None,
        "graph_pool_handle": lambda: object(),
        "cudart": lambda: _Runtime(state),
        "nvtx": SimpleNamespace(range_push=lambda text: 0, range_pop=lambda: 0),
    }
    for name, value in values.items():
        patches.set(torch.cuda, name, value)
        if name in vars(torch.cuda.memory):
            patches.set(torch.cuda.memory, name, value)
    patches.set(torch.version, "cuda", "13.0")
    _history(patches, state)


def _devices(state: State, capability: tuple[int, int], found: SimpleNamespace) -> dict[str, Any]:
    def index(device: Any = None, optional: bool = False, allow_cpu: bool = False) -> int:
        return 0

    def checked(device: Any = None) -> Any:
        number = device if isinstance(device, int) else torch.device("cuda" if device is None else device).index or 0
        if number != 0:
            raise RuntimeError("CUDA error: invalid device ordinal")
        return found

    class device:
        def __init__(self, device: Any) -> None:
            checked(device)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: checked(device) and None,
        "device": device,
        "get_device_properties": checked,
        "get_device_name": lambda device=None: found.name,
        "get_device_capability": lambda device=None: capability,
        "get_device_index": index,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "is_bf16_supported": lambda *_, **__: capability[0] >= 8,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda value, device=None: None,
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state_all": lambda values: None,
        "can_device_access_peer": lambda a, b: True,
        "get_sync_debug_mode": lambda: state.sync_mode,
        "set_sync_debug_mode": lambda mode: setattr(
            state, "sync_mode", {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
        ),
    }


def _memory(state: State) -> dict[str, Any]:
    memory = state.memory

    def set_fraction(fraction: float, device: Any = None) -> None:
        if not 0 <= fraction <= 1:
            raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
        memory.fraction = fraction

    def stats(device: Any = None) -> dict[str, Any]:
        return {
            "num_alloc_retries": memory.retries,
            "num_ooms": memory.ooms,
            "allocated_bytes.all.current": memory.allocated,
            "allocated_bytes.all.peak": memory.peak,
            "reserved_bytes.all.current": memory.reserved,
            "reserved_bytes.all.peak": memory.peak_reserved,
            "num_device_alloc": memory.allocations,
        }

    return {
        "memory_allocated": lambda device=None: memory.allocated,
        "max_memory_allocated": lambda device=None: memory.peak,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.peak_reserved,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peaks(),
        "memory_stats": stats,
        "mem_get_info": lambda device=None: (memory.free, memory.total),
        "empty_cache": memory.empty_cache,
        "get_per_process_memory_fraction": lambda device=None: memory.fraction,
        "set_per_process_memory_fraction": set_fraction,
        "ipc_collect": lambda: None,
    }


def _streams(state: State) -> dict[str, Any]:
    here = threading.local()

    def wait(device: Any = None) -> None:
        state.wait("cudaDeviceSynchronize")

    class Stream:
        device = CUDA
        numbers = iter(range(10**9))

        def __init__(self, device: Any = None, priority: int = 0) -> None:
            self.cuda_stream = next(self.numbers)

        def synchronize(self) -> None:
            state.wait("cudaStreamSynchronize")

        def query(self) -> bool:
            state.wait("cudaStreamQuery")
            return True

        def wait_stream(self, stream: Any) -> None:
            assert isinstance(stream, Stream)

        def wait_event(self, event: Any) -> None:
            assert isinstance(event, Event)
            if not event.recorded and state.graph_here() is not None:
                raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")

        def record_event(self, event: Any = None) -> Any:
            event = Event() if event is None else event
            event.record(self)
            return event

    class Event:
        def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
            self.timing, self.recorded, self.at, self.captured = enable_timing, False, 0.0, False

        def record(self, stream: Any = None) -> None:
            assert stream is None or isinstance(stream, Stream)
            self.recorded, self.at, self.captured = True, time.perf_counter(), state.graph_here() is not None
            self.coming = len(state.coming)

        def wait(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            if state.graph_here() is not None:
                state.wait("cudaEventQuery")
            state.arrive()
            return True

        def synchronize(self) -> None:
            if state.graph_here() is not None:
                state.wait("cudaEventSynchronize")
            if self.recorded:
                state.arrive()

        def elapsed_time(self, end: Any) -> float:
            if not (self.timing and end.timing):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self.recorded and end.recorded):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return 1000 * (end.at - self.at)

    first = Stream()

    def current(device: Any = None) -> Stream:
        found: Stream = getattr(here, "stream", first)
        return found

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        before = current()
        here.stream = before if chosen is None else chosen
        try:
            yield
        finally:
            here.stream = before

    return {
        "Stream": Stream,
        "Event": Event,
        "current_stream": current,
        "default_stream": lambda device=None: first,
        "set_stream": lambda chosen: setattr(here, "stream", chosen),
        "stream": stream,
        "synchronize": wait,
        "_first_stream": first,
    }


def _graph_class(state: State) -> type:
    class CUDAGraph:
        def __init__(self, keep_graph: bool = False) -> None:
            self._graph: Graph | None = None
            self._pool: Any = None

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            if state.recording is not None:
                raise RuntimeError("CUDA error: a stream is capturing already")
            if torch.cuda.current_stream() is torch.cuda._first_stream:  # type: ignore[attr-defined]
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            self._pool = pool
            self._graph = Graph(state.memory, state.check)
            state.recording, state.recording_thread = self._graph, threading.get_ident()

        def capture_end(self) -> None:
            graph, state.recording = state.recording, None
            if graph is None:
                raise RuntimeError("CUDA error: no capture is under way")
            with torch.utils._python_dispatch._disable_current_modes():
                graph.end()
            if graph.invalid:
                self._graph = None
                raise RuntimeError(
                    f"CUDA error: operation failed due to a previous error during capture ({graph.invalid})"
                )
            state.counts["graphs"] = state.counts.get("graphs", 0) + 1

        def replay(self) -> None:
            if self._graph is None or not self._graph.ended:
                raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
            if state.graph_here() is not None:
                raise RuntimeError("a graph cannot be replayed while another is captured")
            state.counts["replays"] = state.counts.get("replays", 0) + 1
            with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
                self._graph.replay()

        def reset(self) -> None:
            self._graph = None

        def pool(self) -> Any:
            return self._pool

    return CUDAGraph


@contextmanager
def _captured(graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
    """`torch.cuda.graph`."""
    with torch.cuda.stream(torch.cuda.Stream() if stream is None else stream):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


class _Runtime:
    """`torch.cuda.cudart()`."""

    def __init__(self, state: State) -> None:
        self._state = state

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self._state.pinned_ranges[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self._state.pinned_ranges.pop(address, None) is not None else 1

    def cudaProfilerStart(self) -> int:
        return 0

    cudaProfilerStop = cudaProfilerStart


def _history(patches: Patches, state: State) -> None:
    patches.set(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    patches.set(torch.cuda.memory, "_snapshot", lambda *_, **__: {"segments": [], "device_traces": [[]]})
