"""What a model wrote is shown, and never obeyed."""

from __future__ import annotations

import sys
import unicodedata

from trimtab.observe.visible import visible, visible_lines


def test_plain_text_is_as_it_was() -> None:
    for text in ("2+2=4", "Grüße, 你好, 🙂, [bold]x[/]", "é"):
        assert visible(text) == text


def test_what_a_terminal_obeys_is_shown() -> None:
    assert visible("\x1b[2J\x07\x00\r\n\t\x7f") == "␛[2J␇␀␍␊␉␡"
    assert visible("\x9b31m‮abc​\u2028") == "<U+009B>31m<U+202E>abc<U+200B><U+2028>"
    assert visible("\ud800") == "<U+D800>"


def test_no_character_is_left_that_is_obeyed_or_not_seen() -> None:
    shown = visible("".join(map(chr, range(sys.maxunicode + 1))))
    assert not {unicodedata.category(c) for c in set(shown)} & {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_lines_end_at_newlines_only() -> None:
    assert visible_lines("a\nb\tc\r\n\x85d") == ["a", "b    c␍", "<U+0085>d"]
