"""Stop strings, exact to the token and independent of when they are looked for.

A completion ends with the first token after which its text contains a stop string. Looking every few steps finds the same token
as looking at every step: what was generated beyond it is dropped. Each look reads only the text that is new, with as much of
the old as a stop string could reach back into; where one is found there, the whole text decides.
"""

from __future__ import annotations

from typing import Any, Protocol

CHECK_EVERY_TOKENS = 8
"""Stop strings are searched after this many new tokens of a sequence, and always when it has ended."""
MAX_TOKENS_PER_CHARACTER = 4
"""A character has at most four bytes, and a token that has text at least one."""


class Growing(Protocol):
    """A completion that is not at its end."""

    looked: int
    """Tokens that have been looked at."""


def decode_all(tokenizer: Any, completions: list[list[int]]) -> list[str]:
    """Texts as rewards and stop strings see them: exactly what was written, without special tokens."""
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts


class StopStrings:
    """Finds stop strings in token lists that grow."""

    def __init__(self, strings: list[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        self._longest = max(map(len, strings), default=0)
        self._reach = MAX_TOKENS_PER_CHARACTER * (1 + self._longest)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, sequence: Growing, tokens: list[int]) -> int | None:
        """Number of tokens up to and including the one that completes the first stop string; None if there is none."""
        start = max(0, sequence.looked - self._reach)
        while start and len(self._text(tokens[start : sequence.looked])) < self._longest:
            start = max(0, start - self._reach)  # special tokens have no text, and a stop string may lie around them
        sequence.looked = len(tokens)
        if not self._contains(tokens[start:]) or not self._contains(tokens):
            return None
        low, high = 1, len(tokens)
        while low < high:  # once a text contains a stop string, so does every longer one
            middle = (low + high) // 2
            if self._contains(tokens[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _contains(self, tokens: list[int]) -> bool:
        text = self._text(tokens)
        return any(string in text for string in self._strings)

    def _text(self, tokens: list[int]) -> str:
        (text,) = decode_all(self._tokenizer, [tokens])
        return text
