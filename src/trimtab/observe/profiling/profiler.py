"""Profiles some steps of a run: starts before the first of them, marks phases, and writes RUN/profile after the last.

    trace-rank-0.json.gz   what torch's profiler saw; opens in Perfetto
    kernels.json           which kernels (on a CPU: operators) took the time, and gaps
    memory.json            on a CUDA device: bytes by component over time, and the largest blocks at the peak
    memory.pickle          the allocator's whole record, for pytorch.org/memory_viz

It only looks: no random number is drawn and no weight is touched, so what is learned is the same. Steps take longer meanwhile.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from trimtab.base.files import write_json
from trimtab.observe.profiling.kernels import KernelSpan, reduce_kernels
from trimtab.observe.profiling.memory import reduce_memory
from trimtab.observe.profiling.request import ProfileRequest

FOLDER, MARK = "profile", "trimtab:"
MAX_ENTRIES = 400_000
"""Of the allocator's record: about 200 MB of host memory."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Profiled(Protocol):
    """What a profile is taken of: this process, or ranks."""

    def start(self) -> None: ...

    def begin_phase(self, name: str) -> None: ...

    def end_phase(self) -> None: ...

    def stop(self) -> None:
        """Write what was seen since `start`."""
        ...


class ProfileWindow:
    """Starts and stops with the steps that were asked for."""

    def __init__(self, request: ProfileRequest, target: Profiled, done: int, tell: Callable[[str], None]) -> None:
        """`done`: steps that the run has made so far."""
        self._request, self._target, self._tell = request, target, tell
        self._running = False
        self.step_ended(done)

    def step_ended(self, step: int) -> None:
        if step == self._request.first - 1 and not self._running:
            self._target.start()
            self._running = True
        elif step >= self._request.last:
            self.close()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self._running:
            yield
            return
        self._target.begin_phase(name)
        try:
            yield
        finally:
            self._target.end_phase()

    def close(self) -> None:
        """Write what was seen so far, also of a run that stops between."""
        if self._running:
            self._running = False
            self._target.stop()
            first, last = self._request.first, self._request.last
            steps = f"step {first}" if first == last else f"steps {first} to {last}"
            self._tell(
                f"profile of {steps}: {FOLDER}/kernels.json in the run folder, with a trace for Perfetto beside it"
            )


class ProcessProfiler:
    """Profiles this process and its device."""

    def __init__(
        self, run_dir: Path, device: torch.device, request: ProfileRequest, rank: int = 0, main: bool = True
    ) -> None:
        """`main`: its tables have the names that a page reads; those of further ranks have the rank in their names."""
        self._folder, self._device, self._request, self._rank = Path(run_dir) / FOLDER, device, request, rank
        self._suffix = "" if main else f"-rank-{rank}"
        self._cuda = device.type == "cuda"
        self._profile: Any = None
        self._open: list[Any] = []

    def start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = profile(activities=activities)
        if self._cuda:
            torch.cuda.synchronize(self._device)
            torch.cuda.memory._record_memory_history("all", context="alloc", stacks="python", max_entries=MAX_ENTRIES)
        self._profile.start()

    def begin_phase(self, name: str) -> None:
        if self._profile is None:
            return
        mark = record_function(MARK + name)
        mark.__enter__()
        self._open.append(mark)
        if self._cuda:
            torch.cuda.nvtx.range_push(name)

    def end_phase(self) -> None:
        if not self._open:
            return
        if self._cuda:
            torch.cuda.synchronize(self._device)  # or its last kernels would count for what comes next
            torch.cuda.nvtx.range_pop()
        self._open.pop().__exit__(None, None, None)

    def stop(self) -> None:
        if self._profile is None:
            return
        found, self._profile = self._profile, None
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = f"trace-rank-{self._rank}.json.gz"
        found.export_chrome_trace(str(self._folder / trace))
        spans, phases = read_spans(found.profiler.kineto_results.events(), self._cuda)
        steps = [self._request.first, self._request.last]
        tables = {"steps": steps, "rank": self._rank, "device": self._device.type, "trace": trace}
        self._write("kernels", tables | reduce_kernels(spans, phases))
        if self._cuda:
            self._write_memory()

    def _write_memory(self) -> None:
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(enabled=None)
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        with (self._folder / f"memory{self._suffix}.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
        entries = snapshot["device_traces"][index]
        self._write("memory", reduce_memory(entries, torch.cuda.memory_allocated(self._device)) | {"rank": self._rank})

    def _write(self, name: str, tables: dict[str, Any]) -> None:
        write_json(self._folder / f"{name}{self._suffix}.json", tables, indent=1)


def read_spans(events: Any, cuda: bool) -> tuple[list[KernelSpan], list[KernelSpan]]:
    """What ran (on the device, or on a CPU every operator), and the phases, of the profiler's events."""
    spans, phases = [], []
    host = torch.autograd.DeviceType.CPU
    for event in events:
        name, on_host, kind = event.name(), event.device_type() == host, _kind(event)
        if kind == "user_annotation":
            if on_host and name.startswith(MARK):
                phases.append(KernelSpan(name.removeprefix(MARK), event.start_ns(), event.duration_ns()))
        elif kind in ON_DEVICE if cuda else kind == "cpu_op":
            track = event.start_thread_id() if on_host else event.device_resource_id()
            spans.append(KernelSpan(name, event.start_ns(), event.duration_ns(), track))
    return spans, phases


def _kind(event: Any) -> str:
    if event.is_user_annotation():
        return "user_annotation"
    return str(event.activity_type())
