"""Liger's kernels in the place of a model's norms, rotation and gated products: `run.kernels: liger`.

The log-prob head stays Trimtab's: Liger's fused cross-entropy gives a loss of its own, and training needs each token's log-prob.

What this module guarantees:
- Only the model that is given changes. Liger replaces classes and functions of transformers for the whole process; all of that
  is put back, but for the rotation, which attention looks up by its name: that one stays, and is Liger's for CUDA tensors
  alone.
- What cannot work (no CUDA device, no package, an architecture that it has no kernels for) is refused before any weight is read.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

from trimtab.base.errors import ConfigError, Problem

ROTATION = "apply_rotary_pos_emb"


def refuse(kind: str, device: torch.device) -> None:
    """Say why Liger cannot serve this kind of model on this device, if it cannot."""
    if device.type != "cuda":
        raise _problem("Liger's kernels need a CUDA device, and this run is on the CPU", "Write auto.")
    if find_spec("liger_kernel") is None:
        raise _problem(
            "the liger-kernel package is not installed", "Install it with: pip install 'trimtab[liger]', or write auto."
        )
    known = _appliers()
    if kind not in known:
        what = f"liger-kernel {version('liger-kernel')} has no kernels for models of type {kind}"
        raise _problem(what, f"Write auto. It has some for {', '.join(sorted(known))}.")


def patch(model: Any) -> None:
    """Put Liger's forward passes into this model's modules, for as long as it lives."""
    whole = model.get_base_model() if hasattr(model, "get_base_model") else model
    apply, home = _appliers()[whole.config.model_type], sys.modules[type(whole).__module__]
    before = dict(vars(home))
    ours = {"cross_entropy": False, "fused_linear_cross_entropy": False}
    apply(model=whole, **{name: value for name, value in ours.items() if name in inspect.signature(apply).parameters})
    for name, value in list(vars(home).items()):
        if name not in before:
            delattr(home, name)
        elif value is not before[name]:
            setattr(home, name, _by_device(value, before[name]) if name == ROTATION else before[name])


def _appliers() -> Mapping[str, Callable[..., None]]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    found: Mapping[str, Callable[..., None]] = MODEL_TYPE_TO_APPLY_LIGER_FN
    return found


def _by_device(theirs: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    """Liger's rotation for what is on a CUDA device, and transformers' own for the rest."""
    own = getattr(own, "plain", own)

    def rotate(q: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return (theirs if q.is_cuda else own)(q, *rest, **named)

    rotate.plain = own  # type: ignore[attr-defined]
    return rotate


def _problem(what: str, fix: str) -> ConfigError:
    return ConfigError([Problem("run.kernels", what, fix)])
