"""The words that turn "no such name" into "did you mean": used by every error that names something unknown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid names, or nothing when none is near."""
    near = difflib.get_close_matches(name, list(valid), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
