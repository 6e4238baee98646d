"""From what an engine is made with to SGLang's own settings. Pure: imports nothing of SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.rollout.external.messages import EngineSetup

BACKEND = "trimtab"
"""Under which name Trimtab's sampler is registered."""
NEEDED = {
    # The context is a few tokens longer than the longest sequence, and may then be longer than the model's.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    # Memory is given up through torch's allocator, which leaves graphs alone.
    "SGLANG_MEMORY_SAVER_CUDA_GRAPH": "0",
    "SGLANG_RUST_SERVER": "0",
    "SGLANG_REQ_WAITING_TIMEOUT": "-1",
    "SGLANG_REQ_RUNNING_TIMEOUT": "-1",
}
UNWANTED = ("SGLANG_MAX_NEW_TOKENS_LIMIT", "SGLANG_TEST_RETRACT", "SGLANG_TEST_SCRIPTED_RUNTIME")
CONTEXT_ROOM = 8
"""SGLang lets no prompt come nearer to the context's end than 6 tokens, and no sequence nearer than 2."""
WATCHDOG_OFF_S = 10**6
"""SGLang's own watchdog would signal this process's parent, which is the trainer."""


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that SGLang is to find."""
    return {name: value for name, value in variables.items() if name not in UNWANTED} | NEEDED


def server_arguments(setup: EngineSetup) -> dict[str, Any]:
    """Arguments of `ServerArgs`. The bytes of the KV cache are not among them: see driver.py."""
    chunk = whole_pages(setup.prefill_tokens, setup.page_tokens)
    arguments: dict[str, Any] = {
        "model_path": setup.folder,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": "cuda" if setup.cuda else "cpu",
        "dtype": setup.dtype,
        "context_length": setup.longest + CONTEXT_ROOM,
        "max_running_requests": setup.max_sequences,
        "chunked_prefill_size": chunk,
        "max_prefill_tokens": max(chunk, 16384),
        "page_size": setup.page_tokens,
        "disable_radix_cache": not setup.prefix_cache,
        "disable_overlap_schedule": True,
        "disable_cuda_graph": setup.eager,
        "disable_prefill_cuda_graph": True,
        "cuda_graph_max_bs_decode": setup.max_sequences,
        "enable_memory_saver": setup.sleeps,
        "sampling_backend": BACKEND,
        "skip_server_warmup": True,
        "watchdog_timeout": WATCHDOG_OFF_S,
        "random_seed": 0,
        "log_level": "warning",
    }
    if setup.plain:
        # The others compute in half precision alone.
        arguments["attention_backend"] = "triton" if setup.cuda else "torch_native"
    if setup.rank:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": setup.rank,
            "max_loras_per_batch": 2,  # the adapters, and none: what graphs are captured with
            "lora_target_modules": adapted_layers(Path(setup.folder)),
        }
        if not setup.cuda:
            arguments["lora_backend"] = "torch_native"
    return arguments


def whole_pages(tokens: int, page: int) -> int:
    """As many tokens or more, in whole pages."""
    return max(1, -(-tokens // page)) * page


def least_kv_tokens(setup: EngineSetup) -> int:
    """With fewer in its cache SGLang would cut the longest sequence short: it counts the prompt in whole pages, and a page."""
    return setup.longest + 2 * setup.page_tokens


def adapted_layers(folder: Path) -> list[str]:
    """Names of the layers that the trainer's adapters are on, from those it wrote last."""
    found = sorted(folder.glob("adapters-*/adapter_config.json"))
    if not found:
        raise RuntimeError(f"there are no adapters in {folder}")
    targets = json.loads(found[-1].read_text())["target_modules"]
    if not isinstance(targets, list):
        raise RuntimeError(f"SGLang needs a list of the layers that have adapters, but the adapters name {targets!r}")
    return sorted({name.rsplit(".", 1)[-1] for name in targets})
