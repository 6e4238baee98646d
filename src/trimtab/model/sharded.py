"""A policy whose weights ranks hold in parts: FSDP2 (`run.shard: full`), for models that do not fit on one device.

A unit is gathered before it is used and given up after: a decoder layer, the embedding, the head; where embedding and head are
one matrix, that is the root's own unit, which stays gathered from the forward pass to the end of the backward pass.

Guarantees:
- Parts of trained matrices are float32 (or wider): they are the masters. Passes compute in the model's own type, on weights that
  are rounded before they are gathered, as one process's masters are rounded into its working weights.
- Gradients of ranks and of micro-batches are summed in float32 (or wider), never averaged.
- Vectors and adapters are whole on every rank; their gradients are summed by the optimizer (update/sharded.py).
- A gather is a collective: all ranks run the same number of passes, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from trimtab.base.errors import ModelError
from trimtab.model.attention import AttentionPlan
from trimtab.model.gradients import Gradients
from trimtab.model.handed import Handed
from trimtab.model.head import Head, TokenStats
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.replica import empty_copy, fill, skeleton_of
from trimtab.model.shard_store import ShardStore
from trimtab.model.versions import forget_groups, fsdp_groups, put_groups, reset_fsdp
from trimtab.model.weights import ADAPTERS, VECTORS, unit_name

Fetch = Callable[[Sequence[torch.nn.Parameter], torch.device], None]
HIDDEN, FUSED, TOKEN_STATS, LOGITS = "trimtab_hidden", "trimtab_fused", "trimtab_token_stats", "trimtab_logits"
"""Methods that are added to modules: FSDP2 gathers weights before them and gives them up after, as it does for `forward`."""


class ShardedPolicy(Policy):
    """See policy.py. Making one takes the model apart: nothing but this policy can use it from then on."""

    weights: ShardStore

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        check: bool = True,
        on_host: bool = False,
        prefetch: int = 1,
        fetch: Fetch | None = None,
    ) -> None:
        """The model may be in host memory; `fetch` puts some of its parameters on the device. `mesh`: over the ranks that hold
        one set of parts, with copies of the set as its first dimension where there are several. `on_host`: parts wait in host
        memory. `prefetch`: units gathered ahead."""
        self.mesh, self._device, self._dtype = mesh, device, model.get_output_embeddings().weight.dtype
        self.skeleton = skeleton_of(model)
        """The model without weights, to make whole copies from (replica.py)."""
        self.units = _shard(model, mesh, device, self._dtype, on_host, fetch or _move)
        """What is gathered as one, in the order of use; the root last."""
        _prefetch(self.units[:-1], prefetch)
        super().__init__(model, check=False)
        setattr(model, HIDDEN, MethodType(_hidden, self))
        setattr(model, FUSED, MethodType(_fused, self))
        for method in (HIDDEN, FUSED):
            register_fsdp_forward_method(model, method)
        if check:
            self._check_packing()
            self.reshard()
        else:
            self._initialise()
        model.train()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def _modules(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        found: torch.Tensor = getattr(self.model, HIDDEN)(tokens_T, positions_T, plan)
        return found

    def load_parameter(self, name: str, value: torch.Tensor) -> None:
        one = self.weights.sharded.get(name)
        if one is None:
            super().load_parameter(name, value)
        elif one.part.numel():
            rows = one.first // one.row_elements
            one.part.data.copy_(value[rows : rows + one.part.shape[0]])

    def whole_copy(self, here: bool) -> Policy | None:
        """A policy with the whole weights in host memory, on the rank that is told to have it `here`. A collective."""
        made = empty_copy(self.skeleton, torch.device("cpu")) if here else None
        fill(made, self.model, self.weights)
        return None if made is None else Policy(made, check=False)

    def present(self) -> AbstractContextManager[None]:
        return self._then_reshard()

    @contextmanager
    def _then_reshard(self) -> Iterator[None]:
        yield
        self.reshard()

    def probe(self, plan: PackedPlan | None = None) -> torch.Tensor:
        with self._then_reshard():
            return super().probe(plan)

    def reshard(self) -> None:
        """Give up what is gathered. No collective."""
        for unit in self.units:
            unit.reshard()

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        if self.fused_forward is not None and isinstance(plan, PackedPlan):
            found: torch.Tensor = getattr(self.model, FUSED)(tokens_T, positions_T, plan)
            return found
        return super().hidden(tokens_T, positions_T, plan)

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """In place: the sum over all ranks that have parts or copies of them."""
        for dimension in range(self.mesh.ndim):
            torch.distributed.all_reduce(values, group=self.mesh.get_group(dimension))
        return values

    @property
    def handed(self) -> Handed:
        """Where gradients can be handed over to FSDP2."""
        return Handed(self.units)

    def reset(self) -> None:
        """Forget a pass that failed half-way, and its gradients."""
        self.handed.clear()
        reset_fsdp(self.units)

    def ungroup(self) -> None:
        """Let go of the process groups: gloo frees ranks that wait for this one only when nobody here holds them any more."""
        forget_groups(self.mesh)
        for unit in self.units:
            for group in fsdp_groups(unit):
                group._all_gather_result = None
                for name in ("shard_process_group", "replicate_process_group"):
                    vars(group.mesh_info).pop(name, None)

    def regroup(self, mesh: DeviceMesh) -> None:
        """Use other process groups of the same ranks, after `ungroup`. Parts stay where they are."""
        if mesh is not self.mesh:  # DTensors know the mesh by itself, so it has to stay
            put_groups(self.mesh, mesh)
        for unit in self.units:
            for group in fsdp_groups(unit):
                info = group.mesh_info
                info.shard_process_group = self.mesh.get_group(info.shard_mesh_dim)
                if self.mesh.ndim > 1:
                    info.replicate_process_group = self.mesh.get_group(info.replicate_mesh_dim)

    @torch.no_grad()
    def _initialise(self) -> None:
        """FSDP2 finds its root in the first pass; parts are where they stay from then on."""
        root: Any = self.units[-1]
        root._get_fsdp_state()._lazy_init()
        self.weights = self._make_store()

    def _check_packing(self) -> None:
        self._initialise()
        super()._check_packing()

    def _make_store(self) -> ShardStore:
        dimension = self.mesh.ndim - 1
        shard, shards = self.mesh.get_local_rank(dimension), self.mesh.size(dimension)
        return ShardStore(self.model, self._dtype, shard, shards)

    def _head(self) -> Head:
        plain = super()._head()
        linear = self.model.get_output_embeddings()
        return ShardedHead(plain.weight_VE, plain.bias_V, plain.scale, plain.softcap, linear, self._device, self._dtype)


def _hidden(
    policy: ShardedPolicy, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan
) -> torch.Tensor:
    return Policy._modules(policy, tokens_T, positions_T, plan)


def _fused(policy: ShardedPolicy, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PackedPlan) -> torch.Tensor:
    assert policy.fused_forward is not None
    return policy.fused_forward(tokens_T, positions_T, plan.longest, plan)


@dataclass(frozen=True)
class ShardedHead(Head):
    """See head.py. The weights are those of `linear` when they are used: gathered, where it is a unit of its own; the root's, who
    has them gathered after a pass, where the embedding is the same matrix."""

    linear: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        setattr(self.linear, TOKEN_STATS, MethodType(_token_stats, self))
        setattr(self.linear, LOGITS, MethodType(_logits, self))
        for method in (TOKEN_STATS, LOGITS):  # nothing happens where it is no unit of its own
            register_fsdp_forward_method(self.linear, method)

    @property
    def gathered(self) -> Head:
        return Head(self.linear.weight, self.linear.bias, self.scale, self.softcap)

    def logits(self, hidden_TE: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        found: torch.Tensor = getattr(self.linear, LOGITS)(hidden_TE, temperature)
        return found

    @property
    def tiled(self) -> bool:
        return Head(torch.empty((1, self.weight_VE.shape[1]), dtype=self.dtype, device=self.device)).tiled

    def token_stats(
        self,
        hidden_TE: torch.Tensor,
        targets_T: torch.Tensor,
        temperature: float,
        chunk: int,
        gradients: Gradients | None = None,
    ) -> TokenStats:
        found: TokenStats = getattr(self.linear, TOKEN_STATS)(hidden_TE, targets_T, temperature, chunk, gradients)
        return found


def _token_stats(head: ShardedHead, *args: Any) -> TokenStats:
    return head.gathered.token_stats(*args)


def _logits(head: ShardedHead, *args: Any) -> torch.Tensor:
    return head.gathered.logits(*args)


def _move(parameters: Sequence[torch.nn.Parameter], device: torch.device) -> None:
    for parameter in parameters:
        parameter.data = parameter.data.to(device)


def _shard(
    model: Any, mesh: DeviceMesh, device: torch.device, dtype: torch.dtype, on_host: bool, fetch: Fetch
) -> list[FSDPModule]:
    """Cut a model's matrices, a unit at a time: no more than one is whole on the device."""
    named = dict(model.named_parameters())
    apart = {
        p: None for name, p in named.items() if unit_name(name, p) in (VECTORS, ADAPTERS)
    }  # in the same order everywhere
    fetch(list(apart), device)
    wide = torch.promote_types(dtype, torch.float32)
    settings: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=wide, cast_forward_inputs=False),
        "ignored_params": set(apart),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if on_host else OffloadPolicy(),
    }
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    units: list[FSDPModule] = []
    for module in [*([] if tied else [embedding]), *_layers(model), *([] if tied else [head]), model]:
        uncut = [p for p in module.parameters() if p not in apart and type(p.data) is torch.Tensor]
        fetch(uncut, device)
        for parameter in uncut:
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
        fully_shard(module, **settings)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        units.append(module)
    return units


def _layers(model: Any) -> list[torch.nn.Module]:
    """The decoder layers, in the order in which they run."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        raise ModelError(
            f"run.shard: {type(model).__name__} has no list of layers that full could gather one by one. Write gradients."
        )
    return list(layers)


def _prefetch(units: list[FSDPModule], ahead: int) -> None:
    """Have so many units gathered while those before them are computed, in the forward and in the backward pass."""
    for at, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[at + 1 : at + 1 + ahead])
        unit.set_modules_to_backward_prefetch(units[max(0, at - ahead) : at][::-1])
