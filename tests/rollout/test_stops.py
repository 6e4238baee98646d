"""Stop strings end a completion at the same token whenever they are looked for."""

from __future__ import annotations

import pytest

from trimtab.rollout.native.stops import LOOK_EVERY, StopStrings


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
    assert StopStrings(stops, tokenizer).find(tokenizer(text).input_ids) == end


def test_looks_only_where_there_is_something_to_find(tokenizer) -> None:
    assert not any(StopStrings([], tokenizer).due() for _ in range(3 * LOOK_EVERY))
    looking = StopStrings([";"], tokenizer)
    assert sum(looking.due() for _ in range(3 * LOOK_EVERY)) == 3
