"""Worked answers as token ids, and which of them are learned.

A row is a conversation (`data.messages`), a prompt with its completion, or plain text. Conversations, and strings where the
tokenizer has a chat template, are written by that template piece by piece: what comes before an answer exactly as a prompt of
reinforcement learning is written, so that what is learned here is what is sampled from later; then the answer with the token
that ends it. Pieces are tokenised by themselves, as a prompt and what the model adds to it are.

Guaranteed: an example is never cut; its first token is never learned, as nothing predicts it; at least one token is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.config.schema import Data
from trimtab.config.sft import SftData
from trimtab.data.deadline import render_within
from trimtab.data.encode import PromptEncoder
from trimtab.data.files import Row
from trimtab.data.images import shown_beside, shown_within
from trimtab.data.pieces import MAX_TOKENS_AFTER_END, Pieces
from trimtab.data.prompt import Message
from trimtab.data.prompts import cut, one_of_each, roles_problem, text_problem
from trimtab.data.stream import Encoder, Item
from trimtab.data.trial import try_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1024
NO_TEMPLATE = "has messages, but the tokenizer has no chat template (or data.chat_template is never)."


@dataclass(frozen=True)
class Example:
    """One row, ready to learn from."""

    id: int
    """Row number in its data set."""
    tokens: list[int]
    learned: list[bool]
    """Whether each token is learned."""

    @property
    def start(self) -> int:
        """The first token that is learned."""
        return self.learned.index(True)


@dataclass(frozen=True)
class _Piece:
    text: str
    learned: bool = False
    ends: bool = False
    """An answer: it ends with a token that says so."""
    last: bool = False


class Checking(Encoder[Item], Protocol[Item]):
    """An encoder that can say what is wrong with a row before anything is done with it."""

    most_in_one: int
    """Sequences of one item."""

    @property
    def templated(self) -> bool:
        """Whether a chat template writes conversations."""
        ...

    def rendered(self, number: int, row: Row) -> str:
        """What the chat template writes of a row; nothing is tokenised."""
        ...

    def problem(self, row: Row) -> str: ...


class ExampleEncoder:
    """Turns rows into examples as `data` and `learn.loss_on` say."""

    most_in_one = 1

    def __init__(self, data: SftData, loss_on: str, tokenizer: PreTrainedTokenizerBase, source_name: str) -> None:
        self.data, self.loss_on, self.tokenizer, self.source_name = data, loss_on, tokenizer, source_name
        self._prompts = PromptEncoder(data, tokenizer, source_name)
        if tokenizer.eos_token_id is None:
            raise DataError(
                "The tokenizer has no end-of-sequence token, so the model could not learn to end its answers. "
                "Set model.tokenizer to one that has it."
            )
        self._eos = int(tokenizer.eos_token_id)
        self._read = Pieces(tokenizer)
        self._ends = self._read.ends
        opening = list(tokenizer("a")["input_ids"][:1])
        self._opening = opening if opening == [tokenizer.bos_token_id] else []

    @property
    def templated(self) -> bool:
        return self._prompts.templated

    def encode(self, ids: Sequence[int], rows: Sequence[Row]) -> list[Example]:
        """One example a row; `ids` are the rows' numbers."""
        pieces = [self._pieces(number, row) for number, row in zip(ids, rows, strict=True)]
        found = iter(self._tokenised(pieces))
        return [self._example(*each, found) for each in zip(ids, rows, pieces, strict=True)]

    def rendered(self, number: int, row: Row) -> str:
        return "".join(piece.text for piece in self._pieces(number, row))

    def _tokenised(self, pieces: list[list[_Piece]]) -> list[list[int]]:
        """The tokens of every piece."""
        behind = [bool(at) or not self.templated for each in pieces for at, _ in enumerate(each)]
        return self._read.tokens([piece.text for each in pieces for piece in each], behind)

    def _example(self, number: int, row: Row, pieces: list[_Piece], found: Iterator[list[int]]) -> Example:
        tokens: list[int] = []
        learned: list[bool] = []
        if not self.templated and self._kind(row) != "text":  # as a prompt that is to be continued
            tokens = list(self._prompts.encode([number], [row])[0].tokens)
            learned = [self.loss_on == "all"] * len(tokens)
        for piece in pieces:
            ids = list(next(found))
            marks = [piece.learned] * len(ids)
            if piece.ends and (self.templated and self._kind(row) != "text"):
                ids, marks = self._ended(ids, marks, piece)
            elif piece.ends and ids[-1:] != [self._eos]:
                ids, marks = [*ids, self._eos], [*marks, True]
            tokens += ids
            learned += marks
        if self._kind(row) == "text":
            tokens, learned = [*self._opening, *tokens], [*([False] * len(self._opening)), *learned]
        if learned:
            learned[0] = False
        if not any(learned):
            raise DataError(
                f"{self.source_name}, row {number + 1} (from 1): the row has no tokens to learn. Remove it."
            )
        return Example(number, tokens, learned)

    def _ended(self, ids: list[int], marks: list[bool], piece: _Piece) -> tuple[list[int], list[bool]]:
        """An answer ends with the special token that its template ends turns with, or with end-of-sequence where there is none;
        what a template writes after that belongs to the next turn."""
        tail = range(len(ids) - 1, max(-1, len(ids) - 1 - MAX_TOKENS_AFTER_END), -1)
        end = next((at for at in tail if ids[at] in self._ends), None)
        if end is None:
            return ([*ids, self._eos], [*marks, piece.learned]) if piece.last else (ids, marks)
        if piece.last:
            return ids[: end + 1], marks[: end + 1]
        return ids, [mark and (at <= end or self.loss_on == "all") for at, mark in enumerate(marks)]

    def problem(self, row: Row) -> str:
        """What is wrong with a row, or nothing."""
        return shown_beside(row) or _problem(row, self)

    def _kind(self, row: Row) -> str:
        data = self.data
        if data.messages in row:
            return "messages"
        return "completion" if data.prompt in row or data.completion in row else "text"

    def _pieces(self, number: int, row: Row) -> list[_Piece]:
        everything = self.loss_on == "all"
        if self._kind(row) == "text":
            return [_Piece(row[self.data.text], True, ends=True, last=True)]
        if not self.templated:
            return [_Piece(row[self.data.completion], True, ends=True, last=True)]
        messages, answers = self._conversation(row)
        if self.loss_on == "last":
            answers = answers[-1:]
        pieces: list[_Piece] = []
        written = ""
        for at in answers:
            before, after = self._render(number, messages[:at], True), self._render(number, messages[: at + 1], False)
            bare = self._render(number, messages[:at], False) if at else ""
            # A generation prompt may hold more than an answer begins with (an opened thought): what both have is the prompt.
            shared = _common(before, after)
            if not shared.startswith(written) or len(shared) < len(_common(bare, before)):
                raise DataError(
                    f"{self.source_name}, row {number + 1} (from 1): the chat template writes earlier turns differently once an "
                    "answer follows, so one text cannot hold all answers. Write learn.loss_on: last, or give each "
                    "answer a row of its own."
                )
            pieces.append(_Piece(shared[len(written) :], everything))
            pieces.append(_Piece(after[len(shared) :], True, ends=True, last=at == answers[-1]))
            written = after
        return pieces

    def _conversation(self, row: Row) -> tuple[list[Message], list[int]]:
        """The messages up to the last answer, and where answers are."""
        data = self.data
        if data.messages in row:
            given, first = row[data.messages], 0
        else:
            shown, answer = row[data.prompt], row[data.completion]
            asked = [{"role": "user", "content": shown}] if isinstance(shown, str) else shown
            answered = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
            given, first = [*asked, *answered], len(asked)
        last = max(at for at, message in enumerate(given) if message["role"] == "assistant")
        messages = self._prompts.shown({data.prompt: given[: last + 1]})
        assert isinstance(messages, list)
        first += len(messages) - last - 1  # a system message of data.system
        return messages, [at for at, m in enumerate(messages) if at >= first and m["role"] == "assistant"]

    def _render(self, number: int, messages: list[Message], answer: bool) -> str:
        if not messages:
            return ""
        where = f"{self.source_name}, row {number + 1} (from 1)"
        render = partial(self.tokenizer.apply_chat_template, messages, tokenize=False, add_generation_prompt=answer)
        try:
            return render_within(render, where)
        except DataError:
            raise
        except Exception as error:  # templates are foreign code
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{where}: the tokenizer's chat template rejects a conversation of {roles}: {error}"
            ) from error


