"""SGLang's scheduler in this process, driven step by step.

SGLang's own engine is three processes that talk over sockets: one that tokenizes, one that schedules and computes, one that
detokenizes. Trimtab has token ids and watches a process of its own, so only the second is made, here, without sockets: its loop
without overlap is four calls (`Driven.turn`), and what ended is read off the requests. Nothing is then hidden from whoever
watches, sampling sees whose logits it has, and weights and memory change between two steps and never within one.
"""

from __future__ import annotations

import socket
from typing import Any

import torch
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.layers.utils import MultiPlatformOp
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.ipc_channels import SchedulerIpcChannels
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.runtime_context import publish as publish_settings
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.srt.utils import DynamicGradMode

from trimtab.rollout.external.drawing import KeyedSampler
from trimtab.rollout.external.messages import EngineSetup
from trimtab.rollout.external.sglang.arguments import BACKEND, least_kv_tokens, server_arguments
from trimtab.rollout.external.sglang.drawing import DrawingSampler

quiet = DynamicGradMode
"""What SGLang's own loop runs under."""


class Driven(Scheduler):
    """One step at a time."""

    running_batch: Any
    last_batch: Any

    def init_ipc_channels(self, port_args: PortArgs) -> None:
        """As of a rank that nobody talks to: nothing is received, and what is sent goes nowhere."""
        self.ipc_channels = SchedulerIpcChannels.create(
            port_args=port_args,
            is_rank_zero=False,
            skip_tokenizer_init=True,
            metrics_enabled=False,
            enable_scripted_runtime=False,
        )
        self.load_snapshot_writer = None
        self.recv_from_tokenizer = None

    @property
    def drawing(self) -> DrawingSampler:
        found = self.tp_worker.model_runner.sampler
        assert isinstance(found, DrawingSampler)
        return found

    def turn(self) -> Any:
        """Compute a batch; the batch, with what it made in its requests, or None where nothing can be computed now."""
        with quiet():
            plan = self.get_next_batch_to_run(running_batch=self.running_batch, last_batch=self.last_batch)
            self.running_batch, batch = plan.running_batch, plan.batch_to_run
            if batch:
                self.drawing.requests = batch.reqs
                self.process_batch_result(batch, self.run_batch(batch))
            self.last_batch = batch
        return batch


def start(setup: EngineSetup) -> Driven:
    """A scheduler whose weights mean nothing yet."""
    keyed = KeyedSampler(setup.max_sequences, setup.longest, torch.device("cuda" if setup.cuda else "cpu"))
    register_sampler_backend(BACKEND, lambda: DrawingSampler(keyed))
    if setup.sleeps:
        _give_memory_up_through_torch()
    if setup.plain:
        _plain_layers()
    _size_cache(setup.kv_bytes)
    settings = ServerArgs(**server_arguments(setup))
    settings.check_server_args()
    publish_settings(settings, role="scheduler")
    scheduler = Driven(settings, _ports(), 0, 0, 0, 0, 0, 0, None)
    # Of all tokens those end a sequence that the trainer names.
    scheduler.model_config.hf_eos_token_id = set()
    if scheduler.max_total_num_tokens < least_kv_tokens(setup):
        raise RuntimeError(
            f"the KV cache holds {scheduler.max_total_num_tokens} tokens, but SGLang needs {least_kv_tokens(setup)} for "
            f"sequences of {setup.longest} tokens. Raise run.rollout.kv_memory or lower run.rollout.page_tokens"
        )
    return scheduler


def _size_cache(kv_bytes: int) -> None:
    """SGLang gives its cache what it finds free; here that is a number. How many tokens it holds is SGLang's to say: that
    depends on the architecture."""

    def given(self: Any, pre_model_load_memory: int) -> int:
        if self.mambaish_config is not None:
            raise RuntimeError(
                "Trimtab cannot tell how much memory SGLang needs for this architecture. Write run.engine: native"
            )
        return kv_bytes

    KVCacheConfigurator._profile_available_bytes = given


def _plain_layers() -> None:
    """SGLang's norms, rotations and gates on a GPU are kernels of half precision; each also has a form in PyTorch."""
    MultiPlatformOp.dispatch_forward = lambda self: self.forward_native


def _give_memory_up_through_torch() -> None:
    """The other way is a library that the process would have to be started with."""
    from torch_memory_saver import torch_memory_saver

    torch_memory_saver.hook_mode = "torch"


def _ports() -> PortArgs:
    """One, for torch's process group of this process alone; there are no sockets to name."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return PortArgs(
        tokenizer_ipc_name="",
        scheduler_input_ipc_name="",
        detokenizer_ipc_name="",
        nccl_port=port,
        rpc_ipc_name="",
        metrics_ipc_name="",
        tokenizer_worker_ipc_name=None,
        decoupled_spec_ipc_config=None,
    )
