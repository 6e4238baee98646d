"""The models of a run as its config states them, with no weight loaded. How a model's shape is found is the caller's: from its
config.json alone (plan/source.py), or, where that does not say all, by building it (run/shapes.py)."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.contradiction import REWARD_MODEL
from trimtab.config.load import AnyConfig
from trimtab.config.resolved import ResolvedConfig
from trimtab.model.sizes import FUSED_FAMILIES
from trimtab.plan.quantised import has_other_layers, refuse_kv
from trimtab.plan.shape import ModelShape
from trimtab.plan.source import ITEMSIZE, stated_adapters, stated_dtype, stored_codes, widened_from
from trimtab.plan.work import Models

ShapeOf = Callable[[str, bool], ModelShape]
"""The shape of the model that a path names; whether its own code may be run to know it."""


def models_of(
    config: AnyConfig, shape: ModelShape, shape_of: ShapeOf, cpu: bool = False, tiled_head: bool = True
) -> Models:
    """All models, on a CPU or on a device that has kernels for a tiled head. `shape`: the policy's."""
    dtype = stated_dtype(config, cpu)
    other = has_other_layers(shape)
    codes = "plain" if other else stored_codes(config.model.path)
    if codes == "4bit" and config.model.lora is None and config.model.base == "auto":
        what = f"the weights of {config.model.path} are in 4 bits, and cannot be trained as they are"
        raise ConfigError([Problem("model.base", what, "Write model.lora: {r: 16}, or model.base: bf16.")])
    refuse_kv(config.model.kv_dtype, shape)
    native = not cpu and dtype in ("bfloat16", "float16")
    return Models(
        shape=shape,
        itemsize=ITEMSIZE[dtype],
        adapters=stated_adapters(config, shape),
        fused=native and shape.kind in FUSED_FAMILIES and config.run.kernels in ("auto", "native"),
        tiled_head=native and tiled_head and shape.hidden % 8 == 0,
        stored=widened_from(config, other),
        critic=critic_of(config, shape, shape_of),
        reward_models=reward_models_of(config, shape_of),
        codes=codes,
    )


def critic_of(config: AnyConfig, policy: ModelShape, shape_of: ShapeOf) -> ModelShape | None:
    if not isinstance(config, ResolvedConfig) or config.learn.advantage != "gae":
        return None
    path = config.learn.critic.path
    return policy if path is None else shape_of(path, config.model.trust_remote_code)


def reward_models_of(config: AnyConfig, shape_of: ShapeOf) -> tuple[ModelShape, ...]:
    if not isinstance(config, ResolvedConfig):
        return ()
    names = [part.fn for part in config.reward if part.fn.startswith(REWARD_MODEL)]
    return tuple(shape_of(name.removeprefix(REWARD_MODEL), False) for name in names)
