"""The engine inside its process: SGLang's scheduler (driver.py), with Trimtab's sampling, stop strings and weights.

Nothing computed under one version of the weights is used under another: what is unfinished is dropped and the prefix cache
emptied when weights change. A sequence that SGLang would end for a reason of its own, or cut short, is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.external.account import Account, stop_strings
from trimtab.rollout.external.messages import Ask, Done, EngineSetup, Generate, Publish
from trimtab.rollout.external.reading import Reader
from trimtab.rollout.external.sglang.admission import Admission
from trimtab.rollout.external.sglang.arguments import environment
from trimtab.rollout.external.sglang.loading import load_weights
from trimtab.rollout.stops import CHECK_EVERY_TOKENS, StopStrings

WEIGHTS, KV = "weights", "kv_cache"


@dataclass
class _SglangRequest:
    ask: Ask
    request: Any = None
    """SGLang's, since it entered."""
    looked: int = 0

    @property
    def made(self) -> list[int]:
        return list(self.request.output_ids)


class SglangCore:
    """One SGLang scheduler."""

    def __init__(self, setup: EngineSetup) -> None:
        wanted = environment(os.environ) | setup.exact
        for name in os.environ.keys() - wanted.keys():
            del os.environ[name]
        os.environ.update(wanted)
        import sglang

        from trimtab.rollout.external.sglang import driver

        self._setup, self._driver = setup, driver
        self._scheduler = driver.start(setup)
        self._drawing = self._scheduler.drawing
        self._running: dict[str, _SglangRequest] = {}
        self._admission = Admission(setup.max_sequences, setup.prefix_cache)
        self._stops, self._stop_ids = StopStrings([], None), frozenset[int]()
        self._asleep: set[str] = set()
        self._published = Publish(0)
        self._reader = Reader()
        self._adapters: str | None = None
        self._taken = 0
        self._checked = False
        blocks = int(self._scheduler.max_total_num_tokens) // setup.page_tokens
        self.account = Account(str(sglang.__version__), blocks)

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def publish(self, order: Publish) -> None:
        """Take the trainer's weights, or its adapters alone; `NotShared` where they cannot be seen, and then as before."""
        if order.weights is not None:
            self._reader.take(order.weights)
        stale, self._published = WEIGHTS in self._asleep, order
        self._wake(WEIGHTS)
        self.abort()
        with self._driver.quiet():
            if order.weights is not None or stale:
                model = self._scheduler.tp_worker.model_runner.model
                load_weights(model, self._reader.read(), check=not self._checked)
                self._checked = True
            if order.adapters is not None:
                self._take_adapters(order)
        self._wake(KV)
        with self._driver.quiet():
            if not self._scheduler.flush_cache(empty_cache=False):
                raise RuntimeError("SGLang did not empty its prefix cache: it still holds unfinished requests")
        if self._setup.cuda:
            torch.cuda.synchronize()  # the trainer may write its weights again

    def _take_adapters(self, order: Publish) -> None:
        """Under a name of their own: SGLang keeps adapters, and what was computed with them, by name. From tensors: a folder it
        would read as it reads the model's, which has no weights."""
        from safetensors.torch import load_file
        from sglang.srt.lora.lora_registry import LoRARef

        assert order.adapters is not None
        folder, runner = Path(order.adapters), self._scheduler.tp_worker.model_runner
        config = json.loads((folder / "adapter_config.json").read_text())
        if self._adapters is not None:
            _refuse_failure(runner.unload_lora_adapter(LoRARef(self._adapters, self._adapters, "", False)))
        self._taken += 1
        self._adapters = f"version-{order.version}-{self._taken}"
        named = LoRARef(self._adapters, self._adapters, str(folder), False)
        tensors = load_file(folder / "adapter_model.safetensors")
        _refuse_failure(runner.load_lora_adapter_from_tensors(named, tensors, config))

    def sleep(self) -> None:
        """Give up weights and KV; what was published is read again when they are needed."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        if self._setup.sleeps and not self._asleep:
            self.abort()
            with self._driver.quiet():
                order = ReleaseMemoryOccupationReqInput(tags=[KV, WEIGHTS])
                self._scheduler.weight_updater.release_memory_occupation(order)
                torch.cuda.empty_cache()
            self._asleep = {KV, WEIGHTS}

    def _wake(self, part: str) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if part in self._asleep:
            with self._driver.quiet():
                self._scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=[part]))
            self._asleep.remove(part)

    def begin(self, order: Generate) -> None:
        if self._asleep:
            self.publish(self._published)
        self.account.begin(order.call)
        sampling = Sampling.model_validate(order.sampling)
        self._drawing.keyed.sampling = sampling
        self._stops = stop_strings(sampling, self._setup.folder)
        self._stop_ids = frozenset(order.stop_ids)
        self._running |= {self._name(ask): _SglangRequest(ask) for ask in order.asks}
        self._drawing.keys = {name: running.ask.key for name, running in self._running.items()}
        self._admission.add(order.asks)

    def _name(self, ask: Ask) -> str:
        """No name may begin with another: SGLang aborts all requests whose names begin with one."""
        return f"{self.account.call}-{ask.id}."

    def step(self) -> Iterator[Done]:
        """One batch of SGLang, and the sequences that ended with it."""
        self._enter()
        batch = self._scheduler.turn()
        if batch is None:
            if self._scheduler.is_fully_idle() and not self._admission:
                raise RuntimeError(f"SGLang stopped working with {len(self._running)} sequences unfinished")
            return
        self.account.step(self._scheduler.pool_stats_observer.get_pool_stats().get_max_pool_usage())
        ended = [request for request in batch.reqs if request.finished() and request.rid in self._running]
        for request in ended:
            self._refuse_ending(request)
        yield from self._finish([(request.rid, list(request.output_ids)) for request in ended])
        if self._stops:
            yield from self._cut_short()

    def _enter(self) -> None:
        """Hand over those whose turn it is."""
        inside = sum(running.request is not None for running in self._running.values())
        for ask in self._admission.enter(inside, self._has_begun):
            self._hand_over(ask)

    def _has_begun(self, ask: Ask) -> bool:
        running = self._running.get(self._name(ask))
        return running is None or (running.request is not None and len(running.request.output_ids) > 0)

    def _hand_over(self, ask: Ask) -> None:
        from array import array

        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        name = self._name(ask)
        params = SamplingParams(max_new_tokens=ask.limit, temperature=0.0, stop_token_ids=sorted(self._stop_ids))
        params.normalize(None)
        self._scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=name,
                input_text=None,
                input_ids=array("q", ask.tokens),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                lora_id=self._adapters,
            )
        )
        request = self._scheduler.waiting_queue[-1]
        assert request.rid == name and request.sampling_params is params
        if params.max_new_tokens != ask.limit:
            raise RuntimeError(f"SGLang would end a sequence after {params.max_new_tokens} of {ask.limit} new tokens")
        self._running[name].request = request
        self._drawing.keyed.hold(name)

    def _refuse_ending(self, request: Any) -> None:
        ending = request.finished_reason.to_json()
        if ending["type"] not in ("stop", "length"):
            raise RuntimeError(f"SGLang gave up a sequence: {ending.get('message') or ending}")

    def _cut_short(self) -> Iterator[Done]:
        """End what has come to a stop string."""
        from sglang.srt.managers.io_struct import AbortReq

        found = []
        for name, running in self._running.items():
            if running.request is not None and len(running.request.output_ids) - running.looked >= CHECK_EVERY_TOKENS:
                made = running.made
                end = self._stops.find(running, made)
                if end is not None:
                    found.append((name, made[:end]))
        for name, _ in found:
            self._scheduler.abort_request(AbortReq(rid=name))
        yield from self._finish(found, cut=True)

    def _finish(self, ended: list[tuple[str, list[int]]], cut: bool = False) -> Iterator[Done]:
        if not ended:
            return
        found = []
        for name, tokens in ended:
            running = self._running.pop(name)
            assert running.request is not None
            self.account.prompt(len(running.ask.tokens), running.request.cached_tokens)
            end = self._stops.find(running, tokens) if self._stops else None
            tokens = tokens if end is None else tokens[:end]
            stopped = cut or end is not None or tokens[-1] in self._stop_ids
            found.append((name, running.ask.id, tokens, stopped))
        logprobs = self._drawing.keyed.take([name for name, *_ in found], [len(tokens) for _, _, tokens, _ in found])
        for (_, id, tokens, stopped), values in zip(found, logprobs):
            yield self.account.done(id, tokens, values, stopped)

    def abort(self) -> None:
        """Leave nothing behind of what is unfinished."""
        from sglang.srt.managers.io_struct import AbortReq

        self._drawing.keyed.forget(self._running)
        self._running.clear()
        self._admission.clear()
        self._scheduler.abort_request(AbortReq(abort_all=True))
        while not self._scheduler.is_fully_idle():
            self._scheduler.turn()


def _refuse_failure(result: Any) -> None:
    if not result.success:
        raise RuntimeError(f"SGLang did not take the adapters: {result.error_message}")
