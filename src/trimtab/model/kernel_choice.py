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
    if policy.device.type != "cuda" or policy.dtype not in (torch.bfloat16, torch.float16):
        return
    if isinstance(policy, ShardedPolicy):
        policy.description += ": fused layers do not run on weights that ranks hold in parts (run.shard: full)"
        return
    if find_spec("triton") is None:
        policy.description += ": Triton is not installed"
        return
    from trimtab.model.fused import FusedForward
    from trimtab.model.parts import Unfusable

    own = policy.probe()
    try:
        policy.fused_forward = FusedForward(policy)
    except Unfusable as reason:
        policy.description += f": {reason}"
        return
    gap = distance(policy.probe(), own)
    if gap <= TOLERANCE_NATS[policy.dtype]:
        policy.description = "fused layers"
    else:
        policy.fused_forward = None
        policy.description += f": fused layers compute different log-probs (off by {gap:.3g} nats)"


def _use_liger(policy: Policy) -> None:
    liger.refuse(policy.config.model_type, policy.device)
    own = policy.probe()
    liger.patch(policy.model)
    gap = distance(policy.probe(), own)
    if not gap <= TOLERANCE_NATS[policy.dtype]:
        what = f"Liger's kernels compute different log-probs for {policy.name} (off by {gap:.3g} nats)"
        raise ConfigError([Problem("run.kernels", what, "Write auto.")])
    policy.description = f"{OWN_MODULES} with Liger's kernels"
