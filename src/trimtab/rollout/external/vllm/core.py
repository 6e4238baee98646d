"""The engine inside its process: vLLM, driven step by step, with Trimtab's sampling, stop strings and weights.

Nothing computed under one version of the weights is used under another: what is unfinished is dropped and the prefix cache reset
when weights change. vLLM leaves that to its user.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.config.learn import Sampling
from trimtab.rollout.external.account import Account, stop_strings
from trimtab.rollout.external.kinds import VLLM_RANKS
from trimtab.rollout.external.messages import Done, EngineSetup, Generate, Publish
from trimtab.rollout.stops import CHECK_EVERY_TOKENS, StopStrings

NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
"""One process is the engine, and its worker where there is one: the trainer watches that one. The second model runner has no
logits processors."""
SPAWN_WORKERS = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
"""Where workers have processes of their own: a fork would hold this one's connection open."""
QUIET_DEFAULTS = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def _in_words() -> Iterator[None]:
    """What vLLM says where a worker in a process of its own has died: while it was waited for, or before."""
    try:
        yield
    except RuntimeError as error:
        if str(error) in ("cancelled", "Executor failed."):
            raise RuntimeError("one of vLLM's worker processes ended") from error
        raise


@dataclass
class _VllmRequest:
    ask_id: int
    looked: int = 0


