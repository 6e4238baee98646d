"""The models of a run: the policy, and the one it began as where they are compared."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from trimtab.config.known import ResolvedRun
from trimtab.config.load import AnyConfig
from trimtab.config.resolved import ResolvedConfig
from trimtab.model.kernel_choice import use_kernels
from trimtab.model.load import load_model
from trimtab.model.memory import free
from trimtab.model.policy import AnyPolicy, FromHost, Policy, WithoutAdapters
from trimtab.model.sharded import ShardedPolicy
from trimtab.run.build import load_policy, with_known_dtype
from trimtab.update.samples import has_reference


def load_policies(
    config: AnyConfig, device: torch.device, checkpoint: Path | None, shards: int = 1
) -> tuple[Policy, AnyPolicy | None]:
    """The policy, and the model that it began as where they are compared. `shards`: ranks that cut the policy's units."""
    policy = load_policy(config.model, config.learn.seed, device, config.run.kernels, checkpoint, shards)
    if not (isinstance(config, ResolvedConfig) and has_reference(config.learn)):
        return policy, None
    if config.model.lora is not None:
        return policy, WithoutAdapters(policy)
    reference = Policy(load_model(config.model, device).requires_grad_(False), check=False)
    use_kernels(reference, config.run.kernels)
    return policy, reference


def load_sharded_policies(
    config: AnyConfig, run: ResolvedRun, device: torch.device, checkpoint: Path | None, mesh: DeviceMesh
) -> tuple[Policy, AnyPolicy | None]:
    """The same for ranks that hold weights in parts. All ranks load together; parts of the reference wait in host memory where
    the plan has them there."""
    model = config.model
    policy = load_policy(model, config.learn.seed, device, run.kernels, checkpoint, mesh=mesh, prefetch=run.prefetch)
    if not (isinstance(config, ResolvedConfig) and has_reference(config.learn)):
        return policy, None
    if model.lora is not None:
        return policy, WithoutAdapters(policy)
    whole = load_model(with_known_dtype(model, device), torch.device("cpu")).requires_grad_(False)
    on_host = run.offload.reference
    return policy, ShardedPolicy(whole, mesh, device, check=False, on_host=on_host, prefetch=run.prefetch)


def put_reference_away(reference: AnyPolicy | None, run: ResolvedRun) -> AnyPolicy | None:
    """A reference that waits in host memory, where the plan has it there."""
    if not run.offload.reference or not isinstance(reference, Policy) or isinstance(reference, ShardedPolicy):
        return reference
    device = reference.device
    away = FromHost(reference)
    free(device)  # another process cannot use what torch keeps
    return away