def _common(one: str, two: str) -> str:
    """What both begin with."""
    low, high = 0, min(len(one), len(two))
    while low < high:  # comparing whole pieces takes a thousandth of the time of comparing characters
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == two[low:middle] else (low, middle - 1)
    return one[:low]


def validate_examples(rows: Sequence[Row], encoder: Checking[Any]) -> None:
    """Raises DataError at the first row that cannot be learned from; one of every order of roles tries the template."""
    if not rows:
        raise DataError(f"{encoder.source_name} holds no rows. A data set needs at least one row.")
    for number, row in enumerate(rows, 1):
        problem = encoder.problem(row)
        if problem:
            raise DataError(f"{encoder.source_name}, row {number} (from 1): {problem}")
    chosen = one_of_each(conversations(row) for row in rows)
    if encoder.templated:
        try_template([partial(encoder.rendered, index, rows[index]) for index in chosen], encoder.source_name)
    for index in chosen:
        encoder.encode([index], [rows[index]])


def conversations(row: Row) -> list[Any]:
    """Those of its columns that are messages."""
    lists = [value for value in row.values() if isinstance(value, list)]
    return [value for value in lists if all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in value)]


def _problem(row: Row, encoder: ExampleEncoder) -> str:
    data = encoder.data
    if data.messages in row:
        if isinstance(row[data.messages], list) and not encoder.templated:
            return NO_TEMPLATE
        return messages_problem(row[data.messages], data.messages, data)
    if data.prompt in row or data.completion in row:
        return completion_problem(row, encoder)
    if data.text not in row:
        columns = ", ".join(map(repr, row)) or "none"
        near = did_you_mean(data.messages, row) or did_you_mean(data.completion, row)
        return (
            f"has none of the columns {data.messages!r}, {data.prompt!r} with {data.completion!r}, and {data.text!r}; its "
            f"columns are {columns}.{near} Name yours with data.messages, data.prompt and data.completion, or data.text."
        )
    text = row[data.text]
    if not isinstance(text, str) or not text:
        return f"column {data.text!r} must be text, but is {cut(text)}."
    return _broken(data.text, text)


