"""Trimtab: say what to learn, and it decides how to run it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from trimtab.api import evaluate as evaluate
    from trimtab.api import train as train


def __getattr__(name: str) -> Any:
    """Load the API on first use: reward workers and `trimtab --help` import this package and must not pay for torch."""
    if name in ("train", "evaluate"):
        from trimtab import api

        return getattr(api, name)
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
