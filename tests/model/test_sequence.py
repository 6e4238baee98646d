"""Sequence parallel: rows that are cut over ranks give what whole rows give, in float64, forward and backward.

Ranks are threads of one process here, which meet in every exchange; tests/invariants/test_sequence_parallel.py has processes.
"""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import VOCABULARY, tiny_model

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model import packed, sequence
from trimtab.model.attention import Rules
from trimtab.model.keep import Keep
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.model.sequence import CutRow, RowPiece, pieces_of
from trimtab.model.sequence_way import AttentionSize, Way, cheaper_way, spans
from trimtab.model.shapes import layer_shapes
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.objectives.objective import Objective
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.stats import UpdateStats

DEADLINE_S = 60.0
WORST = 1e-12


class Meeting:
    """Where threads meet: each puts what it has, and takes what the others have put."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.barrier = threading.Barrier(ranks, timeout=DEADLINE_S)
        self.put: list[Any] = [None] * ranks
        self.turn = threading.Lock()
        """One runs at a time, while others wait: what interprets kernels serves one thread."""

    def all(self, rank: int, thing: Any) -> list[Any]:
        self.put[rank] = thing
        self._wait()
        found = list(self.put)
        self._wait()
        return found

    def _wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait()
        finally:
            self.turn.acquire()


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
            with meeting.turn, torch.autograd.set_multithreading_enabled(False):
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
    if numbers.random() < 0.3:  # some queries at a time
        monkeypatch.setattr(packed, "MAX_MASK_ELEMENTS", 20)
    if numbers.random() < 0.5:  # one head at a time
        monkeypatch.setattr(sequence, "KEYS_AT_A_TIME_BYTES", 1)
    expected, found = attention_of_rows(lengths, prefixes, (heads, kv_heads, 4, value), rules, ranks, way)
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, atol=WORST, rtol=0)


def samples_of(lengths: list[int]) -> list[Sample]:
    """Samples of two prompts, each of which is in the row once."""
    numbers = torch.Generator().manual_seed(0)
    found = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(3, VOCABULARY, (length,), generator=numbers)
        per_token = torch.randn(3, length, generator=numbers, dtype=torch.float64)
        mask = torch.rand(length, generator=numbers) < 0.7 if index == 1 else None
        part = per_token if mask is None else per_token[:, mask]
        found.append(
            Sample(
                [5, 6, 7, 8, 9][: 3 + 2 * (index % 2)], tokens, part[0], part[1] / 10, -part[2].abs(), policy_mask=mask
            )
        )
        found[-1].old_logprobs = found[-1].engine_logprobs
    return found


def gradient_of(policy: Policy, objective: Objective, lengths: list[int]) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a micro-batch and its gradient."""
    batch = MicroBatch.build(samples_of(lengths), torch.device("cpu"))
    loss = objective.loss(policy, batch, UpdateStats(), chunk=5, kl_coef=0.0)
    loss.backward()
    found = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in policy.model.named_parameters()}
    return float(loss.detach()), found


