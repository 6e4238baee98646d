"""Text from outside (a model, a data set, a log) as a terminal may show it: what is no character to look at is made visible.

A control character would be obeyed by the terminal, and a direction mark would turn the text around it; so both are shown by a
sign or by their number, and never sent.
"""

from __future__ import annotations

import unicodedata

HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Categories of characters that are obeyed, or are not seen."""


def visible(text: str) -> str:
    """`text` on one line: control characters as ␛, ␀, ␊, others that are not seen as <U+202E>."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(map(_shown, text))


def visible_lines(text: str) -> list[str]:
    """`text` as lines, each of them visible. Only a newline ends one; a tab is four spaces."""
    return [visible(line.replace("\t", "    ")) for line in text.split("\n")]


def _shown(character: str) -> str:
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    return "␡" if code == 0x7F else f"<U+{code:04X}>"
