"""Stop strings, exact to the token and independent of when they are looked for.

A completion ends with the first token after which its text contains a stop string. Looking every few steps finds the same token
as looking at every step: what was generated beyond it is dropped.
"""

from __future__ import annotations

from typing import Any

LOOK_EVERY = 8


def decode_all(tokenizer: Any, completions: list[list[int]]) -> list[str]:
    """Texts as rewards and stop strings see them: exactly what was written, without special tokens."""
    texts: list[str] = tokenizer.batch_decode(completions, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return texts


class StopStrings:
    """Finds stop strings in token lists."""

    def __init__(self, strings: list[str], tokenizer: Any) -> None:
        self._strings = strings
        self._tokenizer = tokenizer
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._strings)

    def due(self) -> bool:
        """True every few calls, where there are stop strings at all."""
        self._steps += 1
        return bool(self._strings) and self._steps % LOOK_EVERY == 0

    def find(self, tokens: list[int]) -> int | None:
        """Number of tokens up to and including the one that completes the first stop string; None if there is none."""
        if not self._strings or not self._contains(tokens):
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
        (text,) = decode_all(self._tokenizer, [tokens])
        return any(string in text for string in self._strings)
