"""Numbers as people read them, with units. Whatever is missing, NaN or infinite is shown as '-', never as a crash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from trimtab.record.jsonl import finite

MISSING = "-"
BARS = "▁▂▃▄▅▆▇█"


def get(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric, or None when it is absent or not finite."""
    return finite(metrics.get(name))


def number(value: float | None, digits: int = 3) -> str:
    """0.431, 12.35, 4.0e-05: `digits` decimals for small numbers, fewer as they grow."""
    value = finite(value)
    if value is None:
        return MISSING
    if value != 0 and abs(value) < 10**-digits:
        return f"{value:.1e}"
    decimals = digits if abs(value) < 10 else max(0, digits - 1) if abs(value) < 100 else 1
    return f"{value:.{decimals}f}"


def count(value: float | None) -> str:
    """213, 18.2k, 4.1M, 1.2G."""
    value = finite(value)
    if value is None:
        return MISSING
    for limit, scale, unit in ((999.5, 1, ""), (999_950, 1e3, "k"), (999.95e6, 1e6, "M")):
        if abs(value) < limit:
            return f"{value / scale:.{1 if unit else 0}f}{unit}"
    return f"{value / 1e9:.1f}G"


def percent(fraction: float | None, digits: int = 0) -> str:
    fraction = finite(fraction)
    return MISSING if fraction is None else f"{100 * fraction:.{digits}f}%"


def gib(value: float | None) -> str:
    value = finite(value)
    return MISSING if value is None else f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"


def duration(seconds: float | None) -> str:
    """0 s, 0.42 s, 3.1 s, 42 s, 9m 40s, 2h 05m, 3d 04h."""
    seconds = finite(seconds)
    if seconds is None:
        return MISSING
    if seconds < 59.5:
        decimals = 0 if seconds == 0 or seconds >= 9.95 else 2 if seconds < 0.995 else 1
        return f"{seconds:.{decimals}f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 24:
        return f"{hours}h {minutes:02d}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d {hours:02d}h"


def scores(values: Mapping[str, Any]) -> str:
    """Evaluation scores on one line: `pass@1 41.2%, length_mean 213.0`. Nested mappings keep their name in front.

    What is counted of a task or a judge by itself (`eval/task/...`) is for metrics.jsonl and too much for a line.
    """
    parts = []
    shares = "score" not in {name.removeprefix("eval/") for name in values}  # or the error is one of a mean score
    for name, value in values.items():
        name = name.removeprefix("eval/")
        if "/" in name:
            continue
        if isinstance(value, Mapping):
            parts.append(f"{name}: {scores(value)}")
        else:
            parts.append(f"{name} {_score(name, value, shares)}")
    return ", ".join(parts) or MISSING


def _score(name: str, value: Any, shares: bool) -> str:
    if name in ("score", "stderr") and not shares:
        return number(value)
    if name.startswith(("pass@", "stderr", "truncated")):
        return percent(value, 1)
    known = finite(value)
    return f"{known:.0f}" if known is not None and known == round(known) and name != "length_mean" else number(value)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """History in `width` characters or fewer: means of equal stretches, lowest to highest bar. A gap is a space."""
    bins = min(width, len(values))
    edges = [len(values) * i // bins for i in range(bins + 1)] if bins else [0]
    means = [_mean(values[start:end]) for start, end in pairwise(edges)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return " " * len(means)
    low, span = min(known), max(known) - min(known)
    return "".join(" " if m is None else BARS[round(7 * (m - low) / span)] if span else BARS[3] for m in means)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in map(finite, values) if value is not None]
    return sum(known) / len(known) if known else None
