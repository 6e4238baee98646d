"""What is shown of a prompt before a run, and what is said where answers would not end."""

from __future__ import annotations

import pytest

from tests.data.conftest import make_tokenizer
from trimtab.config.sft import SftData
from trimtab.data.examples import ExampleEncoder
from trimtab.data.view import endless_turns, view, view_example

EOS, TURN = 2, 3


def test_a_prompt_is_shown_as_it_is_read() -> None:
    tokenizer = make_tokenizer(template=True)
    tokens = tokenizer("<|turn|>user\n1+1=</s><|turn|>assistant\n", add_special_tokens=False)["input_ids"]
    seen = view("prompt", tokens, tokenizer, {EOS}, ["\n\n"])
    newline = tokens[-1]
    assert seen.text == "<|turn|>user\n1+1=</s><|turn|>assistant\n"
    assert seen.last_tokens[-1] == f'"\\n" ({newline})' and len(seen.last_tokens) == 6
    assert seen.lines()[0] == ("prompt", '"<|turn|>user\\n1+1=</s><|turn|>assistant\\n"')
    assert seen.lines()[-1] == ("stops at", '"</s>" (2), the text "\\n\\n"')
    assert seen.facts() == {
        "first_prompt": seen.text,
        "last_tokens": seen.last_tokens,
        "warnings": [],
        "stop_token_ids": [EOS],
        "stop": ["\n\n"],
    }


def test_a_long_prompt_is_shown_by_its_ends_and_nothing_to_stop_at_is_said() -> None:
    tokenizer = make_tokenizer()
    seen = view("prompt", tokenizer("a" * 500 + "b")["input_ids"], tokenizer, set())
    assert len(seen.lines()[0][1]) < 300 and seen.lines()[0][1].endswith('ab"') and " … " in seen.lines()[0][1]
    assert len(seen.text) == 501
    assert seen.lines()[-1] == ("stops at", "nothing: every answer runs to the token limit")


def turns(end: str) -> str:
    return f"{{% for m in messages %}}[{{{{ m.role }}}}] {{{{ m.content }}}}{end}{{% endfor %}}"


@pytest.mark.parametrize(
    ("end", "stops", "stop", "words"),
    [
        ("</s>", {EOS}, [], ""),
        ("</s>\n", {EOS}, [], ""),
        ("\n", {EOS}, [], ""),  # no end of its own: the end-of-sequence token is what is learned and drawn
        ("<|turn|>", {EOS}, [], '"<|turn|>" (3), which is not among the stop tokens ("</s>" (2))'),
        ("<|turn|>", {EOS}, [], "Write learn.sampling.stop_token_ids: [3], or add 3 to eos_token_id"),
        ("<|turn|>", {EOS, TURN}, [], ""),
        ("<|turn|>\n", set(), [], "not among the stop tokens (none)"),
        ("<end>\n", {EOS}, [], '"<end>", which is not a single token'),
        ("<end>\n", {EOS}, [], 'Write learn.sampling.stop: ["<end>"], or set model.tokenizer'),
        ("<end>\n", {EOS}, ["end>"], ""),
        (
            "~",
            {EOS},
            [],
            "Write learn.sampling.stop_token_ids: [98]",
        ),  # one token, though none that is marked as special
    ],
)
def test_a_turn_that_ends_with_what_does_not_stop(end: str, stops: set[int], stop: list[str], words: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = turns(end)
    said = endless_turns(tokenizer, True, stops, stop)
    assert words in said and bool(said) == bool(words)
    assert endless_turns(tokenizer, False, stops, stop) == ""


@pytest.mark.parametrize("template", ["{{ raise_exception('one turn only') }}", "no answers here"])
def test_a_template_that_cannot_be_asked_is_left_alone(template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    assert endless_turns(tokenizer, True, {EOS}) == ""


def test_an_example_that_teaches_another_end_is_told_without_settings_of_sampling() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = turns("<|turn|>")
    row = {"prompt": "1+1=", "completion": "2"}
    encoder = ExampleEncoder(SftData(train="x"), "last", tokenizer, "data.train")
    seen = view_example("example", encoder, row, tokenizer, [EOS])
    assert seen.text.endswith("[assistant] 2<|turn|>")
    assert seen.warning.endswith("Add 3 to eos_token_id in the model's generation_config.json")
    pair = view_example("pair", encoder, row, tokenizer, [EOS])
    assert (pair.warning, pair.stop_tokens) == ("", None) and "stop" not in pair.facts()
