"""Runs that somebody looks at: what was read of each is kept, so that asking again reads only what was appended."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from trimtab.observe.look import RunLook, look_at

MAX_LOOKS = 64
Result = TypeVar("Result")


class Looks:
    """One look for each run, used by one thread at a time."""

    def __init__(self, most: int = MAX_LOOKS) -> None:
        self._most, self._lock = most, threading.Lock()
        self._held: OrderedDict[Path, tuple[threading.Lock, list[RunLook]]] = OrderedDict()

    def ask(self, folder: Path, question: Callable[[RunLook], Result]) -> Result:
        """What a question gives for the run as it is now."""
        with self._lock:
            lock, held = self._held.setdefault(folder, (threading.Lock(), []))
            self._held.move_to_end(folder)
            while len(self._held) > self._most:
                self._held.popitem(last=False)
        with lock:
            if held:
                held[0].refresh()
            else:
                held.append(look_at(folder, "trimtab serve"))
            return question(held[0])

    def state(self, folder: Path) -> dict[str, Any]:
        return self.ask(folder, lambda look: look.state.as_json())
