"""Plans in which devices share micro-batches: found where a sequence does not fit otherwise, with its memory and time; and the
guides' advice, which the search finds or beats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.plan.test_planner import qwen
from trimtab.base.errors import ConfigError
from trimtab.config.run import Offload, Run
from trimtab.plan.communication import of_shared_rows
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB, NCCL
from trimtab.plan.links import link_of
from trimtab.plan.place import place_over
from trimtab.plan.placement import Placement
from trimtab.plan.planner import Plan, make_plan
from trimtab.plan.refuse_devices import refuse_devices
from trimtab.plan.rows import RowRanks, least_budget, least_score_budget, row_here


def eight(name: str = "h200", hosts: int = 1) -> Machine:
    return Machine(find_device(name), 8 * hosts, 2000 * GIB, 64)


def long(tokens: int, name: str = "qwen2.5-7b", **settings: Any) -> Job:
    """Answers of so many tokens that are given, not drawn: whether they fit is the update's matter."""
    usual = {"longest_prompt": 1, "typical_prompt": 1, "completion": tokens - 1, "prompts": 8, "samples": 1}
    return qwen(name, **{**usual, "generates": False, **settings})


def update_bytes(plan: Plan) -> int:
    return plan.ledger["update"].device_bytes


def test_short_sequences_are_not_shared() -> None:
    plan = place_over(Run(), qwen("qwen2.5-7b"), eight())
    assert plan.run.sequence_parallel == 1 and plan.place.rows == RowRanks()


def test_a_million_tokens_are_planned() -> None:
    """No device holds the residual of a million tokens of a 7B model; sixteen share it, over two hosts."""
    job = long(1_000_000)
    for sharing in (1, 2):
        assert not place_over(Run(sequence_parallel=sharing), job, eight(hosts=2)).fits
    plan = place_over(Run(), job, eight(hosts=2))
    assert plan.fits and isinstance(plan.run.sequence_parallel, int) and plan.run.sequence_parallel >= 4
    assert plan.run.token_budget >= -(-1_000_000 // plan.run.sequence_parallel)
    assert update_bytes(plan) <= plan.limits.device
    waits = plan.times.waits.update
    assert 0 < waits < plan.times.update, "exchanging is less than computing"
    why = next(choice.why for choice in plan.choices if choice.key == "run.sequence_parallel")
    assert why == "long sequences fit only in parts, or are faster so"


def test_what_a_device_has_of_a_row_shrinks_with_the_ranks_that_share_it() -> None:
    job = long(262_144)
    pinned = {
        "shard": "full",
        "checkpoint_activations": True,
        "offload": Offload(activations=False),
        "logprob_chunk": 128,
    }
    found = [
        make_plan(Run(sequence_parallel=n, token_budget=262_144 // n, **pinned), job, eight()) for n in (1, 2, 4, 8)
    ]
    works = [
        sum(plan.ledger["update"].device.get(name, 0) for name in ("activations", "backward work", "log-prob head"))
        for plan in found
    ]
    assert works == sorted(works, reverse=True) and works[3] < works[0] / 4
    assert [least_budget(job, plan.place.rows) for plan in found] == [262_144, 131_072, 65_536, 32_768]
    assert found[1].ledger["update"].device[NCCL] > found[0].ledger["update"].device[NCCL]


def test_models_share_rows_among_different_numbers() -> None:
    job = replace(long(65_536, generates=False), compared=True, old_logprobs=True)
    rows = RowRanks(policy=4, reference=2, critic=4)
    assert least_budget(job, rows) == 16_384 and least_score_budget(job, rows) == 32_768
    plan = make_plan(Run(sequence_parallel={"policy": 4, "reference": 2}), job, eight())
    assert plan.place.rows == RowRanks(4, 2, 4)
    assert plan.run.sequence_parallel == {"policy": 4, "reference": 2}


def test_a_part_of_a_row_counts_what_it_sees() -> None:
    """A rank of gathered keys sees the whole sequence once more; all of its tokens may be learned ones."""
    job = long(100_000)
    part = row_here(job, 25_000, 4, 4)
    assert part.tokens == 25_000 and part.row == 100_000 and part.predicted == 25_000
    assert part.seen > 100_000
    assert row_here(job, 100_000, 1, 4).row == 0


@pytest.mark.parametrize(
    ("job", "machine", "advised"),
    [
        # 001: Ulysses over 2 devices for 32k tokens, of a 7B model on 8 A100.
        (long(32_768), eight("a100-80gb"), {"sequence_parallel": 2}),
        # 000: ring attention with a head stride over 2 for long contexts of 70B.
        (long(32_768, "llama-3.1-70b"), eight("h100", hosts=4), {"sequence_parallel": 2, "shard": "full"}),
    ],
)
def test_the_guides_advice_is_found_or_beaten(job: Job, machine: Machine, advised: dict[str, Any]) -> None:
    """With less time a step; the advice itself fits, with its memory and time known."""
    found, guide = place_over(Run(), job, machine), place_over(Run(**advised), job, machine)
    assert found.fits
    if guide.fits:
        assert found.times.total <= 1.02 * guide.times.total
        assert guide.times.waits.update > 0 and update_bytes(guide) <= guide.limits.device


def test_the_exchange_takes_what_was_worked_out_by_hand() -> None:
    """Llama-3.1-70B over 2 devices gathers keys: 8 heads of 128, twice, of 80 layers, forward and backward."""
    job, machine = long(32_768, "llama-3.1-70b", prompts=1), eight()
    place = Placement(8, 1, "full", 8, rows=RowRanks(2, 2, 2))
    found = of_shared_rows(job, machine, place, 1, 0, recompute=False).update
    rate, call = link_of(machine)
    tokens = job.expected_row.tokens * 2 / 8
    assert found == pytest.approx(2 * (80 * call + 0.5 * tokens * 80 * 8 * 256 * 2 / rate))


def test_sizes_that_devices_do_not_allow_are_refused() -> None:
    job = long(1000)
    with pytest.raises(ConfigError, match=r"16 devices share each micro-batch, but there are only 8.*Write 8"):
        refuse_devices(Run(sequence_parallel=16), job, replace(eight(), here=True))
    hybrid = replace(job, shape=replace(job.shape, kind="qwen3_next"))
    with pytest.raises(ConfigError, match="carry a state from token to token"):
        refuse_devices(Run(sequence_parallel=2), hybrid, eight())
    assert place_over(Run(), replace(hybrid, completion=400_000), eight()).place.rows == RowRanks()
