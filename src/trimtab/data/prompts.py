"""Valid rows, and the prompts made of them.

`validate_rows` checks columns, types and messages of every row before anything expensive starts, and tries the chat
template on one conversation of every order of roles; one that the template refuses for another reason can still fail,
when it is tokenised.
`build_prompts` tokenises a whole set at once, for evaluation; training reads a PromptStream. Prompts that are too long
are left out and counted, never cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.config.schema import Data
from trimtab.data.encode import PromptEncoder, Tools
from trimtab.data.files import Row
from trimtab.data.images import shown_beside, shown_within
from trimtab.data.prompt import Prompt
from trimtab.data.trial import MAX_TEXT_CHARACTERS, try_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BATCH = 1024
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class PromptSet:
    """A tokenised data set."""

    prompts: list[Prompt]
    too_long: int
    """Prompts left out because they are longer than max_prompt_tokens."""
    longest: int
    """Tokens of the longest prompt, the ones left out included."""
    max_prompt_tokens: int
    source_name: str

    def report(self) -> str:
        """What was kept and what was left out, in a sentence."""
        kept = f"{self.source_name}: {len(self.prompts)} prompts, the longest of the set {self.longest} tokens"
        if not self.too_long:
            return f"{kept}."
        return f"{kept}; {self.too_long} left out for being longer than {self.max_prompt_tokens} tokens."


def build_prompts(
    rows: Sequence[Row],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_tokens: int,
    source_name: str,
    tools: Tools = (),
) -> PromptSet:
    """Every row's prompt, validated and tokenised now; at least one."""
    validate_rows(rows, data, tokenizer, source_name=source_name, tools=tools)
    encoder = PromptEncoder(data, tokenizer, source_name, tools)
    prompts: list[Prompt] = []
    longest = 0
    for start in range(0, len(rows), _BATCH):
        batch = rows[start : start + _BATCH]
        for prompt in encoder.encode(range(start, start + len(batch)), batch):
            longest = max(longest, len(prompt.tokens))
            if len(prompt.tokens) <= max_prompt_tokens:
                prompts.append(prompt)
    if not prompts:
        raise all_too_long(source_name, len(rows), longest, max_prompt_tokens)
    return PromptSet(prompts, len(rows) - len(prompts), longest, max_prompt_tokens, source_name)


def all_too_long(source_name: str, count: int, longest: int, limit: int) -> DataError:
    """The error of a set with no usable prompt."""
    return DataError(
        f"{source_name}: all {count} prompts are longer than {limit} tokens (the longest has {longest}). "
        "Raise data.max_prompt_tokens, lower learn.max_new_tokens if the model's context is the limit, "
        "or shorten the prompts."
    )


def validate_rows(
    rows: Sequence[Row], data: Data, tokenizer: PreTrainedTokenizerBase, *, source_name: str, tools: Tools = ()
) -> None:
    """Raises DataError at the first row that cannot become a prompt; tokenises only what tries the chat template."""
    if not rows:
        raise DataError(f"{source_name} holds no rows. A data set needs at least one row.")
    encoder = PromptEncoder(data, tokenizer, source_name, tools)
    for number, row in enumerate(rows, 1):
        if data.prompt not in row:
            raise _missing_column(row, "prompt", data.prompt, source_name, number)
        if data.task is not None:
            _check_task(row, data.task, source_name, number)
        if shown := shown_beside(row):
            raise DataError(f"{source_name}, row {number} (from 1), {shown}")
        problem = _problem(row[data.prompt], data)
        if problem:
            raise DataError(f"{source_name}, row {number} (from 1), column {data.prompt!r}: {problem}")
        if isinstance(row[data.prompt], str) != isinstance(rows[0][data.prompt], str):
            raise DataError(
                f"{source_name}, row {number} (from 1): some prompts are strings and others messages. Use one of the two."
            )
    if not isinstance(rows[0][data.prompt], str) and not encoder.templated:
        raise _no_template(data, source_name)
    empty = next((i for i, row in enumerate(rows) if row[data.prompt] == ""), 0)
    chosen = sorted({0, empty, *one_of_each([row[data.prompt]] for row in rows)})
    if encoder.templated:
        try_template([partial(encoder.text, index, rows[index]) for index in chosen], source_name)
    for index in chosen:
        encoder.encode([index], [rows[index]])


