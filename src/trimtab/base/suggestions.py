""" "Did you mean ...?" for every error that names something unknown.

Also decides whether a name can only be a local path, so that the hub is not asked for it.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

MAX_COMPARED_CHARACTERS = 200
"""Characters of a name that others are compared with: that takes time by its length."""
MAX_NAMES_LISTED = 20
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_OURS = re.compile(r"(runs|checkpoints|outputs)/.*|.*/(final|step-[0-9]+)")
"""Where Trimtab, and most people, write what they train: asking a hub for it costs half a minute of retries."""


def alike(name: str, valid: Iterable[str], most: int = 3, cutoff: float = 0.5) -> list[str]:
    """Valid names that share most of their letters with this one, in the same order: best for codes and for parts of names."""
    return difflib.get_close_matches(name[:MAX_COMPARED_CHARACTERS], list(valid), n=most, cutoff=cutoff)


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid names, or nothing when none is near."""
    near = alike(name, valid)
    return f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def near_or_all(name: str, valid: Iterable[str]) -> str:
    """A sentence with the nearest valid names, otherwise with all of them."""
    names = sorted(valid)
    everything = f"Available: {', '.join(names[:MAX_NAMES_LISTED])}." if names else "None is available."
    return did_you_mean(name, names).strip() or everything


def nearest(word: str, candidates: Sequence[str], cutoff: float) -> str:
    """The candidate with the fewest slips, the first of several, or nothing where none reaches the cutoff (1 is equal)."""
    word = word.lower().replace("-", "_")
    scores = [_alike(word, candidate) if _may_reach(word, candidate, cutoff) else 0.0 for candidate in candidates]
    best = max(scores, default=0.0)
    return candidates[scores.index(best)] if best >= cutoff else ""


def _may_reach(a: str, b: str, cutoff: float) -> bool:
    """Whether `_alike` can reach the cutoff: every letter that only one of them has is an edit. Quick, however long they are."""
    longer = max(len(a), len(b), 1)
    edits = longer - min(len(a), len(b))
    if edits > 1 and 1 - edits / longer < cutoff:
        return False
    edits = longer - (Counter(a) & Counter(b)).total()
    return edits <= 1 or 1 - edits / longer >= cutoff


def _alike(a: str, b: str) -> float:
    """1 less the edits per character; one edit (a swap of neighbours included) is a slip even in a two-letter name."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, 1):
        row = [i]
        for j, y in enumerate(b, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            if i > 1 and j > 1 and x == b[j - 2] and a[i - 2] == y:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    edits = rows[-1][-1]
    return max(1 - edits / max(len(a), len(b), 1), 0.8 if edits == 1 and (len(b) > 1 or a == b.lower()) else 0.0)


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
