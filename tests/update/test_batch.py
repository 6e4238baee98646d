"""Micro-batches: within the cap, nothing lost, each prompt in the row once, and values find their way back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.update.batch import MicroBatch, Sample, parts_by_prompt, row_tokens
from trimtab.update.packing import pack

CPU = torch.device("cpu")


def sample(prompt: list[int], length: int, mark: int) -> Sample:
    values = torch.arange(length, dtype=torch.float32) + 100 * mark
    return Sample(prompt, torch.arange(length) + 1000 * mark, values, values, values)


GROUPS = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.integers(1, 30), min_size=1, max_size=6)), min_size=1, max_size=6
)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(0, 120))
def test_no_micro_batch_exceeds_the_budget_and_no_token_is_lost(groups, spare: int) -> None:
    made = [
        sample(list(range(g, g + prompt)), length, 10 * g + i)
        for g, (prompt, lengths) in enumerate(groups)
        for i, length in enumerate(lengths)
    ]
    budget = max(map(len, made)) + spare
    parts = parts_by_prompt(made, budget)
    batches = [
        MicroBatch.build([s for i in indices for s in parts[i]], CPU)
        for indices in pack([row_tokens(part) for part in parts], budget)
    ]
    assert all(batch.tokens_T.shape[0] <= budget for batch in batches)
    assert sorted(t for b in batches for t in b.targets_R.tolist()) == sorted(
        t for s in made for t in s.tokens.tolist()
    )
    for batch in batches:
        assert sum(batch.plan.lengths) == batch.tokens_T.shape[0]
        # Each target is predicted by the token before it: the prompt's last, or the completion's previous one.
        before = batch.tokens_T[batch.predictors_R]
        expected = torch.cat([torch.tensor([s.prompt_tokens[-1], *s.tokens[:-1].tolist()]) for s in batch.samples])
        assert torch.equal(before, expected)
        assert torch.equal(batch.gather("advantages"), torch.cat([s.advantages for s in batch.samples]))


def test_values_go_back_to_their_own_sample() -> None:
    made = [sample([1, 2], 5, 1), sample([1, 2], 3, 2), sample([3], 4, 3)]
    batch = MicroBatch.build(made, CPU)
    batch.scatter(batch.targets_R.float() + 0.5, "old_logprobs")
    for one in made:
        assert torch.equal(one.old_logprobs, one.tokens.float() + 0.5)


def test_a_prompt_is_in_the_row_once() -> None:
    batch = MicroBatch.build([sample([7, 8, 9], 4, 1), sample([7, 8, 9], 4, 2)], CPU)
    assert batch.tokens_T.tolist().count(7) == 1
    assert batch.tokens_T.shape[0] == 3 + 3 + 3
    assert batch.plan.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5]
