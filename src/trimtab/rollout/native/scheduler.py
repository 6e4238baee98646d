"""Which sequences run, which wait, which page belongs to whom. Pure bookkeeping: no tensors, no model.

Life of a group: waiting -> filling (its prompt is prefilled once, in chunks) -> ready (samples are forked off as rows and pages
allow, sharing the prompt's full pages) -> its samples run and finish. A sample that loses its pages is preempted, and later
filled again from its own tokens and run on.

Guarantees, checked by property tests: every sample finishes exactly once; admission leaves one page of growth for each running
sequence that may need it, so parking is rare; when pages run out, prompts that only wait are given up first, then the youngest
sequence; the oldest sequence always makes progress, so any pool that holds one whole sequence suffices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trimtab.rollout.native.pages import PagePool
from trimtab.rollout.native.snapshots import Snapshots


@dataclass(eq=False)
class PromptGroup:
    """The samples of one request."""

    index: int
    prompt: list[int]
    limits: list[int]
    """Most new tokens of each sample; there are as many samples as limits."""
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    """Where what layers carry is kept from its prefill to its last fork; -1: nowhere."""
    forked: int = 0
    hidden: Any = None
    """Last hidden state of the prompt, from which every sample's first token is drawn."""

    @property
    def samples(self) -> int:
        return len(self.limits)


@dataclass(eq=False)
class Sequence:
    """One sample in the making."""

    group: PromptGroup
    sample: int
    born: int
    """Admission order; the youngest gives way."""
    pages: list[int] = field(default_factory=list)
    row: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Completion so far; kept here only while the sequence is preempted."""
    routes: Any = None
    """Experts that read it, kept as long."""
    key: int = 0
    """Key of its random numbers."""
    stored: int = 0
    """Context tokens whose keys and values are in the pages once all launched steps are done, if it does not end before."""
    looked: int = 0
    """Tokens already searched for stop strings."""
    most_stored: int = field(init=False)
    """`stored` at its limit: keys and values of the last token are never needed."""

    def __post_init__(self) -> None:
        self.most_stored = len(self.group.prompt) + self.limit - 1

    @property
    def limit(self) -> int:
        return self.group.limits[self.sample]


@dataclass(eq=False)
class Filling:
    """Tokens on their way into pages, for a prompt or for a preempted sequence that comes back."""

    owner: PromptGroup | Sequence
    tokens: list[int]
    pages: list[int]
    done: int
    mark: int = 0
    """A snapshot is taken after so many tokens of what layers carry; 0: none is."""

    @property
    def piece(self) -> int:
        """Tokens that may go into one pass."""
        return self.mark - self.done if self.done < self.mark else self.left

    @property
    def slot(self) -> int:
        """Where what layers carry is kept."""
        return self.owner.slot if isinstance(self.owner, PromptGroup) else self.owner.row

    @property
    def left(self) -> int:
        return len(self.tokens) - self.done


@dataclass(frozen=True)
class Fork:
    """A new sequence; `copy` is (from page, to page) where the prompt ends inside a page."""

    sequence: Sequence
    copy: tuple[int, int] | None
    slot: int = -1
    """Where what layers carry at the prompt's end is kept."""


