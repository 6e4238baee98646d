"""Rows become prompts, or an error that names the row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from trimtab.base.errors import DataError
from trimtab.config.schema import Data
from trimtab.data.prompts import PromptSet, build_prompts, validate_rows

from .conftest import make_tokenizer

Make = Callable[..., Data]
Tokenizer = PreTrainedTokenizerFast
USER = {"role": "user", "content": "hi"}
SYSTEM = {"role": "system", "content": "be brief"}
ASSISTANT = {"role": "assistant", "content": "so"}


def build(rows: list[dict[str, Any]], data: Data, tokenizer: Tokenizer, limit: int = 1000) -> PromptSet:
    return build_prompts(rows, data, tokenizer, max_prompt_tokens=limit, source_name="train.jsonl")


def refused(rows: list[dict[str, Any]], data: Data, tokenizer: Tokenizer, limit: int = 1000) -> str:
    with pytest.raises(DataError) as error:
        build(rows, data, tokenizer, limit)
    return str(error.value)


def test_plain_strings(data: Make, plain: Tokenizer) -> None:
    made = build([{"prompt": "1+1=", "answer": "2", "n": 3}, {"prompt": "ab"}], data(), plain)
    first, second = made.prompts
    assert (first.id, first.prompt, first.columns) == (0, "1+1=", {"answer": "2", "n": 3})
    assert plain.decode(first.tokens) == "1+1="
    assert not first.conversational
    assert (second.id, second.columns) == (1, {})
    assert (made.too_long, made.longest) == (0, 4)
    assert made.report() == "train.jsonl: 2 prompts, the longest of the set 4 tokens."


def test_bos_stays_and_an_appended_eos_goes(data: Make) -> None:
    for bos in (False, True):
        for eos in (False, True):
            tokenizer = make_tokenizer(bos=bos, eos=eos)
            tokens = build([{"prompt": "ab"}], data(), tokenizer).prompts[0].tokens
            assert tokenizer.decode(tokens) == "<s>" * bos + "ab"


def test_an_eos_that_the_row_itself_wrote_stays(data: Make, plain: Tokenizer) -> None:
    assert build([{"prompt": "ab</s>"}], data(), plain).prompts[0].tokens[-1] == plain.eos_token_id


def test_system_and_suffix_without_a_template(data: Make, plain: Tokenizer) -> None:
    prompt = build([{"prompt": "1+1"}], data(system="add", suffix=" ="), plain).prompts[0]
    assert prompt.prompt == plain.decode(prompt.tokens) == "add\n\n1+1 ="


def test_string_through_the_template_stays_a_string_for_rewards(data: Make, chat: Tokenizer) -> None:
    prompt = build([{"prompt": "1+1"}], data(system="add", suffix=" ="), chat).prompts[0]
    assert prompt.prompt == "add\n\n1+1 ="
    assert not prompt.conversational
    assert chat.decode(prompt.tokens) == "<s><|turn|>system\nadd</s><|turn|>user\n1+1 =</s><|turn|>assistant\n"


def test_messages(data: Make, chat: Tokenizer) -> None:
    row = {"prompt": [USER, ASSISTANT, USER], "answer": "x"}
    prompt = build([row], data(system="add", suffix="!"), chat).prompts[0]
    system, bang = {"role": "system", "content": "add"}, {"role": "user", "content": "hi!"}
    assert prompt.prompt == [system, USER, ASSISTANT, bang]
    assert prompt.conversational
    assert row["prompt"] == [USER, ASSISTANT, {"role": "user", "content": "hi"}], "the row is left alone"
    expected = chat.apply_chat_template(prompt.prompt, add_generation_prompt=True, return_dict=False)
    assert prompt.tokens == expected
    assert prompt.tokens.count(chat.bos_token_id) == 1


def test_conversation_that_ends_with_the_assistant_is_continued(data: Make, chat: Tokenizer) -> None:
    prompt = build([{"prompt": [USER, ASSISTANT]}], data(), chat).prompts[0]
    assert chat.decode(prompt.tokens) == "<s><|turn|>user\nhi</s><|turn|>assistant\nso"


def test_template_never_and_always(data: Make, plain: Tokenizer, chat: Tokenizer) -> None:
    rows = [{"prompt": "ab"}]
    assert chat.decode(build(rows, data(chat_template="never"), chat).prompts[0].tokens) == "<s>ab"
    assert "<|turn|>" in chat.decode(build(rows, data(chat_template="always"), chat).prompts[0].tokens)
    assert "has no chat template" in refused(rows, data(chat_template="always"), plain)


def test_messages_need_a_template(data: Make, plain: Tokenizer, chat: Tokenizer) -> None:
    rows = [{"prompt": [USER]}]
    assert "the tokenizer has no chat template. Use an instruction-tuned" in refused(rows, data(), plain)
    assert "Set data.chat_template: auto" in refused(rows, data(chat_template="never"), chat)


def test_what_the_template_refuses_is_a_data_error(data: Make, chat: Tokenizer) -> None:
    message = refused([{"prompt": [USER, {"role": "tool", "content": "x"}]}], data(), chat)
    assert (
        "train.jsonl, row 1 (from 1): the tokenizer's chat template rejects a conversation of user, tool: no tools"
        in message
    )


def test_every_order_of_roles_is_tried_before_the_run(data: Make, chat: Tokenizer) -> None:
    rows = [{"prompt": [USER]}, {"prompt": [USER]}, {"prompt": [USER, {"role": "tool", "content": "x"}]}]
    with pytest.raises(DataError, match=r"row 3 \(from 1\): the tokenizer's chat template rejects"):
        validate_rows(rows, data(), chat, source_name="train.jsonl")


def test_keys_that_a_table_gives_every_message_are_left_out(data: Make, chat: Tokenizer) -> None:
    asks = copy.deepcopy(chat)
    asks.chat_template = (
        "{% for m in messages %}{{ m.tool_calls | length if 'tool_calls' in m else m.content }}{% endfor %}"
    )
    rows = [{"prompt": [{**USER, "tool_calls": None, "name": None}]}]
    (prompt,) = build_prompts(rows, data(), asks, max_prompt_tokens=100, source_name="train.jsonl").prompts
    assert asks.decode(prompt.tokens) == USER["content"]
    assert prompt.prompt == [USER]


def test_missing_column(data: Make, plain: Tokenizer) -> None:
    message = refused([{"question": "a", "answer": "b"}], data(prompt="questions"), plain)
    assert "train.jsonl has no column 'questions'; its columns are 'question', 'answer'." in message
    assert "Did you mean 'question'?" in message
    assert "row 2 (from 1) has no column 'prompt'" in refused([{"prompt": "a"}, {"x": 1}], data(), plain)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (3, "is 3, of type int"),
        (None, "is nothing (null)"),
        ({"role": "user"}, "of type dict"),
        ([], "empty list"),
        (["hi"], "message 1 must be {role: ..., content: ...}"),
        ([USER, {"content": "x"}], "message 2 must be"),
        ([{"role": "user"}], "message 1 (role user) must have a string as its content, but has None"),
        ([{"role": "user", "content": [{"type": "text"}]}], "must have a string as its content"),
        (
            [{"role": "user", "content": [{"type": "image"}]}],
            "message 1 (role user) holds an image. Trimtab trains on text alone",
        ),
        ([{"role": "user", "content": [{"type": "text"}, {"type": "video_url"}]}], "holds a video"),
        ("\ud83d half", "unpaired surrogate ('\\ud83d')"),
        ([{"role": "user", "content": "é\udc00"}], "unpaired surrogate"),
    ],
)
def test_wrong_prompts_name_their_row(data: Make, chat: Tokenizer, content: Any, words: str) -> None:
    good = "ok" if isinstance(content, str) else [USER]
    message = refused([{"prompt": good}, {"prompt": content}], data(), chat)
    assert "train.jsonl, row 2 (from 1), column 'prompt'" in message
    assert words in message


@pytest.mark.parametrize(
    ("column", "held", "words"),
    [("images", [b""], "an image"), ("audio", "a.wav", "audio"), ("video", {"path": "x"}, "a video")],
)
def test_rows_with_images_are_refused(data: Make, plain: Tokenizer, column: str, held: Any, words: str) -> None:
    message = refused([{"prompt": "a"}, {"prompt": "b", column: held}], data(), plain)
    assert f"train.jsonl, row 2 (from 1), column {column!r} holds {words}. Trimtab trains on text alone" in message
    assert build([{"prompt": "a", "image": None, "images": []}], data(), plain).prompts


def test_assistant_message_with_tool_calls_may_have_no_content(data: Make, chat: Tokenizer) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert build([{"prompt": [USER, call, USER]}], data(), chat).prompts[0].conversational


def test_system_and_suffix_that_do_not_fit_the_messages(data: Make, chat: Tokenizer) -> None:
    assert "already has a system message" in refused([{"prompt": [SYSTEM, USER]}], data(system="x"), chat)
    assert "last user message, but the row has none" in refused([{"prompt": [SYSTEM]}], data(suffix="x"), chat)


def test_strings_and_messages_do_not_mix(data: Make, chat: Tokenizer) -> None:
    assert "row 2 (from 1): some prompts are strings and others messages" in refused(
        [{"prompt": "a"}, {"prompt": [USER]}], data(), chat
    )


def test_prompts_longer_than_the_model_are_left_out_and_counted(data: Make, plain: Tokenizer) -> None:
    made = build([{"prompt": "x" * n} for n in (3, 9, 5, 12)], data(), plain, limit=5)
    assert [prompt.id for prompt in made.prompts] == [0, 2]
    assert (made.too_long, made.longest) == (2, 12)
    assert made.report().endswith("2 left out for being longer than 5 tokens.")


def test_all_prompts_too_long(data: Make, plain: Tokenizer) -> None:
    message = refused([{"prompt": "x" * 9}, {"prompt": "x" * 12}], data(), plain, limit=5)
    assert "all 2 prompts are longer than 5 tokens (the longest has 12)" in message
    assert "data.max_prompt_tokens" in message


def test_prompt_without_tokens(data: Make, plain: Tokenizer, chat: Tokenizer) -> None:
    rows = [{"prompt": "a"}, {"prompt": "a"}, {"prompt": ""}]
    with pytest.raises(DataError, match=r"row 3 \(from 1\): the prompt '' has no tokens"):
        validate_rows(rows, data(), plain, source_name="x")
    assert len(build(rows, data(), chat).prompts) == 3
    assert len(build(rows, data(), make_tokenizer(bos=True)).prompts) == 3
    assert "no tokens" in refused(rows, data(), make_tokenizer(eos=True))


def test_no_rows(data: Make, plain: Tokenizer) -> None:
    assert "holds no rows" in refused([], data(), plain)


def test_many_rows_are_tokenised_alike_in_every_batch(data: Make, plain: Tokenizer) -> None:
    made = build([{"prompt": str(i)} for i in range(2500)], data(), plain)
    assert all(plain.decode(prompt.tokens) == str(prompt.id) for prompt in made.prompts)
    assert len(made.prompts) == 2500
