"""The text of what a model wrote, plain or as messages."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """The text of a completion, plain or as messages."""
    if isinstance(completion, str):
        return completion
    content = completion[-1].get("content")  # a message that only calls tools may have none
    return content if isinstance(content, str) else "".join(piece.get("text", "") for piece in content or ())
