"""SGLang without a GPU, so that its part of the contract can be tested anywhere. Nobody would train with it: its kernels are
interpreted."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

from trimtab.rollout.sglang.arguments import BACKEND

NEEDED = {"TRITON_INTERPRET": "1"}


def prepare() -> None:
    """Before a model is made. SGLang's rotation asks for a kernel of vLLM's, which its form in PyTorch then does not call."""
    from sglang.srt.server_args import ServerArgs

    if importlib.util.find_spec("vllm") is None:
        kernels: Any = ModuleType("vllm._custom_ops")
        kernels.rotary_embedding = None
        sys.modules |= {"vllm": ModuleType("vllm"), "vllm._custom_ops": kernels}

    choose = ServerArgs._handle_cpu_backends

    def with_sampler(self: Any) -> None:  # on a CPU it would be SGLang's own
        choose(self)
        self.sampling_backend = BACKEND

    ServerArgs._handle_cpu_backends = with_sampler
