"""Tokens of a text that stands behind another one.

A conversation is tokenised piece by piece: what is there is never tokenised again, so that what a model drew stays what it drew.
Some tokenizers put a space before every text; behind another text there is none, so pieces are read behind an anchor there, which
is taken off again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANCHOR = "\n"
MAX_TOKENS_AFTER_END = 4
"""Tokens, at most, that a template writes after the one that ends a turn, and that one."""


class Pieces:
    """Tokenises pieces of one conversation, or of many."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        alone, anchor, behind = self._ids(["a", ANCHOR, ANCHOR + "a"])
        self._anchor = anchor
        self._anchored = behind[: len(anchor)] == anchor and behind[len(anchor) :] != alone
        others = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id)
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(
            tokenizer.all_special_ids
        )
        self.ends = (special - set(others)) | ({tokenizer.eos_token_id} - {None})
        """Tokens that may end a turn."""

    def tokens(self, texts: Sequence[str], behind: Sequence[bool]) -> list[list[int]]:
        """Tokens of each text; `behind`: whether another one stands before it."""
        if not self._anchored:
            return self._ids(list(texts))
        found = self._ids([ANCHOR + text if anchored else text for text, anchored in zip(texts, behind, strict=True)])
        return [ids[len(self._anchor) :] if anchored else ids for ids, anchored in zip(found, behind)]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return list(self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
