"""Which kernels run a policy's packed rows: `run.kernels`.

Every choice is compared with the model's own modules before it is used.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.run import Kernels
from trimtab.model import liger
from trimtab.model.policy import OWN_MODULES, TOLERANCE_NATS, Policy, distance
from trimtab.model.sharded import ShardedPolicy

TOLERANCE_GRADIENT = {torch.float64: 1e-4, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.3}
"""How far two gradients of a matrix that should be the same may be apart, of its norm. One that is not handed over, or added up
over two ranks twice or not at all, is off by a half or more."""


def use_kernels(policy: Policy, kernels: Kernels) -> None:
    """From now on the policy runs packed rows as `run.kernels` says."""
    if kernels in ("auto", "native"):
        fuse(policy)
    if kernels == "native" and not policy.fused:
        why = policy.description if ":" in policy.description else "they need a CUDA device and bfloat16"
        raise ConfigError([Problem("run.kernels", f"fused layers do not support this run: {why}", "Write auto.")])
    if kernels == "liger":
        _use_liger(policy)
    if kernels == "plain" and policy.fused:
        policy.fused_forward = None
        policy.description = OWN_MODULES


def fuse(policy: Policy) -> None:
    """From now on the policy runs packed rows through kernels made for training, where they serve this model on this device and
    agree with its own modules."""
    if not suits(policy.device, policy.dtype):
        return
    if find_spec("triton") is None:
        policy.description += ": Triton is not installed"
        return
    from trimtab.model.parts import Unfusable

    try:
        problem = _fuse_sharded(policy) if isinstance(policy, ShardedPolicy) else _fuse_whole(policy)
    except Unfusable as reason:
        problem = str(reason)
    if problem is None:
        policy.description = "fused layers"
    else:
        policy.fused_forward = None
        policy.description += f": {problem}"


def suits(device: torch.device, dtype: torch.dtype) -> bool:
    """The fused layers were made for this device and type."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def _fuse_whole(policy: Policy) -> str | None:
    """Use the fused layers; or say why not."""
    from trimtab.model.fused import FusedForward

    own = policy.probe()
    policy.fused_forward = FusedForward(policy)
    return _difference(distance(policy.probe(), own), policy.dtype)


def _fuse_sharded(policy: ShardedPolicy) -> str | None:
    """The same for weights that ranks hold in parts. Gradients are compared, too: they are handed over under a private name of
    torch. All ranks find the same."""
    from trimtab.model.fused_sharded import FusedSharded, gradient_gap

    own = policy.probe()
    policy.fused_forward = FusedSharded(policy)
    gap = torch.tensor([distance(policy.probe(), own)], dtype=torch.float64, device=policy.device)
    problem = _difference(float(policy.sum_over_ranks(gap)) / policy.mesh.size(), policy.dtype)
    if problem is not None:
        return problem
    apart = gradient_gap(policy)
    wrong = not apart <= TOLERANCE_GRADIENT[policy.dtype]
    return f"fused layers hand over another gradient (off by {apart:.2g} of its norm)" if wrong else None


def _difference(gap: float, dtype: torch.dtype) -> str | None:
    if gap <= TOLERANCE_NATS[dtype]:
        return None
    return f"fused layers compute different log-probs (off by {gap:.3g} nats)"


def _use_liger(policy: Policy) -> None:
    liger.refuse(policy.config.model_type, policy.device)
    own = policy.probe()
    liger.patch(policy.model)
    gap = distance(policy.probe(), own)
    if not gap <= TOLERANCE_NATS[policy.dtype]:
        what = f"Liger's kernels compute different log-probs for {policy.name} (off by {gap:.3g} nats)"
        raise ConfigError([Problem("run.kernels", what, "Write auto.")])
    policy.description = f"{OWN_MODULES} with Liger's kernels"
