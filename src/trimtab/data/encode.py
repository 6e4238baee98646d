"""Rows to token ids, one way for training and evaluation.

- A string prompt is used as it is, or becomes one user message of the tokenizer's chat template; messages always need
  the template.
- The template writes its own special tokens, so none are added to its text: BOS is never doubled.
- A prompt never ends in an end-of-sequence token that the tokenizer appended: the model would be asked to go on after
  the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import DataError, ModelError
from trimtab.config.schema import Data
from trimtab.data.deadline import render_within
from trimtab.data.files import Row
from trimtab.data.prompt import Message, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Tools = Sequence[Mapping[str, Any]]


def templated(data: Data, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether prompts are written by the tokenizer's chat template."""
    return bool(tokenizer.chat_template) and data.chat_template != "never"


class PromptEncoder:
    """Turns rows into prompts as `data` says. Rows are taken to be valid (see prompts.validate_rows)."""

    def __init__(self, data: Data, tokenizer: PreTrainedTokenizerBase, source_name: str, tools: Tools = ()) -> None:
        """`tools`: schemas of functions that the chat template shows to the model."""
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ModelError(
                "model.tokenizer: the tokenizer has only special tokens, so every text becomes an empty prompt. Often the "
                "model's folder has no tokenizer files. Set model.tokenizer to a folder or hub repository with tokenizer files."
            )
        has_template = bool(tokenizer.chat_template)
        if data.chat_template == "always" and not has_template:
            raise DataError(
                "data.chat_template is 'always', but the tokenizer has no chat template. "
                "Use an instruction-tuned model's tokenizer (model.tokenizer), or data.chat_template: never."
            )
        self.data = data
        self.tokenizer = tokenizer
        self.source_name = source_name
        self.templated = templated(data, tokenizer)
        self._tools = [dict(tool) for tool in tools]
        self._eos_appended = _appends_eos(tokenizer)

    def shown(self, row: Row) -> str | list[Message]:
        """The prompt as rewards see it: the row's, with the system message and the suffix."""
        content = row[self.data.prompt]
        if isinstance(content, str):
            system = f"{self.data.system}\n\n" if self.data.system else ""
            return f"{system}{content}{self.data.suffix}"
        messages = [_said(message) for message in content]
        if self.data.suffix:
            last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
            messages[last_user]["content"] += self.data.suffix
        return [*self._system_message(), *messages]

    def text(self, id_: int, row: Row) -> str:
        """What the tokenizer reads."""
        content = row[self.data.prompt]
        if not self.templated:
            shown = self.shown(row)
            assert isinstance(shown, str), "messages need a chat template; validate_rows checks it"
            return shown
        if isinstance(content, str):
            asked = {"role": "user", "content": content + self.data.suffix}
            return self._render(id_, [*self._system_message(), asked])
        return self._render(id_, self.shown(row))  # type: ignore[arg-type]

    def encode(self, ids: Sequence[int], rows: Sequence[Row]) -> list[Prompt]:
        """One prompt a row, tokenised in one batch; `ids` are the rows' numbers."""
        encoded = self.tokenizer(
            [self.text(*each) for each in zip(ids, rows, strict=True)],
            add_special_tokens=not self.templated,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [self._prompt(*each) for each in zip(ids, rows, encoded["input_ids"], strict=True)]

    def _prompt(self, id_: int, row: Row, tokens: list[int]) -> Prompt:
        if self._eos_appended and not self.templated:
            tokens = tokens[:-1]
        if not tokens:
            raise DataError(
                f"{self.source_name}, row {id_ + 1} (from 1): the prompt {self.text(id_, row)!r} has no tokens. Remove the row."
            )
        columns = {name: value for name, value in row.items() if name != self.data.prompt}
        return Prompt(id_, self.shown(row), tokens, columns)

    def _system_message(self) -> list[Message]:
        return [{"role": "system", "content": self.data.system}] if self.data.system else []

    def _render(self, id_: int, messages: list[Message]) -> str:
        """A conversation that ends with the assistant's turn is continued; any other is answered."""
        unfinished, where = messages[-1]["role"] == "assistant", f"{self.source_name}, row {id_ + 1} (from 1)"
        render = partial(
            self.tokenizer.apply_chat_template,
            messages,
            tools=self._tools or None,
            tokenize=False,
            add_generation_prompt=not unfinished,
            continue_final_message=unfinished,
        )
        try:
            return render_within(render, where)
        except DataError:
            raise
        except Exception as error:  # templates are foreign code: Gemma's, for one, refuses system messages
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"{where}: the tokenizer's chat template rejects a conversation of {roles}: {error}"
            ) from error


def _said(message: Message) -> Message:
    """A message without empty keys: in a table every message has the keys of all, and templates that ask whether there are
    `tool_calls` take an empty entry for some."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}


def _appends_eos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer puts its end-of-sequence token after plain text (as T5's and some base models' do)."""
    probe: Any = tokenizer("a", return_special_tokens_mask=True)
    ends_special = bool(probe["special_tokens_mask"]) and probe["special_tokens_mask"][-1] == 1
    return ends_special and len(probe["input_ids"]) > 1 and probe["input_ids"][-1] == tokenizer.eos_token_id
