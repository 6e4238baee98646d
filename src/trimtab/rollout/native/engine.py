"""The native engine: generates with the trainer's own weights, on a CPU too, through the model's own modules.

A round: prefill what the scheduler admits, fork samples off finished prompts, launch a few decode steps for everything that
runs, and, while the device works on them, look who ended in the round before and hand over the groups that are complete. The
device always has its next round in hand: a sequence that reaches its limit is not in it, and one that met a stop token sits it
out on the device. Nothing here depends on how the batch happens to be composed, so neither do the tokens.

So memory that runs out costs time and no token: prompts are prefilled in smaller chunks, or sequences are preempted and fewer run
at a time, from then on.

Shapes: B running sequences, V vocabulary, E hidden size.
"""

from __future__ import annotations

import importlib.util
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any

import torch

from trimtab.base.errors import EngineError, MemoryExhausted
from trimtab.config.learn import Sampling
from trimtab.model.memory import Arguments, Result, Shortage, attempt, free, in_parts
from trimtab.model.policy import Policy
from trimtab.model.shapes import LayerShape, layer_shapes, state_shapes
from trimtab.rollout.collect import Collector
from trimtab.rollout.engine import Request, RolloutStats, check_requests, refuse_while
from trimtab.rollout.feed import Bounds, Feed
from trimtab.rollout.native.agreement import refuse_other_steps
from trimtab.rollout.native.cache import Carried, PrefillPlan, PrefillSegment
from trimtab.rollout.native.carrying import Carrying
from trimtab.rollout.native.decoder import Decoder
from trimtab.rollout.native.eager import EagerDecoder
from trimtab.rollout.native.handing_back import hand_back, load_of
from trimtab.rollout.native.kv_codes import Stored, stored_bytes
from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.round_clock import RoundClock
from trimtab.rollout.native.rounds import Ended, Round
from trimtab.rollout.native.rows import Rows
from trimtab.rollout.native.scheduler import Filling, PromptGroup, Scheduler, Sequence
from trimtab.rollout.native.together import Together
from trimtab.rollout.sampler import stream_key
from trimtab.rollout.stops import CHECK_EVERY_TOKENS, StopStrings
from trimtab.rollout.trajectory import Finish, Group, Trajectory

MIN_PREFILL_TOKENS = 16
"""Tokens of a prefill: a smaller one would save nothing worth having."""


