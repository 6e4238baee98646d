"""The words that turn "no such name" into "did you mean": used by every error that names something unknown.

And whether a name can only be that of something on this machine, so that no hub is asked for it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path

LONGEST_NAME = 200
"""Characters of a name that others are compared with: that takes time by its length."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_OURS = re.compile(r"(runs|checkpoints|outputs)/.*|.*/(final|step-[0-9]+)")
"""Where Trimtab, and most people, write what they train: asking a hub for it costs half a minute of retries."""


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid names, or nothing when none is near."""
    near = difflib.get_close_matches(name[:LONGEST_NAME], list(valid), n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def is_local(name: str) -> bool:
    """Whether a name is that of a file or folder here, there or missing. A hub has `name` and `org/name`."""
    first, slash, _ = name.partition("/")
    return (
        not _HUB_NAME.fullmatch(name)
        or _OURS.fullmatch(name) is not None
        or (bool(slash) and Path(first).expanduser().is_dir())
        or Path(name).expanduser().exists()
    )


def near_paths(path: Path, fits: Callable[[Path], bool] = lambda entry: True) -> str:
    """What to say of a path that is not there: the first folder of it that is missing, and what stands near it."""
    path = path.absolute()
    while not path.parent.is_dir() and path.parent != path:
        path = path.parent
        fits = Path.is_dir
    lost = f" There is no folder {path}." if fits is Path.is_dir else ""
    try:
        beside = [entry.name for entry in path.parent.iterdir() if fits(entry)]
    except OSError:
        beside = []
    return lost + did_you_mean(path.name, beside)
