"""Running out of memory: how it is recognised, how what was lost is given back, and how much there is.

`attempt` turns an out-of-memory error into a value. Its `except` block has ended when it returns, so neither the error nor its
traceback is alive any more, and the traceback was all that kept the frames of the failed work, and with them their tensors.
Only then can `free` give the memory back: inside an `except` block it would find everything still in use.

It is in model/ because generation and training both need it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar, TypeVarTuple

import psutil
import torch

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")

OUT_OF_MEMORY_PHRASES = (
    "out of memory",  # "CUDA error: out of memory", "HIP out of memory", "hipErrorOutOfMemory"
    "outofmemory",
    "can't allocate memory",  # DefaultCPUAllocator
    "not enough memory",  # the same on other systems
    "STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN, hipBLAS
)
"""What a RuntimeError about memory says. Triton's "out of resource" is not one: that is a kernel too large for the chip."""


@dataclass(frozen=True)
class Shortage:
    """Work that ran out of memory: what the error said, and nothing that would keep its tensors."""

    message: str


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's own errors, and for those that only say so: the CPU allocator's, cuBLAS's, the drivers'."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign.lower() in text for sign in OUT_OF_MEMORY_PHRASES)


def attempt(work: Callable[[*Arguments], Result], *args: *Arguments) -> Result | Shortage:
    """What `work` gives for these arguments, or a Shortage. Other errors propagate."""
    try:
        return work(*args)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines()
        return Shortage(lines[0] if lines else type(error).__name__)


def free(device: torch.device) -> None:
    """Give back what failed work has left: cycles to Python, cached blocks to the device. Never in an `except` block."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def device_room(device: torch.device, outside: int = 0) -> int:
    """Bytes that can be allocated now: what is free on the device, or what is left of this process's share if that is less.
    `outside`: bytes this process holds beside torch's."""
    share = torch.cuda.get_per_process_memory_fraction(device.index) * torch.cuda.mem_get_info(device)[1]
    held = torch.cuda.memory_reserved(device)
    return min(torch.cuda.mem_get_info(device)[0], int(share) - held - outside)


def in_parts(
    work: Callable[[slice], None],
    count: int,
    device: torch.device,
    trying: Callable[[Callable[[slice], None], slice], Shortage | None] = attempt,
) -> Shortage | None:
    """Do `work` on all of `count` items, in halves of halves where memory runs out; a Shortage if it does with a single one.

    For work on each item by itself, which may be repeated. `trying`: `attempt`, or one that others have a say in.
    """
    pending = [slice(0, count)]
    while pending:
        part = pending.pop()
        outcome = trying(work, part)
        if isinstance(outcome, Shortage):
            if part.stop - part.start <= 1:
                return outcome
            free(device)
            middle = (part.start + part.stop) // 2
            pending += [slice(middle, part.stop), slice(part.start, middle)]
    return None


def host_memory(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> tuple[int, int]:
    """Bytes of host memory in all, and those available: the machine's, or less where a control group (a container, a job of a
    cluster) sets a limit to this process.

    What a group uses is counted without cached files that the kernel would drop, as `available` is for a machine.
    """
    machine = psutil.virtual_memory()
    total, available = int(machine.total), int(machine.available)
    for folder, names in _groups(root, own):
        limit, used = _number(folder / names.limit), _number(folder / names.used)
        if limit is not None and used is not None and limit < machine.total:
            working = used - _field(folder / "memory.stat", names.cached)
            total, available = min(total, limit), max(0, min(available, limit - working))
    return total, available


class _Names(NamedTuple):
    limit: str
    used: str
    cached: str


_FIRST = _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_SECOND = _Names("memory.max", "memory.current", "inactive_file")


def _groups(root: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """The folders of the process's groups, each up to its root, in the first or second version of the interface."""
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, names = (root / "memory", _FIRST) if controllers else (root, _SECOND)
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), names


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no such file, or no limit in it ("max")."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> int:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)