def completion_problem(row: Row, encoder: ExampleEncoder) -> str:
    data = encoder.data
    missing = [name for name in (data.prompt, data.completion) if name not in row]
    if missing:
        near = did_you_mean(missing[0], row)
        return f"has no column {missing[0]!r}; its columns are {', '.join(map(repr, row))}.{near}"
    prompt, answer = row[data.prompt], row[data.completion]
    for name in (data.prompt, data.completion):
        if not isinstance(row[name], str | list):
            what = "nothing (null)" if row[name] is None else f"{cut(row[name])}, of type {type(row[name]).__name__}"
            return f"column {name!r} must be text or a list of {{role, content}} messages, but is {what}."
    if not isinstance(prompt, str) or not isinstance(answer, str):
        if not encoder.templated:
            return NO_TEMPLATE
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        answered = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        return messages_problem([*asked, *answered], data.completion, data)
    if not answer:
        return f"column {data.completion!r} is empty: there is nothing to learn."
    return _broken(data.prompt, prompt) or _broken(data.completion, answer)


def _broken(column: str, text: str) -> str:
    found = text_problem(text)
    return f"column {column!r} {found}" if found else ""


def messages_problem(messages: Any, column: str, data: Data) -> str:
    if not isinstance(messages, list) or not messages:
        return f"column {column!r} must be a list of {{role, content}} messages, but is {cut(messages)}."
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"column {column!r}: message {number} must be {{role: ..., content: ...}}, but is {cut(message)}."
        content = message.get("content")
        if shown := shown_within(content):
            return f"column {column!r}: message {number} {shown}"
        if not isinstance(content, str) and not message.get("tool_calls"):
            return f"column {column!r}: message {number} must have a string as its content, but has {cut(content)}."
        if isinstance(content, str) and (found := _broken(column, content)):
            return found
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return f"column {column!r} has no message with the role assistant: there is nothing to learn."
    wrong = roles_problem([message["role"] for message in messages[: answers[-1] + 1]], data)
    return f"column {column!r}: {wrong}" if wrong else ""


@dataclass(frozen=True)
class ExampleSet:
    """What is known of a data set before it is used."""

    count: int
    fitting: int
    """Those that are used, as far as is known."""
    longest: int
    """Tokens that the longest one takes in a row."""
    exact: bool
    """Every example was looked at."""
    note: str
    """What is left out, or nothing."""


def measure_examples(rows: Sequence[Row], encoder: Checking[Any], limit: int, characters: int) -> ExampleSet:
    """Lengths of all examples, or of the longest texts where all have more than so many characters."""
    sizes = [sum(len(str(value)) for value in row.values()) for row in rows]
    exact = sum(sizes) <= characters
    chosen = range(len(rows)) if exact else sorted(range(len(rows)), key=sizes.__getitem__)[-64:]
    found: list[tuple[int, int]] = []
    for start in range(0, len(chosen), _BATCH):
        ids = list(chosen[start : start + _BATCH])
        items = encoder.encode(ids, [rows[i] for i in ids])
        found += [(len(item.tokens), getattr(item, "row_tokens", len(item.tokens))) for item in items]
    lengths, fitting = [length for length, _ in found], [room for length, room in found if length <= limit]
    if exact and not fitting:
        raise DataError(
            f"{encoder.source_name}: all {len(rows)} examples are longer than {limit} tokens (the longest has {max(lengths)}). "
            "Raise learn.max_tokens if the model's context allows, or shorten the examples."
        )
    left_out, at_least = len(lengths) - len(fitting), "" if exact else "at least "
    note = (
        f"{encoder.source_name}: {at_least}{left_out} of {len(rows)} examples are longer than {limit} tokens; training skips them"
        if left_out
        else ""
    )
    longest = max(fitting, default=limit) if exact else limit * encoder.most_in_one
    return ExampleSet(len(rows), len(fitting) if exact else len(rows), longest, exact, note)
