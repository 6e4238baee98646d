"""The state of running sequences as device tensors, one row each, so that decoding touches no sequence from Python.

The host keeps a mirror of the two facts it schedules by, how many tokens a row has and whether it is finished. It asks for them
once a round and gets them when the round's work is done; what changes between rounds travels in one piece, not row by row.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from trimtab.model.routing import FREE, Asked
from trimtab.model.transfer import to_device
from trimtab.rollout.native.scheduler import Sequence

RUNNING, STOPPED, AT_LIMIT = 0, 1, 2
NO_TOKEN = -1


@dataclass
class RowState:
    """R rows on one device; see kernels/sampling.py, which advances them."""

    last_tokens: torch.Tensor
    positions: torch.Tensor
    """Position of the newest token, which has been drawn but whose keys and values are not stored yet."""
    generated: torch.Tensor
    keys: torch.Tensor
    limits: torch.Tensor
    done: torch.Tensor
    tokens: torch.Tensor
    logprobs: torch.Tensor
    stop_ids: torch.Tensor


@dataclass
class Outputs:
    """Tokens and log-probs of sequences that ended, on their way to the host."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    counts: list[int]
    arrived: torch.cuda.Event | None
    routes: torch.Tensor | None = None

    def each(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        routes = [None] * len(self.counts) if self.routes is None else list(self.routes)
        return [
            (t[:n].clone(), p[:n].clone(), None if r is None else _read(r[:n]))
            for t, p, r, n in zip(self.tokens, self.logprobs, routes, self.counts)
        ]


def _read(routes: torch.Tensor) -> torch.Tensor:
    """Without those of the last token, which nothing has read yet."""
    found = routes.clone()
    found[-1:] = FREE
    return found


class Rows:
    """`count` rows of up to `limit` new tokens and `width` pages, with up to `stops` stop tokens; and one row more that no
    sequence has and nothing advances."""

    def __init__(
        self,
        count: int,
        limit: int,
        width: int,
        stops: int,
        device: torch.device,
        routes: tuple[int, int] | None = None,
    ) -> None:
        """`routes`: routers and experts of a token, where it is kept which experts read each new token."""
        self.count, self.limit, self.width, self.stops = count, limit, width, stops
        self.device = device
        self.idle_row = count

        def whole(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.pages = whole(count + 1, width)
        self.state = RowState(
            last_tokens=whole(count + 1),
            positions=whole(count + 1),
            generated=whole(count + 1),
            keys=whole(count + 1),
            limits=whole(count + 1),
            done=torch.full((count + 1,), STOPPED, dtype=torch.int32, device=device),
            tokens=whole(count + 1, limit),
            logprobs=whole(count + 1, limit, dtype=torch.float32),
            stop_ids=whole(stops),
        )
        self.routes = None if routes is None else whole(count + 1, limit, *routes, dtype=torch.int16)
        self._generated = np.zeros(count, dtype=np.int64)
        self._done = np.zeros(count, dtype=np.int64)
        self._known_pages = np.zeros(count, dtype=np.int64)

    def begin(self, stop_token_ids: Seq[int]) -> None:
        """A new call with its own stop tokens; no sequence is left from the one before."""
        ids = list(stop_token_ids) + [NO_TOKEN] * (self.stops - len(stop_token_ids))
        self.state.stop_ids.copy_(torch.tensor(ids))
        self.state.done.fill_(STOPPED)

    def to_device(self, numbers: npt.ArrayLike) -> torch.Tensor:
        """int64 on the device, without waiting for what runs there."""
        return to_device(torch.as_tensor(np.asarray(numbers, dtype=np.int64)), self.device)

    def index(self, sequences: Seq[Sequence]) -> torch.Tensor:
        return self.to_device([s.row for s in sequences])

    def start(self, sequences: Seq[Sequence]) -> torch.Tensor:
        """Forked sequences take their rows, and their first token comes next. Returns their rows."""
        rows = [s.row for s in sequences]
        facts = [
            rows,
            [len(s.group.prompt) - 1 for s in sequences],
            [s.key for s in sequences],
            [s.limit for s in sequences],
        ]
        index, positions, keys, limits = self.to_device(facts)
        self._place(index, positions, keys, limits)
        self.state.generated[index] = 0
        self._generated[rows] = self._done[rows] = self._known_pages[rows] = 0
        return index

    def append(self, index_B: torch.Tensor, tokens_B: torch.Tensor, logprobs_B: torch.Tensor) -> None:
        """Add one drawn token to each row and note which rows it ends."""
        state = self.state
        at_B = state.generated[index_B]
        state.tokens[index_B, at_B] = tokens_B
        state.logprobs[index_B, at_B] = logprobs_B.float()
        state.last_tokens[index_B] = tokens_B
        state.positions[index_B] += 1
        state.generated[index_B] = at_B + 1
        ended_B = torch.where(at_B + 1 >= state.limits[index_B], AT_LIMIT, RUNNING)
        state.done[index_B] = torch.where(torch.isin(tokens_B, state.stop_ids), STOPPED, ended_B).to(torch.int32)

    def recorded(self, index_B: torch.Tensor) -> Asked:
        """What routers are asked for in a decode step: to note which experts read the newest token of each row."""
        routes = self.routes
        if routes is None:
            return Asked()
        at_B = self.state.generated[index_B] - 1

        def record(layer: int, index_BK: torch.Tensor) -> None:
            routes[:, :, layer].index_put_((index_B, at_B), index_BK.to(torch.int16))

        return Asked(record=record)

    def ask(self, index_B: torch.Tensor) -> torch.Tensor:
        """The facts of the rows as they will be when everything launched so far is done; not to be read before that."""
        facts = torch.stack((self.state.generated[index_B], self.state.done[index_B].long()))
        return facts.to("cpu", non_blocking=True)

    def note_facts(self, sequences: Seq[Sequence], facts: torch.Tensor) -> None:
        """Bring the mirror up to date with facts that have arrived."""
        rows = [s.row for s in sequences]
        self._generated[rows], self._done[rows] = facts.numpy()

    def set_pages(self, sequences: Seq[Sequence]) -> None:
        """Write the pages that the scheduler added since the last round."""
        entries = []
        for sequence in sequences:
            known, row = int(self._known_pages[sequence.row]), sequence.row
            if known < len(sequence.pages):
                entries += [(row, known + i, page) for i, page in enumerate(sequence.pages[known:])]
                self._known_pages[row] = len(sequence.pages)
        if entries:
            row, column, page = self.to_device(np.array(entries).T)
            self.pages[row, column] = page

    def forget_pages(self, sequence: Sequence) -> None:
        """The sequence's pages have moved; `set_pages` will write them again."""
        self._known_pages[sequence.row] = 0

    def finished(self, sequence: Sequence) -> bool:
        return bool(self._done[sequence.row])

    def stopped(self, sequence: Sequence) -> bool:
        return int(self._done[sequence.row]) == STOPPED

    def ask_tokens(self, index_B: torch.Tensor) -> torch.Tensor:
        """What the rows will have drawn when everything launched so far is done; not to be read before that."""
        return self.state.tokens[index_B].to("cpu", non_blocking=True)

    def drawn(self, sequences: Seq[Sequence], tokens: torch.Tensor) -> list[list[int]]:
        """The tokens that each sequence has drawn, from what `ask_tokens` gave."""
        return [row[: self._generated[s.row]].tolist() for s, row in zip(sequences, tokens)]

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """End a sequence at a stop string."""
        self._generated[sequence.row], self._done[sequence.row] = tokens, STOPPED

    def results(self, sequences: Seq[Sequence]) -> Outputs:
        """Start to bring home what ended sequences drew; their rows may be used again at once."""
        index, counts = self.index(sequences), [int(self._generated[s.row]) for s in sequences]
        longest = max(counts)
        tokens, logprobs = self.state.tokens[index, :longest], self.state.logprobs[index, :longest]
        routes = None if self.routes is None else self.routes[index, :longest]
        arrived = None
        if self.device.type == "cuda":
            tokens, logprobs = (x.to("cpu", non_blocking=True) for x in (tokens, logprobs))
            routes = None if routes is None else routes.to("cpu", non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        return Outputs(tokens, logprobs, counts, arrived, routes)

    def save(self, sequence: Sequence) -> None:
        """Keep what a sequence has made before it is preempted."""
        made = int(self._generated[sequence.row])
        sequence.tokens = self.state.tokens[sequence.row, :made].tolist()
        sequence.logprobs = self.state.logprobs[sequence.row, : len(sequence.tokens)].tolist()
        if self.routes is not None:
            sequence.routes = self.routes[sequence.row, :made].cpu()

    def restore(self, sequence: Sequence) -> None:
        """Put a preempted sequence into its new row, as it was."""
        row, made = sequence.row, len(sequence.tokens)
        state = self.state
        state.tokens[row, :made] = torch.tensor(sequence.tokens, device=self.device)
        state.logprobs[row, :made] = torch.tensor(sequence.logprobs, device=self.device)
        if self.routes is not None and sequence.routes is not None:
            self.routes[row, :made] = sequence.routes.to(self.device)
        state.last_tokens[row] = sequence.tokens[-1]
        state.generated[row] = made
        index, position, key, limit = self.to_device(
            [[row], [len(sequence.group.prompt) + made - 1], [sequence.key], [sequence.limit]]
        )
        self._place(index, position, key, limit)
        self._generated[row], self._done[row], self._known_pages[row] = made, RUNNING, 0

    def _place(self, index: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor, limits: torch.Tensor) -> None:
        self.state.positions[index] = positions
        self.state.keys[index] = keys
        self.state.limits[index] = limits
        self.state.done[index] = RUNNING
