"""Models as a plan sees them: those that are loaded, and those that a config names (`trimtab plan`, critics, reward models).

A config of a known family says all (plan/source.py). Others are built without memory and measured; only that loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import ModelError
from trimtab.config.load import AnyConfig, Offline
from trimtab.config.resolved import ResolvedConfig
from trimtab.config.schema import Model
from trimtab.model.context import HYBRIDS, config_of_layer, context_of
from trimtab.plan.job import Machine
from trimtab.plan.quantised import has_other_layers
from trimtab.plan.reading import refuse_reading
from trimtab.plan.shape import Block, ModelShape, read_shape
from trimtab.plan.source import described_shape, is_quantised, widened_from
from trimtab.plan.stated import critic_of, models_of, reward_models_of
from trimtab.plan.work import Lengths, Models, job_of

if TYPE_CHECKING:
    from trimtab.model.policy import Policy


def loaded_models(config: AnyConfig, policy: Policy) -> Models:
    """The models of a run whose policy is loaded."""
    from trimtab.model.codes import codes_of

    shape = shape_of_model(policy.model)
    return Models(
        shape=shape,
        itemsize=policy.dtype.itemsize,
        adapters=sum(p.numel() for p in policy.parameters()) if config.model.lora else 0,
        fused=policy.fused,
        tiled_head=policy.tiled_head,
        stored=widened_from(config, has_other_layers(shape)),
        critic=critic_of(config, shape, shape_of),
        reward_models=reward_models_of(config, shape_of),
        codes=codes_of(policy.model),
    )


def evaluated_models(config: ResolvedConfig, policy: Policy) -> Models:
    """The models of an evaluation: nothing is trained, so there is no critic, and adapters are no more than weights."""
    shape, itemsize = shape_of_model(policy.model), policy.dtype.itemsize
    return Models(shape, itemsize, reward_models=reward_models_of(config, shape_of))


def stated_models(config: AnyConfig, shape: ModelShape, cpu: bool = False, tiled_head: bool = True) -> Models:
    """The models of a run that a config describes, on a CPU or on a device that has kernels for a tiled head."""
    return models_of(config, shape, shape_of, cpu, tiled_head)


def refuse_unreadable(config: ResolvedConfig | Offline, lengths: Lengths, machine: Machine) -> None:
    """Refuse, before it is read, a model that fits nowhere once it is dequantised."""
    if is_quantised(config.model.path):
        shape = shape_of(config.model.path, config.model.trust_remote_code)
        job = job_of(config, stated_models(config, shape, machine.cpu, machine.device.tiled_head), lengths)
        refuse_reading(config.run, job, machine)


def shape_of(path: str, trust_remote_code: bool = False) -> ModelShape:
    """The shape of the model that a path names."""
    described = described_shape(path)
    if described is not None:
        return described
    from trimtab.model.load import building, load_config
    from trimtab.model.policy import refuse_other_layers

    model = Model(path=path, base="bf16", trust_remote_code=trust_remote_code)
    refuse_other_layers(model)
    read = load_config(model)
    with building(model, read):
        return measured_shape(read, trust_remote_code)


def measured_shape(config: Any, trust_remote_code: bool = False) -> ModelShape:
    """The shape that a transformers config of any architecture describes, read off a model built without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        # In bfloat16, for which the products of experts are defined without values, too.
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=trust_remote_code)
        return shape_of_model(made)


def shape_of_model(model: Any) -> ModelShape:
    """The shape of a built model, adapters left out; facts that its config does not state get their usual values."""
    import torch

    from trimtab.model.codes import parameter_elements

    text = model.config.get_text_config()
    if text.model_type in HYBRIDS and model.device.type != "meta":
        return measured_shape(model.config)  # where a forward pass needs no weights, and no other rank
    total = parameter_elements(model) - sum(p.numel() for name, p in model.named_parameters() if "lora_" in name)
    try:
        known = read_shape(text.to_dict())
        if known.parameters == total:
            return known
    except (KeyError, ModelError):
        pass
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    tied = head is None or head.weight is table
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == text.num_hidden_layers)
    if text.model_type in HYBRIDS:
        from trimtab.run.hybrid_shapes import measured_hybrid_blocks

        blocks = measured_hybrid_blocks(model, text, list(layers))
    else:
        blocks = tuple(
            _measured_block(config_of_layer(text, index), index, layer) for index, layer in enumerate(layers)
        )
    shape = ModelShape(text.model_type, text.hidden_size, text.vocab_size, tied, blocks, 0, context_of(text))
    return replace(shape, other=total - shape.parameters)


NORMS_AFTER = ("post_feedforward_layernorm", "post_mlp_layernorm")
"""What layers call a norm of what they add to the residual."""


def _measured_block(config: Any, index: int, layer: Any) -> Block:
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    width = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    count = sum(p.numel() for name, p in layer.named_parameters() if "lora_" not in name)
    attention: Any = getattr(layer, "self_attn", None)
    window = getattr(attention, "sliding_window", None)
    block = Block(
        heads, kv_heads, size, size, width[index] if isinstance(width, Sequence) else width, count, count,
        window if isinstance(window, int) else None,
        head_norm=hasattr(attention, "q_norm"), sandwich=any(hasattr(layer, name) for name in NORMS_AFTER),
        dense=getattr(config, "attn_logit_softcapping", None) is not None,
    )  # fmt: skip
    return _with_experts(block, config, layer)


def _with_experts(block: Block, config: Any, layer: Any) -> Block:
    """The same with the experts that grouped products serve."""
    from trimtab.model.experts import expert_modules

    modules = expert_modules(layer)
    used = getattr(config, "num_experts_per_tok", None)
    if not modules or not used:
        return block
    stacked = [p for p in modules[0].parameters(recurse=False) if p.ndim == 3]
    experts, *sizes = modules[0].down_proj.shape
    unused = sum(p.numel() for p in stacked) * (experts - used) // experts
    width = sizes[0] if modules[0].is_transposed else sizes[1]
    return replace(block, width=width, experts=experts, experts_used=used, active=block.parameters - unused)
