"""SGLang without a GPU, so that its part of the contract can be tested anywhere. Nobody would train with it: its kernels are
interpreted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from trimtab.rollout.external.sglang.arguments import BACKEND

NEEDED = {"TRITON_INTERPRET": "1"}


def prepare() -> None:
    """Before a model is made. SGLang's rotation asks for a kernel of vLLM's, which its form in PyTorch then does not call; its
    adapters ask for memory that is pinned, which there is none of without a GPU."""
    from sglang.srt.server_args import ServerArgs

    for make in (torch.tensor, torch.zeros, torch.empty, torch.arange):
        setattr(torch, make.__name__, _unpinned(make))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        library, kernels = (_module(name) for name in ("vllm", "vllm._custom_ops"))
        kernels.rotary_embedding = None
        sys.modules |= {"vllm": library, "vllm._custom_ops": kernels}

    choose = ServerArgs._handle_cpu_backends

    def with_sampler(self: Any) -> None:  # on a CPU it would be SGLang's own
        choose(self)
        self.sampling_backend = BACKEND

    ServerArgs._handle_cpu_backends = with_sampler


def _module(name: str) -> Any:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    return made


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(make)
    def made(*given: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        return make(*given, **settings)

    return made