class VllmCore:
    """One vLLM engine."""

    def __init__(self, setup: EngineSetup) -> None:
        usual = {key: value for key, value in QUIET_DEFAULTS.items() if key not in os.environ}
        os.environ.update(usual | NEEDED | setup.exact | (SPAWN_WORKERS if setup.tensor_parallel > 1 else {}))
        import vllm

        from trimtab.rollout.external.vllm import inside
        from trimtab.rollout.external.vllm.drawing import DrawingProcessor

        self._setup, self._inside = setup, inside
        arguments: dict[str, Any] = {
            "model": setup.folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": setup.dtype,
            "max_model_len": setup.longest,
            "max_num_seqs": setup.max_sequences,
            "max_num_batched_tokens": max(setup.prefill_tokens, setup.max_sequences),
            "enable_chunked_prefill": True,
            "kv_cache_memory_bytes": setup.kv_bytes,
            "block_size": setup.page_tokens,
            "enable_prefix_caching": setup.prefix_cache,
            "enforce_eager": setup.eager,
            "enable_sleep_mode": setup.sleeps,
            "logits_processors": [DrawingProcessor],
            "async_scheduling": False,
            "disable_log_stats": True,
            "seed": 0,
        }
        if setup.cuda:
            # The cache has its size; this would only refuse to start beside a trainer that holds more than the rest.
            arguments["gpu_memory_utilization"] = 0.01
        if setup.tensor_parallel > 1:
            arguments |= {"tensor_parallel_size": setup.tensor_parallel, "distributed_executor_backend": "mp"}
        if setup.rank:
            arguments |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_cpu_loras": 1,
                "max_lora_rank": lora_room(setup.rank),
            }
        self._llm = vllm.LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._running: dict[str, _VllmRequest] = {}
        self._stops = StopStrings([], None)
        self._asleep = False
        self._published = Publish(0)
        self._adapters: Any = None
        self._taken = 0
        self.account = Account(vllm.__version__, int(self._engine.vllm_config.cache_config.num_gpu_blocks))
        self._cache = self._engine.engine_core.engine_core.scheduler.kv_cache_manager

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def _workers(self, work: Any, *given: Any) -> Any:
        """All of vLLM's workers do it; what the first one answers."""
        with _in_words():
            return self._llm.collective_rpc(work, args=given)[0]

    @_in_words()
    def publish(self, order: Publish) -> None:
        """Take the trainer's weights, or its adapters alone; `NotShared` where they cannot be seen, and then as before."""
        if order.weights is not None:
            self._workers(self._inside.see, order.weights)
        asleep, self._published = self._asleep, order
        self._wake(["weights"])
        self.abort()
        if order.weights is not None or asleep:
            self._workers(self._inside.reload)
        if order.adapters is not None:
            self._take_adapters(order)
        self._wake(["kv_cache"])
        if not self._llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache: it still holds blocks of unfinished requests")

    def _take_adapters(self, order: Publish) -> None:
        """Under a name of their own: vLLM caches adapters, and what was computed with them, by name."""
        from vllm.lora.request import LoRARequest

        if self._adapters is not None:
            self._engine.remove_lora(self._adapters.lora_int_id)
        self._taken += 1
        self._adapters = LoRARequest(f"version {order.version}, {self._taken}", self._taken, order.adapters)
        self._engine.add_lora(self._adapters)

    @_in_words()
    def sleep(self) -> None:
        """Give up weights and KV; what was published is read again when they are needed."""
        if self._setup.sleeps and not self._asleep:
            self.abort()
            self._llm.sleep(level=2)
            self._asleep = True

    def _wake(self, parts: list[str]) -> None:
        if self._asleep:
            self._llm.wake_up(tags=parts)
            self._asleep = parts == ["weights"]

    @_in_words()
    def begin(self, order: Generate) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._asleep:
            self.publish(self._published)
        self.account.begin(order.call)
        self._workers(self._inside.sample_as, order.sampling)
        self._stops = stop_strings(Sampling.model_validate(order.sampling), self._setup.folder)
        for ask in order.asks:
            name = f"{order.call}-{ask.id}"
            self._running[name] = _VllmRequest(ask.id)
            params = SamplingParams(
                temperature=0.0,
                max_tokens=ask.limit,
                stop_token_ids=order.stop_ids,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                extra_args={"id": ask.id, "key": ask.key},
            )
            self._engine.add_request(name, {"prompt_token_ids": ask.tokens}, params, lora_request=self._adapters)

    def step(self) -> Iterator[Done]:
        """One step of vLLM, and the sequences that ended with it."""
        with _in_words():
            outputs = self._engine.step()
        self.account.step(self._cache.usage)
        ended = [
            (out.request_id, out.outputs[0]) for out in outputs if out.finished and out.request_id in self._running
        ]
        for out in outputs:
            if out.finished:
                self.account.prompt(len(out.prompt_token_ids or []), out.num_cached_tokens or 0)
        yield from self._finish([(name, list(o.token_ids), o.finish_reason == "stop") for name, o in ended])
        if self._stops and self.account.steps % CHECK_EVERY_TOKENS == 0:
            yield from self._cut_short()

    def _cut_short(self) -> Iterator[Done]:
        """End what has come to a stop string."""
        found = []
        everything = self._workers(self._inside.made, [running.ask_id for running in self._running.values()])
        for (name, running), made in zip(self._running.items(), everything, strict=True):
            end = self._stops.find(running, made) if len(made) > running.looked else None
            if end is not None:
                found.append((name, made[:end], True))
        if found:
            states = self._engine.output_processor
            for name, _, _ in found:
                (state,) = (states.request_states[id] for id in states.external_req_ids[name])
                self.account.prompt(state.prompt_len, state.num_cached_tokens)
            self._engine.abort_request([name for name, _, _ in found])
            yield from self._finish(found)

    def _finish(self, ended: list[tuple[str, list[int], bool]]) -> Iterator[Done]:
        if not ended:
            return
        found = []
        for name, tokens, stopped in ended:
            running = self._running.pop(name)
            end = self._stops.find(running, tokens) if self._stops else None
            found.append((running.ask_id, tokens if end is None else tokens[:end], stopped or end is not None))
        counts = [len(tokens) for _, tokens, _ in found]
        logprobs = self._workers(self._inside.take, [id for id, _, _ in found], counts)
        for (id, tokens, stopped), values in zip(found, logprobs):
            yield self.account.done(id, tokens, values, stopped)

    @_in_words()
    def abort(self) -> None:
        """Leave nothing behind of what is unfinished."""
        if self._running:
            self._engine.abort_request(list(self._running))
            self._workers(self._inside.forget, [running.ask_id for running in self._running.values()])
            self._running.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


def lora_room(rank: int) -> int:
    """The smallest rank that vLLM has kernels for and that holds this one; larger ones were refused before the start."""
    return next(room for room in VLLM_RANKS if room >= rank)
