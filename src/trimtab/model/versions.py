"""What differs between the versions of torch and transformers that are served (pyproject.toml has their ranges).

A difference is found by looking for the thing itself, not by a version number, and stands here only.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention.varlen import varlen_attn
from transformers import Cache

VARLEN_HAS_GQA = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Not in torch 2.11."""

STATES_ARE_HANDED = hasattr(Cache, "get_conv_state")
"""Layers that carry a state ask a cache for it and give it back (recurrent.py). Older transformers reach into their own cache."""


def grouped_varlen_attn(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, offsets: torch.Tensor, key_offsets: torch.Tensor,
    longest: int, longest_key: int, scale: float | None, left: int,
) -> torch.Tensor:  # fmt: skip
    """Variable-length flash attention in which several query heads may share a key/value head. `left` is the window; -1: none."""
    where = (offsets, key_offsets, longest, longest_key)
    if q_THD.shape[1] == k_TKD.shape[1] or VARLEN_HAS_GQA:
        grouped: Any = {"enable_gqa": True} if VARLEN_HAS_GQA else {}
        out = varlen_attn(q_THD, k_TKD, v_TKD, *where, scale=scale, window_size=(left, 0), **grouped)
    else:
        out = _GroupedFlash.apply(q_THD, k_TKD, v_TKD, *where, scale, left)
    assert isinstance(out, torch.Tensor)
    return out


class _GroupedFlash(torch.autograd.Function):
    """`varlen_attn` with fewer key/value heads, which the kernels of torch 2.11 can do and its function does not offer."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: torch.Tensor, key_offsets: torch.Tensor,
        longest: int, longest_key: int, scale: float, left: int,
    ) -> torch.Tensor:  # fmt: skip
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, offsets, key_offsets, longest, longest_key, 0.0, left < 0, False, scale=scale, window_size_left=left,
            window_size_right=0,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse, offsets, key_offsets, state, unused)
        ctx.settings = (longest, longest_key, scale, left)
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, offsets, key_offsets, state, unused = ctx.saved_tensors
        longest, longest_key, scale, left = ctx.settings
        found = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(), q, k, v, out, lse, offsets, key_offsets, longest, longest_key, 0.0, left < 0, state, unused,
            scale=scale, window_size_left=left, window_size_right=0,
        )  # fmt: skip
        return *found, *[None] * 6


def gather_flat(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
    """All ranks' parts in one tensor; torch 2.13 has another name for it."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own, group=group)


def reduce_flat(own: torch.Tensor, whole: torch.Tensor, group: Any, async_op: bool = False) -> Any:
    """This rank's part of the sum; torch 2.13 has another name for it."""
    reduce = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return reduce(own, whole, group=group, async_op=async_op)


def fsdp_groups(module: Any) -> list[Any]:
    """What FSDP2 gathers together for a module; torch 2.11 has at most one group."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def wait_at_most(timeout: timedelta, group: Any) -> None:
    """How long collectives of a group may take from now on; torch has no public name for it."""
    change = getattr(dist.distributed_c10d, "_set_pg_timeout", None)
    if change is not None:
        change(timeout, group)


def abort_process_group() -> None:
    """End all collectives that are under way, from another thread; torch has no public name for it."""
    dist.distributed_c10d._abort_process_group()


def collective_trace(backend: str) -> bytes | None:
    """What torch's flight recorder has of this process's collectives, as JSON; None where it has none. May be called while one
    hangs. NCCL has a recorder of its own; older torch has none for gloo."""
    name = "_dump_nccl_trace_json" if backend == "nccl" else "_dump_fr_trace_json"
    dump = getattr(torch._C._distributed_c10d, name, None)
    found: bytes | str | None = None if dump is None else dump()
    return found.encode() if isinstance(found, str) else found


def reset_fsdp(units: Sequence[Any]) -> None:
    """Forget what FSDP2 knows of a pass that failed half-way, and give up what is gathered; `units` has the root last. torch 2.11
    has no name for it."""
    root = units[-1]
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
        return
    idle = torch.distributed.fsdp._fully_shard._fsdp_common.TrainingState.IDLE
    for unit in units:
        state = unit._get_fsdp_state()
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._comm_ctx.post_forward_order.clear()
        state._training_state = idle
        for group in fsdp_groups(unit):
            group._all_gather_result = group._post_reduce_event = None
            group._post_forward_indices.clear()
            group._training_state = idle
            group._to_sharded()


def forget_groups(mesh: Any) -> None:
    """Let a device mesh hold no process group. torch 2.11 has no registry of its own."""
    if hasattr(mesh, "_pg_registry"):
        mesh._pg_registry.clear()


def put_groups(mesh: Any, other: Any) -> None:
    """Make a device mesh use the process groups of another, of the same shape. torch 2.11 has no registry of its own."""
    mesh._dim_group_names = other._dim_group_names
    if hasattr(other, "_pg_registry"):
        mesh._pg_registry.update(other._pg_registry)