def assert_ranks_have_the_gradient(architecture: str, ranks: int, lengths: list[int], **changes: Any) -> set[Way]:
    """Of a sequence-level loss, which needs all of a sequence's log-probs at once. Returns the ways in which ranks attended."""
    objective = PolicyGradient(resolve(Learn(algorithm="gspo")))
    model = tiny_model(architecture, torch.float64, **changes)
    expected, gradient = gradient_of(Policy(copy.deepcopy(model), check=False), objective, lengths)
    policies = [Policy(copy.deepcopy(model), check=False) for _ in range(ranks)]
    shapes = layer_shapes(policies[0]).values()
    sizes = tuple(AttentionSize(1, s.heads, s.key[0], s.key[1], s.value[1]) for s in shapes)

    def work(group: Threads) -> tuple[float, dict[str, torch.Tensor]]:
        policies[group.rank].sequence = group
        return gradient_of(policies[group.rank], objective, lengths)

    found = on_ranks(ranks, sizes, work)
    assert [loss for loss, _ in found] == pytest.approx([expected] * ranks, rel=1e-6, abs=1e-9)
    scale = max(float(grad.abs().max()) for grad in gradient.values())
    assert scale > 1e-4
    for name, grad in gradient.items():
        total = torch.stack([grads[name] for _, grads in found]).sum(0)
        torch.testing.assert_close(total, grad, atol=2e-6 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    plan = MicroBatch.build(samples_of(lengths), torch.device("cpu")).plan
    return {cheaper_way(sizes, ranks, plan.lengths, plan.prefixes)}


@pytest.mark.parametrize(
    ("architecture", "ranks", "way", "changes"),
    [
        ("qwen3", 2, "keys", {}),
        ("qwen3", 4, "heads", {"tie_word_embeddings": True}),
        ("gemma2", 2, "heads", {"num_key_value_heads": 4}),
        ("gpt_oss", 3, "keys", {}),
        ("mistral", 4, "keys", {"num_key_value_heads": 1}),
    ],
)
def test_ranks_have_the_gradient_of_whole_rows(
    architecture: str, ranks: int, way: Way, changes: dict[str, Any]
) -> None:
    """Windows, soft caps, sinks, shared prompts, a mask over tokens and a loss over sequences."""
    assert assert_ranks_have_the_gradient(architecture, ranks, [6, 9, 4, 7], **changes) == {way}


@pytest.mark.parametrize(("ranks", "keep"), [(2, Keep.INPUT), (4, Keep.SOME), (4, Keep.ALL)])
def test_fused_layers_run_parts_of_rows(ranks: int, keep: Keep) -> None:
    """Two ranks gather keys, four exchange heads; against the model's own modules on whole rows in float64."""
    pytest.importorskip("triton", reason="Triton is not installed")
    from trimtab.model.fused import FusedForward

    objective, lengths = PolicyGradient(resolve(Learn(algorithm="gspo"))), [6, 9, 4]
    model = tiny_model("qwen3", num_hidden_layers=2)
    expected, gradient = gradient_of(Policy(copy.deepcopy(model).double(), check=False), objective, lengths)
    policies = [Policy(copy.deepcopy(model), check=False) for _ in range(ranks)]
    sizes = tuple(AttentionSize(1, s.heads, s.key[0], s.key[1], s.value[1]) for s in layer_shapes(policies[0]).values())
    for policy in policies:
        policy.fused_forward = FusedForward(policy)
        policy.keep = keep

    def work(group: Threads) -> tuple[float, dict[str, torch.Tensor]]:
        policies[group.rank].sequence = group
        return gradient_of(policies[group.rank], objective, lengths)

    found = on_ranks(ranks, sizes, work)
    assert [loss for loss, _ in found] == pytest.approx([expected] * ranks, rel=1e-4, abs=1e-6)
    scale = max(float(grad.abs().max()) for grad in gradient.values())
    for name, grad in gradient.items():
        total = torch.stack([grads[name] for _, grads in found]).sum(0)
        torch.testing.assert_close(total.double(), grad, atol=2e-4 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_rows_that_are_shorter_than_the_ranks_are_many() -> None:
    """A rank without a token takes part in every exchange, and adds nothing."""
    for changes in ({}, {"num_key_value_heads": 1}):
        assert_ranks_have_the_gradient("qwen3", 4, [1], **changes)


def _without_the_others(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    ends = sum(ctx.row.counts[: ctx.row.group.rank])
    return grad[ends : ends + ctx.row.counts[ctx.row.group.rank]], None


def _averaged(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
    (grad,) = grads
    return None if grad is None else grad.index_select(0, ctx.rows.mine) / ctx.rows.group.ranks, None


def _shifted(lengths: Any, prefixes: Any, parts: Any) -> list[RowPiece]:
    found = pieces_of(lengths, prefixes, parts)
    return [RowPiece(p.length, p.before + 1, ((p.seen[0][0], p.seen[0][0] + 1), *p.seen)) for p in found]


def _without_borders(lengths: Any, prefixes: Any, parts: Any) -> list[RowPiece]:
    return pieces_of([sum(lengths)], [None], parts)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "a sum over ranks is missing": lambda patch: patch.setattr(
        sequence._GatheredKeys, "backward", staticmethod(_without_the_others)
    ),
    "the gradient is averaged": lambda patch: patch.setattr(sequence._WholeRow, "backward", staticmethod(_averaged)),
    "a piece sees one key too many": lambda patch: patch.setattr(sequence, "pieces_of", _shifted),
    "borders between sequences are lost": lambda patch: patch.setattr(sequence, "pieces_of", _without_borders),
    "positions are shifted": lambda patch: patch.setattr(
        sequence.KeysPlan,
        "positions",
        property(lambda plan: plan._all_positions[plan._row.rows_S] + 1 * (plan._row.rows_S > 9)),
    ),
}


@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_seen(error: str, monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED[error](monkeypatch)
    with pytest.raises(AssertionError):
        assert_ranks_have_the_gradient("qwen3", 2, [6, 9, 4, 7])


@pytest.mark.parametrize("way", ["heads", "keys"])
def test_parts_are_even_and_have_every_token_once(way: Way) -> None:
    for total in range(40):
        for ranks in (2, 3, 4, 7):
            parts = [[t for a, b in spans(way, total, ranks, rank) for t in range(a, b)] for rank in range(ranks)]
            assert sorted(t for part in parts for t in part) == list(range(total))
            assert max(map(len, parts)) == -(-total // ranks) and max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "way"),
    [
        (28, 4, 4, "keys"),  # Qwen2.5-7B: 4 heads of keys against 7 + 1 of queries and keys
        (28, 4, 3, "keys"),  # 28 heads are not for 3 ranks
        (32, 8, 2, "keys"),  # Llama-3.1-8B
        (32, 8, 8, "heads"),
        (32, 32, 2, "heads"),
        (64, 8, 16, "heads"),
    ],
)
def test_the_cheaper_way_is_taken(heads: int, kv_heads: int, ranks: int, way: Way) -> None:
    sizes = (AttentionSize(28, heads, kv_heads, 128, 128),)
    assert cheaper_way(sizes, ranks, [65536], [None]) == way


def test_uneven_rows_are_exchanged_by_heads() -> None:
    """A prompt and a long answer at the end of the row: with keys the last ranks would have more to do than the first."""
    sizes = (AttentionSize(28, 8, 8, 16, 16),)
    lengths: list[int] = [1] * 30000 + [30000]
    assert cheaper_way(sizes, 2, lengths, [None] * len(lengths)) == "heads"


def test_sizes_of_a_part_are_those_of_its_own_tokens() -> None:
    """What is learned is divided among ranks, and so is nearly what is computed; each knows how long the whole row is."""
    batch = MicroBatch.build(samples_of([6, 9, 4, 7]), torch.device("cpu"))
    sizes = (AttentionSize(1, 4, 2, 8, 8),)
    found = on_ranks(2, sizes, lambda group: batch.sizes_on(group))
    assert sum(tokens for tokens, *_ in found) == len(batch.tokens_T)
    assert sum(learned for _, learned, *_ in found) == len(batch.targets_R)
    assert sum(pairs for *_, pairs, _ in found) <= batch.plan.pairs and all(
        row == len(batch.tokens_T) for *_, row in found
    )
