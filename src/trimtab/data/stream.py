"""The endless stream of what is trained on, prompts or examples: deterministic, resumable, tokenised ahead of use.

- The order is a function of (seed, number of rows, shuffle) alone: epoch after epoch, each a permutation of all rows.
- `position` counts the rows behind the last prompt that take() returned, the ones left out for length included. A
  stream that starts at that position goes on exactly where this one stands, however the prompts were taken.
- A thread tokenises a bounded number of rows ahead, so take() waits only for the first ones; no more of the set is
  tokenised than is used. What goes wrong in the thread is raised by take().

A prompt can come twice in one take(): at the border of two epochs, or when more prompts are taken than there are
rows.
"""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

import numpy as np

from trimtab.base.errors import DataError
from trimtab.config.schema import Data
from trimtab.data.encode import PromptEncoder, Tools
from trimtab.data.files import Row
from trimtab.data.prompt import Prompt
from trimtab.data.prompts import all_too_long

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import PreTrainedTokenizerBase

_BATCH = 64


class _Item(Protocol):
    @property
    def id(self) -> int: ...

    @property
    def tokens(self) -> list[int]: ...


Item = TypeVar("Item", bound=_Item)
Keep = Callable[[int, int], bool]
_Batches = queue.Queue[list[Item] | BaseException]


class Encoder(Protocol[Item]):
    """Rows to items, one each."""

    source_name: str

    def encode(self, ids: Sequence[int], rows: Sequence[Row]) -> list[Item]: ...


class Stream(Generic[Item]):
    """Items of rows that are known to be valid. One thread may take."""

    def __init__(
        self,
        rows: Sequence[Row],
        encoder: Encoder[Item],
        *,
        most_tokens: int,
        seed: int,
        shuffle: bool,
        position: int = 0,
        ahead: int = 1024,
    ) -> None:
        """`encoder` is used in a thread from now on, and nowhere else: a fast tokenizer is not safe to share."""
        assert rows, "an empty set is refused before"
        self.most_tokens = most_tokens
        self.source_name = encoder.source_name
        self._count = len(rows)
        self._position = position
        self.passed_over = 0
        """How many were not kept so far."""
        self._ready: deque[Item] = deque()
        self._left_out: dict[int, int] = {}  # row -> its tokens
        self._failure: BaseException | None = None
        self._batches: _Batches[Item] = queue.Queue(maxsize=max(1, ahead // _BATCH))
        stop = threading.Event()
        order = row_order(len(rows), seed=seed, shuffle=shuffle, position=position)
        # The thread does not hold the stream, so a stream that is dropped unclosed ends its thread too.
        thread = threading.Thread(
            target=_tokenise, args=(encoder, rows, order, self._batches, stop), name="trimtab-prompts", daemon=True
        )
        self._close = weakref.finalize(self, _end, thread, self._batches, stop)
        thread.start()

    @property
    def position(self) -> int:
        """Rows of the endless stream used up since its very beginning; start another stream here to resume."""
        return self._position

    @property
    def too_long(self) -> int:
        """Different rows met so far, by this stream, that were left out for being too long."""
        return len(self._left_out)

    def take(self, count: int, keep: Keep | None = None) -> list[Item]:
        """The next ones, exactly this many. `keep`: of a row at a position, whether it is taken or passed over."""
        assert self._close.alive, "take() after close()"
        items: list[Item] = []
        while len(items) < count:
            item, position = self._next(), self._position
            self._position += 1
            if len(item.tokens) <= self.most_tokens:
                if keep is not None and not keep(item.id, position):
                    self.passed_over += 1
                    continue
                items.append(item)
                continue
            self._left_out[item.id] = len(item.tokens)
            if self.too_long == self._count:
                self._failure = self._all_too_long(max(self._left_out.values()))
        return items

    def _all_too_long(self, longest: int) -> Exception:
        return DataError(
            f"{self.source_name}: all {self._count} examples are longer than {self.most_tokens} tokens (the longest has "
            f"{longest}). Raise learn.max_tokens if the model's context allows, or shorten the examples."
        )

    def report(self) -> str:
        """What has been left out so far, in a sentence."""
        return (
            f"{self.source_name}: {self._count} rows; skipped {self.too_long} so far because they are longer than "
            f"{self.most_tokens} tokens."
        )

    def close(self) -> None:
        """Ends the thread. May be called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> Item:
        if not self._ready and self._failure is None:
            batch = self._batches.get()
            if isinstance(batch, BaseException):
                self._failure = batch
            else:
                self._ready.extend(batch)
        if self._failure is not None:
            raise self._failure
        return self._ready.popleft()


class PromptStream(Stream[Prompt]):
    """Prompts of rows that `validate_rows` has accepted."""

    def __init__(
        self,
        rows: Sequence[Row],
        data: Data,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int,
        seed: int,
        position: int = 0,
        source_name: str = "data.train",
        ahead: int = 1024,
        tools: Tools = (),
    ) -> None:
        encoder = PromptEncoder(data, copy.deepcopy(tokenizer), source_name, tools)
        super().__init__(
            rows,
            encoder,
            most_tokens=max_prompt_tokens,
            seed=seed,
            shuffle=data.shuffle,
            position=position,
            ahead=ahead,
        )

    def _all_too_long(self, longest: int) -> Exception:
        return all_too_long(self.source_name, self._count, longest, self.most_tokens)


def row_order(count: int, *, seed: int, shuffle: bool, position: int = 0) -> Iterator[int]:
    """Row numbers without end, from a position on.

    An epoch is shuffled by sorting a counter-based generator's raw output, which, unlike numpy's own permutation, is
    the same in every numpy version.
    """
    epoch, start = divmod(position, count)
    while True:
        if shuffle:
            keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(count)
            order = np.argsort(keys, kind="stable")
        else:
            order = np.arange(count)
        yield from order[start:].tolist()
        epoch, start = epoch + 1, 0


def _tokenise(
    encoder: Encoder[Item], rows: Sequence[Row], order: Iterator[int], batches: _Batches[Item], stop: threading.Event
) -> None:
    """The thread: tokenises in the stream's order until told to stop; waits when the queue is full."""
    try:
        while not stop.is_set():
            ids = list(islice(order, _BATCH))
            batches.put(encoder.encode(ids, [rows[i] for i in ids]))
    except BaseException as error:  # belongs to take(): it would be lost here
        batches.put(error)


def _end(thread: threading.Thread, batches: _Batches[Item], stop: threading.Event) -> None:
    """After `stop` the thread puts one batch at most, and emptying the queue makes room for it: it cannot hang."""
    stop.set()
    while not batches.empty():
        batches.get_nowait()
    if thread is not threading.current_thread():  # garbage collection may run anywhere
        thread.join()
