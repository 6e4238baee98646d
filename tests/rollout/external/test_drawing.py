"""Tokens drawn inside another library: those of `sampler.sample`, noted by request and position."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from trimtab.config.learn import Sampling
from trimtab.rollout.external.drawing import KeyedSampler, LogitsRow
from trimtab.rollout.external.sglang.rows import draw_batch
from trimtab.rollout.sampler import sample

VOCABULARY = 50
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.6, "top_p": 0.8}, {"temperature": 0.0}, {"top_k": 4}], ids=str
)
@pytest.mark.parametrize("rows", [(2, 0), (2, 0, 1)], ids=["some", "all, in another order"])
def test_a_row_draws_what_the_sampler_draws(sampling: dict, rows: tuple[int, ...]) -> None:
    drawn, settings, scores = KeyedSampler(4, 8, DEVICE), Sampling(**sampling), logits(3)
    drawn.sampling = settings
    keys, positions = [11, -5, 2**62], [0, 3, 7]
    for name in "abc":
        drawn.hold(name)
    at, tokens = drawn.draw(scores, [LogitsRow(i, "abc"[i], keys[i], positions[i]) for i in rows])
    wanted, logprobs = sample(
        scores.cpu()[list(rows)] / (settings.temperature or 1.0),
        settings,
        torch.tensor([keys[i] for i in rows]),
        torch.tensor([positions[i] for i in rows]),
    )
    assert at.tolist() == list(rows) and tokens.tolist() == wanted.tolist()
    found = drawn.take(["c", "a"], [8, 1])
    assert [len(row) for row in found] == [8, 1]
    torch.testing.assert_close(torch.stack([found[0][7], found[1][0]]), logprobs[:2], atol=1e-5, rtol=0)


def test_slots_are_kept_given_back_and_made() -> None:
    drawn = KeyedSampler(2, 4, DEVICE)
    for name in ("a", "b", "a", "c", "d", "e"):
        drawn.hold(name)  # three more than there were slots
    scores = logits(5)
    _, tokens = drawn.draw(scores, [LogitsRow(i, name, i, 0) for i, name in enumerate("abcde")])
    assert len(tokens) == 5
    values = {name: drawn.take([name], [1])[0].item() for name in "ca"}
    whole = torch.log_softmax(scores.float(), -1)
    assert values["c"] == pytest.approx(whole[2, tokens[2]].item(), abs=1e-5)
    assert values["a"] == pytest.approx(whole[0, tokens[0]].item(), abs=1e-5)
    assert "a" not in drawn and "b" in drawn
    drawn.forget(["b", "never there"])
    assert "b" not in drawn


def test_a_request_that_is_held_again_keeps_what_was_noted() -> None:
    """As one that lost its row in a batch and came back."""
    drawn, scores, tokens = KeyedSampler(4, 4, DEVICE), logits(2), []
    for position in range(2):
        drawn.hold("a")
        tokens.append(drawn.draw(scores[position : position + 1], [LogitsRow(0, "a", 3, position)])[1].item())
    whole = torch.log_softmax(scores.float(), -1).cpu()
    wanted = [whole[position, token].item() for position, token in enumerate(tokens)]
    assert drawn.take(["a"], [2])[0].tolist() == pytest.approx(wanted, abs=1e-5)


def test_slots_that_were_given_back_are_used_again() -> None:
    drawn = KeyedSampler(2, 4, DEVICE)
    for round in range(3):
        names = [f"{round}{name}" for name in "ab"]
        for name in names:
            drawn.hold(name)
        drawn.draw(logits(2), [LogitsRow(i, name, i, 0) for i, name in enumerate(names)])
        drawn.forget(names[:1])
        drawn.take(names[1:], [1])
    assert drawn._logprobs.shape[0] == 2


def test_half_precision_is_drawn_from_in_full() -> None:
    """Temperature and logarithms in bfloat16 would be off by a hundredth."""
    drawn, scores = KeyedSampler(4, 8, DEVICE), 5 * logits(1).bfloat16()
    drawn.sampling = Sampling(temperature=0.7)
    drawn.hold("a")
    drawn.draw(scores, [LogitsRow(0, "a", 9, 0)])
    _, wanted = sample(scores.float().cpu() / 0.7, drawn.sampling, torch.tensor([9]), torch.tensor([0]))
    assert drawn.take(["a"], [1])[0].item() == pytest.approx(wanted.item(), abs=1e-4)


@dataclass
class Request:
    """As much of SGLang's as is looked at."""

    rid: str
    output_ids: list[int] = field(default_factory=list)
    inflight_middle_chunks: int = 0


def test_rows_that_nobody_reads_change_nothing() -> None:
    """The middle of a prompt, and a request that was aborted a step ago."""
    drawn, scores = KeyedSampler(4, 8, DEVICE), logits(3)
    drawn.hold("chunk")
    drawn.hold("mine")
    requests = [Request("chunk", [], 1), Request("gone", [1, 2]), Request("mine", [4])]
    keys = {"chunk": 1, "mine": 2}
    tokens = draw_batch(drawn, scores, requests, keys)
    wanted, _ = sample(scores.cpu()[[2]], Sampling(), torch.tensor([2]), torch.tensor([1]))
    assert tokens.tolist() == [0, 0, wanted.item()]
    assert drawn.take(["chunk"], [1])[0].tolist() == [0.0]
    assert draw_batch(drawn, scores[:1], requests[1:2], keys).tolist() == [0]


def test_a_request_that_is_computed_again_is_noted_as_before() -> None:
    """SGLang retracts requests: prompt and what was made come back as one prompt, in chunks, in other rows."""
    drawn = KeyedSampler(4, 8, DEVICE)
    drawn.hold("a")
    request, keys, rows = Request("a"), {"a": 77}, [logits(1, seed) for seed in range(4)]
    for scores in rows[:3]:
        request.output_ids.append(int(draw_batch(drawn, scores, [request], keys)))
    again = Request("a", request.output_ids[:2], 1)
    draw_batch(drawn, rows[3], [again], keys)  # a chunk in the middle of it
    again.inflight_middle_chunks = 0
    assert (
        int(draw_batch(drawn, torch.cat([rows[3], rows[2]]), [Request("b"), again], keys)[1]) == request.output_ids[2]
    )
    found = drawn.take(["a"], [3])[0]
    wanted = [torch.log_softmax(row[0].float(), -1)[token].item() for row, token in zip(rows, request.output_ids)]
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


def test_a_batch_that_is_not_the_one_computed_is_noticed() -> None:
    with pytest.raises(AssertionError, match="3 rows of 1 requests"):
        draw_batch(KeyedSampler(4, 8, DEVICE), logits(3), [Request("a")], {})
