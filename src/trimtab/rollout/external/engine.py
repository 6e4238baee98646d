"""Another library behind the contract of rollout/engine.py.

It runs in processes of their own (members.py), in this environment or in another (`run.rollout.python`), so that neither library
touches the other's. Such libraries are often bound by the work of their host: several processes on one device then share out the
sequences of a rollout. They draw tokens as the native engine does, by the same code and from the same random numbers:
`run.engine` does not change what is learned, beyond the rounding of another forward pass.

What a process had not finished when it was lost is asked for again with the same keys: every sequence arrives exactly once.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.model.adapters import has_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.collect import Collector
from trimtab.rollout.engine import Request, RolloutStats, check_requests, refuse_while
from trimtab.rollout.external.agreement import refuse_other_logprobs
from trimtab.rollout.external.backlog import Backlog
from trimtab.rollout.external.kinds import Kind
from trimtab.rollout.external.members import Member, Members
from trimtab.rollout.external.messages import Abort, Ask, Beat, Done, Generate, Sleep
from trimtab.rollout.external.process import SILENCE_TIMEOUT_S, EngineLost, wait_for
from trimtab.rollout.external.tail import TailClock
from trimtab.rollout.feed import Feed, Load
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.trajectory import Group, Trajectory

SHARE_SENT_AHEAD = 1 / 16
"""Of the sequences that a process runs at a time: so many more lie ready in it, where others may be taken back."""


class ExternalEngine:
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
        devices: Sequence[torch.device] = (),
        python: str = sys.executable,
        logs: Path | None = None,
        on_recovery: Callable[[str], None] = lambda line: None,
        on_restart: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`on_recovery` is called with what was lowered each time a process ran out of memory, `on_restart` each time that one
        was lost; another goes on in its place. `devices`: those that the model is cut over, where they are not the policy's own
        and the ones behind it."""
        self.policy, self.tokenizer = policy, tokenizer
        self.stats = RolloutStats()
        self.on_recovery, self.on_restart = on_recovery, on_restart
        self._made_with, self._parts = max_sequences, tensor_parallel
        self._stop_ids = list(stop_token_ids)
        self._context, self._vocab_size = min(policy.context_tokens, longest), int(policy.config.vocab_size)
        self._generating, self._call = False, 0
        self._sampling: dict[str, Any] = {}
        self._backlog = Backlog()
        cuda = policy.device.type == "cuda"
        self._sleeps, self._lent = lend_memory and cuda, False
        settings = {
            "dtype": str(policy.dtype).removeprefix("torch."),
            "cuda": cuda,
            "kv_bytes": kv_bytes // processes // kv_cut(policy.config, tensor_parallel),
            "page_tokens": page_tokens,
            "prefill_tokens": prefill_tokens,
            "longest": longest,
            "prefix_cache": prefix_cache,
            "eager": eager,
            "sleeps": self._sleeps,
            "rank": _rank(policy),
            "tensor_parallel": tensor_parallel,
        }
        self.members = Members(
            kind,
            policy,
            tokenizer,
            python,
            settings,
            processes=processes,
            max_sequences=max_sequences,
            logs=logs,
            devices=devices,
            on_recovery=lambda line: self.on_recovery(line),
            on_restart=lambda line: self.on_restart(line),
        )
        try:
            refuse_other_logprobs(self, policy, self._context, f"{kind.title} {self.members.ready.version}")
        except BaseException:
            self.close()
            raise
        self.stats = RolloutStats()

    @property
    def description(self) -> str:
        members = self.members
        where = "" if members.python == sys.executable else f" of {members.python}"
        many = "in its own process" if len(members) == 1 else f"in {len(members)} processes"
        if self._parts > 1:
            many += f", the model split over {self._parts} devices"
        how = "read in place" if members.weights.direct else "through host memory"
        return f"{members.kind.title} {members.ready.version}{where}, {many}; weights {how}; Trimtab samples the tokens"

    @property
    def non_torch_bytes(self) -> int:
        return 0

    @property
    def version(self) -> int:
        return self.members.version

    @property
    def max_sequences(self) -> int:
        return self.members.max_sequences

    @property
    def waits(self) -> int:
        """Grows while a process is waited for. Each wait has an end of its own (process.py, members.py)."""
        return self.members.waits

    @property
    def pids(self) -> list[int]:
        """Ids of the processes there are."""
        return [member.process.pid for member in self.members if member.process is not None]

    def publish(self, version: int) -> None:
        refuse_while(self._generating, "publish")
        self._take_back()
        self.members.publish(version)

    def lend(self) -> None:
        if self._sleeps:
            refuse_while(self._generating, "lend")
            awake = self.members.tell_all(Sleep())
            self.members.tell_all(Sleep(), awake)
            self._lent = True

    def generate(self, requests: Sequence[Request], feed: Feed | None = None) -> Iterator[Group]:
        """`feed`: further requests, that come from where this engine is one of several (rollout/feed.py)."""
        refuse_while(self._generating, "generate")
        sampling = check_requests(requests, self._context, self._vocab_size)
        self._take_back()
        self.stats = RolloutStats(slots=self.max_sequences)
        self._call, self._sampling = self._call + 1, sampling.model_dump()
        for member in self.members:
            member.asks, member.beat = {}, None
        self._backlog = Backlog()
        asked, whose = Collector(self.tokenizer), dict[int, tuple[int, int]]()
        self._generating, began, callers = True, time.perf_counter(), 0.0
        tail = TailClock(self.max_sequences)
        try:
            self._begin(requests, asked, whose, hold=feed is not None)
            while feed is not None or any(member.asks for member in self.members):
                whole: list[Group | None] = []
                if feed is not None:
                    came = time.perf_counter()
                    tail.pause(came)
                    last, whole = self._exchange(feed, asked, whose)
                    callers += time.perf_counter() - came
                    if last:
                        break
                tail.see(self._unfinished, time.perf_counter())
                ended = self._next_done() if feed is None else self._next_done(wait=False)
                if ended is not None:
                    index, sample = whose[ended.id]
                    whole.append(asked.put(index, self._trajectory(asked.requests[index], sample, ended)))
                for group in filter(None, whole):
                    left = time.perf_counter()
                    tail.pause(left)
                    yield group
                    callers += time.perf_counter() - left
        finally:
            self._call_off([member for member in self.members if member.asks])
            # Those between two rollouts are told with the next.
            self.stats.restarts, self.members.restarts = self.members.restarts, 0
            self._generating = False
        tail.see(0, time.perf_counter())
        self.stats.decode_s, self.stats.tail_s = time.perf_counter() - began - callers, tail.seconds

    @property
    def _unfinished(self) -> int:
        return len(self._backlog) + sum(len(member.asks) for member in self.members)

    def _exchange(
        self, feed: Feed, asked: Collector, whose: dict[int, tuple[int, int]]
    ) -> tuple[bool, list[Group | None]]:
        """Tell the feed what there is to do, and take what it has: whether that was the last, and groups that became whole as
        others draw the rest. A process keeps what it was given: it starts what it likes."""
        self._hand_out()
        news = feed.exchange(self._load)
        if news.requests:
            check_requests([*asked.requests[:1], *news.requests], self._context, self._vocab_size)
            self._begin(news.requests, asked, whose, hold=True)
            self._hand_out()
        if not news.give_back:
            return news.last, []
        cuts = self._backlog.hand_back(news.give_back)
        feed.returned(cuts, self._load)
        return news.last, [asked.cut(cut.index, cut.samples) for cut in cuts]

    @property
    def _load(self) -> Load:
        given = sum(len(member.asks) for member in self.members)
        running = min(given, self.max_sequences)
        return Load(len(self._backlog) + given - running, running, self.max_sequences - running)

    def _hand_out(self) -> None:
        """Processes get what they have room for, and a little more: a sequence that ends leaves none of them waiting for us."""
        full = self.members.each + max(1, int(self.members.each * SHARE_SENT_AHEAD))
        while self._backlog:
            member = min(self.members, key=lambda member: len(member.asks))
            room = full - len(member.asks)
            if room < 1:
                return
            self._send_more(member, {ask.id: ask for ask in self._backlog.next_of_one_request(room)})

    def _send_more(self, member: Member, asks: dict[int, Ask]) -> None:
        fresh = not member.asks
        member.asks |= asks
        if asks:
            self._ask(member, list(asks.values()), fresh)

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        return None

    @property
    def lowered(self) -> dict[str, int]:
        return {"max_sequences": self.max_sequences} if self.max_sequences < self._made_with else {}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        fewer = min(self.max_sequences, limits.get("max_sequences", self.max_sequences))
        if fewer < self.max_sequences:
            self.members.lower(fewer)

    def close(self) -> None:
        self.members.close()

    def _take_back(self) -> None:
        """Give up what the trainer's allocator has cached since `lend`; until then no other process can use it."""
        if self._lent:
            self._lent = False
            torch.cuda.empty_cache()

    def _begin(
        self, requests: Sequence[Request], asked: Collector, whose: dict[int, tuple[int, int]], hold: bool
    ) -> None:
        """Give every member its part, the samples of a prompt to one of them; or `hold` them back until there is room. Notes
        which sample of which request each is."""
        loads = {member: sum(ask.limit for ask in member.asks.values()) for member in self.members}
        new: dict[Member, dict[int, Ask]] = {member: {} for member in self.members}
        for index, request in zip(asked.extend(requests), requests):
            asks = []
            for sample, limit in enumerate(request.limits):
                number = request.first_sample + sample
                key = stream_key(request.seed, request.step, request.prompt.id, number, request.first_position)
                # One list of tokens: it is sent once for all samples.
                asks.append(Ask(len(whose), request.prompt.tokens, limit, key))
                whose[len(whose)] = (index, sample)
            if hold:
                self._backlog.add(index, asks)
                continue
            member = min(loads, key=lambda member: loads[member])
            loads[member] += sum(request.limits)
            new[member] |= {ask.id: ask for ask in asks}
        for member, its in new.items():
            self._send_more(member, its)

    def _ask(self, member: Member, asks: Sequence[Ask] | None = None, fresh: bool = True) -> None:
        """Send these, to as many processes as that takes; by default, and after a loss, everything that is unfinished. `fresh`:
        the process had nothing to do, so its silence counts from now."""
        while member.asks:
            try:
                stops = [*self._stop_ids, *self._sampling["stop_token_ids"]]
                unfinished = list(member.asks.values()) if asks is None else list(asks)
                member.running.send(Generate(self._call, unfinished, self._sampling, stops))
                member.heard = time.monotonic() if fresh else member.heard
                return
            except EngineLost as lost:
                self.members.recover(member, lost)
                asks, fresh = None, True

    def _next_done(self, wait: bool = True) -> Done | None:
        """The next sequence that is not assigned yet; without `wait`, None where none comes soon."""
        while True:
            busy = sorted((m for m in self.members if m.asks), key=lambda member: member.heard)
            wait_for([member.running for member in busy])
            self.members.waited()
            for member in busy:
                try:
                    message = member.running.take()
                    if message is None and time.monotonic() - member.heard > SILENCE_TIMEOUT_S:
                        raise member.running.silent(SILENCE_TIMEOUT_S)
                except EngineLost as lost:
                    self.members.recover(member, lost)
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
            if not wait:
                return None

    def _call_off(self, members: Sequence[Member]) -> None:
        """Nobody listens any more: nothing of this call may come later."""
        alive = [member for member in members if member.process is not None]  # or it was given up
        for member in members:
            member.asks = {}
        self.members.tell_all(Abort(), alive)

    def _note(self, member: Member, beat: Beat) -> None:
        if beat.call != self._call:
            return
        member.beat = beat
        beats = [member.beat for member in self.members if member.beat is not None]
        self.stats.decode_steps = max(beat.decode_steps for beat in beats)
        self.stats.prefill_tokens = sum(beat.prefill_tokens for beat in beats)
        self.stats.cached_prefix_tokens = sum(beat.cached_tokens for beat in beats)
        self.stats.peak_pages = sum(beat.blocks for beat in beats)
        self.stats.total_pages = self.members.ready.blocks * len(self.members)

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


def kv_cut(config: Any, devices: int) -> int:
    """Parts that the KV cache is cut into. With fewer KV heads than devices, several devices hold the same heads."""
    if devices == 1:
        return 1
    return min(devices, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _rank(policy: Policy) -> int:
    """Rank of the policy's adapters; 0 where there are none."""
    if not has_adapters(policy.model):
        return 0
    return int(policy.model.peft_config[policy.model.active_adapter].r)
