"""The state of running sequences as device tensors, one row each, so that a decode step touches no sequence from Python.

The host keeps a mirror of the two facts it schedules by, how many tokens a row has and whether it is finished; `sync` refreshes
it, once after every step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trimtab.rollout.native.scheduler import Sequence


class Rows:
    """`count` rows of up to `limit` new tokens and `width` pages."""

    def __init__(self, count: int, limit: int, width: int, stop_token_ids: list[int], device: torch.device) -> None:
        self.count = count
        self.device = device

        def whole(*size: int) -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.pages = whole(count, width)
        self.positions = whole(count)
        """Of the newest token: it has been drawn but its keys and values are not stored yet."""
        self.last_tokens = whole(count)
        self.generated = whole(count)
        self.keys = whole(count)
        self._limits = whole(count)
        self._tokens = whole(count, limit)
        self._logprobs = torch.zeros(count, limit, dtype=torch.float32, device=device)
        self._stop_ids = torch.tensor(sorted(set(stop_token_ids)), dtype=torch.int64, device=device)
        self._stopped = torch.zeros(count, dtype=torch.bool, device=device)
        self._host_generated = [0] * count
        self._host_finished = [False] * count
        self._host_stopped = [False] * count
        self._host_pages = [0] * count

    def index(self, sequences: Iterable[Sequence]) -> torch.Tensor:
        return torch.tensor([s.row for s in sequences], device=self.device)

    def start(self, sequence: Sequence, key: int, limit: int) -> None:
        """A forked sequence takes its row; its first token comes next."""
        row = sequence.row
        self.positions[row] = len(sequence.group.prompt) - 1
        self.generated[row] = 0
        self.keys[row] = key
        self._limits[row] = limit
        self._clear(row)

    def append(self, index_B: torch.Tensor, tokens_B: torch.Tensor, logprobs_B: torch.Tensor) -> None:
        """Add one drawn token to each row and note which rows it ends."""
        at_B = self.generated[index_B]
        self._tokens[index_B, at_B] = tokens_B
        self._logprobs[index_B, at_B] = logprobs_B.float()
        self.last_tokens[index_B] = tokens_B
        self.positions[index_B] += 1
        self.generated[index_B] += 1
        self._stopped[index_B] = torch.isin(tokens_B, self._stop_ids)

    def sync(self, sequences: list[Sequence]) -> None:
        """Bring the host's mirror up to date."""
        if not sequences:
            return
        index = self.index(sequences)
        facts = torch.stack((self.generated[index], self._limits[index], self._stopped[index].long())).tolist()
        for sequence, generated, limit, stopped in zip(sequences, *facts):
            row = sequence.row
            self._host_generated[row] = generated
            self._host_stopped[row] = bool(stopped)
            self._host_finished[row] = bool(stopped) or generated >= limit

    def set_pages(self, sequence: Sequence) -> None:
        """Write pages that the scheduler added since the last step."""
        row, known = sequence.row, self._host_pages[sequence.row]
        if known < len(sequence.pages):
            self.pages[row, known : len(sequence.pages)] = torch.tensor(sequence.pages[known:], device=self.device)
            self._host_pages[row] = len(sequence.pages)

    def forget_pages(self, sequence: Sequence) -> None:
        """The sequence's pages have moved; `set_pages` will write them again."""
        self._host_pages[sequence.row] = 0

    def finished(self, sequence: Sequence) -> bool:
        return self._host_finished[sequence.row]

    def stopped(self, sequence: Sequence) -> bool:
        return self._host_stopped[sequence.row]

    def tokens_of(self, sequence: Sequence) -> list[int]:
        tokens: list[int] = self._tokens[sequence.row, : self._host_generated[sequence.row]].tolist()
        return tokens

    def truncate(self, sequence: Sequence, tokens: int) -> None:
        """End a sequence at a stop string."""
        self._host_generated[sequence.row] = tokens
        self._host_finished[sequence.row] = self._host_stopped[sequence.row] = True

    def result(self, sequence: Sequence) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and log-probs on the CPU."""
        row, count = sequence.row, self._host_generated[sequence.row]
        return self._tokens[row, :count].cpu().clone(), self._logprobs[row, :count].cpu().clone()

    def save(self, sequence: Sequence) -> None:
        """Keep what a sequence has made before it is parked."""
        sequence.tokens = self.tokens_of(sequence)
        sequence.logprobs = self._logprobs[sequence.row, : len(sequence.tokens)].tolist()
        sequence.key, sequence.limit = int(self.keys[sequence.row]), int(self._limits[sequence.row])

    def restore(self, sequence: Sequence) -> None:
        """Put a parked sequence into its new row, as it was."""
        row, made = sequence.row, len(sequence.tokens)
        self._clear(row)
        self._tokens[row, :made] = torch.tensor(sequence.tokens, device=self.device)
        self._logprobs[row, :made] = torch.tensor(sequence.logprobs, device=self.device)
        self.last_tokens[row] = sequence.tokens[-1]
        self.generated[row] = self._host_generated[row] = made
        self.positions[row] = len(sequence.group.prompt) + made - 1
        self.keys[row], self._limits[row] = sequence.key, sequence.limit

    def _clear(self, row: int) -> None:
        self._stopped[row] = False
        self._host_finished[row] = self._host_stopped[row] = False
        self._host_generated[row] = self._host_pages[row] = 0
