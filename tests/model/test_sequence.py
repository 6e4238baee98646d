"""Sequence parallel: rows that are cut over ranks give what whole rows give, in float64, forward and backward.

Ranks are threads of one process here, which meet in every exchange; tests/invariants/test_sequence_parallel.py has processes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_model

from trimtab.model import sequence
from trimtab.model.attention import Rules
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.sequence import CutRow, cut_row, pieces_of
from trimtab.model.sequence_way import AttentionSize, Way, cheaper_way, pairs_of_most, spans

DEADLINE_S = 60.0
WORST = 1e-12


class Meeting:
    """Where threads meet: each puts what it has, and takes what the others have put."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=DEADLINE_S)
        self.put: list[Any] = [None] * ranks

    def all(self, rank: int, thing: Any) -> list[Any]:
        self.put[rank] = thing
        self.barrier.wait()
        found = list(self.put)
        self.barrier.wait()
        return found


class Threads:
    """See `SequenceGroup`."""

    def __init__(self, meeting: Meeting, rank: int, sizes: tuple[AttentionSize, ...]) -> None:
        self.meeting, self.rank, self.ranks, self.sizes = meeting, rank, meeting.ranks, sizes

    def exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        assert len(x) == sum(sent)
        parts = [parts[self.rank] for parts in self.meeting.all(self.rank, x.detach().clone().split(sent))]
        assert [len(part) for part in parts] == received
        return torch.cat(parts)

    def gather(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        parts = self.meeting.all(self.rank, x.detach().clone())
        assert [len(part) for part in parts] == counts
        return torch.cat(parts)


def on_ranks(ranks: int, sizes: tuple[AttentionSize, ...], work: Callable[[Threads], Any]) -> list[Any]:
    """What each rank's work returned."""
    meeting, found, failed = Meeting(ranks), [None] * ranks, []

    def one(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                found[rank] = work(Threads(meeting, rank, sizes))
        except BaseException as error:
            failed.append(error)
            meeting.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive(), "a rank waits for another"
    real = [error for error in failed if not isinstance(error, threading.BrokenBarrierError)]
    if failed:
        raise (real or failed)[0]
    return found


def some_row(numbers: random.Random) -> tuple[list[int], list[int | None]]:
    """Segments, some of which continue from an earlier one."""
    prompts = [numbers.randint(1, 9) for _ in range(numbers.randint(1, 3))]
    lengths, prefixes = list(prompts), [None] * len(prompts)  # type: list[int], list[int | None]
    for _ in range(numbers.randint(0, 5)):
        lengths.append(numbers.randint(1, 12))
        prefixes.append(numbers.randrange(len(prompts)))
    return lengths, prefixes


def attention_of_rows(
    lengths: list[int], prefixes: list[int | None], heads: tuple[int, int, int, int], rules: Rules, ranks: int, way: Way
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs and gradients of the whole row, and the same put together from ranks."""
    h, k, size, value = heads
    numbers = torch.Generator().manual_seed(sum(lengths) + ranks)
    total = sum(lengths)
    shapes = ((h, size), (k, size), (k, value))
    inputs = [torch.randn(total, *shape, generator=numbers, dtype=torch.float64) for shape in shapes]
    slope = torch.randn(total, h, value, generator=numbers, dtype=torch.float64)
    sinks = None if rules.sinks_H is None else rules.sinks_H

    def run(plan: PackedPlan, rows: torch.Tensor | slice, real: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        own = [x[rows].clone().requires_grad_() for x in inputs]
        scored = None if sinks is None else sinks.clone().requires_grad_()
        out = plan.attend(0, *own, Rules(rules.scale, rules.window, rules.softcap, scored))
        wanted = [*own, *([] if scored is None else [scored])]
        grads = torch.autograd.grad(out[:real], wanted, slope[rows][:real], allow_unused=True)
        return out[:real].detach(), [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wanted)]

    whole = PackedPlan(lengths, "cpu", prefixes)
    expected, gradients = run(whole, slice(None), total)
    size_of = (AttentionSize(1, h, k, size, value),)

    def work(group: Threads) -> tuple[CutRow, torch.Tensor, list[torch.Tensor]]:
        row = CutRow(PackedPlan(lengths, "cpu", prefixes), group, way)
        out, grads = run(row.plan, row.rows_S, row.real)
        assert torch.equal(row.plan.positions[: row.real], whole.positions[row.rows_S[: row.real]])
        assert row.plan.longest == whole.longest
        return row, out, grads

    out = torch.full_like(expected, torch.nan)
    found = [torch.full_like(x, torch.nan) for x in inputs] + [torch.zeros_like(g) for g in gradients[3:]]
    for row, part, grads in on_ranks(ranks, size_of, work):
        mine = row.rows_S[: row.real]
        out[mine] = part
        for place, grad in enumerate(grads):
            if place < 3:
                found[place][mine] = grad[: row.real]
            else:
                found[place] += grad
    return [expected, *gradients], [out, *found]


CASES = range(12)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 250))])
def test_cut_rows_attend_as_whole_rows(case: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random segments, prefixes, windows, soft caps, sinks, heads and numbers of ranks, some with fewer tokens than ranks."""
    numbers = random.Random(case)
    lengths, prefixes = some_row(numbers)
    ranks, way = numbers.choice([2, 3, 4, 5]), numbers.choice(["heads", "keys"])
    kv_heads = numbers.choice([1, 2, 4])
    group = numbers.choice([1, 2, 3])
    heads = kv_heads * group * (ranks if way == "heads" and kv_heads * group % ranks else 1)
    value = numbers.choice([4, 6])
    rules = Rules(
        0.4,
        window=numbers.choice([None, 1, 4, 9]),
        softcap=numbers.choice([None, None, 2.0]),
        sinks_H=torch.linspace(-1, 1, heads, dtype=torch.float64) if numbers.random() < 0.3 else None,
    )
    if numbers.random() < 0.5:  # one head at a time
        monkeypatch.setattr(sequence, "KEYS_AT_A_TIME_BYTES", 1)
    expected, found = attention_of_rows(lengths, prefixes, (heads, kv_heads, 4, value), rules, ranks, way)
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, atol=WORST, rtol=0)
