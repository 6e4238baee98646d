"""Rows that show something beside text. Trimtab trains on text alone, also the text part of a model that sees: such a row would
be answered blindly, so it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
PARTS = ("image", "image_url", "input_image", "video", "video_url", "audio", "input_audio")
FIX = (
    "Trimtab trains on text alone, also a model that sees: use rows that can be answered without it, and leave it out."
)


def shown_beside(row: Mapping[str, Any]) -> str:
    """What is wrong with a row that has images beside its text, or nothing."""
    for name in COLUMNS:
        held = row.get(name)
        if held is not None and (not isinstance(held, list | dict | str | bytes) or len(held)):
            return f"column {name!r} holds {_what(name)}. {FIX}"
    return ""


def shown_within(content: Any) -> str:
    """What is wrong with a message that is made of parts of which one is an image, or nothing."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in PARTS:
            return f"holds {_what(str(kind))}. {FIX}"
    return ""


def _what(name: str) -> str:
    kind = next(kind for kind in ("image", "video", "audio") if kind in name)
    return "audio" if kind == "audio" else f"{'an' if kind == 'image' else 'a'} {kind}"
