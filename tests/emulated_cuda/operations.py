"""Every operation of torch on its way to the CPU: the device's rules are kept, and its results are marked as lying there.

A dispatch mode below autograd sees all of them, in every thread. Rules: tensors of one operation lie on one device, except
0-dimensional ones on the host, indices, and copies; inside the recording of a graph, or where `set_sync_debug_mode("error")` is
set, nothing waits for the host; nothing touches memory that is lent; a copy to the host that did not wait arrives, for the host,
with the next wait (until then it holds garbage).
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from emulated_cuda import flash
from emulated_cuda.graphs import Graph
from emulated_cuda.memory import DeviceMemory
from emulated_cuda.patches import Patches
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

aten = torch.ops.aten
HOST = torch.device("cpu")
CUDA = torch.device("cuda", 0)
COPIES = {"copy_", "_to_copy", "_foreach_copy_", "_copy_from", "_foreach_copy"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
WAIT = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "equal", "is_nonzero",
    "bincount", "_assert_async", "nonzero_numpy", "repeat_interleave.Tensor",
}  # fmt: skip
PASS = {"_pin_memory", "is_pinned", "record_stream", "lift_fresh", "set_", "detach", "resize_"}


class State:
    """What is going on on the device."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.memory = memory
        self.recording: Graph | None = None
        self.recording_thread = 0
        self.sync_mode = 0
        self.lent: dict[int, str] = {}
        """Arenas that are not mapped, by address, and why."""
        self.pinned: dict[int, Any] = {}
        self.pinned_ranges: dict[int, int] = {}
        self.coming: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies that the host must not read yet: where to, and what."""
        self.launches = 0
        self.leaving = threading.local()
        """`.on`: this thread has asked for a copy on the host. Without it, operations within torch that name the device of a
        tensor, which they take for a CPU's, mean where it is."""
        self.undecided: dict[int, Any] = {}
        """Storages that formulas of autograd made, which take a tensor for the CPU's. They lie where they are used."""
        self.counts: dict[str, int] = {}
        """Waits, recordings and replays, for tests."""

    def graph_here(self) -> Graph | None:
        return self.recording if self.recording_thread == threading.get_ident() else None

    def wait(self, what: str) -> None:
        """The host waits for the device."""
        if self.graph_here() is not None:
            self.recording.invalid = what  # type: ignore[union-attr]
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({what})")
        if self.sync_mode == 2:
            raise RuntimeError(f"called a synchronizing CUDA operation ({what})")
        self.arrive()

    def arrive(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            while self.coming:
                where, what = self.coming.pop(0)
                where.data.copy_(what)

    def check(self, tensor: torch.Tensor) -> None:
        """The device may touch it."""
        if self.lent and tensor.numel():
            why = self.lent.get(tensor.untyped_storage().data_ptr())
            if why:
                raise RuntimeError(f"CUDA error: an illegal memory access was encountered ({why})")

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        if tensor.untyped_storage()._cdata in self.pinned:
            return True
        at = tensor.data_ptr()
        return any(begin <= at < begin + size for begin, size in self.pinned_ranges.items())

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        self.pinned[key] = weakref.ref(storage, lambda _: self.pinned.pop(key, None))
        return tensor


class Device(TorchDispatchMode):
    """The mode; one for each thread."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(self.state, func, args, dict(kwargs or {}))


def run(state: State, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func._schema.name.partition("::")[2]
    asked = kwargs.get("device")
    to_device = _of(asked) if asked is not None else None
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
        found = func(*args, **kwargs)
        return state.pin(found)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
    placed = [(x, state.memory.holds(x)) for x in tensors if x.device.type != "meta"]
    on_device = any(there for _, there in placed)
    if not to_device and not on_device:
        if name == "_pin_memory":
            return state.pin(args[0].clone())
        if name == "is_pinned":
            return state.is_pinned(args[0])
        found = func(*args, **kwargs)
        if asked is not None and torch._C._current_graph_task_id() != -1 and isinstance(found, torch.Tensor):
            key = found.untyped_storage()._cdata
            state.undecided[key] = weakref.ref(found.untyped_storage(), lambda _: state.undecided.pop(key, None))
        return found
    if name == "_pin_memory":
        raise RuntimeError(f"cannot pin '{args[0].type()}' only dense CPU tensors can be pinned")
    if name == "is_pinned":
        return False
    for at, (x, there) in enumerate(placed):
        if there:
            state.check(x)
        elif state.undecided.pop(x.untyped_storage()._cdata, None) is not None:
            state.memory.hold(x)
            placed[at] = (x, True)
    if to_device:
        kwargs["device"] = HOST
    if name in COPIES:
        return _copy(state, func, name, args, kwargs, to_device, asked)
    target = to_device if to_device is not None else on_device
    if on_device and torch._C._current_graph_task_id() != -1:
        target = True  # formulas of autograd name the device that they take a tensor for
    _check_places(state, func, name, args, placed)
    _check_waits(state, func, name, args)
    work = flash.REPLACED.get(func._schema.name, func)
    if name == "histc" and not args[0].is_floating_point():  # the CPU has it for floating point only
        work = _counted
    if name in ("mm", "addmm", "bmm", "baddbmm") and func._overloadname in ("dtype", "dtype_out"):
        work = _wide_product(func, name)
    return execute(state, func, work, args, kwargs, target)


def execute(state: State, func: Any, work: Any, args: Any, kwargs: dict[str, Any], target: bool) -> Any:
    """Do the work, record it where a graph is being made, and mark what is new."""
    graph = state.graph_here()
    if graph is not None:
        graph.before(func, args, kwargs)
    found = work(*args, **kwargs)
    if target:
        mark(state, found)
        if func._schema.name in ("aten::resize_", "aten::set_"):
            state.memory.resized(args[0])
    if graph is not None:
        graph.add(func, work, args, kwargs, found)
    return found


def mark(state: State, found: Any) -> None:
    for x in tree_flatten(found)[0]:
        if isinstance(x, torch.Tensor) and x.device.type != "meta":
            state.memory.hold(x)


def _of(device: Any) -> bool | None:
    kind = torch.device(device).type
    return True if kind == "cuda" else False if kind == "cpu" else None


def _check_places(state: State, func: Any, name: str, args: Any, placed: list[tuple[torch.Tensor, bool]]) -> None:
    if name in PASS or name.startswith("new_") or name.endswith("_like"):
        return
    skipped: set[int] = set()
    if name in INDEXED:
        indices = [x for x in args[1] if x is not None]
        if not state.memory.holds(args[0]) and any(map(state.memory.holds, indices)):
            raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
        skipped = {id(x) for x in indices}
        if any(not state.memory.holds(x) or x.dtype in (torch.bool, torch.uint8) for x in indices):
            state.wait(f"{name} with indices that the host knows or counts")
    strict = name in ("mm", "addmm", "bmm", "embedding", "index_select", "gather", "scatter", "cat", "stack")
    apart = [x for x, there in placed if not there and id(x) not in skipped and (x.dim() or strict)]
    if apart:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
            f"{[(tuple(x.shape), 'cuda' if there else 'cpu') for x, there in placed]})"
        )


def _check_waits(state: State, func: Any, name: str, args: Any) -> None:
    full = f"{name}.{func._overloadname}"
    if name in WAIT or full in WAIT:
        if name == "repeat_interleave":
            return
        state.wait(name)
    elif name == "repeat_interleave" and func._overloadname == "Tensor":
        state.wait(name)


def _copy(
    state: State, func: Any, name: str, args: Any, kwargs: dict[str, Any], to_device: bool | None, asked: Any
) -> Any:
    memory = state.memory
    if name == "_to_copy":
        source = args[0]
        begin = memory.holds(source)
        end = begin if to_device is None else to_device or (begin and not getattr(state.leaving, "on", False))
        if begin and not end:
            return _home(state, source, func(*args, **kwargs), bool(kwargs.get("non_blocking")), True)
        if end and not begin:
            _check_arrived(state, source)
            if not (kwargs.get("non_blocking") and state.is_pinned(source)):
                state.wait("a copy from memory that is not pinned")
        return execute(state, func, func, args, kwargs, end)
    if name == "copy_":
        where, source = args[0], args[1]
        begin, end = memory.holds(source), memory.holds(where)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        if begin and not end:
            if blocking or not state.is_pinned(where):
                state.wait("a copy to the host")
                return func(*args, **kwargs)
            return _home(state, source, where, True, False)
        if end and not begin:
            _check_arrived(state, source)
            if source.dim() and (blocking or not state.is_pinned(source)):
                state.wait("a copy from the host")
        return execute(state, func, func, args, kwargs, end)
    if len({memory.holds(x) for part in args[:2] for x in part}) > 1:
        state.wait("copies from or to the host")
    return execute(state, func, func, args, kwargs, True)


def _home(state: State, source: torch.Tensor, where: torch.Tensor, late: bool, fresh: bool) -> torch.Tensor:
    """A copy to the host: at once, or with the next wait."""
    if not late:
        state.wait("a copy to the host")
        return where
    if state.graph_here() is not None:
        raise RuntimeError("CUDA error: a copy to the host inside a graph is not emulated")
    what = where.clone() if fresh else source.to(where.dtype).clone()
    garbage(where)
    state.coming.append((where, what))
    return state.pin(where) if fresh else where


def garbage(tensor: torch.Tensor) -> None:
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.is_floating_point():
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


def _check_arrived(state: State, source: torch.Tensor) -> None:
    """The device works in order: what is copied back has arrived before."""
    if state.coming:
        state.arrive()


def _counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.histc(x.double(), *args, **kwargs).to(x.dtype)


def _wide_product(func: Any, name: str) -> Any:
    def product(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if any(x.dtype not in (torch.float16, torch.bfloat16) for x in tensors[-2:]):
            raise RuntimeError(
                "out_dtype is only supported for torch.float32 output with float16/bfloat16 inputs on CUDA"
            )
        wide = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.dtype))
        found: torch.Tensor = getattr(torch, name)(
            *(x.to(wide) for x in tensors), **{k: v for k, v in kwargs.items() if k in ("alpha", "beta")}
        )  # fmt: skip
        out = kwargs.get("out")
        return found if out is None else out.copy_(found)

    return product


def install(patches: Patches, state: State) -> None:
    """The mode, in this thread and in those that start from now on."""
    mode = Device(state)
    mode.__enter__()
    patches.later(lambda: mode.__exit__(None, None, None))
    begin = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def bootstrap(self: threading.Thread) -> None:
        with Device(state):
            begin(self)

    patches.set(threading.Thread, "_bootstrap_inner", bootstrap)