def one_of_each(conversations: Iterable[Iterable[Any]]) -> list[int]:
    """The first row of every order of roles: it is by their order that templates refuse conversations."""
    found: dict[tuple[tuple[str, ...], ...], int] = {}
    for index, row in enumerate(conversations):
        found.setdefault(tuple(tuple(m["role"] for m in value) for value in row if isinstance(value, list)), index)
    return list(found.values())


def _problem(content: Any, data: Data) -> str:
    """What is wrong with a prompt, or nothing."""
    if isinstance(content, str):
        return text_problem(content)
    if not isinstance(content, list):
        what = "nothing (null)" if content is None else f"{cut(content)}, of type {type(content).__name__}"
        return f"must be a string or a list of {{role, content}} messages, but is {what}."
    if not content:
        return "holds an empty list of messages."
    problems = (_message_problem(message, number) for number, message in enumerate(content, 1))
    return next(filter(None, problems), "") or roles_problem([message["role"] for message in content], data)


def _message_problem(message: Any, number: int) -> str:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return f"message {number} must be {{role: ..., content: ...}}, but is {cut(message)}."
    content = message.get("content")
    if isinstance(content, str):
        return text_problem(content)
    if content is None and message.get("tool_calls") and message["role"] != "user":
        return ""
    if shown := shown_within(content):
        return f"message {number} (role {message['role']}) {shown}"
    return f"message {number} (role {message['role']}) must have a string as its content, but has {cut(content)}."


def cut(value: Any) -> str:
    """A value of a row as an error shows it: a row may hold megabytes."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def roles_problem(roles: list[str], data: Data) -> str:
    if data.suffix and "user" not in roles:
        return "data.suffix is added to the last user message, but the row has none."
    if data.system and "system" in roles:
        return "the row already has a system message. Remove it, or leave data.system out."
    return ""


def text_problem(text: str) -> str:
    """JSON can hold half of a character (a lone surrogate), which no tokenizer accepts, and texts that no model can read."""
    if len(text) > MAX_TEXT_CHARACTERS:
        return f"has {len(text):,} characters; the limit is {MAX_TEXT_CHARACTERS:,}. Shorten it, or remove the row."
    if text.isascii():
        return ""
    half = _SURROGATE.search(text)
    return f"holds an unpaired surrogate ({half.group()!a}), which is not valid text." if half else ""


def _check_task(row: Row, column: str, source_name: str, number: int) -> None:
    if column not in row:
        raise _missing_column(row, "task", column, source_name, number)
    if not isinstance(row[column], str | int | float) or row[column] == "":
        raise DataError(
            f"{source_name}, row {number} (from 1), column {column!r}: the task must be text or a number, but is "
            f"{cut(row[column])}. Change it, or set data.task to another column."
        )


def _missing_column(row: Row, key: str, column: str, source_name: str, number: int) -> DataError:
    where = source_name if number == 1 else f"{source_name}, row {number} (from 1)"
    return DataError(
        f"{where} has no column {column!r}; its columns are {', '.join(map(repr, row)) or 'none'}."
        f"{did_you_mean(column, row)} Set data.{key} to the column with the {key}s."
    )


def _no_template(data: Data, source_name: str) -> DataError:
    if data.chat_template == "never":
        why = "data.chat_template is 'never'"
        fix = "Set data.chat_template: auto, or make the prompts strings."
    else:
        why = "the tokenizer has no chat template"
        fix = "Use an instruction-tuned model's tokenizer (model.tokenizer), or make the prompts strings."
    return DataError(f"{source_name} has prompts that are messages, but {why}. {fix}")
