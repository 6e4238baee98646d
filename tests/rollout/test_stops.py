"""Stop strings end a completion at the same token whenever they are looked for."""

from __future__ import annotations

import pytest

from trimtab.rollout.native.scheduler import PromptGroup, Sequence
from trimtab.rollout.stops import StopStrings


def sequence() -> Sequence:
    return Sequence(PromptGroup(0, [1], [100]), 0, 0)


@pytest.mark.parametrize(
    ("text", "stops", "end"),
    [
        ("12+34=46;99", [";"], 9),
        ("ab##cd##", ["##"], 4),
        ("abc", ["x"], None),
        ("ab12", ["b1", "ab12"], 3),
        ("", ["a"], None),
    ],
)
def test_finds_the_token_that_completes_the_first_stop(tokenizer, text: str, stops: list[str], end: int | None) -> None:
    assert StopStrings(stops, tokenizer).find(sequence(), tokenizer(text).input_ids) == end


@pytest.mark.parametrize("every", [1, 3, 7, 50])
def test_finds_the_same_token_however_often_it_looks(tokenizer, every: str) -> None:
    """Each look reads only what is new and the little before it that a stop string could begin in."""
    tokens = tokenizer("a" * 90 + "x" * 30 + "stop here" + "b" * 40).input_ids
    stops, growing = StopStrings(["stop here"], tokenizer), sequence()
    for count in range(every, len(tokens) + every, every):
        end = stops.find(growing, tokens[:count])
        if end is not None:
            break
    assert end == 129


@pytest.mark.parametrize("every", [1, 8, 200])
def test_tokens_without_text_do_not_hide_a_stop(tokenizer, every: int) -> None:
    """Special tokens are not in the text, so a stop string may lie around any number of them."""
    a, b = tokenizer("ab").input_ids
    tokens = [b] * 40 + [a] + [tokenizer.pad_token_id] * 60 + [b] * 20
    stops, growing = StopStrings(["ab"], tokenizer), sequence()
    looks = (stops.find(growing, tokens[:count]) for count in range(every, len(tokens) + every, every))
    assert next((end for end in looks if end is not None), None) == 102


def test_there_may_be_nothing_to_look_for(tokenizer) -> None:
    assert not StopStrings([], tokenizer)
    assert StopStrings([";"], tokenizer)