class NativeEngine:
    """Paged KV, group fork, chunked prefill, continuous batching, counter-based sampling."""

    def __init__(
        self,
        policy: Policy,
        tokenizer: Any,
        stop_token_ids: Seq[int],
        *,
        kv_bytes: int,
        page_tokens: int,
        max_sequences: int,
        prefill_tokens: int,
        prefix_cache: bool = True,
        lend_memory: bool = False,
        kv_dtype: Stored = "auto",
        on_recovery: Callable[[str], None] = lambda line: None,
        kv_parts: int = 1,
        joined: Together | None = None,
    ) -> None:
        """`on_recovery` is called with what was lowered each time `generate` ran out of memory and goes on. Of cut.py: `joined`,
        the ranks that generate with this one, and `kv_parts`, devices that share the bytes of the KV cache."""
        self.policy = policy
        self.tokenizer = tokenizer
        self.stop_token_ids = list(stop_token_ids)
        self.max_sequences = max_sequences
        self.prefill_tokens = prefill_tokens
        self.version = 0
        self.stats = RolloutStats()
        self.on_recovery = on_recovery
        self._made_with = (max_sequences, prefill_tokens, kv_bytes)
        self._joined = joined
        self._shapes = shapes = layer_shapes(policy, kv_dtype == "auto" and kv_parts == 1)
        token_bytes = sum(stored_bytes(s, policy.dtype, kv_dtype) for s in shapes.values())
        self.page_bytes = kv_parts * page_tokens * token_bytes
        self._states, self._kv_dtype = state_shapes(policy), kv_dtype
        self._prefix_cache = prefix_cache
        self.pool = PagePool(kv_bytes // self.page_bytes, page_tokens, self._prefix_cache)
        self._rows: Rows | None = None
        self._clock = RoundClock(max_sequences)
        self._lends, self._lent, self._generating = lend_memory, False, False
        self._too_many = 0
        """Sequences that could not decode together: when all that was launched has been looked at, they are preempted."""
        self._decoder = self._make_decoder(shapes)
        self._carrying = self._carry()
        if lend_memory and (reason := getattr(self._decoder, "not_lendable", "")):
            raise EngineError(
                f"run.rollout.lend_memory: the engine cannot lend its memory: {reason}. Write auto or false"
            )
        if self._states:
            refuse_other_steps(self)

    @property
    def description(self) -> str:
        """How decode steps run, in words for the user."""
        return self._decoder.description

    @property
    def non_torch_bytes(self) -> int:
        """Device memory held now that torch's allocator does not know of."""
        return self._decoder.non_torch_bytes

    def _make_decoder(self, shapes: dict[int, LayerShape]) -> Decoder:
        policy = self.policy
        carried = Carried(self._states, self.max_sequences) if self._states else None
        if policy.device.type != "cuda":
            return EagerDecoder(policy, shapes, self.pool, carried, self._kv_dtype)
        if policy.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
            decoder = EagerDecoder(policy, shapes, self.pool, carried, self._kv_dtype)
            lacking = "float64 has no kernels" if policy.dtype == torch.float64 else "Triton is not installed"
            decoder.description += f": {lacking}"
            return decoder
        from trimtab.rollout.native.cuda import CudaDecoder

        pages, page_tokens = self.pool.total, self.pool.page_tokens
        return CudaDecoder(
            policy, shapes, pages, page_tokens, self.max_sequences, carried, self._joined, self._kv_dtype
        )

    def _carry(self) -> Carrying:
        return Carrying(self._decoder.cache.states, self.pool.page_tokens, self.policy.device, self._in_parts)

    def _forget_prefixes(self) -> None:
        self.pool.forget_all()
        self._carrying.forget_all()

    def publish(self, version: int) -> None:
        """The weights are the trainer's own, so none moves; what was computed with the old ones is forgotten."""
        refuse_while(self._generating, "publish")
        self.version = version
        self._decoder.refresh()
        self._forget_prefixes()

    def lend(self) -> None:
        """Give the memory of keys, values and intermediates to the update, if asked to at the start; `generate` takes it back."""
        if self._lends and not self._lent:
            refuse_while(self._generating, "lend")
            self._forget_prefixes()
            self._decoder.lend()
            self._lent = True

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        before = self.pool.total
        pages = max(before // 2, self._least_pages(least_tokens))
        if self._lends or pages >= before:
            return None
        refuse_while(self._generating, "shrink")
        self._set_pages(pages)
        return before * self.page_bytes, pages * self.page_bytes

    def _set_pages(self, pages: int) -> None:
        """A new, empty cache, and with it whatever is made for its addresses."""
        self._decoder.close()
        self._rows = None
        free(self.policy.device)
        self.pool = PagePool(pages, self.pool.page_tokens, self._prefix_cache)
        self._decoder = self._make_decoder(self._shapes)
        self._carrying = self._carry()

    @property
    def lowered(self) -> dict[str, int]:
        now = (self.max_sequences, self.prefill_tokens, self.pool.total * self.page_bytes)
        before = (*self._made_with[:2], self._made_with[2] // self.page_bytes * self.page_bytes)
        names = ("max_sequences", "prefill_tokens", "kv_memory")
        return {name: value for name, value, first in zip(names, now, before) if value < first}

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        self.max_sequences = min(self.max_sequences, limits.get("max_sequences", self.max_sequences))
        self.prefill_tokens = min(self.prefill_tokens, limits.get("prefill_tokens", self.prefill_tokens))
        pages = limits.get("kv_memory", self.pool.total * self.page_bytes) // self.page_bytes
        pages = max(pages, self._least_pages(least_tokens))
        if pages < self.pool.total:
            self._set_pages(pages)

    def _least_pages(self, tokens: int) -> int:
        """Pages of the smallest pool that can serve one sequence of this many tokens: a fork copies one page more."""
        return -(-tokens // self.pool.page_tokens) + 1

    def close(self) -> None:
        self._decoder.close()

    @torch.no_grad()
    def generate(self, requests: Seq[Request], feed: Feed | None = None) -> Iterator[Group]:
        """`feed`: further requests, that come from where this engine is one of several (rollout/feed.py)."""
        refuse_while(self._generating, "generate")
        sampling = self._check(requests)
        bounds = Bounds.of(requests) if feed is None else feed.bounds
        self.stats = RolloutStats(slots=self.max_sequences, total_pages=self.pool.total)
        self.pool.peak_held = 0
        if self._lent:
            self._reclaim()
            self._lent = False
        stop_token_ids = sorted({*self.stop_token_ids, *sampling.stop_token_ids})
        rows = self._rows_for(bounds, len(stop_token_ids))
        rows.begin(stop_token_ids)
        self._decoder.begin(rows, sampling, bounds.tokens)
        replays = self._decoder.replays
        stops = StopStrings(sampling.stop, self.tokenizer)
        slots = self._carrying.begin(self._decoder.cache.states)
        work = Scheduler(self.pool, min(rows.count, self.max_sequences), self.prefill_tokens, rows.save, slots)
        self._clock = clock = RoundClock(min(len(work.free_rows), bounds.samples))
        asked = Collector(self.tokenizer)
        _add(requests, asked, work)
        rounds: deque[Round] = deque()
        ended: Ended | None = None
        began, callers = time.perf_counter(), 0.0
        self._generating = True
        try:
            while work.unfinished or rounds or ended or feed is not None:
                whole: list[Group] = []
                if feed is not None:
                    came = time.perf_counter()
                    last, whole = self._exchange(feed, asked, work, bool(rounds or ended))
                    callers += time.perf_counter() - came
                    if last:
                        break
                launched = self._launch(work, rows, asked.requests, stops, bool(rounds))
                if launched is not None:
                    rounds.append(launched)
                for index, trajectory in self._trajectories(ended, asked.requests):
                    if (group := asked.put(index, trajectory)) is not None:
                        whole.append(group)
                for group in whole:
                    idle, left = not rounds or rounds[-1].idle, time.perf_counter()
                    yield group
                    callers += time.perf_counter() - left if idle else 0.0
                ended = None
                if rounds and (launched is None or len(rounds) > self._decoder.rounds_ahead):
                    ended = self._harvest(work, rows, stops, rounds.popleft())
        finally:
            self._release(work)
            self._generating, self._too_many = False, 0
        clock.end()
        self.stats.prefill_s, self.stats.tail_s = clock.prefill_s, clock.tail_s
        self.stats.decode_s = time.perf_counter() - began - callers - self.stats.prefill_s
        self.stats.cached_prefix_tokens = work.cached_tokens
        self.stats.peak_pages = self.pool.peak_held
        self.stats.graph_steps = self._decoder.replays - replays

    def _reclaim(self) -> None:
        if isinstance(attempt(self._decoder.reclaim), Shortage):
            free(self.policy.device)
            self._decoder.reclaim()

    def _attempt(self, work: Callable[[*Arguments], Result], *args: *Arguments) -> Result | Shortage:
        """See model/memory.py. Ranks that generate together have the same outcome (cut.py)."""
        return attempt(work, *args)

    def _exchange(self, feed: Feed, asked: Collector, work: Scheduler, pending: bool) -> tuple[bool, list[Group]]:
        """Tell the feed what there is to do, and take what it has: whether that was the last, and groups that became whole as
        others draw the rest. `pending`: some that ended have not been handed over."""
        news = feed.exchange(load_of(work, pending))
        if news.requests:
            self._check([*asked.requests[:1], *news.requests])
            _add(news.requests, asked, work)
        if not news.give_back:
            return news.last, []
        cuts = hand_back(work, news.give_back)
        feed.returned(cuts, load_of(work, pending))
        found = [asked.cut(cut.index, cut.samples) for cut in cuts]
        return news.last, [group for group in found if group is not None]

    def _rows_for(self, bounds: Bounds, stops: int) -> Rows:
        """The rows of the last call where they suffice: graphs know their addresses."""
        width = -(-bounds.tokens // self.pool.page_tokens)
        need = (min(self.max_sequences, bounds.samples), bounds.new_tokens, width, max(1, stops))
        if self._rows is not None:
            have = (self._rows.count, self._rows.limit, self._rows.width, self._rows.stops)
            if all(n <= h for n, h in zip(need, have)):
                return self._rows
            need = tuple(map(max, need, have))  # type: ignore[assignment]
        self._rows = Rows(*need, self.policy.device, self.policy.routers.routes)
        return self._rows

    def _launch(
        self, work: Scheduler, rows: Rows, requests: Seq[Request], stops: StopStrings, more: bool
    ) -> Round | None:
        """Give the device a round of work. None where there is none yet: earlier rounds (`more`) have to be looked at first."""
        if self._too_many:
            if more:
                return None
            self._retreat(work)
        clock, tokens_before = self._clock, self.stats.prefill_tokens
        clock.began(self._mark() or time.perf_counter())
        begun = self._prefill(work, rows, requests)
        if begun is not None:
            clock.filled(self._mark() or time.perf_counter(), self.stats.prefill_tokens - tokens_before)
        live, steps = work.live(), 0
        if live:
            steps = work.steps_ahead(live, self._decoder.most_steps)
            # Pages are short. Look at earlier rounds first: what ended gives pages back; what is preempted must have been seen.
            if (not steps and (more or begun)) or not self._decode(work, rows, live, max(1, steps)):
                live = []
        asked = list({id(s): s for s in (*(begun or []), *live) if s.row >= 0}.values())
        if not asked:
            return None
        index_B = rows.index(asked)
        tokens = rows.ask_tokens(index_B) if stops else None
        facts = rows.ask(index_B)
        done = self._mark()
        if live:
            clock.decoded(done or time.perf_counter(), len(live), max(1, steps), work)
        return Round(asked, facts, tokens, done, clock.launched)

    def _mark(self) -> torch.cuda.Event | None:
        """An event that comes when the device has done all that was launched so far; None where there is no CUDA."""
        if self.policy.device.type != "cuda":
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _prefill(self, work: Scheduler, rows: Rows, requests: Seq[Request]) -> list[Sequence] | None:
        """Fill what the scheduler chose, then start the samples of every prompt that is complete; None: nothing was done."""
        filled = self._fill(work, rows)
        forks = work.fork()
        if not forks:
            return [] if filled else None
        copies = [fork.copy for fork in forks if fork.copy]
        if copies:
            pairs = rows.to_device(copies).t()
            self._in_parts(lambda part: self._decoder.cache.copy_pages(pairs[:, part]), len(copies), "copying a page")
        self._carrying.hand(forks)
        for fork in forks:
            request, sequence = requests[fork.sequence.group.index], fork.sequence
            sample = request.first_sample + sequence.sample
            sequence.key = stream_key(request.seed, request.step, request.prompt.id, sample, request.first_position)
        index_B = rows.start([fork.sequence for fork in forks])
        groups = list({fork.sequence.group.index: fork.sequence.group for fork in forks}.values())
        place = {group.index: at for at, group in enumerate(groups)}
        prompt_B = rows.to_device([place[fork.sequence.group.index] for fork in forks])

        def draw(part: slice) -> None:
            hidden_BE = torch.stack([group.hidden for group in groups])[prompt_B[part]]
            self._decoder.draw(index_B[part], hidden_BE)

        self._in_parts(draw, len(forks), "drawing a token")
        self.stats.sequences += len(forks)
        return [fork.sequence for fork in forks]

    def _fill(self, work: Scheduler, rows: Rows) -> bool:
        """Prefill what the scheduler chose, in smaller chunks where memory runs out; False where there was nothing to fill."""
        while chosen := self._carrying.next_fill(work):
            outcome = self._attempt(self._fill_chunk, chosen, rows)
            if not isinstance(outcome, Shortage):
                for (filling, count), last in zip(chosen, outcome):
                    if work.filled(filling, count):
                        if isinstance(filling.owner, PromptGroup):
                            filling.owner.hidden = last
                        else:
                            rows.restore(filling.owner)
                self._carrying.keep(chosen)
                return True
            free(self.policy.device)
            tokens = sum(count for _, count in chosen)
            if tokens <= MIN_PREFILL_TOKENS:
                raise _exhausted(f"a prefill of {tokens} tokens", outcome)
            before, self.prefill_tokens = self.prefill_tokens, max(MIN_PREFILL_TOKENS, tokens // 2)
            work.prefill_tokens = self.prefill_tokens
            self.on_recovery(
                f"out of memory in prefill ({tokens:,} tokens); rollout.prefill_tokens {before:,} -> {self.prefill_tokens:,}"
            )
        return False

    def _fill_chunk(self, chosen: list[tuple[Filling, int]], rows: Rows) -> torch.Tensor:
        """Put tokens into their pages; returns the last hidden state of each filling."""
        segments = [PrefillSegment(f.tokens[f.done : f.done + n], f.done, f.pages, f.slot) for f, n in chosen]
        attention = PrefillPlan(self._decoder.cache, segments, self.policy.device)
        tokens = rows.to_device([t for s in segments for t in s.tokens])
        hidden = self._decoder.prefill(tokens, attention.positions, attention)
        attention.commit()
        self.stats.prefill_tokens += tokens.shape[0]
        return hidden[rows.to_device(torch.tensor(attention.lengths).cumsum(0) - 1)]

    def _in_parts(self, work: Callable[[slice], None], count: int, what: str) -> None:
        short = in_parts(work, count, self.policy.device, self._attempt)
        if short is not None:
            raise _exhausted(what, short)

    def _retreat(self, work: Scheduler) -> None:
        """Park all that runs and let fewer run at a time: whatever the failed steps did to their rows is forgotten."""
        failed, self._too_many = self._too_many, 0
        self.max_sequences = failed // 2
        self.stats.preempted += len(work.retreat(self.max_sequences))
        self.on_recovery(
            f"out of memory in decoding ({failed:,} sequences); preempted them; rollout.max_sequences -> {self.max_sequences:,}"
        )

    def _decode(self, work: Scheduler, rows: Rows, live: list[Sequence], steps: int) -> bool:
        """Launch decode steps for everything that runs, as far as there is memory for it; False where there is not."""
        preempted = work.make_room(live, steps)
        self.stats.preempted += len(preempted)
        live[:] = [s for s in live if s.row >= 0]
        rows.set_pages(live)
        outcome = self._attempt(self._decoder.run, live, steps)
        if isinstance(outcome, Shortage):
            if len(live) == 1:
                raise _exhausted("decoding a single sequence", outcome)
            self._too_many = len(live)
            free(self.policy.device)
            return False
        for sequence in live:
            sequence.stored += steps
        self.stats.decode_steps += steps
        return True

    def _harvest(self, work: Scheduler, rows: Rows, stops: StopStrings, round: Round) -> Ended | None:
        """Take sequences that ended in a round off their rows."""
        round.wait()
        self._clock.looked_at(round.launched)
        kept = [i for i, s in enumerate(round.sequences) if s.row >= 0]  # the others ended in a round before
        running = [round.sequences[i] for i in kept]
        rows.note_facts(running, round.facts[:, kept])
        if round.tokens is not None:
            for sequence, tokens in zip(running, rows.drawn(running, round.tokens[kept])):
                due = rows.finished(sequence) or len(tokens) - sequence.looked >= CHECK_EVERY_TOKENS
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
        return Ended(ended, finish, outputs)

    def _trajectories(self, ended: Ended | None, requests: Seq[Request]) -> Iterator[tuple[int, Trajectory]]:
        if ended is None:
            return
        for sequence, finish, (tokens, logprobs, routes) in zip(ended.sequences, ended.finish, ended.outputs.each()):
            yield (
                sequence.group.index,
                Trajectory(
                    prompt=requests[sequence.group.index].prompt,
                    sample=sequence.sample,
                    tokens=tokens,
                    logprobs=logprobs,
                    versions=torch.full(tokens.shape, self.version, dtype=torch.int32),
                    finish=finish,
                    routes=routes,
                ),
            )

    def _release(self, work: Scheduler) -> None:
        """Give every page back, also when the caller stops listening half way."""
        for sequence in work.running:
            self.pool.release(sequence.pages)
        for filling in work.filling:
            self.pool.release(filling.pages)
        for group in work.ready:
            self.pool.release(group.pages)

    def _check(self, requests: Seq[Request]) -> Sampling:
        """Refuse what cannot be served before any work is done."""
        sampling = check_requests(requests, self.policy.context_tokens, self.policy.config.vocab_size)
        for request in requests:
            total = len(request.prompt.tokens) + max(request.limits)
            need = self._pages_for(request) + 1
            if need > self.pool.total:
                have = self.pool.total * self.page_bytes / 2**20
                raise EngineError(
                    f"one sequence of {total} tokens needs {need * self.page_bytes / 2**20:.1f} MiB of KV cache, but "
                    f"the cache has {have:.1f} MiB. Raise run.rollout.kv_memory or lower learn.max_new_tokens"
                )
        return sampling

    def _pages_for(self, request: Request) -> int:
        return -(-(len(request.prompt.tokens) + max(request.limits)) // self.pool.page_tokens)


def _add(requests: Seq[Request], asked: Collector, work: Scheduler) -> None:
    for index, request in zip(asked.extend(requests), requests):
        work.add(PromptGroup(index, request.prompt.tokens, request.limits))


def _exhausted(what: str, short: Shortage) -> MemoryExhausted:
    return MemoryExhausted(
        f"rollout ran out of memory with nothing left to lower ({what}: {short.message}). Lower run.rollout.kv_memory if it is "
        "pinned; else, in this order: lower learn.max_new_tokens, train adapters (model.lora), take a smaller model."
    )
