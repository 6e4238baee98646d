"""What an environment says, as the tokens that follow what the model drew.

With a chat template a reply is exactly what the template writes behind an answer: a conversation is rendered whose answer is a
mark, and what comes after the mark is taken. So nothing that the model drew is rendered or tokenised again, whatever a template
does to earlier turns (leaves thoughts out, trims, reorders). The token that ends a turn is not written again where the model drew
it. Without a template a reply is its text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trimtab.base.errors import DataError, EnvError
from trimtab.data.deadline import render_within
from trimtab.data.pieces import MAX_TOKENS_AFTER_END, Pieces
from trimtab.data.prompt import Message
from trimtab.rollout.conversations.observation import Reply
from trimtab.rollout.conversations.tools import END, OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ASKED, ANSWERED, REPLIED = "TRIMTABASKED", "TRIMTABANSWERED", "TRIMTABREPLIED"
PLAIN = "environment"
"""The role of a reply that is plain text."""


class ReplyEncoder:
    """One tokenizer's way to go on. Made when its template can write what the environment will say; an EnvError otherwise."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, templated: bool, tools: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.templated = templated
        self._tools = [dict(tool) for tool in tools]
        self._pieces = Pieces(tokenizer)
        marks = {tokenizer.convert_tokens_to_ids(mark) for mark in (OPEN, END)} - {tokenizer.unk_token_id, None}
        self._left_out = (set(tokenizer.all_special_ids) | self._pieces.ends) - (marks if tools else set())
        self._longest = max(map(len, tokenizer.get_vocab()))
        """Characters of a token, at most."""
        if templated:
            self._try("tool" if tools else "user")

    def said(self, tokens: Sequence[int]) -> str:
        """A turn of the model as text: what it drew, without special tokens; those that mark tool calls stay."""
        kept = [token for token in tokens if token not in self._left_out]
        text: str = self.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def turns(self, reply: Reply) -> list[Message]:
        """A reply as messages, for people and rewards."""
        if not isinstance(reply, str):
            return reply
        return [{"role": "user" if self.templated else PLAIN, "content": reply}]

    def exceeds(self, reply: Reply, tokens: int) -> bool:
        """Whether a reply is longer than `tokens` tokens can be. Tokenising a long text takes long, and no deadline ends it."""
        texts = [reply] if isinstance(reply, str) else [message["content"] for message in reply]
        return sum(map(len, texts)) > tokens * self._longest

    def after(self, reply: Reply, last: int) -> list[int]:
        """The tokens of a reply behind a turn whose last token was `last`, up to where the model's next one begins."""
        if not self.templated:
            return self._plain(reply)
        asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
        text = self._render([*asked, *self.turns(reply)], answer=True)
        tokens = self._behind(text[text.index(ANSWERED) + len(ANSWERED) :])
        ended = tokens[:MAX_TOKENS_AFTER_END]
        if last in self._pieces.ends and last in ended:
            return tokens[ended.index(last) + 1 :]
        return tokens

    def opened(self, prompt: list[int], opening: Reply) -> list[int]:
        """A prompt with an environment's opening behind it."""
        if not self.templated:
            return prompt + self._plain(opening)
        asked = [{"role": "user", "content": ASKED}]
        bare, answer = self._render(asked, answer=False), self._render(asked, answer=True)
        whole = self._render([*asked, *self.turns(opening)], answer=True)
        turn = self._behind(answer[len(bare) :]) if answer.startswith(bare) else []
        if not whole.startswith(bare) or not turn or prompt[-len(turn) :] != turn:
            raise EnvError(
                "the chat template cannot append to the prompt what reset returned: it writes the prompt differently when "
                "messages follow, or the prompt ends inside an answer. Return None from reset, and put the text into the data"
            )
        return prompt[: -len(turn)] + self._behind(whole[len(bare) :])

    def _plain(self, reply: Reply) -> list[int]:
        if not isinstance(reply, str):
            raise EnvError(
                "the environment returned messages, but no chat template writes them (the tokenizer has none, or "
                "data.chat_template is never). Return text"
            )
        return self._behind(reply)

    def _behind(self, text: str) -> list[int]:
        return self._pieces.tokens([text], [True])[0] if text else []

    def _render(self, messages: list[Message], *, answer: bool) -> str:
        render = partial(
            self.tokenizer.apply_chat_template,
            messages,
            tools=self._tools or None,
            tokenize=False,
            add_generation_prompt=answer,
        )
        try:
            return render_within(render, "environment")
        except DataError as error:
            raise EnvError(str(error)) from None
        except Exception as error:  # templates are foreign code
            roles = ", ".join(message["role"] for message in messages)
            raise EnvError(
                f"environment: the tokenizer's chat template rejects a conversation with the roles {roles}: {error}"
            ) from error

    def _try(self, role: str) -> None:
        asked = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
        text = self._render([*asked, {"role": role, "name": "tool", "content": REPLIED}], answer=True)
        if ANSWERED not in text or REPLIED not in text[text.index(ANSWERED) :]:
            raise EnvError(
                f"environment: the tokenizer's chat template leaves out messages of the role {role} after an answer. Set "
                "model.tokenizer to a tokenizer whose template writes them, or write data.chat_template: never"
            )


def refuse_hidden_tools(shown: str, schemas: Sequence[Mapping[str, Any]]) -> None:
    """Tools that the prompt does not name will not be called. `shown`: a prompt as the model reads it."""
    for schema in schemas:
        name = schema["function"]["name"]
        if name not in shown:
            raise EnvError(
                f"environment.tools: the tokenizer's chat template does not list tools, so the model would not know {name!r}. "
                "Describe each tool and its name in data.system, or set model.tokenizer to another tokenizer"
            )
