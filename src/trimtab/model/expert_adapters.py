"""Adapters on the stacked weights of experts, in PEFT's layout and under PEFT's names (`target_parameters`).

PEFT adds what an adapter makes of the whole stack to the weights before every forward pass: a copy of all experts in memory and a
product over all of them. Here the adapters stand beside the grouped products instead, as they do beside linear layers.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper

from trimtab.model.experts import EXPERTS_NAME, ExpertAdapter, expert_modules, run_experts


class AdaptedExperts(ParamWrapper):
    """PEFT's wrapper of one stacked weight; where several are adapted, one wraps the other."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        base: Any = self.get_base_layer()
        written_out = base.config._experts_implementation != EXPERTS_NAME
        if self.merged or written_out or kwargs:
            found: torch.Tensor = super().forward(x, *args, **kwargs)
            return found
        index_TK, weights_TK = args
        return run_experts(base, x, index_TK, weights_TK, adapters_on(self))


def adapters_on(module: Any) -> dict[str, tuple[ExpertAdapter, ...]]:
    """What the active adapters add to a module of experts, by the name of the weight."""
    found: dict[str, tuple[ExpertAdapter, ...]] = {}
    while isinstance(module, ParamWrapper):
        active = [] if module.disable_adapters else [name for name in module.active_adapters if name in module.lora_A]
        found[module.parameter_name] = tuple(
            ExpertAdapter(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name]))
            for name in active
        )
        module = module.base_layer
    return found


def stand_beside_products(model: Any) -> None:
    """Let the adapters on experts that grouped products serve be applied beside these."""
    served = {id(module) for module in expert_modules(model)}
    for module in model.modules():
        if type(module) is ParamWrapper and id(module.get_base_layer()) in served:
            module.__class__ = AdaptedExperts


def stacked_weights(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's stacked expert weights, by their names."""
    modules = {id(module) for module in expert_modules(model)}
    return {
        f"{name}.{weight}": tuple(parameter.shape)
        for name, module in model.named_modules()
        if id(module) in modules
        for weight, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3
    }


@torch.no_grad()
def merged_stack(wrapper: ParamWrapper) -> torch.Tensor:
    """A stacked weight in host memory with what its adapters add rounded in once, one expert at a time."""
    weight = wrapper.get_param()
    whole = torch.empty(weight.shape, dtype=weight.dtype)
    wide = torch.promote_types(weight.dtype, torch.float32)
    for expert in range(weight.shape[0]):
        total = weight[expert].to(wide, copy=True)
        for name in wrapper.active_adapters:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            a_rI, b_Or = (
                a.unflatten(0, (weight.shape[0], -1))[expert],
                b.unflatten(1, (-1, weight.shape[0]))[:, :, expert],
            )
            added = (b_Or.to(wide) @ a_rI.to(wide)) * wrapper.scaling[name]
            total += added.t() if wrapper.get_base_layer().is_transposed else added
        whole[expert] = total.to(weight.dtype)
    return whole
