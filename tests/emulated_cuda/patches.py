"""Attributes and items that are replaced for a while, and put back in the opposite order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MISSING = object()


class Patches:
    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Replace an attribute; returns what stood there."""
        before = vars(owner).get(name, MISSING)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if before is MISSING else setattr(owner, name, before))
        return getattr(owner, name) if before is MISSING else before

    def item(self, owner: dict[Any, Any], key: Any, value: Any) -> None:
        before = owner.get(key, MISSING)
        owner[key] = value
        self._undo.append(lambda: owner.pop(key, None) if before is MISSING else owner.__setitem__(key, before))

    def later(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
