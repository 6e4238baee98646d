"""What the engine takes for granted of SGLang, looked up in its sources: TRIMTAB_SGLANG_SOURCES is the folder of its package.

Nothing is imported: SGLang cannot be without a GPU.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

import pytest

from tests.rollout.external.sglang.test_arguments import SETUP
from trimtab.rollout.external.sglang.arguments import NEEDED, UNWANTED, server_arguments

SOURCES = os.environ.get("TRIMTAB_SGLANG_SOURCES")
pytestmark = pytest.mark.skipif(SOURCES is None, reason="name the folder of SGLang's package in TRIMTAB_SGLANG_SOURCES")
SCHEDULER = "srt/managers/scheduler.py"
MESSAGES = "srt/managers/io_struct.py"
RUNNER = "srt/model_executor/model_runner.py"

FUNCTIONS = {
    (SCHEDULER, "Scheduler.__init__"): (
        "self server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank"
    ),
    (SCHEDULER, "Scheduler.init_ipc_channels"): "self port_args",
    (SCHEDULER, "Scheduler.get_next_batch_to_run"): "self running_batch last_batch",
    (SCHEDULER, "Scheduler.run_batch"): "self batch pp_proxy_tensors",
    (SCHEDULER, "Scheduler.process_batch_result"): "self batch result",
    (SCHEDULER, "Scheduler.handle_generate_request"): "self recv_req",
    (SCHEDULER, "Scheduler.abort_request"): "self recv_req",
    (SCHEDULER, "Scheduler.is_fully_idle"): "self for_health_check",
    (SCHEDULER, "Scheduler.flush_cache"): "self empty_cache",
    (RUNNER, "ModelRunner.load_lora_adapter_from_tensors"): "self lora_ref tensors config_dict added_tokens_config",
    (RUNNER, "ModelRunner.unload_lora_adapter"): "self lora_ref",
    ("srt/server_args.py", "ServerArgs._handle_cpu_backends"): "self",
    ("srt/managers/scheduler_components/ipc_channels.py", "SchedulerIpcChannels.create"): (
        "cls port_args is_rank_zero skip_tokenizer_init metrics_enabled enable_scripted_runtime"
    ),
    (
        "srt/managers/scheduler_components/weight_updater.py",
        "SchedulerWeightUpdaterManager.release_memory_occupation",
    ): ("self recv_req"),
    ("srt/managers/scheduler_components/weight_updater.py", "SchedulerWeightUpdaterManager.resume_memory_occupation"): (
        "self recv_req"
    ),
    ("srt/managers/scheduler_components/pool_stats_observer.py", "SchedulerPoolStatsObserver.get_pool_stats"): "self",
    ("srt/managers/scheduler_components/pool_stats_observer.py", "PoolStats.get_max_pool_usage"): "self",
    ("srt/layers/sampler.py", "Sampler.forward"): (
        "self logits_output sampling_info return_logprob top_logprobs_nums token_ids_logprobs positions"
    ),
    ("srt/layers/sampler.py", "register_sampler_backend"): "backend factory",
    ("srt/layers/utils/multi_platform.py", "MultiPlatformOp.dispatch_forward"): "self",
    (
        "srt/mem_cache/kv_cache_configurator.py",
        "KVCacheConfigurator._profile_available_bytes",
    ): "self pre_model_load_memory",
    ("srt/server_args.py", "ServerArgs.check_server_args"): "self",
    ("srt/runtime_context.py", "publish"): "server_args role hf_config",
    ("srt/sampling/sampling_params.py", "SamplingParams.normalize"): "self tokenizer",
    ("srt/managers/schedule_batch.py", "Req.finished"): "self",
    ("srt/models/qwen2.py", "Qwen2ForCausalLM.load_weights"): "self weights",
}
"""Their arguments, all of them."""

FIELDS = {
    ("srt/server_args.py", "PortArgs"): (
        "tokenizer_ipc_name scheduler_input_ipc_name detokenizer_ipc_name nccl_port rpc_ipc_name metrics_ipc_name "
        "tokenizer_worker_ipc_name decoupled_spec_ipc_config"
    ),
    ("srt/server_args.py", "ServerArgs"): " ".join(server_arguments(SETUP)) + (
        " attention_backend enable_lora max_lora_rank max_loras_per_batch lora_target_modules"
    ),
    (MESSAGES, "BaseReq"): "rid",
    (MESSAGES, "TokenizedGenerateReqInput"): (
        "input_text input_ids input_embeds mm_inputs token_type_ids sampling_params return_logprob logprob_start_len "
        "top_logprobs_num token_ids_logprob stream lora_id"
    ),
    (MESSAGES, "AbortReq"): "abort_all",
    (MESSAGES, "ReleaseMemoryOccupationReqInput"): "tags",
    (MESSAGES, "ResumeMemoryOccupationReqInput"): "tags",
    ("srt/lora/lora_registry.py", "LoRARef"): "lora_id lora_name lora_path pinned",
    (MESSAGES, "LoRAUpdateOutput"): "success error_message",
    ("srt/sampling/sampling_params.py", "SamplingParams"): "max_new_tokens temperature stop_token_ids",
    ("srt/managers/scheduler_components/output_sender.py", "SenderWrapper"): "socket",
    (SCHEDULER, "Scheduler"): (
        "ipc_channels load_snapshot_writer recv_from_tokenizer running_batch last_batch waiting_queue tp_worker model_config "
        "max_total_num_tokens weight_updater pool_stats_observer"
    ),
    ("srt/managers/schedule_batch.py", "Req"): (
        "rid origin_input_ids output_ids sampling_params finished_reason inflight_middle_chunks cached_tokens"
    ),
    ("srt/configs/model_config.py", "ModelConfig"): "hf_eos_token_id",
    (RUNNER, "ModelRunner"): "sampler",
    ("srt/mem_cache/kv_cache_configurator.py", "KVCacheConfigurator"): "mambaish_config",
    ("srt/lora/layers.py", "BaseLayerWithLoRA"): "base_layer",
}  # fmt: skip
"""Declared in the class, or given to `self` in a method of it."""


@cache
def tree(file: str) -> ast.Module:
    return ast.parse((Path(SOURCES or "") / file).read_text())


def find(file: str, path: str) -> ast.AST:
    found: ast.AST = tree(file)
    for part in path.split("."):
        named = (ast.ClassDef, ast.FunctionDef)
        inside = [node for node in ast.iter_child_nodes(found) if isinstance(node, named) and node.name == part]
        assert inside, f"{file} has no {path}"
        found = inside[-1]
    return found


@pytest.mark.parametrize(
    ("where", "arguments"), FUNCTIONS.items(), ids=lambda value: value[1] if isinstance(value, tuple) else ""
)
def test_functions_have_their_arguments(where: tuple[str, str], arguments: str) -> None:
    found = find(*where)
    assert isinstance(found, ast.FunctionDef)
    given = found.args
    assert [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)] == arguments.split()


@pytest.mark.parametrize(
    ("where", "names"), FIELDS.items(), ids=lambda value: value[1] if isinstance(value, tuple) else ""
)
def test_classes_have_their_fields(where: tuple[str, str], names: str) -> None:
    there: set[str] = set()
    for node in ast.walk(find(*where)):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            there |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
            there |= {part.id for part in parts if isinstance(part, ast.Name)}
    assert set(names.split()) <= there, set(names.split()) - there


def test_the_loop_without_overlap_is_what_is_done_here() -> None:
    """`Driven.turn` leaves out receiving, pausing, what happens while idle, and a check for debugging."""
    calls = {
        ast.unparse(node.func)
        for node in ast.walk(find(SCHEDULER, "Scheduler.event_loop_normal"))
        if isinstance(node, ast.Call)
    }
    assert calls == {
        "DynamicGradMode", "self.request_receiver.recv_requests", "self.process_input_requests", "self.get_next_batch_to_run",
        "self.run_batch", "self.process_batch_result", "self.on_idle", "envs.SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY.get",
        "self.invariant_checker.self_check_during_busy",
    }  # fmt: skip


def test_a_sender_without_a_socket_sends_nothing() -> None:
    function = find("srt/managers/scheduler_components/output_sender.py", "SenderWrapper.send_output")
    assert isinstance(function, ast.FunctionDef)
    assert ast.unparse(function.body[0]) == "if self.socket is None:\n    return"


def test_the_loop_runs_in_the_scheduler_after_its_settings_are_published() -> None:
    calls = [
        ast.unparse(node.func)
        for node in ast.walk(find(SCHEDULER, "run_scheduler_process"))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("publish", "Scheduler", "scheduler.run_event_loop")
    ]
    assert sorted(calls) == ["Scheduler", "publish", "scheduler.run_event_loop"]


@pytest.mark.parametrize("name", [*NEEDED, *UNWANTED])
def test_variables_are_known(name: str) -> None:
    known = (Path(SOURCES or "") / "srt/environ.py").read_text()
    graphs = (Path(SOURCES or "") / "srt/model_executor/runner_backend/full_cuda_graph_backend.py").read_text()
    assert name in known or f'"{name}"' in graphs
