"""Another library behind the contract of rollout/engine.py.

It runs in processes of their own, in this environment or in another (`run.rollout.python`), so that neither library touches the
other's. Such libraries are often bound by the work of their host: several processes on one device then share out the sequences
of a rollout. They draw tokens as the native engine does, by the same code and from the same random numbers: `run.engine` does
not change what is learned, beyond the rounding of another forward pass.

A process that dies, hangs or runs out of memory is started again with the current weights, and what was unfinished is asked for
again with the same keys: every sequence arrives exactly once. One that fails again and again without a single sequence ends the
run with its own last lines.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.errors import EngineError
from trimtab.model.adapters import has_adapters
from trimtab.model.memory import free
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import TOLERANCE_NATS, Policy
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
from trimtab.rollout.outside.process import SILENT_S, EngineLost, EngineProcess, wait_for
from trimtab.rollout.outside.weights import SharedWeights
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.trajectory import Group, Trajectory

START_S = 600.0
"""Imports, kernels, graphs."""
MOST_FAILURES = 3
"""In a row, without a sequence in between."""
PROBE_PROMPTS, PROBE_TOKENS = 3, 12


@dataclass(eq=False)
class Member:
    """One of the processes, and what it is asked for."""

    process: EngineProcess | None = None
    asks: dict[int, Ask] = field(default_factory=dict)
    """What has not come yet."""
    failures: int = 0
    heard: float = 0.0
    """When it last said something."""
    beat: Beat | None = None
    sequences: int = 0
    """At most at a time."""

    @property
    def running(self) -> EngineProcess:
        assert self.process is not None
        return self.process

    def stop(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


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
        processes: int = 1,
        tensor_parallel: int = 1,
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
        self._members = [Member() for _ in range(processes)]
        self._generating, self._call = False, 0
        self._sampling: dict[str, Any] = {}
        self._restarts = 0
        """Between two rollouts: they are told with the next."""
        self._lent = False
        self._folder = tempfile.TemporaryDirectory(prefix="trimtab-model-")
        _write_config(policy, tokenizer, Path(self._folder.name))
        self._weights = SharedWeights(policy, one_device=tensor_parallel == 1)
        self._sleeps = lend_memory and policy.device.type == "cuda"
        self._settings: dict[str, Any] = {
            "folder": self._folder.name,
            "dtype": str(policy.dtype).removeprefix("torch."), "cuda": policy.device.type == "cuda",
            "kv_bytes": kv_bytes // processes // kv_cut(policy.config, tensor_parallel), "page_tokens": page_tokens,
            "prefill_tokens": prefill_tokens, "longest": longest, "prefix_cache": prefix_cache, "eager": eager,
            "sleeps": self._sleeps, "rank": _rank(policy), "tensor_parallel": tensor_parallel,
        }  # fmt: skip
        self.ready: Ready
        self._adapters = self._weights.write_adapters(Path(self._folder.name))
        try:
            self._start(self._members)
        except EngineLost as lost:
            raise self._given_up(lost) from lost
        except BaseException:
            self.close()
            raise
        self._refuse_other_logprobs()

    @property
    def description(self) -> str:
        where = "" if self._python == sys.executable else f" of {self._python}"
        many = "a process of its own" if len(self._members) == 1 else f"{len(self._members)} processes of their own"
        if self._settings["tensor_parallel"] > 1:
            many += f", the model in {self._settings['tensor_parallel']} parts"
        how = "read in place" if self._weights.direct else "through host memory"
        return f"{self.kind.title} {self.ready.version}{where}, {many}; weights {how}; Trimtab draws the tokens"

    @property
    def outside_bytes(self) -> int:
        return 0

    @property
    def pids(self) -> list[int]:
        """Of the processes there are."""
        return [member.process.pid for member in self._members if member.process is not None]

    def publish(self, version: int) -> None:
        self._refuse_while_generating("publish")
        self._take_back()
        self.version = version
        self._adapters = self._weights.write_adapters(Path(self._folder.name))
        if self._adapters is None:
            self._recover_all(self._publish(self._members))
        else:
            self._recover_all(self._tell(self._members, Publish(version, None, self._adapters))[1])

    def lend(self) -> None:
        if self._sleeps:
            self._refuse_while_generating("lend")
            lost = self._tell(self._members, Sleep())[1]
            self._recover_all(lost)
            self._recover_all(self._tell(list(lost), Sleep())[1])  # who had to start again is awake
            self._lent = True

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        self._refuse_while_generating("generate")
        sampling = check_requests(requests, self._context)
        self._take_back()
        self.stats, self._restarts = RolloutStats(slots=self.max_sequences, restarts=self._restarts), 0
        self._call, self._sampling = self._call + 1, sampling.model_dump()
        whose = self._share_out(requests)
        done: dict[int, list[Trajectory]] = {index: [] for index in range(len(requests))}
        self._generating, began, callers = True, time.perf_counter(), 0.0
        try:
            for member in self._members:
                self._ask(member)
            while any(member.asks for member in self._members):
                ended = self._next_done()
                index, sample = whose[ended.id]
                done[index].append(self._trajectory(requests[index], sample, ended))
                if len(done[index]) == requests[index].samples:
                    group = whole_group(requests[index], done.pop(index), index, self.tokenizer)
                    left = time.perf_counter()
                    yield group
                    callers += time.perf_counter() - left
        finally:
            self._settle([member for member in self._members if member.asks])
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
            for member in self._members:
                member.stop()
            try:
                self._start(self._members)
            except EngineLost as lost:
                raise self._given_up(lost) from lost

    def close(self) -> None:
        for member in self._members:
            member.stop()
        self._weights.close()
        self._folder.cleanup()

    def _refuse_other_logprobs(self) -> None:
        """A library may compute a model in another way than the trainer, or not take all of its weights. Nothing that such a one
        draws is learned from."""
        numbers, words = torch.Generator().manual_seed(1), int(self.policy.config.vocab_size)
        length, new = probe(getattr(self.policy.config, "sliding_window", None), self._context)
        rows = torch.randint(0, words, (PROBE_PROMPTS, length), generator=numbers).tolist()
        requests = [Request(Prompt(i, "", row), 2, new, Sampling(), seed=1, step=0) for i, row in enumerate(rows)]
        try:
            found = [trajectory for group in self.generate(requests) for trajectory in group.trajectories]
            gap = float(torch.cat([(t.logprobs - trainer_logprobs(self.policy, t)).abs() for t in found]).mean())
            if not gap <= TOLERANCE_NATS[self.policy.dtype]:
                whose = f"{self.kind.title} {self.ready.version} gives other log-probs for {self.policy.name} than the trainer"
                raise EngineError(
                    f"{whose}: {gap:.2g} nats a token. It computes this model in another way, or does not take its weights. "
                    "Write run.engine: native."
                )
        except BaseException:
            self.close()
            raise
        self.stats = RolloutStats()

    def _take_back(self) -> None:
        """Of what was lent the trainer's allocator still holds what nobody uses, and no other process could have it."""
        if self._lent:
            self._lent = False
            torch.cuda.empty_cache()

    def _share_out(self, requests: Sequence[Request]) -> dict[int, tuple[int, int]]:
        """Give every member its part, the samples of a prompt to one of them; returns whose each sequence is."""
        whose: dict[int, tuple[int, int]] = {}
        for member in self._members:
            member.asks, member.beat = {}, None
        loads = dict.fromkeys(self._members, 0)
        for index, request in enumerate(requests):
            member = min(loads, key=lambda member: loads[member])
            loads[member] += sum(request.limits)
            for sample, limit in enumerate(request.limits):
                number = request.first_sample + sample
                key = stream_key(request.seed, request.step, request.prompt.id, number, request.first_position)
                id = len(whose)
                whose[id] = (index, sample)
                member.asks[id] = Ask(
                    id, request.prompt.tokens, limit, key
                )  # pickled, one list is sent once for all samples
        return whose

    def _start(self, members: Sequence[Member]) -> None:
        """Processes with the trainer's weights. The first alone where something is compiled, which the others then find."""
        free(self.policy.device)  # they need room of their own
        threads = {} if self._settings["cuda"] else {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        each = -(-self.max_sequences // len(self._members))
        ahead = 1 if self._settings["cuda"] and not self._settings["eager"] else 0
        for together in (members[:ahead], members[ahead:]):
            for member in together:
                member.process = EngineProcess(self.kind.name, self._python, threads)
                member.process.send(Setup(**self._settings, max_sequences=each))
                member.sequences = each
            for member in together:
                ready = member.running.receive(START_S)
                assert isinstance(ready, Ready)
                self.ready = ready
        for lost in self._publish(members).values():
            raise lost

    def _publish(self, members: Sequence[Member]) -> dict[Member, EngineLost]:
        """Weights and adapters, by the way that all can read them from."""
        answers, lost = self._tell(members, Publish(self.version, self._weights.publish(), self._adapters))
        if not any(isinstance(answer, Unread) for answer in answers):
            return lost
        self._weights.direct = False
        return lost | self._publish([member for member in members if member not in lost])

    def _tell(self, members: Sequence[Member], order: Any) -> tuple[list[Settled | Unread], dict[Member, EngineLost]]:
        """An order that all carry out at once: their answers, and who was lost over it."""
        answers: list[Settled | Unread] = []
        lost: dict[Member, EngineLost] = {}
        for step in (lambda member: member.running.send(order), lambda member: answers.append(self._answer(member))):
            for member in members:
                if member not in lost:
                    try:
                        step(member)
                    except EngineLost as error:
                        lost[member] = error
        return answers, lost

    def _answer(self, member: Member) -> Settled | Unread:
        while True:
            message = member.running.receive(SILENT_S)
            if isinstance(message, Settled | Unread):
                return message

    def _restart(self, member: Member) -> None:
        """Until it starts, or has failed too often."""
        while True:
            try:
                member.stop()
                self._start([member])
                return
            except EngineLost as lost:
                self._count(member, lost)
                self.on_restart(f"{self.kind.title} did not start ({lost}); starting it again")

    def _count(self, member: Member, lost: EngineLost) -> None:
        member.failures += 1
        if member.failures > MOST_FAILURES:
            raise self._given_up(lost, f", {member.failures} times in a row without a sequence in between") from lost

    def _given_up(self, lost: EngineLost, often: str = "") -> EngineError:
        self.close()
        lines = f" Its last lines:\n{lost.lines}" if lost.lines else ""
        return EngineError(f"{self.kind.title} cannot go on: {str(lost).rstrip('.')}{often}.{lines}")

    def _recover_all(self, lost: Mapping[Member, EngineLost]) -> None:
        for member, error in lost.items():
            self._recover(member, error)

    def _recover(self, member: Member, lost: EngineLost) -> None:
        """A new process in place of one that is lost; what ran out of memory gets fewer sequences at a time."""
        self._count(member, lost)
        count = len(self._members)
        if lost.short and member.sequences > -(-self.max_sequences // count):  # another has run out at the same time
            self.on_restart(
                f"{self.kind.title} ran out of memory; starting it again with fewer sequences, as another was"
            )
        elif lost.short and self.max_sequences > count:
            self.max_sequences //= 2
            fewer = f"rollout.max_sequences -> {self.max_sequences:,}"
            self.on_recovery(f"{self.kind.title} ran out of memory; starting it again; {fewer}")
        else:
            anew = f"{len(member.asks):,} sequences are generated anew"
            self.on_restart(f"{self.kind.title} was lost ({lost}); starting it again, {anew}")
        if self._generating:
            self.stats.restarts += 1
        else:
            self._restarts += 1
        self._restart(member)

    def _ask(self, member: Member) -> None:
        """Send everything that is unfinished, to as many processes as that takes."""
        while member.asks:
            try:
                stops = [*self._stop_ids, *self._sampling["stop_token_ids"]]
                member.running.send(Generate(self._call, list(member.asks.values()), self._sampling, stops))
                member.heard = time.monotonic()
                return
            except EngineLost as lost:
                self._recover(member, lost)

    def _next_done(self) -> Done:
        """The next sequence that nobody has had."""
        while True:
            busy = sorted((m for m in self._members if m.asks), key=lambda member: member.heard)
            wait_for([member.running for member in busy])
            for member in busy:
                try:
                    message = member.running.take()
                    if message is None and time.monotonic() - member.heard > SILENT_S:
                        raise member.running.silent(SILENT_S)
                except EngineLost as lost:
                    self._recover(member, lost)
                    self._ask(member)
                    continue
                if message is None:
                    continue
                member.heard = time.monotonic()
                if isinstance(message, Beat):
                    self._note(member, message)
                elif isinstance(message, Done) and message.call == self._call and message.id in member.asks:
                    member.failures = 0
                    del member.asks[message.id]
                    return message

    def _settle(self, members: Sequence[Member]) -> None:
        """Nobody listens any more: nothing of this call may come later."""
        alive = [member for member in members if member.process is not None]  # or it was given up
        lost = self._tell(alive, Abort())[1]
        for member in members:
            member.asks = {}
        self._recover_all(lost)

    def _note(self, member: Member, beat: Beat) -> None:
        if beat.call != self._call:
            return
        member.beat = beat
        beats = [member.beat for member in self._members if member.beat is not None]
        self.stats.decode_steps = max(beat.decode_steps for beat in beats)
        self.stats.prefill_tokens = sum(beat.prefill_tokens for beat in beats)
        self.stats.cached_prefix_tokens = sum(beat.cached_tokens for beat in beats)
        self.stats.peak_pages = sum(beat.blocks for beat in beats)
        self.stats.total_pages = self.ready.blocks * len(self._members)

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


def probe(window: int | None, context: int) -> tuple[int, int]:
    """Tokens of a prompt and after it that show how a library computes a model. Where attention has a window that sequences of a
    run grow out of, they go well beyond it: some libraries have none."""
    new = min(PROBE_TOKENS, -(-context // 2))
    enough = 2 * window if window is not None and window < context else 0
    return max(1, min(max(PROBE_TOKENS, enough), context - new)), new


@torch.no_grad()
def trainer_logprobs(policy: Policy, trajectory: Trajectory) -> torch.Tensor:
    """Of what was drawn."""
    device, first = policy.device, len(trajectory.prompt.tokens)
    tokens = torch.tensor([*trajectory.prompt.tokens, *trajectory.tokens.tolist()], device=device)
    plan = PackedPlan([len(tokens) - 1], device)
    hidden_TE = policy.hidden(tokens[:-1], plan.positions, plan)[first - 1 :].contiguous()
    return policy.head.token_stats(hidden_TE, tokens[first:], 1.0, len(tokens)).logprobs.float().cpu()


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


def kv_cut(config: Any, devices: int) -> int:
    """Into how many parts a cache is cut: of few heads of keys several devices have the same."""
    if devices == 1:
        return 1
    return min(devices, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _rank(policy: Policy) -> int:
    """Of the policy's adapters; 0 where there are none."""
    if not has_adapters(policy.model):
        return 0
    return int(policy.model.peft_config[policy.model.active_adapter].r)
