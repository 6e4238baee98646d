"""Pairs of answers as token ids: one prompt, the better continuation, the worse one.

Each answer is written by the chat template as a worked answer is (examples.py), with the token that ends it, which is where a
score is read. Whatever both conversations begin with is the prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.config.reward_model import PairData
from trimtab.config.sft import SftData
from trimtab.data.examples import NO_TEMPLATE, ExampleEncoder, completion_problem, messages_problem
from trimtab.data.files import Row
from trimtab.data.images import shown_beside

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Pair:
    """One row, ready to learn from."""

    id: int
    """Row number in its data set."""
    prompt: list[int]
    better: list[int]
    worse: list[int]
    margin: float = 0.0

    @property
    def tokens(self) -> list[int]:
        """The longer of the two conversations."""
        return [*self.prompt, *max(self.better, self.worse, key=len)]

    @property
    def row_tokens(self) -> int:
        """Room that both take together: the prompt once."""
        return len(self.prompt) + len(self.better) + len(self.worse)


class PairEncoder:
    """Turns rows into pairs as `data` says."""

    most_in_one = 2

    def __init__(self, data: PairData, tokenizer: PreTrainedTokenizerBase, source_name: str) -> None:
        self.data, self.source_name = data, source_name
        shared = data.model_dump(exclude={"chosen", "rejected", "margin"})
        self._answers = ExampleEncoder(SftData.model_validate(shared), "last", tokenizer, source_name)

    @property
    def templated(self) -> bool:
        return self._answers.templated

    def encode(self, ids: Sequence[int], rows: Sequence[Row]) -> list[Pair]:
        """One pair a row; `ids` are the rows' numbers."""
        texts = [self._as_example(row, side) for row in rows for side in (self.data.chosen, self.data.rejected)]
        found = self._answers.encode([number for number in ids for _ in range(2)], texts)
        pairs = []
        for at, (number, row) in enumerate(zip(ids, rows, strict=True)):
            better, worse = found[2 * at].tokens, found[2 * at + 1].tokens
            if better == worse:
                raise DataError(
                    f"{self.source_name}, row {number + 1} (from 1): both answers are the same. Remove the row."
                )
            most = min(found[2 * at].start, found[2 * at + 1].start)
            same = next((i for i in range(most) if better[i] != worse[i]), most)
            if not same:
                raise DataError(
                    f"{self.source_name}, row {number + 1} (from 1): the two conversations begin differently, so they do not "
                    "answer the same prompt. Remove the row."
                )
            margin = 0.0 if self.data.margin is None else float(row[self.data.margin])
            pairs.append(Pair(number, better[:same], better[same:], worse[same:], margin))
        return pairs

    def rendered(self, number: int, row: Row) -> str:
        sides = (self.data.chosen, self.data.rejected)
        return "".join(self._answers.rendered(number, self._as_example(row, side)) for side in sides)

    def problem(self, row: Row) -> str:
        """What is wrong with a row, or nothing."""
        data = self.data
        if shown := shown_beside(row):
            return shown
        for side in (data.chosen, data.rejected):
            if side not in row:
                return f"has no column {side!r}; its columns are {', '.join(map(repr, row))}.{did_you_mean(side, row)}"
        if data.prompt not in row and isinstance(row[data.chosen], str):
            return f"has no column {data.prompt!r}, and its answers are not whole conversations.{did_you_mean(data.prompt, row)}"
        if data.margin is not None:
            if data.margin not in row:
                columns = ", ".join(map(repr, row))
                near = did_you_mean(data.margin, row)
                return f"has no column {data.margin!r} (data.margin); its columns are {columns}.{near}"
            if not _is_margin(row[data.margin]):
                return f"column {data.margin!r} must be a finite number of at least 0, but is {row[data.margin]!r}."
        for side in (data.chosen, data.rejected):
            example = self._as_example(row, side)
            if "messages" in example:
                given = example["messages"]
                bare = isinstance(given, list) and not self._answers.templated
                found = NO_TEMPLATE if bare else messages_problem(given, side, data)
            else:
                found = completion_problem(example, self._answers).replace("'completion'", repr(side))
            if found:
                return found
        return ""

    def _as_example(self, row: Row, side: str) -> dict[str, Any]:
        if self.data.prompt in row:
            return {self.data.prompt: row[self.data.prompt], "completion": row[side]}
        return {"messages": row[side]}


def _is_margin(value: object) -> bool:
    """The loss asks the better answer to lead by so much: below 0 it would be told to let the worse one lead."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
