"""Tools: functions that the model calls by name, in the form that Hermes and Qwen models write,

    <tool_call>
    {"name": "calculator", "arguments": {"expression": "12 * 34"}}
    </tool_call>

as many in a turn as it likes. A turn without a call ends the conversation. What the model got wrong (no JSON, no such tool,
arguments that do not fit) and what a tool raises is told to the model, so that it can do better; it costs no completion.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.base.errors import EnvError
from trimtab.rollout.conversations.calculator import calculator
from trimtab.rollout.conversations.observation import Message, Observation
from trimtab.rollout.conversations.wire import TOOL
from trimtab.workers.child import await_
from trimtab.workers.user_code import UserCode, import_object

OPEN, END = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}(.*?)(?:{END}|(?={OPEN})|\Z)", re.DOTALL)
BUILTINS: dict[str, Callable[..., Any]] = {"calculator": calculator}


class BadCall(Exception):
    """The message is for the model."""


@dataclass(frozen=True)
class Tool:
    call: Callable[..., Any]
    schema: dict[str, Any]

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name

    def __call__(self, arguments: dict[str, Any]) -> str:
        try:
            inspect.signature(self.call).bind(**arguments)
        except TypeError as error:
            parameters = ", ".join(self.schema["function"]["parameters"]["properties"])
            raise BadCall(f"{self.name}: {error}. It takes: {parameters or 'nothing'}") from error
        except ValueError:
            pass  # some functions written in C have no signature
        try:
            result = self.call(**arguments)
            if inspect.isawaitable(result):
                result = await_(result)
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except (
            Exception
        ) as error:  # the tool's own refusal, such as a division by zero; a number too long to be written
            raise BadCall(f"{type(error).__name__}: {error}".strip(": ")) from error


class ToolBox:
    """Answers the model's turns."""

    def __init__(self, tools: list[Tool], templated: bool) -> None:
        self._tools = {tool.name: tool for tool in tools}
        self._templated = templated

    @classmethod
    def load(cls, sources: list[UserCode], templated: bool) -> ToolBox:
        tools = [_load(source) for source in sources]
        names = [tool.name for tool in tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise EnvError(
                f"environment.tools: two functions are called {twice!r}. The model calls them by name: rename one"
            )
        return cls(tools, templated)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self._tools.values()]

    def step(self, text: str) -> Observation:
        calls = CALL.findall(text)
        if not calls:
            return Observation(done=True)
        counts = {"tool_calls": float(len(calls)), "tool_errors": 0.0, "tool_malformed": 0.0}
        answers: list[Message] = []
        for call in calls:
            message: Message = {"role": "tool", "content": ""}
            try:
                name, arguments = parse(call)
            except BadCall as error:
                counts["tool_malformed"] += 1
                message["content"] = f"Error: {error}"
            else:
                try:
                    tool = self._find(name)
                    message["name"] = tool.name
                    message["content"] = whole(tool(arguments))
                except BadCall as error:
                    message["content"] = whole(f"Error: {error}")
            counts["tool_errors"] += message["content"].startswith("Error: ")
            answers.append(message)
        return Observation(answers if self._templated else as_text(answers), counts=counts)

    def _find(self, name: str) -> Tool:
        if name not in self._tools:
            raise BadCall(f"there is no tool {name!r}. Available: {', '.join(self._tools)}")
        return self._tools[name]


def whole(text: str) -> str:
    """With a question mark for half of a character: JSON can name one, so a model can make a tool say it."""
    return text.encode(errors="replace").decode()


def as_text(answers: list[Message]) -> str:
    """Where there is no chat template: what Qwen's writes between its own marks."""
    return "".join(f"\n<tool_response>\n{message['content']}\n</tool_response>" for message in answers) + "\n"


def parse(call: str) -> tuple[str, dict[str, Any]]:
    """Name and arguments of what stands between the marks."""
    form = 'write {"name": ..., "arguments": {...}}'
    try:
        found = json.loads(call.strip())
    except (ValueError, RecursionError) as error:
        raise BadCall(f"the call is not JSON ({error}); {form}") from error
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        raise BadCall(f"the call names no tool; {form}")
    arguments = found.get("arguments", found.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise BadCall(f"the arguments are not JSON ({error}); {form}") from error
    if not isinstance(arguments, dict):
        raise BadCall(f"the arguments are not a JSON object; {form}")
    return found["name"], arguments


def _load(source: UserCode) -> Tool:
    from transformers.utils import get_json_schema

    call = BUILTINS[source.name] if source.kind == "builtin" else import_object(source, TOOL)
    if inspect.isclass(call):
        raise EnvError(
            f"tool {source} is a class. Name a function, or make the class the environment: environment.fn: {source}"
        )
    try:
        tool = Tool(call, get_json_schema(call))
    except Exception as error:  # transformers says in several ways what a docstring or a signature lacks
        raise EnvError(
            f"tool {source} cannot be shown to the model: {error}. Give every parameter a type, and write a docstring that "
            "says what the function does and, under `Args:`, what each parameter is"
        ) from error
    _refuse_uncallable(tool, source)
    return tool


def _refuse_uncallable(tool: Tool, source: UserCode) -> None:
    """The model gives arguments by the names that it is shown. A function that cannot take them so would refuse every call."""
    shown = tool.schema["function"]["parameters"]["properties"]
    for parameter in inspect.signature(tool.call).parameters.values():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not by_name or (parameter.default is parameter.empty and parameter.name not in shown):
            raise EnvError(
                f"tool {source}: the model passes arguments by name, and {parameter.name!r} cannot be passed so. Write named "
                "parameters, without *, ** or /. Instead of a method name a function, or set environment.fn to the class"
            )
