"""What an environment is, and what it says. Importable without torch: worker processes import it.

An environment is a class that the user writes:

    class Guess:
        def __init__(self, tries=5): ...             # environment.args
        def reset(self, number, **columns): ...      # a new completion begins: the row's columns; may return an opening
        def step(self, text): ...                    # the model said this; returns what it is told

There is one instance a completion. It keeps what it knows in its attributes, and is called in one process from `reset` to the
end; a copy of it is kept after every call, where it can be pickled, so that it outlives the death of that process.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]
Reply = str | list[Message]
MEASURED = frozenset(
    (
        "turns_mean",
        "turn_limit",
        "tokens_mean",
        "failed",
        "seconds",
        "wait_s",
        "tool_error_share",
        "tool_malformed_share",
    )
)
"""Names under environment/ that Trimtab's own metrics have: a count of that name would take their place."""


@dataclass
class Observation:
    """The answer to one turn of the model."""

    reply: Reply = ""
    """What the model reads next: text (with a chat template: the user's next message), or {role, content} messages."""
    done: bool = False
    """The conversation is over; the reply is not read."""
    reward: float | None = None
    """For this turn. The sum over a completion is the reward `environment`."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Whatever is worth counting: the metric environment/NAME is the mean over completions of their sums."""


class Refused(Exception):
    """What an environment returned cannot be used; the message says why and what to return."""


def checked_opening(returned: Any) -> Reply | None:
    """What `reset` returned, as it goes to the trainer."""
    return None if returned is None else _reply(returned, "reset")


def checked_observation(returned: Any) -> Observation:
    """What `step` returned, as it goes to the trainer: plain text, messages, numbers."""
    if isinstance(returned, str | list):
        returned = Observation(returned)
    if not isinstance(returned, Observation):
        raise Refused(
            f"step returned {_shown(returned)}; return text, a list of messages or a trimtab.Observation(reply, done=, reward=)"
        )
    if not isinstance(returned.counts, Mapping):
        raise Refused(f"step returned {_shown(returned.counts)} as counts; return names and numbers, {{name: number}}")
    counts = {}
    for name, value in returned.counts.items():
        if not isinstance(name, str) or not name or any(c.isspace() or c == "/" for c in name):
            raise Refused(f"step counted {name!r}; names of counts are text without spaces and slashes")
        if name in MEASURED:
            raise Refused(
                f"step counted {name!r}, but environment/{name} is a metric of Trimtab; give the count another name"
            )
        counts[name] = _number(value, f"the count {name!r}")
    reward = None if returned.reward is None else _number(returned.reward, "a reward")
    return Observation(_reply(returned.reply, "step"), bool(returned.done), reward, counts)


def _reply(returned: Any, method: str) -> Reply:
    if isinstance(returned, str):
        return _text(returned, method)
    if not isinstance(returned, list):
        raise Refused(f"{method} returned {_shown(returned)} for the model to read; return text or a list of messages")
    for message in returned:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise Refused(
                f"{method} returned the message {_shown(message)}; a message is {{role: ..., content: ...}}, both text"
            )
        if message["role"] == "assistant":
            raise Refused(
                f"{method} returned a message with the role assistant, which is the model. Use user, tool or system"
            )
    return [_plain(message, method) for message in returned]


def _plain(message: Message, method: str) -> Message:
    """A message whose entries are text, numbers and lists of them: it is rendered, sent on and written down as JSON."""
    try:
        made = json.loads(json.dumps(message, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise Refused(
            f"{method} returned the message {_shown(message)}, which cannot be written as JSON: {error}"
        ) from error
    return {key: _text(value, method) if isinstance(value, str) else value for key, value in made.items()}


def _text(text: str, method: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused(f"{method} returned text that is not valid Unicode: {error.reason}") from error
    return str(text)


def _number(value: Any, what: str) -> float:
    if getattr(value, "shape", None) == ():
        value = value.item()  # a torch or numpy scalar
    if not isinstance(value, numbers.Real) or not math.isfinite(float(value)):
        raise Refused(f"step returned {_shown(value)} as {what}; return a finite number")
    return float(value)


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {repr(value)[:80]}"
