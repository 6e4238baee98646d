"""What a report that goes to others leaves out: folders, the host, the command. Of a path only its last part stays."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PATH = re.compile(
    r"(?<![\w/.:~-])(?:~|[A-Za-z]:)?(?:[/\\][^\s'\"`,;:()<>|/\\]+)+[/\\]?|(?<![\w/.~-])~[/\\][^\s'\"`,;:()<>|]+"
)
"""An absolute path, or one from a home folder, wherever it stands in a text; no address of a page."""
LEFT_OUT = ("host", "command", "folder", "resume")
TEXTS = ("samples", "columns", "steps", "trace")
"""Parts that are not looked through: text of data and model, numbers, and names of spans."""


def last_parts(text: str) -> str:
    """The text with the last part of each absolute path in it."""
    return PATH.sub(lambda found: re.split(r"[/\\]", found.group().rstrip("/\\"))[-1] or "…", text)


def make_private(run: dict[str, Any], host: str | None) -> dict[str, Any]:
    """Page data of a run without what identifies a machine or a person's folders."""

    def scrub(value: Any, key: str = "") -> Any:
        if isinstance(value, str):
            shown = last_parts(value)
            return shown.replace(host, "host") if host else shown
        if isinstance(value, Mapping):
            return {name: None if name in LEFT_OUT else scrub(item, name) for name, item in value.items()}
        if isinstance(value, list):
            return [scrub(item) for item in value]
        return value

    shown = {key: value if key in TEXTS else scrub(value) for key, value in run.items()}
    shown["name"] = last_parts(str(run.get("name")))
    for part in shown.get("verdict", {}).get("parts", ()):
        if part.get("id") == "next" and run["state"]["kind"] == "failed":
            part |= {"text": "Continue it with --resume.", "key": None}
    return shown
