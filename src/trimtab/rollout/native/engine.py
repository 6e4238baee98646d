"""The native engine: generates with the trainer's own weights, on a CPU through its own modules too.

A round: prefill what the scheduler admits, fork samples off finished prompts, launch a few decode steps for everything that
runs, and, while the device works on them, look who ended in the round before and hand over the groups that are complete. The
device always has its next round in hand: a sequence that reaches its limit is not in it, and one that met a stop token sits it
out on the device. Nothing here depends on how the batch happens to be composed, so neither do the tokens.

Shapes: B running sequences, V vocabulary, E hidden size.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.config.learn import Sampling
from trimtab.errors import EngineError
from trimtab.model.policy import Policy
from trimtab.model.shapes import LayerShape, layer_shapes
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.native import scheduler as plan
from trimtab.rollout.native.cache import KVCache, PrefillPlan, PrefillSegment
from trimtab.rollout.native.eager import EagerDecoder
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.rows import Outputs, Rows
from trimtab.rollout.native.sampler import stream_key
from trimtab.rollout.native.stops import LOOK_EVERY, StopStrings, decode_all
from trimtab.rollout.trajectory import Finish, Group, Trajectory


class Decoder(Protocol):
    """How a device takes decode steps."""

    cache: KVCache
    path: str
    """What runs, and why not something faster, in words for the user."""
    replays: int
    """Steps so far that were replays of a graph."""

    @property
    def outside_bytes(self) -> int:
        """Device memory held that torch's allocator does not know of."""
        ...

    most_steps: int
    """Steps of a round: the host looks at the sequences after these."""
    rounds_ahead: int
    """Rounds that may be launched before the host has looked at the ones before."""

    def refresh(self) -> None: ...

    def begin(self, rows: Rows, sampling: Sampling, longest: int) -> None: ...

    def prefill(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: PrefillPlan) -> torch.Tensor: ...

    def draw(self, index_B: torch.Tensor, hidden_BE: torch.Tensor) -> None: ...

    def run(self, live: Sequence[plan.Sequence], steps: int) -> None: ...

    def lend(self) -> None: ...

    def reclaim(self) -> None: ...

    def close(self) -> None: ...


@dataclass
class _Round:
    """Launched work, and what was asked for when it is done."""

    sequences: list[plan.Sequence]
    facts: torch.Tensor
    tokens: torch.Tensor | None
    """Of those sequences, where stop strings have to be looked for."""
    done: torch.cuda.Event | None

    @property
    def idle(self) -> bool:
        """True once the device has done it."""
        return self.done is None or self.done.query()

    def wait(self) -> None:
        if self.done is not None:
            self.done.synchronize()


@dataclass
class _Ended:
    """Sequences that are off their rows, and what they drew."""

    sequences: list[plan.Sequence]
    finish: list[Finish]
    outputs: Outputs


