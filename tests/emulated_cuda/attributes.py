"""What a tensor says of itself, and its ways between host and device. It stands on the class, for every thread and subclass."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from emulated_cuda.operations import CUDA, HOST, State
from emulated_cuda.patches import Patches


def install(patches: Patches, state: State) -> None:
    _places(patches, state)
    _moves(patches, state)
    _reads(patches, state)
    _makers(patches, state)


def _places(patches: Patches, state: State) -> None:
    device = torch._C.TensorBase.device
    holds = state.memory.holds
    patches.set(torch.Tensor, "device", property(lambda self: CUDA if holds(self) else device.__get__(self)))
    patches.set(torch.Tensor, "is_cuda", property(holds))
    patches.set(torch.Tensor, "is_cpu", property(lambda self: self.device.type == "cpu"))
    patches.set(torch.Tensor, "get_device", lambda self: 0 if holds(self) else -1)
    patches.set(torch.Tensor, "record_stream", lambda self, stream: None)


def _moves(patches: Patches, state: State) -> None:
    plain = torch._C.TensorBase.to
    holds = state.memory.holds

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        if (args and isinstance(args[0], torch.Tensor)) or "other" in kwargs:
            other = kwargs.pop("other", None) if "other" in kwargs else args[0]
            kwargs, args = {**kwargs, "dtype": other.dtype, "device": other.device}, ()
        if len(args) > 2 and isinstance(args[-1], bool):  # device, dtype, non_blocking, copy
            rest = [x for x in args if isinstance(x, bool)]
            args = tuple(x for x in args if not isinstance(x, bool))
            kwargs["non_blocking"] = rest[0]
            copy = copy or (len(rest) > 1 and rest[1])
        device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
        dtype = self.dtype if dtype is None else dtype
        here = holds(self)
        there = here if device is None else device.type == "cuda"
        named: dict[str, Any] = {} if form is None else {"memory_format": form}
        if (device is not None and device.type == "meta") or self.is_meta:
            return plain(self, device or self.device, dtype, non_blocking, copy, **named)
        if here == there:
            return plain(self, dtype, non_blocking, copy, **named)
        target = CUDA if there else HOST
        state.leaving.on = not there
        try:
            found: torch.Tensor = torch.ops.aten._to_copy(
                self, dtype=dtype, device=target, non_blocking=non_blocking, **named
            )
        finally:
            state.leaving.on = False
        return found

    def cuda(self: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        return to(self, CUDA, non_blocking=non_blocking)

    patches.set(torch.Tensor, "to", to)
    patches.set(torch.Tensor, "cuda", cuda)
    patches.set(torch.Tensor, "cpu", lambda self, **_: to(self, HOST))


def _reads(patches: Patches, state: State) -> None:
    holds = state.memory.holds
    numpy, listed, array = torch._C.TensorBase.numpy, torch._C.TensorBase.tolist, torch.Tensor.__array__

    def to_numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if holds(self):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")
        return numpy(self, *args, **kwargs)

    def to_list(self: torch.Tensor) -> Any:
        if holds(self):
            state.check(self)
            state.wait("tolist")
        return listed(self)

    def to_array(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if holds(self):
            return to_numpy(self)
        return array(self, *args, **kwargs)

    patches.set(torch.Tensor, "numpy", to_numpy)
    patches.set(torch.Tensor, "tolist", to_list)
    patches.set(torch.Tensor, "__array__", to_array)
    clone = torch.UntypedStorage.clone

    def clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
        found = clone(self)
        if self._cdata in state.memory._held or self._cdata in state.memory.foreign:
            state.memory.hold(torch.empty(0, dtype=torch.uint8).set_(found))
        return found

    patches.set(torch.UntypedStorage, "clone", clone_storage)


def _makers(patches: Patches, state: State) -> None:
    """Those that leave the CPU before the dispatcher is asked."""
    make, take, same = torch.tensor, torch.as_tensor, torch.asarray

    def home(kwargs: dict[str, Any]) -> torch.device | None:
        asked = kwargs.pop("device", None)
        if asked is None:
            if not torch._C._len_torch_function_stack():
                return None
            default = torch.empty(0).device  # `with torch.device(...)`
            return default if default.type != "cpu" else None
        return torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked)

    def tensor(data: Any, **kwargs: Any) -> torch.Tensor:
        device, grad = home(kwargs), kwargs.pop("requires_grad", False)
        with torch._C.DisableTorchFunction():
            found = make(data, **kwargs)
        found = found if device is None else found.to(device)
        return found.requires_grad_() if grad else found

    def as_tensor(data: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> torch.Tensor:
        array = getattr(data, "__cuda_array_interface__", None)
        if isinstance(data, torch.Tensor):
            asked = kwargs.get("device")
            return data.to(device=asked, dtype=dtype)
        if array is not None:
            return _view(state, data, array)
        device = home(kwargs)
        with torch._C.DisableTorchFunction():
            found = take(data, dtype=dtype)
        return found if device is None else found.to(device)

    def asarray(data: Any, **kwargs: Any) -> torch.Tensor:
        device = home(kwargs)
        found = data if isinstance(data, torch.Tensor) else same(data, **kwargs)
        return found if device is None else found.to(device)

    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        return tensor(data, **{"dtype": self.dtype, "device": self.device, **kwargs})

    def one_hot(index: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if num_classes < 0:
            state.wait("one_hot without a number of classes")
            num_classes = int(index.max()) + 1
        return index.new_zeros((*index.shape, num_classes)).scatter_(-1, index[..., None], 1)

    attend = torch.nn.functional.scaled_dot_product_attention

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if state.memory.holds(q) and kwargs.get("is_causal") and q.shape[-1] != v.shape[-1]:
            seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            kwargs |= {"is_causal": False, "attn_mask": seen}
        return attend(q, k, v, *args, **kwargs)

    patches.set(torch.nn.functional, "scaled_dot_product_attention", attention)
    patches.set(torch.nn.functional, "one_hot", one_hot)
    patches.set(torch, "tensor", tensor)
    patches.set(torch, "as_tensor", as_tensor)
    patches.set(torch, "asarray", asarray)
    patches.set(torch.Tensor, "new_tensor", new_tensor)


def _view(state: State, source: Any, array: dict[str, Any]) -> torch.Tensor:
    """Memory at an address of the device, which keeps what it came from."""
    assert array["typestr"] == "|u1"
    (size,), (address, _) = array["shape"], array["data"]
    memory = (ctypes.c_uint8 * size).from_address(address)
    memory.source = source  # type: ignore[attr-defined]
    found = torch.frombuffer(memory, dtype=torch.uint8)
    state.memory.hold_foreign(found)
    return found
