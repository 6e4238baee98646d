"""The native engine: generates with the trainer's own modules and weights, through the same registered attention.

One loop: prefill what the scheduler admits, fork samples off finished prompts, decode one token for everything that runs,
hand over the groups that are complete. Nothing here depends on how the batch happens to be composed, so neither do the tokens.

Shapes: B running sequences, P pages of the longest of them, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab.config.learn import Sampling
from trimtab.errors import EngineError
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request, RolloutStats
from trimtab.rollout.native import scheduler as plan
from trimtab.rollout.native.cache import DecodePlan, KVCache, PrefillPlan, PrefillSegment, layer_shapes
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.rows import Rows
from trimtab.rollout.native.sampler import sample, stream_key
from trimtab.rollout.native.stops import StopStrings, decode_all
from trimtab.rollout.trajectory import Group, Trajectory


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
        self._cache = KVCache(shapes, self.pool.total, page_tokens, policy.dtype, policy.device)

    def publish(self, version: int) -> None:
        """The weights are the trainer's own, so nothing moves; what was computed with the old ones is forgotten."""
        self.version = version
        self.pool.forget_all()

    def close(self) -> None:
        self._cache.keys.clear()
        self._cache.values.clear()

    @torch.no_grad()
    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        sampling = self._check(requests)
        self.stats = RolloutStats(slots=self.max_sequences, total_pages=self.pool.total)
        self.pool.peak_held = 0
        rows = Rows(
            min(self.max_sequences, sum(r.samples for r in requests)),
            max(r.max_new_tokens for r in requests),
            max(self._pages_for(r) for r in requests),
            [*self.stop_token_ids, *sampling.stop_token_ids],
            self.policy.device,
        )
        stops = StopStrings(sampling.stop, self.tokenizer)
        work = plan.Scheduler(self.pool, rows.count, self.prefill_tokens, rows.save)
        for index, request in enumerate(requests):
            work.add(plan.PromptGroup(index, request.prompt.tokens, request.samples, request.max_new_tokens))
        done: dict[int, list[Trajectory]] = {index: [] for index in range(len(requests))}
        try:
            while work.unfinished:
                started = time.perf_counter()
                self._prefill(work, rows, requests, sampling)
                middle = time.perf_counter()
                self._decode(work, rows, sampling)
                finished = self._harvest(work, rows, stops, requests)
                self.stats.prefill_s += middle - started
                self.stats.decode_s += time.perf_counter() - middle
                for index, trajectory in finished:
                    done[index].append(trajectory)
                    if len(done[index]) == requests[index].samples:
                        yield self._group(requests[index], done.pop(index), index)
        finally:
            self._release(work)
        self.stats.cached_prefix_tokens = work.cached_tokens
        self.stats.peak_pages = self.pool.peak_held

    def _prefill(self, work: plan.Scheduler, rows: Rows, requests: Sequence[Request], sampling: Sampling) -> None:
        """Fill what the scheduler chose, then start the samples of every prompt that is complete."""
        chosen = work.next_fill()
        if chosen:
            segments = [PrefillSegment(f.tokens[f.done : f.done + n], f.done, f.pages) for f, n in chosen]
            attention = PrefillPlan(self._cache, segments, self.policy.device)
            tokens = torch.tensor([t for s in segments for t in s.tokens], device=self.policy.device)
            hidden = self.policy.hidden(tokens, attention.positions, attention)
            self.stats.prefill_tokens += tokens.shape[0]
            for (filling, count), last in zip(chosen, torch.tensor(attention.lengths).cumsum(0) - 1):
                if work.filled(filling, count):
                    if isinstance(filling.owner, plan.PromptGroup):
                        filling.owner.hidden = hidden[last].clone()
                    else:
                        rows.restore(filling.owner)
        forks = work.fork()
        if not forks:
            return
        for fork in forks:
            if fork.copy:
                self._cache.copy_page(*fork.copy)
            request, sequence = requests[fork.sequence.group.index], fork.sequence
            key = stream_key(request.seed, request.step, request.prompt.id, request.first_sample + sequence.sample)
            rows.start(sequence, key, request.max_new_tokens)
        hidden = torch.stack([fork.sequence.group.hidden for fork in forks])
        self._draw(rows, rows.index(f.sequence for f in forks), hidden, sampling)
        rows.sync([fork.sequence for fork in forks])
        self.stats.sequences += len(forks)

    def _decode(self, work: plan.Scheduler, rows: Rows, sampling: Sampling) -> None:
        """One token for every running sequence that is not finished already."""
        live = [s for s in work.running if not rows.finished(s)]
        if not live:
            return
        self.stats.parked += len(work.make_room())
        live = [s for s in live if s.row >= 0]
        width = max(len(s.pages) for s in live)
        first_page = self._in_a_row(live, rows) if width == 1 else None
        for sequence in live:
            rows.set_pages(sequence)
        index_B = rows.index(live)
        pages_BP, positions_B = rows.pages[index_B, :width], rows.positions[index_B]
        slots_B, longest = self._cache.slots(pages_BP, positions_B), max(s.stored for s in live) + 1
        attention = DecodePlan(self._cache, pages_BP, positions_B, slots_B, longest, first_page)
        hidden = self.policy.hidden(rows.last_tokens[index_B], positions_B, attention)
        for sequence in live:
            sequence.stored += 1
        self._draw(rows, index_B, hidden, sampling)
        self.stats.decode_steps += 1
        self.stats.occupied_slots += len(live)

    def _in_a_row(self, live: list[plan.Sequence], rows: Rows) -> int | None:
        """Put sequences of one page each in page order, and their pages side by side: attention then reads them where they are.

        A page moves at most once for each sequence that ended below it. Returns the first page, or None where others lie between.
        """
        live.sort(key=lambda s: s.pages[0])
        for sequence in reversed(live):
            target = self.pool.lower(sequence.pages[0])
            if target is None:
                break
            self._cache.copy_page(sequence.pages[0], target, sequence.stored)
            sequence.pages = [target]
            rows.forget_pages(sequence)
        live.sort(key=lambda s: s.pages[0])
        first, last = live[0].pages[0], live[-1].pages[0]
        return first if last - first == len(live) - 1 else None

    def _draw(self, rows: Rows, index_B: torch.Tensor, hidden_BE: torch.Tensor, sampling: Sampling) -> None:
        logits_BV = self.policy.head.logits(hidden_BE, sampling.temperature or 1.0)
        tokens_B, logprobs_B = sample(logits_BV, sampling, rows.keys[index_B], rows.generated[index_B])
        rows.append(index_B, tokens_B, logprobs_B)
        self.stats.generated_tokens += tokens_B.shape[0]

    def _harvest(
        self, work: plan.Scheduler, rows: Rows, stops: StopStrings, requests: Sequence[Request]
    ) -> list[tuple[int, Trajectory]]:
        """Take finished sequences off their rows."""
        rows.sync(work.running)
        if stops.due():
            for sequence in work.running:
                cut = stops.find(rows.tokens_of(sequence))
                if cut is not None:
                    rows.truncate(sequence, cut)
        ended = [s for s in work.running if rows.finished(s)]
        harvest = []
        for sequence in ended:
            cut = stops.find(rows.tokens_of(sequence))
            if cut is not None:
                rows.truncate(sequence, cut)
            harvest.append((sequence.group.index, self._trajectory(sequence, rows, requests)))
            work.finish(sequence)
        return harvest

    def _trajectory(self, sequence: plan.Sequence, rows: Rows, requests: Sequence[Request]) -> Trajectory:
        tokens, logprobs = rows.result(sequence)
        return Trajectory(
            prompt=requests[sequence.group.index].prompt,
            sample=sequence.sample,
            tokens=tokens,
            logprobs=logprobs,
            versions=torch.full(tokens.shape, self.version, dtype=torch.int32),
            finish="stop" if rows.stopped(sequence) else "length",
        )

    def _group(self, request: Request, trajectories: list[Trajectory], index: int) -> Group:
        trajectories.sort(key=lambda t: t.sample)
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

    def _check(self, requests: Sequence[Request]) -> Sampling:
        """Refuse what cannot be served before any work is done."""
        if not requests:
            raise EngineError("generate was called without requests")
        if len({r.sampling.model_dump_json() for r in requests}) > 1:
            raise EngineError("the requests of one generate call must share their sampling settings")
        for request in requests:
            total = len(request.prompt.tokens) + request.max_new_tokens
            if total > self.policy.context_tokens:
                raise EngineError(
                    f"prompt {request.prompt.id} has {len(request.prompt.tokens)} tokens; with max_new_tokens "
                    f"{request.max_new_tokens} that exceeds the model's context of {self.policy.context_tokens}"
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
        return -(-(len(request.prompt.tokens) + request.max_new_tokens) // self.pool.page_tokens)
