"""What a judge is asked and what is taken for its score, and the memory of what it said."""

from __future__ import annotations

from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.reward.judge.cache import FILE, ScoreCache
from trimtab.reward.judge.client import retry_after_s
from trimtab.reward.judge.words import Template, read_score

TEN = (0.0, 10.0)
SCORES = {
    "7": 7.0,
    " 7.5\n": 7.5,
    '{"score": 3}': 3.0,
    '```json\n{"score": 3.5, "why": {"a": 1}}\n```': 3.5,
    'It is {short}.\n{"reason": "ok", "score": 10}': 10.0,
    "Well argued.\nScore: 8": 8.0,
    "**Score:** 8.5": 8.5,
    "Good.\n\n- score = 2.": 2.0,
    '<think>score: 1? {"score": 2}</think>\n9': 9.0,
}
NO_SCORES = [
    "",
    "great",
    "9 out of 10 people agree.",
    "I give it a 7",
    "Score: high",
    "Score: 8/10",
    "Score: 8\nThat is all I have to say.",
    "11",
    "-1",
    "1e1",
    "nan",
    '{"score": "7"}',
    '{"score": true}',
    '{"score": null}',
    '{"score": 11}',
    '{"score": Infinity}',
    '{"score": NaN}',
    '{"score": ' + "9" * 400 + "}",
    '{"score": ' + "9" * 5000 + "}",
    '{"points": 7}',
    '{"score": 7',
    "[7]",
    "[" * 19_000,
    "Score: " + "9" * 400,
]


@pytest.mark.parametrize(("answer", "score"), SCORES.items())
def test_a_score_in_a_form_that_was_asked_for(answer: str, score: float) -> None:
    assert read_score(answer, TEN, None) == score


@pytest.mark.parametrize("answer", NO_SCORES, ids=lambda answer: answer[:20])
def test_anything_else_is_no_score(answer: str) -> None:
    assert read_score(answer, TEN, None) is None


@settings(deadline=None)
@given(st.text())
def test_no_text_breaks_it(answer: str) -> None:
    score = read_score(answer, TEN, None)
    assert score is None or 0 <= score <= 10


def test_a_pattern_takes_its_last_match_and_nothing_else() -> None:
    pattern = regex.compile(r"Rating: \[\[(.+?)\]\]")
    assert read_score("Rating: [[2]] no, Rating: [[4]]", TEN, pattern) == 4.0
    for answer in ("7", '{"score": 7}', "Rating: [[high]]", "Rating: [[40]]"):
        assert read_score(answer, TEN, pattern) is None


def test_a_pattern_that_never_ends_is_ended() -> None:
    assert read_score("a" * 5000, TEN, regex.compile("((?:a+)+)+b")) is None


def test_only_named_fields_are_filled_in_and_once() -> None:
    template = Template('{prompt}|{completion}|{gold}|{"score": N}|{ gold }|{}', reserved=set())
    assert template.columns == {"gold"}
    filled = template.fill("{completion}", "{gold}", {"gold": "{prompt}", "other": 1})
    assert filled == '{completion}|{gold}|{prompt}|{"score": N}|{ gold }|{}'


@pytest.mark.parametrize(
    ("header", "seconds"),
    [(None, 0.0), ("", 0.0), ("7", 7.0), ("soon", 0.0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0), ("-3", 0.0)],
)
def test_how_long_an_endpoint_asks_to_wait(header: str | None, seconds: float) -> None:
    assert retry_after_s(header) == seconds


def test_a_date_to_come_is_a_time_to_wait() -> None:
    assert retry_after_s("Wed, 21 Oct 2122 07:28:00 GMT") > 1e6


def test_a_cache_forgets_what_was_used_longest_ago() -> None:
    cache = ScoreCache(limit=2)
    cache.put("a", 1.0)
    cache.put("b", 2.0)
    assert cache.get("a") == 1.0
    cache.put("c", 3.0)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1.0, None, 3.0)
    assert len(cache) == 2


def test_a_cache_on_disk_leaves_damage_out(tmp_path: Path) -> None:
    first = ScoreCache(tmp_path)
    for name, score in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        first.put(name, score)
    path = tmp_path / FILE
    whole = path.read_bytes()
    damaged = whole.replace(b'"b"', b'\xff"b"') + b'[1]\n{"request": "d", "score": NaN}\n{"request": 5, "score": 1}\n'
    path.write_bytes(damaged + b"[" * 100_000 + b'\n{"request": "e", "sc')
    second = ScoreCache(tmp_path)
    assert [second.get(name) for name in "abcde"] == [1.0, None, 3.0, None, None]
    second.put("f", 6.0)
    assert ScoreCache(tmp_path).get("f") == 6.0
    assert len(path.read_bytes().splitlines()) == 3, "a torn file was replaced by a whole one"


def test_a_file_that_has_grown_is_cut_to_what_is_kept(tmp_path: Path) -> None:
    first = ScoreCache(tmp_path, limit=4)
    for number in range(20):
        first.put(str(number), float(number))
    second = ScoreCache(tmp_path, limit=4)
    assert [second.get(str(number)) for number in (15, 16, 19)] == [None, 16.0, 19.0]
    assert len((tmp_path / FILE).read_bytes().splitlines()) == 4


def test_a_folder_that_is_not_there_yet_is_not_made(tmp_path: Path) -> None:
    cache = ScoreCache(tmp_path / "run")
    cache.put("a", 1.0)
    assert cache.get("a") == 1.0
    assert not (tmp_path / "run").exists()


def test_a_judge_reads_a_conversation_whole() -> None:
    turns = [{"role": "assistant", "content": "6*7?"}, {"role": "tool", "content": "42"}]
    asked = [{"role": "user", "content": "q"}]
    filled = Template("{prompt}|{completion}", set()).fill(
        asked, [*turns, {"role": "assistant", "content": "It is 42"}], {}
    )
    assert filled == "q|assistant: 6*7?\n\ntool: 42\n\nassistant: It is 42"


def test_a_message_that_only_calls_tools_has_no_text() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    asked = [{"role": "user", "content": "q"}, call]
    assert Template("{prompt}|{completion}", set()).fill(asked, "x", {}) == "user: q\n\nassistant: |x"
