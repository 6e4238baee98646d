"""Triton's kernels in its interpreter, as on the device: their launches are checked and recorded, and its gaps are mended.

Mended: bfloat16 (products, sums and the rounding to it, which the interpreter does bit by bit towards zero), programmatic
dependent launch and prefetches (nothing to do), properties of the device that compiled kernels would ask the driver for.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from emulated_cuda.operations import State
from emulated_cuda.patches import Patches
from torch.utils._pytree import tree_flatten


def install(patches: Patches, state: State, capability: tuple[int, int]) -> None:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.tools.tensor_descriptor import TensorDescriptor

    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before Triton is imported"
    shared = 227 * 1024 if capability >= (9, 0) else 163 * 1024
    utils = SimpleNamespace(get_device_properties=lambda index: {"max_shared_mem": shared, "multiprocessor_count": 4})
    active = SimpleNamespace(utils=utils, get_current_device=lambda: 0, get_current_target=lambda: None)
    before = triton.runtime.driver.__dict__.get("_active")
    triton.runtime.driver.set_active(active)
    patches.later(lambda: setattr(triton.runtime.driver, "_active", before))

    executor = interpreter.GridExecutor
    patches.set(executor, "_init_args_hst", lambda self, args, kwargs: (list(args), dict(kwargs)))
    patches.set(executor, "_restore_args_dev", lambda self, *_: None)
    run = executor.__call__

    def tensors_of(value: Any) -> list[torch.Tensor]:
        found = []
        for x in tree_flatten(value)[0]:
            x = x.base if isinstance(x, TensorDescriptor) else x
            if isinstance(x, torch.Tensor):
                found.append(x)
        return found

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        tensors = tensors_of((args, kwargs))
        if any(not state.memory.holds(x) for x in tensors):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        for x in tensors:
            state.check(x)
        state.launches += 1
        state.counts[self.fn.__name__] = state.counts.get(self.fn.__name__, 0) + 1
        graph = state.graph_here()
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            if graph is None:
                run(self, *args, **kwargs)
                return
            graph.note(tensors)
            run(self, *args, **kwargs)
            graph.launch(lambda a, k: run(self, *opened(a), **opened(k)), closed(args), closed(kwargs))

    def closed(value: Any) -> Any:
        """Descriptors as what pytree looks into."""
        if isinstance(value, dict):
            return {name: closed(x) for name, x in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(map(closed, value))
        if not isinstance(value, TensorDescriptor):
            return value
        return (
            "descriptor",
            value.base,
            list(value.shape),
            list(value.strides),
            list(value.block_shape),
            value.padding,
        )

    def opened(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: opened(x) for name, x in value.items()}
        if isinstance(value, tuple) and value[:1] == ("descriptor",):
            return TensorDescriptor(*value[1:])
        return type(value)(map(opened, value)) if isinstance(value, tuple | list) else value

    patches.set(executor, "__call__", launch)
    _mend_bfloat16(patches, interpreter, tl)
    for name in ("trimtab.model.kernels.chain",):
        module = importlib.import_module(name)
        patches.set(module, "gdc_wait", lambda: None)
        patches.set(module, "gdc_launch_dependents", lambda: None)
    skinny = importlib.import_module("trimtab.rollout.native.kernels.skinny")
    patches.set(skinny, "read_ahead", lambda pointers: None)


def _mend_bfloat16(patches: Patches, interpreter: Any, tl: Any) -> None:
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def wide(data: np.ndarray) -> np.ndarray:
        return (data.astype(np.uint32) << 16).view(np.float32)

    def narrow(data: np.ndarray) -> np.ndarray:
        """To the nearest, ties to even."""
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(data), np.uint16(0x7FC0), rounded)

    def is_bf16(x: Any) -> bool:
        return bool(x.get_element_ty() == tl.bfloat16) and x.data.dtype == np.uint16

    cast, dot, binary, unary, ternary = (
        vars(builder)[name] for name in ("cast_impl", "create_dot", "binary_op", "unary_op", "ternary_op")
    )

    def cast_impl(self: Any, src: Any, to: Any) -> Any:
        source, target = src.dtype.scalar, to.scalar
        if source == tl.bfloat16 and target != tl.bfloat16:
            return cast(self, handle(wide(src.data), tl.float32), to)
        if target == tl.bfloat16 and source != tl.bfloat16:
            return handle(narrow(src.data.astype(np.float32)), tl.bfloat16)
        return cast(self, src, to)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        a, b = (handle(wide(x.data), tl.float32) if is_bf16(x) else x for x in (a, b))
        if a.data.dtype == np.float16:
            a, b = (handle(x.data.astype(np.float32), tl.float32) for x in (a, b))
        return dot(self, a, b, d, *rest)

    def create_fp_to_fp(self: Any, src: Any, to: Any, mode: Any) -> Any:
        if tl.bfloat16 in (src.dtype.scalar, to.scalar):
            return cast_impl(self, src, to)
        return whole(self, src, to, mode)

    def several(original: Any) -> Any:
        def op(self: Any, *args: Any) -> Any:
            handles = [x for x in args if isinstance(x, handle)]
            if not any(map(is_bf16, handles)):
                return original(self, *args)
            plain = [handle(wide(x.data), tl.float32) if isinstance(x, handle) and is_bf16(x) else x for x in args]
            found = original(self, *plain)
            return found if found.data.dtype == np.bool_ else handle(narrow(found.data), tl.bfloat16)

        return op

    whole = vars(builder)["create_fp_to_fp"]
    patches.set(builder, "cast_impl", cast_impl)
    patches.set(builder, "create_dot", create_dot)
    patches.set(builder, "create_fp_to_fp", create_fp_to_fp)
    patches.set(builder, "binary_op", several(binary))
    patches.set(builder, "unary_op", several(unary))
    patches.set(builder, "ternary_op", several(ternary))