class Scheduler:
    """Works through a list of groups with a given number of rows and a pool of pages."""

    def __init__(
        self, pool: PagePool, rows: int, prefill_tokens: int, save: Callable[[Sequence], None] = lambda sequence: None,
        snapshots: Snapshots | None = None,
    ) -> None:  # fmt: skip
        """`snapshots`: slots of what layers carry at the end of a prompt; None: they carry nothing."""
        self._snapshots = snapshots
        self.restores: list[tuple[int, Filling]] = []
        """Slots whose contents fillings go on from; whoever copies them empties the list."""
        self.pool = pool
        self._save = save
        """Called with a running sequence that is about to lose its row, to keep its tokens and log-probs."""
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[PromptGroup] = deque()
        self.filling: list[Filling] = []
        self.ready: deque[PromptGroup] = deque()
        self.running: list[Sequence] = []
        self.preempted: deque[Sequence] = deque()
        self.free_rows = list(range(rows - 1, -1, -1))
        self.cached_tokens = 0
        self._births = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.waiting or self.filling or self.ready or self.running or self.preempted)

    @property
    def spare_pages(self) -> int:
        """Pages that are left when every running sequence that may need one has it."""
        return self.pool.available - self._growing()

    def add(self, group: PromptGroup) -> None:
        self.waiting.append(group)

    def next_fill(self) -> list[tuple[Filling, int]]:
        """What to prefill now: (filling, number of tokens), together at most `prefill_tokens`."""
        self._admit()
        room, chosen = self.prefill_tokens, []
        for filling in self.filling:
            take = min(room, filling.piece)
            if take:
                chosen.append((filling, take))
                room -= take
        return chosen

    def filled(self, filling: Filling, tokens: int) -> bool:
        """Note that `tokens` more are in their pages; True when the filling is complete."""
        filling.done += tokens
        if filling.left:
            return False
        self.filling.remove(filling)
        owner = filling.owner
        if isinstance(owner, Sequence):
            owner.pages, owner.stored = filling.pages, len(filling.tokens)
            self.running.append(owner)
        else:
            owner.pages = filling.pages
            self.pool.remember(owner.prompt, owner.pages)
            self.ready.append(owner)
        return True

    def fork(self) -> list[Fork]:
        """Start as many samples of prefilled prompts as rows and pages allow.

        Prompts' pages are given back at the end: one that is copied from is not copied to, so copying can be repeated.
        """
        forks: list[Fork] = []
        reserved = self._growing()
        while self.ready and self.free_rows:
            group = self.ready[0]
            made = self._fork_one(group, reserved)
            if made is None:
                break
            forks.append(made)
            reserved += self._may_grow(made.sequence)
            if group.forked == group.samples:
                self.ready.popleft()
        for group in {fork.sequence.group.index: fork.sequence.group for fork in forks}.values():
            if group.forked == group.samples:
                self.pool.release(group.pages)
                group.pages = []
                self.free_slot(group)
        return forks

    def free_slot(self, group: PromptGroup) -> None:
        """The state at the end of a prompt is needed no more: all its samples are forked, or it will be filled again."""
        if self._snapshots is not None and group.slot >= 0:
            self._snapshots.give(group.slot)
            group.slot = -1

    def live(self) -> list[Sequence]:
        """Running sequences that are not at their limit once all launched steps are done; siblings side by side."""
        live = [s for s in self.running if s.stored < s.most_stored]
        live.sort(key=lambda s: (s.group.index, s.sample))
        return live

    def steps_ahead(self, live: list[Sequence], most: int) -> int:
        """How many tokens these can grow by before pages run out; 0 where even one takes parking a sequence."""
        steps = min(most, max(s.most_stored - s.stored for s in live))
        while steps and sum(self._pages_wanted(s, steps) for s in self._short(live, steps)) > self.pool.available:
            steps //= 2
        return steps

    def make_room(self, live: list[Sequence], steps: int = 1) -> list[Sequence]:
        """Give sequences the pages their next tokens need; returns those that had to be preempted."""
        preempted: list[Sequence] = []
        for sequence in sorted(self._short(live, steps), key=lambda s: s.born):
            while sequence.row >= 0 and (wanted := self._pages_wanted(sequence, steps)):
                pages = self.pool.take(wanted)
                if pages is not None:
                    sequence.pages += pages
                elif not self._give_up_prompt():
                    preempted.append(self._preempt_youngest())
        return preempted

    def retreat(self, rows: int) -> list[Sequence]:
        """Preempt everything that runs, and continue with at most this many rows. The host must have seen all tokens so far."""
        while self._give_up_prompt():
            pass
        preempted = []
        while self.filling or self.running:
            preempted.append(self._preempt_youngest(last=True))
        self.free_rows = sorted(self.free_rows, reverse=True)[-rows:]
        return preempted

    def finish(self, ended: list[Sequence]) -> None:
        """Take sequences off their rows and give their pages back."""
        gone = set(map(id, ended))
        self.running = [s for s in self.running if id(s) not in gone]
        for sequence in ended:
            self._vacate(sequence)

    def _admit(self) -> None:
        if not self.free_rows:
            return
        reserved = self._growing()
        while self.preempted and self.free_rows:
            sequence = self.preempted[0]
            tokens = (sequence.group.prompt + sequence.tokens)[:-1]
            if not self._start_filling(sequence, tokens, reserved):
                return
            self.preempted.popleft()
            sequence.row = self.free_rows.pop()
        rows = self._uncommitted_rows()
        while self.waiting and rows > 0:
            group = self.waiting[0]
            if self._snapshots is not None and not self._snapshots.available:
                return
            if not self._start_filling(group, group.prompt, reserved):
                return
            group.slot = -1 if self._snapshots is None else self._snapshots.take()
            self.waiting.popleft()
            rows -= group.samples - group.forked

    def _start_filling(self, owner: PromptGroup | Sequence, tokens: list[int], reserved: int) -> bool:
        """Claim pages for `tokens`, using what is cached of all but the last; False (and no change) if too few are left."""
        cached, slot, mark = self.pool.recall(tokens[:-1]), -1, 0
        if self._snapshots is not None:
            held, slot = self._snapshots.find(tokens, len(cached), takes_one=isinstance(owner, PromptGroup))
            mark = len(cached) * self.pool.page_tokens if held < len(cached) else 0
            self.pool.release(cached[held:])
            cached = cached[:held]
        need = self._pages_for(len(tokens)) - len(cached)
        idle = not self.running and not self.filling
        fresh = self.pool.take(need) if idle or self.pool.available - need > reserved else None
        if fresh is None:
            self.pool.release(cached)
            return False
        done = len(cached) * self.pool.page_tokens
        self.cached_tokens += done
        self.filling.append(Filling(owner, tokens, cached + fresh, done, mark))
        if slot >= 0:
            self.restores.append((slot, self.filling[-1]))
        return True

    def _fork_one(self, group: PromptGroup, reserved: int) -> Fork | None:
        full, rest = divmod(len(group.prompt), self.pool.page_tokens)
        fresh: list[int] | None = []
        if not rest and self.running and self.pool.available <= reserved:
            return None  # it takes no page yet, but its first token will
        if rest:
            while True:
                fresh = self.pool.take(1) if not self.running or self.pool.available > reserved else None
                if fresh is not None or self.running or not self._give_up_prompt(keep=group):
                    break
            if fresh is None:
                return None
        shared = group.pages[:full]
        self.pool.share(shared)
        sequence = Sequence(group, group.forked, self._births, shared + (fresh or []), self.free_rows.pop())
        sequence.stored = len(group.prompt)
        self._births += 1
        group.forked += 1
        self.running.append(sequence)
        copy = (group.pages[full], fresh[0]) if fresh else None
        return Fork(sequence, copy, group.slot)

    def _give_up_prompt(self, keep: PromptGroup | None = None) -> bool:
        """Take the pages of the youngest prompt that only waits to be forked; it will be prefilled again."""
        for filling in reversed(self.filling):
            if isinstance(filling.owner, PromptGroup):
                self.filling.remove(filling)
                self.pool.release(filling.pages)
                self.free_slot(filling.owner)
                self.waiting.appendleft(filling.owner)
                return True
        if self.ready and self.ready[-1] is not keep:
            group = self.ready.pop()
            self.pool.release(group.pages)
            group.pages = []
            self.free_slot(group)
            self.waiting.appendleft(group)
            return True
        return False

    def _preempt_youngest(self, last: bool = False) -> Sequence:
        for filling in self.filling:  # a sequence that is just coming back is younger than any that runs
            owner = filling.owner
            assert isinstance(owner, Sequence)
            self.filling.remove(filling)
            owner.pages = filling.pages
            self._vacate(owner)
            self.preempted.appendleft(owner)
            return owner
        assert last or len(self.running) > 1, "the pool is smaller than one sequence; refused before the run"
        youngest = max(self.running, key=lambda s: s.born)
        self._save(youngest)
        self.finish([youngest])
        self.preempted.appendleft(youngest)
        return youngest

    def _vacate(self, sequence: Sequence) -> None:
        self.pool.release(sequence.pages)
        self.free_rows.append(sequence.row)
        sequence.pages, sequence.row, sequence.stored = [], -1, 0

    def _uncommitted_rows(self) -> int:
        promised = sum(g.samples - g.forked for g in self.ready)
        for filling in self.filling:
            if isinstance(filling.owner, PromptGroup):
                promised += filling.owner.samples - filling.owner.forked
        return len(self.free_rows) - promised

    def _growing(self) -> int:
        """How many running sequences have pages that may not last to their end."""
        return sum(map(self._may_grow, self.running))

    def _may_grow(self, sequence: Sequence) -> bool:
        return len(sequence.pages) * self.pool.page_tokens < sequence.most_stored

    def _short(self, live: list[Sequence], steps: int) -> list[Sequence]:
        """Sequences whose pages may not hold their next `steps` tokens."""
        page = self.pool.page_tokens
        return [s for s in live if s.stored + steps > len(s.pages) * page]

    def _pages_wanted(self, sequence: Sequence, steps: int) -> int:
        """Pages that a sequence lacks for its next `steps` tokens."""
        reach = min(sequence.stored + steps, sequence.most_stored)
        return max(0, self._pages_for(reach) - len(sequence.pages))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.page_tokens)
