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
from trimtab.run.read_once import WeightReader
from trimtab.update.peers import ALONE, Peers
from trimtab.update.samples import has_reference


def load_policies(
    config: AnyConfig, device: torch.device, checkpoint: Path | None, peers: Peers = ALONE, compares: bool = True
) -> tuple[Policy, AnyPolicy | None]:
    """The policy, and the model that it began as where they are compared. `peers`: ranks that load the same together, and may
    cut the policy's units. `compares`: False where other ranks have that model."""
    model, seed, kernels = config.model, config.learn.seed, config.run.kernels
    policy = load_policy(model, seed, device, kernels, checkpoint, peers.shards, peers=peers)
    keep_routes(policy, config)
    if not (compares and isinstance(config, ResolvedConfig) and has_reference(config.learn)):
        return policy, None
    if model.lora is not None:
        return policy, WithoutAdapters(policy)
    return policy, load_reference(config, device, peers)


def load_reference(config: AnyConfig, device: torch.device, peers: Peers = ALONE) -> Policy:
    """The model that the policy began as, whole."""
    model = config.model
    reader = WeightReader(peers, model.trust_remote_code)
    whole = reader.whole(lambda: load_model(model, device).requires_grad_(False), device)
    reference = Policy(whole, check=False)
    use_kernels(reference, config.run.kernels)
    return reference


def load_sharded_policies(
    config: AnyConfig,
    run: ResolvedRun,
    device: torch.device,
    checkpoint: Path | None,
    mesh: DeviceMesh,
    peers: Peers,
    compares: bool = True,
) -> tuple[Policy, AnyPolicy | None]:
    """The same for ranks that hold weights in parts. All ranks load together; parts of the reference wait in host memory where
    the plan has them there."""
    model, seed, ahead = config.model, config.learn.seed, run.prefetch
    policy = load_policy(model, seed, device, run.kernels, checkpoint, mesh=mesh, prefetch=ahead, peers=peers)
    keep_routes(policy, config)
    if not (compares and isinstance(config, ResolvedConfig) and has_reference(config.learn)):
        return policy, None
    if model.lora is not None:
        return policy, WithoutAdapters(policy)
    return policy, load_sharded_reference(config, run, device, mesh, peers)


def load_sharded_reference(
    config: AnyConfig, run: ResolvedRun, device: torch.device, mesh: DeviceMesh, peers: Peers
) -> ShardedPolicy:
    """The model that the policy began as, in parts."""
    model = config.model
    reader, known = WeightReader(peers, model.trust_remote_code), with_known_dtype(model, device)
    whole = reader.without_values(lambda: load_model(known, torch.device("cpu")).requires_grad_(False))
    on_host = run.offload.reference
    return ShardedPolicy(whole, mesh, device, check=False, on_host=on_host, prefetch=run.prefetch, fetch=reader.fetch)


def keep_routes(policy: Policy, config: AnyConfig) -> None:
    """The native engine keeps which experts the policy chose, where the trainer is to replay that."""
    policy.routers.kept = isinstance(config, ResolvedConfig) and config.learn.router_replay


def put_reference_away(reference: AnyPolicy | None, run: ResolvedRun) -> AnyPolicy | None:
    """A reference that waits in host memory, where the plan has it there."""
    if not run.offload.reference or not isinstance(reference, Policy) or isinstance(reference, ShardedPolicy):
        return reference
    device = reference.device
    away = FromHost(reference)
    free(device)  # another process cannot use what torch keeps
    return away
