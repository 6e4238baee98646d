"""Worked answers: what of a row is learned, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_tokenizer
from tokenizers import AddedToken, normalizers

from trimtab.base.errors import DataError
from trimtab.config.sft import SftData
from trimtab.data.encode import PromptEncoder
from trimtab.data.examples import Example, ExampleEncoder, _common, measure_examples, validate_examples

CHAT = (
    "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
FORGETFUL = (  # an earlier answer is written shorter once another one follows, as templates that drop thoughts do
    "{% for m in messages %}{% if m['role'] == 'assistant' and not loop.last %}({{ m['role'] }}:...<eos>\n"
    "{% else %}({{ m['role'] }}:{{ m['content'] }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}(assistant:{% endif %}"
)
THINKING = (  # the generation prompt opens a thought that answers of the data set do not have
    "{% for m in messages %}({{ m['role'] }}:{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant:#think#{% endif %}"
)


def encoder(template: str | None = None, loss_on: str = "assistant", **data: object) -> ExampleEncoder:
    settings = SftData.model_validate({"train": "rows.jsonl", **data})
    return ExampleEncoder(settings, loss_on, tiny_tokenizer(template), "data.train")


def text(example: Example, made: ExampleEncoder, learned: bool) -> str:
    ids = [token for token, mark in zip(example.tokens, example.learned) if mark is learned]
    return "".join(made.tokenizer.convert_ids_to_tokens(ids))


def one(made: ExampleEncoder, row: dict) -> Example:
    validate_examples([row], made)
    return made.encode([0], [row])[0]


TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "2"},
]


def test_every_answer_of_a_conversation_is_learned_with_its_end() -> None:
    made = encoder(CHAT)
    example = one(made, {"messages": TALK})
    assert text(example, made, True) == "yo<eos>2<eos>"
    assert text(example, made, False) == "(user:hi<eos>\n(assistant:\n(user:1+1<eos>\n(assistant:"


def test_the_last_answer_alone() -> None:
    made = encoder(CHAT, "last")
    example = one(made, {"messages": TALK})
    assert text(example, made, True) == "2<eos>"
    assert "yo" in text(example, made, False)


def test_everything_but_the_first_token() -> None:
    made = encoder(CHAT, "all")
    example = one(made, {"messages": TALK})
    assert text(example, made, False) == "("
    assert example.tokens[-1] == made.tokenizer.eos_token_id


def test_a_prompt_is_what_reinforcement_learning_would_ask() -> None:
    data = {"system": "s", "suffix": "!"}
    made = encoder(CHAT, **data)
    row = {"prompt": "1+1", "completion": "2"}
    example = one(made, row)
    asked = PromptEncoder(made.data, made.tokenizer, "data.train").encode([0], [row])[0].tokens
    assert example.tokens[: example.start] == asked
    assert text(example, made, True) == "2<eos>"


def test_without_a_template_a_completion_follows_its_prompt() -> None:
    made = encoder()
    example = one(made, {"prompt": "1+1=", "completion": "2"})
    assert text(example, made, False) == "1+1=" and text(example, made, True) == "2<eos>"


def test_plain_text_is_learned_whole() -> None:
    made = encoder()
    example = one(made, {"text": "abc"})
    assert text(example, made, True) == "bc<eos>" and text(example, made, False) == "a"


def test_messages_and_strings_may_be_prompt_and_completion() -> None:
    made = encoder(CHAT)
    asked, answered = TALK[:3], TALK[3:]
    whole = one(made, {"prompt": asked, "completion": answered})
    assert text(whole, made, True) == "2<eos>"
    assert one(made, {"prompt": asked, "completion": "2"}).tokens == whole.tokens


def test_a_template_without_an_end_gets_one_at_the_last_answer() -> None:
    made = encoder(ENDLESS)
    example = one(made, {"messages": TALK})
    assert text(example, made, True) == "yo\n2\n<eos>"


def test_a_generation_prompt_that_says_more_is_no_part_of_the_answer() -> None:
    made = encoder(THINKING)
    example = one(made, {"messages": TALK})
    assert text(example, made, True) == "yo<eos>2<eos>"


def test_a_template_that_rewrites_earlier_turns_is_told() -> None:
    with pytest.raises(DataError, match=r"loss_on: last"):
        one(encoder(FORGETFUL), {"messages": TALK})
    made = encoder(FORGETFUL, "last")
    assert text(one(made, {"messages": TALK}), made, True) == "2<eos>"


def test_messages_after_the_last_answer_are_left_out() -> None:
    made = encoder(CHAT)
    more = [*TALK, {"role": "user", "content": "bye"}]
    assert one(made, {"messages": more}).tokens == one(made, {"messages": TALK}).tokens


@pytest.mark.parametrize(
    ("row", "template", "says"),
    [
        ({"question": "a"}, None, "has none of the columns 'messages'"),
        ({"prompt": "a"}, None, "has no column 'completion'"),
        ({"prompt": "a", "completion": ""}, None, "nothing to learn"),
        (
            {"prompt": "a", "completion": 3},
            CHAT,
            "column 'completion' must be text or a list of {role, content} messages",
        ),
        ({"prompt": 1, "completion": "x"}, None, "column 'prompt' must be text or a list"),
        ({"prompt": 1, "completion": "x"}, None, "messages, but is 1, of type int."),
        (
            {"prompt": "a", "completion": None},
            None,
            "column 'completion' must be text or a list of {role, content} messages, but is nothing (null).",
        ),
        ({"prompt": [], "completion": "x"}, None, "no chat template"),
        ({"messages": None}, None, "column 'messages' must be a list of {role, content} messages, but is None"),
        ({"messages": TALK}, None, "no chat template"),
        ({"messages": []}, CHAT, "must be a list"),
        ({"messages": [{"role": "user"}]}, CHAT, "message 1 must have a string"),
        ({"messages": [{"text": "a"}]}, CHAT, "message 1 must be {role"),
        ({"messages": TALK[:1]}, CHAT, "no message with the role assistant"),
        ({"text": "a", "image": b"x"}, None, "column 'image' holds an image"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            CHAT,
            "column 'messages': message 1 holds an image",
        ),
        ({"text": ""}, None, "must be text"),
        ({"text": "a\ud83d"}, None, "column 'text' holds an unpaired surrogate"),
        ({"prompt": "a", "completion": "a\ud83d"}, None, "column 'completion' holds an unpaired surrogate"),
        (
            {"messages": [{"role": "assistant", "content": "\ud83d"}]},
            CHAT,
            "column 'messages' holds an unpaired surrogate",
        ),
        ({"text": "a"}, None, None),
    ],
)
def test_rows_that_cannot_be_learned_from_are_refused(row: dict, template: str | None, says: str | None) -> None:
    good = {"text": "abc"} if template is None else {"messages": TALK}
    made = encoder(template)
    if says is None:
        validate_examples([good, row], made)
        return
    with pytest.raises(DataError, match=r"row 2 \(from 1\)") as error:
        validate_examples([good, row], made)
    assert says in str(error.value)


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_system_and_suffix_that_do_not_fit_the_messages(column: str) -> None:
    told = [{"role": "system", "content": "be kind"}]
    rows = {
        "messages": [{"messages": [*told, *TALK]}, {"messages": [*told, TALK[1], TALK[0]]}],
        "prompt": [{"prompt": [*told, TALK[0]], "completion": "a"}, {"prompt": told, "completion": "a"}],
    }[column]
    with pytest.raises(DataError, match="already has a system message"):
        validate_examples(rows[:1], encoder(CHAT, system="be brief"))
    with pytest.raises(DataError, match=r"data.suffix is added to the last user message, but the row has none"):
        validate_examples(rows[1:], encoder(CHAT, suffix="!"))


def test_every_order_of_roles_is_tried_before_the_run() -> None:
    rows = [{"messages": TALK}, {"messages": [{"role": "tool", "content": "x"}, TALK[1]]}]
    with pytest.raises(
        DataError, match=r"row 2 \(from 1\): the tokenizer's chat template rejects a conversation of tool"
    ):
        validate_examples(
            rows, encoder("{% if messages[0].role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + CHAT)
        )


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(DataError, match="holds no rows"):
        validate_examples([], encoder())


def test_lengths_are_measured_and_long_examples_counted() -> None:
    rows = [{"text": "a" * n} for n in (3, 10, 40)]
    found = measure_examples(rows, encoder(), limit=20, characters=1000)
    assert (found.longest, found.exact) == (11, True) and "1 of 3 examples are longer than 20" in found.note
    assert measure_examples(rows, encoder(), limit=20, characters=10).longest == 20
    with pytest.raises(DataError, match="all 3 examples are longer than 2"):
        measure_examples(rows, encoder(), limit=2, characters=1000)


def test_text_is_never_cut_at_a_special_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<mid>", special=True)])
    made = ExampleEncoder(SftData(train="x.jsonl"), "assistant", tokenizer, "data.train")
    assert text(one(made, {"text": "ab<mid>cd"}), made, True) == "b<mid>cd<eos>"
    assert text(one(made, {"prompt": "a", "completion": "b<mid>c"}), made, True) == "b<mid>c<eos>"
    assert text(one(made, {"text": "ab<eos>"}), made, True) == "b<eos>"


def test_an_end_that_is_special_only_among_added_tokens_is_one() -> None:
    tokenizer = tiny_tokenizer(CHAT.replace("<eos>", "<eot>"))
    tokenizer.add_tokens([AddedToken("<eot>", special=True)])
    made = ExampleEncoder(SftData(train="x.jsonl"), "assistant", tokenizer, "data.train")
    assert text(one(made, {"messages": TALK}), made, True) == "yo<eot>2<eot>"


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_space_that_a_tokenizer_puts_before_every_text_is_in_no_answer(template: str | None) -> None:
    tokenizer = tiny_tokenizer(template)
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    made = ExampleEncoder(SftData(train="x.jsonl"), "assistant", tokenizer, "data.train")
    example = one(made, {"prompt": "1+1=", "completion": "2"})
    assert text(example, made, True) == "2<eos>"
    whole = "1+1=2<eos>" if template is None else "(user:1+1=<eos>\n(assistant:2<eos>"
    assert example.tokens == tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_a_suffix_goes_to_the_question_that_is_answered() -> None:
    made = encoder(CHAT, suffix="!")
    more = [*TALK[:2], {"role": "user", "content": "bye"}]
    assert "(user:hi!<eos>" in text(one(made, {"messages": more}), made, False)
    with pytest.raises(DataError, match=r"data.suffix is added to the last user message"):
        one(made, {"messages": [{"role": "assistant", "content": "a"}]})


def test_turns_of_a_prompt_are_not_learned() -> None:
    made = encoder(CHAT, system="s")
    example = one(made, {"prompt": TALK[:3], "completion": TALK[3:]})
    assert text(example, made, True) == "2<eos>"


@given(st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_what_two_texts_begin_with(one: str, two: str) -> None:
    common = _common(one, two)
    assert one.startswith(common) and two.startswith(common)
    rest = one[len(common) :], two[len(common) :]
    assert not all(rest) or rest[0][0] != rest[1][0]
