"""What SGLang is started with, without SGLang."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.rollout.external.messages import EngineSetup
from trimtab.rollout.external.sglang.arguments import (
    BACKEND,
    CONTEXT_ROOM,
    adapted_layers,
    environment,
    least_kv_tokens,
    server_arguments,
    whole_pages,
)

SETUP = EngineSetup(
    folder="/model", dtype="bfloat16", cuda=True, max_sequences=24, kv_bytes=2**30, prefill_tokens=1000, page_tokens=16,
    longest=300, prefix_cache=True, eager=False, sleeps=True,
)  # fmt: skip


def test_limits_are_those_of_the_engine() -> None:
    found = server_arguments(SETUP)
    assert found["max_running_requests"] == found["cuda_graph_max_bs_decode"] == 24
    assert found["chunked_prefill_size"] == 1008, "SGLang wants whole pages"
    assert found["context_length"] == 300 + CONTEXT_ROOM
    assert found["page_size"] == 16 and found["enable_memory_saver"] is True
    assert found["disable_radix_cache"] is False and found["disable_cuda_graph"] is False
    assert found["disable_overlap_schedule"] is True and found["skip_tokenizer_init"] is True
    assert "attention_backend" not in found and "enable_lora" not in found


def test_choices_are_passed_on() -> None:
    found = server_arguments(replace(SETUP, prefix_cache=False, eager=True, sleeps=False, dtype="float32"))
    assert found["disable_radix_cache"] is True and found["disable_cuda_graph"] is True
    assert found["enable_memory_saver"] is False
    assert found["attention_backend"] == "triton"


def test_what_is_trimtabs_is_not_left_to_sglang() -> None:
    """Weights, tokens and the watch over the process; prompts vary too much in length for graphs."""
    found = server_arguments(SETUP)
    assert (found["model_path"], found["load_format"], found["device"]) == ("/model", "dummy", "cuda")
    assert found["sampling_backend"] == BACKEND and found["disable_prefill_cuda_graph"] is True
    assert found["watchdog_timeout"] >= 10**6, "it would signal the trainer"


@pytest.mark.parametrize("prompt", [1, 299])
def test_the_longest_sequence_stays_clear_of_the_contexts_end(prompt: int) -> None:
    """SGLang lets no prompt come nearer to it than 6 tokens, and no sequence nearer than 2."""
    context = server_arguments(SETUP)["context_length"]
    assert prompt <= context - 6 and SETUP.longest <= context - 2


def test_small_chunks_of_prompts_leave_the_other_limit_as_sglang_has_it() -> None:
    assert server_arguments(replace(SETUP, prefill_tokens=64))["max_prefill_tokens"] == 16384


def test_large_chunks_of_prompts_are_not_cut_by_another_limit() -> None:
    assert server_arguments(replace(SETUP, prefill_tokens=40000))["max_prefill_tokens"] == 40000


@pytest.mark.parametrize(("tokens", "page", "whole"), [(1, 16, 16), (16, 16, 16), (17, 16, 32), (64, 1, 64)])
def test_whole_pages(tokens: int, page: int, whole: int) -> None:
    assert whole_pages(tokens, page) == whole


@pytest.mark.parametrize("page", [1, 16, 32])
@pytest.mark.parametrize("prompt", [1, 31, 32, 33, 290])
def test_the_least_cache_holds_what_sglang_counts_for_the_longest_sequence(page: int, prompt: int) -> None:
    """Scheduler.init_req_max_new_tokens: prompt in whole pages + new tokens + a page + 1 may not be more than the cache."""
    setup = replace(SETUP, page_tokens=page)
    assert whole_pages(prompt, page) + (setup.longest - prompt) + page + 1 <= least_kv_tokens(setup)


def test_variables_that_would_end_sequences_are_gone() -> None:
    found = environment({"SGLANG_MAX_NEW_TOKENS_LIMIT": "5", "SGLANG_REQ_RUNNING_TIMEOUT": "1", "HOME": "/root"})
    assert "SGLANG_MAX_NEW_TOKENS_LIMIT" not in found and found["SGLANG_REQ_RUNNING_TIMEOUT"] == "-1"
    assert found["HOME"] == "/root"


def test_float32_is_float32() -> None:
    assert SETUP.exact == {} and replace(SETUP, dtype="float32").exact == {"TRITON_F32_DEFAULT": "ieee"}


def test_adapters_are_where_the_trainer_has_them(tmp_path: Path) -> None:
    written = tmp_path / "adapters-1"
    written.mkdir()
    (written / "adapter_config.json").write_text(
        json.dumps({"target_modules": ["self_attn.q_proj", "down_proj", "q_proj"]})
    )
    found = server_arguments(replace(SETUP, folder=str(tmp_path), rank=12))
    assert found["lora_target_modules"] == ["down_proj", "q_proj"] and found["max_lora_rank"] == 12
    assert found["max_loras_per_batch"] == 2, "graphs are captured with none"
    (written / "adapter_config.json").write_text(json.dumps({"target_modules": ".*proj"}))
    with pytest.raises(RuntimeError, match="a list of the layers"):
        adapted_layers(tmp_path)
    with pytest.raises(RuntimeError, match="no adapters"):
        adapted_layers(tmp_path / "elsewhere")


def test_without_a_gpu_nothing_asks_for_one() -> None:
    found = server_arguments(replace(SETUP, cuda=False, dtype="bfloat16"))
    assert found["device"] == "cpu" and found["attention_backend"] == "torch_native"
    assert "attention_backend" not in server_arguments(replace(SETUP, cuda=True, dtype="bfloat16"))


@pytest.mark.parametrize("cuda", [True, False])
def test_adapters_without_a_gpu_are_computed_in_pytorch(cuda: bool, tmp_path: Path) -> None:
    (tmp_path / "adapters-1").mkdir()
    (tmp_path / "adapters-1" / "adapter_config.json").write_text(json.dumps({"target_modules": ["q_proj"]}))
    found = server_arguments(replace(SETUP, folder=str(tmp_path), rank=8, cuda=cuda))
    assert found.get("lora_backend") == (None if cuda else "torch_native")
