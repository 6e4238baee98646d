"""What an environment says, behind what the model drew: exactly what the template writes, and nothing twice."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rollout.conversations.templates import ALTERNATES, DEAF, LLAMA2, QWEN, THINKS, chat_tokenizer
from trimtab.base.errors import EnvError
from trimtab.rollout.conversations.replies import ReplyEncoder, refuse_hidden_tools

SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"properties": {}}}}


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


TEXT = st.text(alphabet="abc 12<>\n", max_size=12)


@settings(max_examples=100, deadline=None)
@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_the_whole_is_what_the_template_writes_of_the_whole_conversation(answer: str, replies: list[str]) -> None:
    """Prompt, what the model drew and the reply, one behind the other, are the tokens of the conversation rendered at once."""
    tokenizer = TOKENIZERS["qwen"]
    encoder = ReplyEncoder(tokenizer, True, [SCHEMA])
    asked = [{"role": "user", "content": "question"}]
    messages = [{"role": "tool", "content": reply} for reply in replies]
    said = [{"role": "assistant", "content": answer}]
    prompt = ids(
        tokenizer, tokenizer.apply_chat_template(asked, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    )
    drawn = [*ids(tokenizer, answer), tokenizer.eos_token_id]
    behind = encoder.after(messages, drawn[-1])
    conversation = [*asked, *said, *messages]
    whole = tokenizer.apply_chat_template(conversation, tools=[SCHEMA], tokenize=False, add_generation_prompt=True)
    assert prompt + drawn + behind == ids(tokenizer, whole)


TOKENIZERS = {"qwen": chat_tokenizer(QWEN)}


def test_a_turn_that_ended_without_its_token_gets_it() -> None:
    """A stop string, or another end token, ended it."""
    tokenizer = TOKENIZERS["qwen"]
    encoder = ReplyEncoder(tokenizer, True)
    by_itself = encoder.after("go on", ids(tokenizer, "x")[-1])
    other_end = encoder.after("go on", tokenizer.convert_tokens_to_ids("<eos>"))
    as_usual = encoder.after("go on", tokenizer.eos_token_id)
    assert by_itself == other_end == [tokenizer.eos_token_id, *as_usual]
    assert tokenizer.decode(as_usual) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_forgets_thoughts_cannot_change_what_was_drawn() -> None:
    tokenizer = chat_tokenizer(THINKS)
    encoder = ReplyEncoder(tokenizer, True)
    behind = encoder.after("and now?", tokenizer.eos_token_id)
    assert tokenizer.decode(behind) == "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n<think>\n"


def test_an_end_token_that_does_not_come_first_is_found() -> None:
    tokenizer = chat_tokenizer(LLAMA2, eos="<eos>")
    encoder = ReplyEncoder(tokenizer, True)
    behind = encoder.after("more", tokenizer.eos_token_id)
    assert tokenizer.decode(behind) == "<bos>[INST] more [/INST]"
    assert tokenizer.decode(encoder.after("more", ids(tokenizer, "x")[-1])) == " <eos><bos>[INST] more [/INST]"


@pytest.mark.parametrize("template", [QWEN, THINKS, DEAF])
def test_an_opening_comes_before_the_turn_that_the_prompt_has_opened(template: str) -> None:
    tokenizer = chat_tokenizer(template)
    encoder = ReplyEncoder(tokenizer, True)
    asked = [{"role": "user", "content": "question"}]
    prompt = ids(tokenizer, tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    whole = [*asked, {"role": "user", "content": "board: ..."}]
    expected = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert encoder.opened(prompt, "board: ...") == ids(tokenizer, expected)


def test_an_opening_that_cannot_be_written_is_refused() -> None:
    tokenizer = chat_tokenizer(QWEN)
    with pytest.raises(EnvError, match="cannot append to the prompt what reset returned"):
        ReplyEncoder(tokenizer, True).opened(ids(tokenizer, "an answer that is to be continued"), "hello")
    alternating = chat_tokenizer(ALTERNATES)
    asked = [{"role": "user", "content": "question"}]
    prompt = ids(alternating, alternating.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
    with pytest.raises(EnvError, match="rejects a conversation with the roles user, user: roles must alternate"):
        ReplyEncoder(alternating, True).opened(prompt, "hello")


def test_plain_text_is_appended_as_it_is() -> None:
    tokenizer = chat_tokenizer(None)
    encoder = ReplyEncoder(tokenizer, False)
    assert encoder.after("<4>", 3) == ids(tokenizer, "<4>")
    assert encoder.opened([7, 8], "go") == [7, 8, *ids(tokenizer, "go")]
    assert encoder.after("", 3) == []
    assert encoder.turns("hi") == [{"role": "environment", "content": "hi"}]
    with pytest.raises(EnvError, match="no chat template writes them"):
        encoder.after([{"role": "tool", "content": "1"}], 3)


def test_templates_that_cannot_show_answers_are_refused_at_once() -> None:
    with pytest.raises(EnvError, match="leaves out messages of the role tool after an answer"):
        ReplyEncoder(chat_tokenizer(DEAF), True, [SCHEMA])
    with pytest.raises(
        EnvError, match="rejects a conversation with the roles user, assistant, tool: only user and assistant"
    ):
        ReplyEncoder(chat_tokenizer(LLAMA2, eos="<eos>"), True, [SCHEMA])


def test_tools_that_no_prompt_shows_are_refused() -> None:
    tokenizer, asked = TOKENIZERS["qwen"], [{"role": "user", "content": "hi"}]
    refuse_hidden_tools(tokenizer.apply_chat_template(asked, tools=[SCHEMA], tokenize=False), [SCHEMA])
    with pytest.raises(EnvError, match="the model would not know 'add'"):
        refuse_hidden_tools(tokenizer.apply_chat_template(asked, tokenize=False), [SCHEMA])


@pytest.mark.parametrize("special", [False, True])
def test_marks_of_calls_survive_when_a_turn_becomes_text(special: bool) -> None:
    tokenizer = chat_tokenizer(QWEN, marks_are_special=special)
    drawn = [*ids(tokenizer, "see <tool_call>{}</tool_call>"), tokenizer.eos_token_id]
    assert ReplyEncoder(tokenizer, True, [SCHEMA]).said(drawn) == "see <tool_call>{}</tool_call>"
    assert ReplyEncoder(tokenizer, True).said([*ids(tokenizer, "plain"), tokenizer.eos_token_id]) == "plain"