class NativeEngine:
    """Paged KV, group fork, chunked prefill, continuous batching, counter-based sampling."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        *,
        kv_bytes: int,
        page_tokens: int,
        max_sequences: int,
        prefill_tokens: int,
        prefix_cache: bool = True,
        lend_memory: bool = False,
    ) -> None:
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop_token_ids = list(stop_token_ids)
        self.max_sequences = max_sequences
        self.prefill_tokens = prefill_tokens
        self.version = 0
        self.stats = RolloutStats()
        shapes = layer_shapes(policy)
        page_bytes = page_tokens * sum(s.bytes_per_token(policy.dtype.itemsize) for s in shapes.values())
        self.pool = PagePool(kv_bytes // page_bytes, page_tokens, prefix_cache)
        self.page_bytes = page_bytes
        self._rows: Rows | None = None
        self._prefills: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        """When the device began and ended each prefill of this call."""
        self._lends, self._lent, self._generating = lend_memory, False, False
        self._decoder = self._make_decoder(shapes)
        if lend_memory and (reason := getattr(self._decoder, "not_lendable", "")):
            raise EngineError(f"run.rollout.lend_memory: memory cannot be lent here, {reason}; write auto or false")

    @property
    def path(self) -> str:
        """How decode steps run, in words for the user."""
        return self._decoder.path

    @property
    def outside_bytes(self) -> int:
        """Device memory held now that torch's allocator does not know of."""
        return self._decoder.outside_bytes

    def _make_decoder(self, shapes: dict[int, LayerShape]) -> Decoder:
        policy = self.policy
        if policy.device.type != "cuda":
            return EagerDecoder(policy, shapes, self.pool)
        if policy.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
            decoder = EagerDecoder(policy, shapes, self.pool)
            lacking = "float64 has no kernels" if policy.dtype == torch.float64 else "Triton is not installed"
            decoder.path += f": {lacking}"
            return decoder
        from trimtab.rollout.native.cuda import CudaDecoder

        return CudaDecoder(policy, shapes, self.pool.total, self.pool.page_tokens, self.max_sequences)

    def publish(self, version: int) -> None:
        """The weights are the trainer's own, so none moves; what was computed with the old ones is forgotten."""
        self._refuse_while_generating("publish")
        self.version = version
        self._decoder.refresh()
        self.pool.forget_all()

    def lend(self) -> None:
        """Give the memory of keys, values and intermediates to the update, if asked to at the start; `generate` takes it back."""
        if self._lends and not self._lent:
            self._refuse_while_generating("lend")
            self.pool.forget_all()
            self._decoder.lend()
            self._lent = True

    def close(self) -> None:
        self._decoder.close()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        self._refuse_while_generating("generate")
        sampling = self._check(requests)
        self.stats = RolloutStats(slots=self.max_sequences, total_pages=self.pool.total)
        self.pool.peak_held = 0
        self._prefills.clear()
        if self._lent:
            self._decoder.reclaim()
            self._lent = False
        stop_token_ids = sorted({*self.stop_token_ids, *sampling.stop_token_ids})
        rows = self._rows_for(requests, len(stop_token_ids))
        rows.begin(stop_token_ids)
        longest = max(len(r.prompt.tokens) + max(r.limits) for r in requests)
        self._decoder.begin(rows, sampling, longest)
        replays = self._decoder.replays
        stops = StopStrings(sampling.stop, self.tokenizer)
        work = plan.Scheduler(self.pool, rows.count, self.prefill_tokens, rows.save)
        for index, request in enumerate(requests):
            work.add(plan.PromptGroup(index, request.prompt.tokens, request.limits))
        done: dict[int, list[Trajectory]] = {index: [] for index in range(len(requests))}
        rounds: deque[_Round] = deque()
        ended: _Ended | None = None
        began, callers = time.perf_counter(), 0.0
        self._generating = True
        try:
            while work.unfinished or rounds or ended:
                launched = self._launch(work, rows, requests, stops, bool(rounds))
                if launched is not None:
                    rounds.append(launched)
                for index, trajectory in self._trajectories(ended, requests):
                    done[index].append(trajectory)
                    if len(done[index]) == requests[index].samples:
                        group = self._group(requests[index], done.pop(index), index)
                        idle, left = not rounds or rounds[-1].idle, time.perf_counter()
                        yield group
                        callers += time.perf_counter() - left if idle else 0.0
                ended = None
                if rounds and (launched is None or len(rounds) > self._decoder.rounds_ahead):
                    ended = self._harvest(work, rows, stops, rounds.popleft())
        finally:
            self._release(work)
            self._generating = False
        self.stats.prefill_s += sum(a.elapsed_time(b) for a, b in self._prefills) / 1e3
        self.stats.decode_s = time.perf_counter() - began - callers - self.stats.prefill_s
        self.stats.cached_prefix_tokens = work.cached_tokens
        self.stats.peak_pages = self.pool.peak_held
        self.stats.graph_steps = self._decoder.replays - replays

    def _rows_for(self, requests: Sequence[Request], stops: int) -> Rows:
        """The rows of the last call where they suffice: graphs know their addresses."""
        count = min(self.max_sequences, sum(r.samples for r in requests))
        limit = max(max(r.limits) for r in requests)
        width = max(self._pages_for(r) for r in requests)
        need = (count, limit, width, max(1, stops))
        if self._rows is not None:
            have = (self._rows.count, self._rows.limit, self._rows.width, self._rows.stops)
            if all(n <= h for n, h in zip(need, have)):
                return self._rows
            need = tuple(map(max, need, have))  # type: ignore[assignment]
        self._rows = Rows(*need, self.policy.device)
        return self._rows

    def _launch(
        self, work: plan.Scheduler, rows: Rows, requests: Sequence[Request], stops: StopStrings, more: bool
    ) -> _Round | None:
        """Give the device a round of work; None where there is none before earlier rounds (`more`) have been looked at."""
        before, started = self._mark(), time.perf_counter()
        begun = self._prefill(work, rows, requests)
        if begun is not None:
            after = self._mark()
            if before is None or after is None:
                self.stats.prefill_s += time.perf_counter() - started
            else:
                self._prefills.append((before, after))
        live = work.live()
        if live:
            steps = work.steps_ahead(live, self._decoder.most_steps)
            # Pages are short: who ended gives some back, and nobody is parked whose tokens the host has not seen.
            if not steps and (more or begun):
                live = []
            else:
                self._decode(work, rows, live, max(1, steps))
        asked = list({id(s): s for s in (*(begun or []), *live) if s.row >= 0}.values())
        if not asked:
            return None
        index_B = rows.index(asked)
        tokens = rows.ask_tokens(index_B) if stops else None
        facts = rows.ask(index_B)
        return _Round(asked, facts, tokens, self._mark())

    def _mark(self) -> torch.cuda.Event | None:
        """When the device has done all that was launched so far."""
        if self.policy.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _prefill(self, work: plan.Scheduler, rows: Rows, requests: Sequence[Request]) -> list[plan.Sequence] | None:
        """Fill what the scheduler chose, then start the samples of every prompt that is complete; None: nothing was done."""
        chosen = work.next_fill()
        if chosen:
            segments = [PrefillSegment(f.tokens[f.done : f.done + n], f.done, f.pages) for f, n in chosen]
            attention = PrefillPlan(self._decoder.cache, segments, self.policy.device)
            tokens = rows.to_device([t for s in segments for t in s.tokens])
            hidden = self._decoder.prefill(tokens, attention.positions, attention)
            self.stats.prefill_tokens += tokens.shape[0]
            ends = rows.to_device(torch.tensor(attention.lengths).cumsum(0) - 1)
            for (filling, count), last in zip(chosen, hidden[ends]):
                if work.filled(filling, count):
                    if isinstance(filling.owner, plan.PromptGroup):
                        filling.owner.hidden = last
                    else:
                        rows.restore(filling.owner)
        forks = work.fork()
        if not forks:
            return [] if chosen else None
        copies = [fork.copy for fork in forks if fork.copy]
        if copies:
            self._decoder.cache.copy_pages(rows.to_device(copies).t())
        for fork in forks:
            request, sequence = requests[fork.sequence.group.index], fork.sequence
            sample = request.first_sample + sequence.sample
            sequence.key = stream_key(request.seed, request.step, request.prompt.id, sample)
        index_B = rows.start([fork.sequence for fork in forks])
        groups = list({fork.sequence.group.index: fork.sequence.group for fork in forks}.values())
        place = {group.index: at for at, group in enumerate(groups)}
        prompt_B = rows.to_device([place[fork.sequence.group.index] for fork in forks])
        self._decoder.draw(index_B, torch.stack([group.hidden for group in groups])[prompt_B])
        self.stats.sequences += len(forks)
        return [fork.sequence for fork in forks]

    def _decode(self, work: plan.Scheduler, rows: Rows, live: list[plan.Sequence], steps: int) -> None:
        """Launch decode steps for everything that runs, as far as there is memory for it."""
        parked = work.make_room(live, steps)
        self.stats.parked += len(parked)
        live[:] = [s for s in live if s.row >= 0]
        rows.set_pages(live)
        self._decoder.run(live, steps)
        for sequence in live:
            sequence.stored += steps
        self.stats.decode_steps += steps

    def _harvest(self, work: plan.Scheduler, rows: Rows, stops: StopStrings, round: _Round) -> _Ended | None:
        """Take sequences that ended in a round off their rows."""
        round.wait()
        kept = [i for i, s in enumerate(round.sequences) if s.row >= 0]  # the others ended in a round before
        running = [round.sequences[i] for i in kept]
        rows.learn(running, round.facts[:, kept])
        if round.tokens is not None:
            for sequence, tokens in zip(running, rows.drawn(running, round.tokens[kept])):
                due = rows.finished(sequence) or len(tokens) - sequence.looked >= LOOK_EVERY
                end = stops.find(sequence, tokens) if due else None
                if end is not None:
                    rows.truncate(sequence, end)
        ended = [s for s in running if rows.finished(s)]
        if not ended:
            return None
        finish: list[Finish] = ["stop" if rows.stopped(s) else "length" for s in ended]
        outputs = rows.results(ended)
        work.finish(ended)
        self.stats.generated_tokens += sum(outputs.counts)
        return _Ended(ended, finish, outputs)

    def _trajectories(self, ended: _Ended | None, requests: Sequence[Request]) -> Iterator[tuple[int, Trajectory]]:
        if ended is None:
            return
        for sequence, finish, (tokens, logprobs) in zip(ended.sequences, ended.finish, ended.outputs.each()):
            yield (
                sequence.group.index,
                Trajectory(
                    prompt=requests[sequence.group.index].prompt,
                    sample=sequence.sample,
                    tokens=tokens,
                    logprobs=logprobs,
                    versions=torch.full(tokens.shape, self.version, dtype=torch.int32),
                    finish=finish,
                ),
            )

    def _group(self, request: Request, trajectories: list[Trajectory], index: int) -> Group:
        trajectories.sort(key=lambda t: t.sample)
        if self.tokenizer is not None:
            texts = decode_all(self.tokenizer, [t.tokens.tolist() for t in trajectories])
            for trajectory, text in zip(trajectories, texts):
                trajectory.text = text
        return Group(request.prompt, trajectories, index)

    def _release(self, work: plan.Scheduler) -> None:
        """Give every page back, also when the caller stops listening half way."""
        for sequence in work.running:
            self.pool.release(sequence.pages)
        for filling in work.filling:
            self.pool.release(filling.pages)
        for group in work.ready:
            self.pool.release(group.pages)

    def _refuse_while_generating(self, what: str) -> None:
        if self._generating:
            raise EngineError(f"{what} was called while an earlier generate is not finished; exhaust or close it first")

    def _check(self, requests: Sequence[Request]) -> Sampling:
        """Refuse what cannot be served before any work is done."""
        if not requests:
            raise EngineError("generate was called without requests")
        if len({r.sampling.model_dump_json() for r in requests}) > 1:
            raise EngineError("the requests of one generate call must share their sampling settings")
        for request in requests:
            if not request.prompt.tokens or request.samples < 1 or min(request.limits) < 1:
                raise EngineError(
                    f"prompt {request.prompt.id}: a request needs at least one prompt token, one sample and one new token"
                )
            total = len(request.prompt.tokens) + max(request.limits)
            if total > self.policy.context_tokens:
                raise EngineError(
                    f"prompt {request.prompt.id} has {len(request.prompt.tokens)} tokens; with max_new_tokens "
                    f"{max(request.limits)} that exceeds the model's context of {self.policy.context_tokens}"
                )
            need = self._pages_for(request) + 1
            if need > self.pool.total:
                have = self.pool.total * self.page_bytes / 2**20
                raise EngineError(
                    f"one sequence of {total} tokens needs {need * self.page_bytes / 2**20:.1f} MiB of KV cache and there "
                    f"are {have:.1f} MiB; raise run.rollout.kv_memory or lower learn.max_new_tokens"
                )
        return requests[0].sampling

    def _pages_for(self, request: Request) -> int:
        return -(-(len(request.prompt.tokens) + max(request.limits)) // self.pool.page_tokens)
