"""Tool calls as models write them, right and wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.base.errors import EnvError
from trimtab.rollout.conversations.observation import checked_observation
from trimtab.rollout.conversations.tools import BUILTINS, ToolBox
from trimtab.rollout.conversations.wire import TOOL
from trimtab.workers.user_code import locate_object

HERE = Path(__file__).parent


def box(*names: str, templated: bool = True) -> ToolBox:
    return ToolBox.load([locate_object(name, HERE, {}, BUILTINS, TOOL) for name in names], templated)


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_a_call_is_answered_by_a_message_of_the_tool() -> None:
    seen = box("calculator").step(f"Let me see. {call('calculator', expression='12*34')}")
    assert seen.reply == [{"role": "tool", "name": "calculator", "content": "408"}]
    assert not seen.done
    assert seen.counts == {"tool_calls": 1, "tool_errors": 0, "tool_malformed": 0}


def test_a_turn_without_a_call_ends_the_conversation() -> None:
    assert box("calculator").step("The answer is 408.").done


def test_several_calls_in_one_turn_are_answered_in_order() -> None:
    seen = box("calculator", "worlds.py:add").step(
        call("add", a=1, b=2) + call("calculator", expression="1/0") + call("add", a=1)
    )
    assert [message["content"] for message in seen.reply] == ["3", "Error: ZeroDivisionError: division by zero", "2"]
    assert seen.counts == {"tool_calls": 3, "tool_errors": 1, "tool_malformed": 0}


def test_without_a_template_the_answer_is_text() -> None:
    seen = box("worlds.py:add", templated=False).step(call("add", a=1) + call("add", a=2))
    assert seen.reply == "\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response>\n"


@pytest.mark.parametrize(
    ("text", "error", "malformed"),
    [
        ("<tool_call>calculator(1)</tool_call>", "not JSON", 1),
        ("<tool_call>[1]</tool_call>", "names no tool", 1),
        ('<tool_call>{"name": 3}</tool_call>', "names no tool", 1),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "not a JSON object", 1),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "arguments are not JSON", 1),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not JSON", 1),
        ('<tool_call>{"name": "add"', "not JSON", 1),
        (call("subtract", a=1), "there is no tool 'subtract'. Available: add, refuse", 0),
        (call("add", c=1), "It takes: a, b", 0),
        (call("add"), "It takes: a, b", 0),
        (call("add", a="x"), "TypeError", 0),
        (call("add", a=int("9" * 4300)), "ValueError: Exceeds the limit", 0),
        ('<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "there is no tool", 0),
        (call("refuse", text="\ud800"), "ValueError: not ?", 0),
    ],
)
def test_a_bad_call_is_told_to_the_model(text: str, error: str, malformed: int) -> None:
    seen = checked_observation(box("worlds.py:add", "worlds.py:refuse").step(text))
    assert error in seen.reply[0]["content"]
    assert seen.reply[0]["content"].startswith("Error: ")
    assert not seen.done
    assert seen.counts == {"tool_calls": 1, "tool_errors": 1, "tool_malformed": malformed}


def test_arguments_may_be_a_string_of_json_or_left_out() -> None:
    assert (
        box("worlds.py:add")
        .step('<tool_call>{"name": "add", "arguments": "{\\"a\\": 4}"}</tool_call>')
        .reply[0]["content"]
        == "5"
    )


def test_half_a_character_in_an_answer_is_a_question_mark() -> None:
    """A model can name one in JSON: what it made the tool say costs no completion."""
    seen = checked_observation(box("worlds.py:echo").step(call("echo", text="a\ud800b")))
    assert seen.reply == [{"role": "tool", "name": "echo", "content": "a?b"}]


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet='<>/tool_ca{}[]":,1 \n', max_size=80))
def test_whatever_a_model_writes_is_answered(text: str) -> None:
    seen = BOX.step(f"<tool_call>{text}")
    assert seen.reply
    assert not seen.done


BOX = box("worlds.py:add")


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (["calculater"], "there is no built-in tool 'calculater'. Did you mean 'calculator'"),
        (["worlds.py:addd"], "there is no 'addd' in it"),
        (["worlds.py:undocumented"], "cannot be shown to the model"),
        (["worlds.py:untyped"], "cannot be shown to the model"),
        (["worlds.py:spread"], "and 'numbers' cannot be passed so"),
        (["worlds.py:unbound"], "and 'self' cannot be passed so"),
        (["worlds.py:Echo"], "is a class. Name a function, or make the class the environment"),
        (["worlds.py:add", "worlds.py:add"], "two functions are called 'add'"),
        (["nowhere.py:add"], "there is no file"),
    ],
)
def test_what_cannot_be_a_tool_is_refused(names: list[str], error: str) -> None:
    with pytest.raises(EnvError) as caught:
        box(*names)
    assert error in str(caught.value)


def test_schemas_are_what_templates_take() -> None:
    (schema,) = box("worlds.py:add").schemas
    assert schema["type"] == "function"
    assert schema["function"]["name"] == "add"
    assert list(schema["function"]["parameters"]["properties"]) == ["a", "b"]
