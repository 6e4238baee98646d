"""Another library behind the contract of rollout/engine.py.

It runs in a process of its own, in this environment or in another (`run.rollout.python`), so that neither library touches the
other's. It draws tokens as the native engine does, by the same code and from the same random numbers: `run.engine` does not
change what is learned, beyond the rounding of another forward pass.

A process that dies, hangs or runs out of memory is started again with the current weights, and what was unfinished is asked for
again with the same keys: every sequence arrives exactly once. One that fails again and again without a single sequence ends the
run with its own last lines.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.errors import EngineError
from trimtab.model.adapters import has_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request, RolloutStats, check_requests, whole_group
from trimtab.rollout.outside.kinds import Kind
from trimtab.rollout.outside.messages import (
    Abort,
    Ask,
    Beat,
    Done,
    Generate,
    Publish,
    Ready,
    Settled,
    Setup,
    Sleep,
    Unread,
)
from trimtab.rollout.outside.process import EngineLost, EngineProcess
from trimtab.rollout.outside.weights import SharedWeights
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.trajectory import Group, Trajectory

START_S = 600.0
"""Imports, kernels, graphs."""
SILENT_S = 300.0
"""A process that steps says so every second; one step may compile something."""
MOST_FAILURES = 3
"""In a row, without a sequence in between."""


class OutsideEngine:
    """See rollout/engine.py."""

    def __init__(
        self,
        kind: Kind,
        policy: Policy,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        *,
        kv_bytes: int,
        max_sequences: int,
        prefill_tokens: int,
        longest: int,
        page_tokens: int,
        prefix_cache: bool = True,
        lend_memory: bool = False,
        eager: bool = False,
        python: str = sys.executable,
    ) -> None:
        self.kind, self.policy, self.tokenizer = kind, policy, tokenizer
        self.version = 0
        self.stats = RolloutStats()
        self.on_recovery: Callable[[str], None] = lambda line: None
        self.on_restart: Callable[[str], None] = lambda line: None
        self.max_sequences = max_sequences
        self._made_with = max_sequences
        self._stop_ids = list(stop_token_ids)
        self._context = min(policy.context_tokens, longest)
        self._python = python
        self._process: EngineProcess | None = None
        self._generating, self._call, self._failures = False, 0, 0
        self._restarts = 0
        """Between two rollouts: they are told with the next."""
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-model-")
        _write_config(policy, tokenizer, Path(self._folder.name))
        self._weights = SharedWeights(policy)
        self._sleeps = lend_memory and policy.device.type == "cuda"
        self._settings: dict[str, Any] = {
            "folder": self._folder.name,
            "dtype": str(policy.dtype).removeprefix("torch."), "cuda": policy.device.type == "cuda",
            "kv_bytes": kv_bytes, "prefill_tokens": prefill_tokens, "page_tokens": page_tokens, "longest": longest,
            "prefix_cache": prefix_cache, "eager": eager, "sleeps": self._sleeps, "rank": _rank(policy),
        }  # fmt: skip
        self.ready: Ready
        self._adapters = self._weights.write_adapters(Path(self._folder.name))
        try:
            self._start()
        except EngineLost as lost:
            raise self._given_up(lost) from lost

    @property
    def path(self) -> str:
        where = "" if self._python == sys.executable else f" of {self._python}"
        read = "reads the trainer's weights" if self._weights.direct else "gets weights through host memory"
        version = f"{self.kind.title} {self.ready.version}"
        return f"{version}{where}, a process of its own, {read}; Trimtab draws the tokens"

    @property
    def outside_bytes(self) -> int:
        return 0

    @property
    def pid(self) -> int | None:
        """Of the process, where there is one."""
        return None if self._process is None else self._process.pid

    def publish(self, version: int) -> None:
        self._refuse_while_generating("publish")
        self.version = version
        self._adapters = self._weights.write_adapters(Path(self._folder.name))
        try:
            if self._adapters is None:
                self._publish_all()
            else:
                self._carry_out(Publish(version, None, self._adapters))
        except EngineLost as lost:
            self._recover(lost, 0)

    def _publish_all(self) -> None:
        """Weights and adapters, by the way that this process can read them from."""
        order = Publish(self.version, self._weights.publish(), self._adapters)
        if isinstance(self._carry_out(order), Unread):
            self._weights.direct = False
            self._carry_out(Publish(self.version, self._weights.publish(), self._adapters))

    def lend(self) -> None:
        if self._sleeps:
            self._refuse_while_generating("lend")
            try:
                self._carry_out(Sleep())
            except EngineLost as lost:
                self._recover(lost, 0)

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        self._refuse_while_generating("generate")
        sampling = check_requests(requests, self._context)
        self.stats, self._restarts = RolloutStats(slots=self.max_sequences, restarts=self._restarts), 0
        self._call += 1
        asks: dict[int, Ask] = {}
        whose: dict[int, tuple[int, int]] = {}
        for index, request in enumerate(requests):
            for sample, limit in enumerate(request.limits):
                number = request.first_sample + sample
                key = stream_key(request.seed, request.step, request.prompt.id, number, request.first_position)
                id = len(whose)
                whose[id] = (index, sample)
                asks[id] = Ask(id, list(request.prompt.tokens), limit, key)
        done: dict[int, list[Trajectory]] = {index: [] for index in range(len(requests))}
        self._generating, began, callers = True, time.perf_counter(), 0.0
        try:
            self._ask(asks, sampling.model_dump())
            while asks:
                ended = self._next_done(asks, sampling.model_dump())
                index, sample = whose[ended.id]
                del asks[ended.id]
                done[index].append(self._trajectory(requests[index], sample, ended))
                if len(done[index]) == requests[index].samples:
                    group, left = (
                        whole_group(requests[index], done.pop(index), index, self.tokenizer),
                        time.perf_counter(),
                    )
                    yield group
                    callers += time.perf_counter() - left
        finally:
            if asks:
                self._settle()
            self._generating = False
        self.stats.decode_s = time.perf_counter() - began - callers

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        return None

    @property
    def lowered(self) -> dict[str, int]:
        return {"max_sequences": self.max_sequences} if self.max_sequences < self._made_with else {}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        fewer = min(self.max_sequences, limits.get("max_sequences", self.max_sequences))
        if fewer < self.max_sequences:
            self.max_sequences = fewer
            self._restart()

    def close(self) -> None:
        self._stop()
        self._weights.close()
        self._folder.cleanup()

    def _start(self) -> None:
        """A process with the weights that were last published."""
        threads = {} if self._settings["cuda"] else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._process = EngineProcess(self.kind.name, self._python, threads)
        self._process.send(Setup(**self._settings, max_sequences=self.max_sequences))
        ready = self._process.receive(START_S)
        assert isinstance(ready, Ready)
        self.ready = ready
        self._publish_all()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    def _restart(self) -> None:
        """Until it starts, or has failed too often."""
        while True:
            try:
                self._stop()
                self._start()
                return
            except EngineLost as lost:
                self._count(lost)

    def _count(self, lost: EngineLost) -> None:
        self._failures += 1
        if self._failures > MOST_FAILURES:
            raise self._given_up(lost) from lost

    def _given_up(self, lost: EngineLost) -> EngineError:
        tail = "" if self._process is None else self._process.last_lines()
        self.close()
        lines = f" Its last lines:\n{tail}" if tail else ""
        return EngineError(f"{self.kind.title} cannot go on: {lost}.{lines}")

    def _recover(self, lost: EngineLost, unfinished: int) -> None:
        """A new process in place of one that is lost; what ran out of memory gets fewer sequences at a time."""
        self._count(lost)
        if lost.short and self.max_sequences > 1:
            self.max_sequences //= 2
            fewer = f"rollout.max_sequences -> {self.max_sequences:,}"
            self.on_recovery(f"{self.kind.title} ran out of memory; started again; {fewer}")
        else:
            anew = f"{unfinished:,} sequences are generated anew"
            self.on_restart(f"{self.kind.title} was lost ({lost}); started again, {anew}")
        if self._generating:
            self.stats.restarts += 1
        else:
            self._restarts += 1
        self._restart()

    def _ask(self, asks: dict[int, Ask], sampling: dict[str, Any]) -> None:
        """Send everything that is unfinished, to as many processes as that takes."""
        while True:
            try:
                assert self._process is not None
                self._process.send(
                    Generate(self._call, list(asks.values()), sampling, [*self._stop_ids, *sampling["stop_token_ids"]])
                )
                return
            except EngineLost as lost:
                self._recover(lost, len(asks))

    def _next_done(self, asks: dict[int, Ask], sampling: dict[str, Any]) -> Done:
        while True:
            try:
                assert self._process is not None
                message = self._process.receive(SILENT_S)
            except EngineLost as lost:
                self._recover(lost, len(asks))
                self._ask(asks, sampling)
                continue
            if isinstance(message, Beat):
                self._note(message)
            elif message.call == self._call and message.id in asks:
                self._failures = 0
                assert isinstance(message, Done)
                return message

    def _carry_out(self, order: Any) -> Settled | Unread:
        """An order that is answered; `EngineLost` where its process is."""
        assert self._process is not None
        self._process.send(order)
        while True:
            message = self._process.receive(SILENT_S)
            if isinstance(message, Settled | Unread):
                return message

    def _settle(self) -> None:
        """Nobody listens any more: nothing of this call may come later."""
        if self._process is None:
            return  # it was given up
        try:
            self._carry_out(Abort())
        except EngineLost:
            self._restart()

    def _note(self, beat: Beat) -> None:
        if beat.call == self._call:
            self.stats.decode_steps = beat.decode_steps
            self.stats.prefill_tokens, self.stats.cached_prefix_tokens = beat.prefill_tokens, beat.cached_tokens
            self.stats.peak_pages, self.stats.total_pages = beat.blocks, self.ready.blocks

    def _trajectory(self, request: Request, sample: int, ended: Done) -> Trajectory:
        tokens = torch.from_numpy(np.frombuffer(ended.tokens, np.int64).copy())
        self.stats.sequences += 1
        self.stats.generated_tokens += len(tokens)
        return Trajectory(
            prompt=request.prompt,
            sample=sample,
            tokens=tokens,
            logprobs=torch.from_numpy(np.frombuffer(ended.logprobs, np.float32).copy()),
            versions=torch.full(tokens.shape, self.version, dtype=torch.int32),
            finish="stop" if ended.stopped else "length",
        )

    def _refuse_while_generating(self, what: str) -> None:
        if self._generating:
            raise EngineError(f"{what} was called while an earlier generate is not finished; exhaust or close it first")


def _write_config(policy: Policy, tokenizer: Any, folder: Path) -> None:
    """What a library needs to build the model; weights come by another way."""
    model = policy.model.get_base_model() if has_adapters(policy.model) else policy.model
    config = model.config
    named = config.architectures
    config.architectures = [type(model).__name__]
    try:
        config.save_pretrained(folder)
    finally:
        config.architectures = named
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _rank(policy: Policy) -> int:
    """Of the policy's adapters; 0 where there are none."""
    if not has_adapters(policy.model):
        return 0
    return int(policy.model.peft_config[policy.model.active_adapter].r)
