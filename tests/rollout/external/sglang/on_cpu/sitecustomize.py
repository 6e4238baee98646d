"""SGLang without a GPU, so that its part of the contract can be tested anywhere: `python` beside this file runs SGLang's
interpreter with it. Nobody would train with it: SGLang's kernels are interpreted.

As soon as SGLang's settings are imported, torch pins no memory, vLLM's kernels are there in name and the sampler is Trimtab's."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from functools import wraps
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SETTINGS = "sglang.srt.server_args"


class Preparing(importlib.abc.MetaPathFinder):
    """Lets SGLang's settings be found as ever, and prepares when they have been imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != SETTINGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_prepare(module: ModuleType) -> None:
            execute(module)
            prepare(module.ServerArgs)

        spec.loader.exec_module = execute_and_prepare  # type: ignore[method-assign]
        return spec


def prepare(settings: Any) -> None:
    """SGLang's rotation asks for a kernel of vLLM's, which its form in PyTorch then does not call; its adapters ask for memory
    that is pinned, which there is none of without a GPU."""
    import torch

    from trimtab.rollout.external.sglang.arguments import BACKEND

    for make in (torch.tensor, torch.zeros, torch.empty, torch.arange):
        setattr(torch, make.__name__, unpinned(make))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    if "vllm" not in sys.modules and importlib.util.find_spec("vllm") is None:
        library, kernels = (named_module(name) for name in ("vllm", "vllm._custom_ops"))
        kernels.rotary_embedding = None
        sys.modules |= {"vllm": library, "vllm._custom_ops": kernels}

    choose = settings._handle_cpu_backends

    def with_sampler(self: Any) -> None:  # on a CPU it would be SGLang's own
        choose(self)
        self.sampling_backend = BACKEND

    settings._handle_cpu_backends = with_sampler


def named_module(name: str) -> Any:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    return made


def unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*given: Any, pin_memory: bool = False, **settings: Any) -> Any:
        return make(*given, **settings)

    return made


sys.meta_path.insert(0, Preparing())
