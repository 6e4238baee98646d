"""The list of runs, answered in about a second, whatever there is.

Runs are judged by a thread of their own, which ends when all are. A list waits for it a little; runs that it has not come to are
shown as they were judged before or, for the first time, with what their last lines say.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from trimtab.base.errors import TrimtabError
from trimtab.observe.web.server import judged
from trimtab.observe.web.server.kept import Kept, Made, stamp
from trimtab.observe.web.server.tail import LineTail, parse_line
from trimtab.record.columns import STEP
from trimtab.record.layout import METRICS_FILE, RUN_FILE, run_name
from trimtab.record.reader import read_object

LIST_SECONDS = 0.4
"""How long a list waits for runs to be judged."""
LAST_LINES_BYTES = 8 << 10


class Heads:
    """What a list shows of runs. May be asked by several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._kept = clock, Kept(10_000, clock)
        self._changed = threading.Condition()
        self._waiting: OrderedDict[str, Path] = OrderedDict()
        self._works = False

    def list(self, runs: Mapping[str, Path]) -> list[Made]:
        end = self._clock() + LIST_SECONDS
        found = {id: self._kept.get(id, folder) for id, folder in runs.items()}
        missing = {id: runs[id] for id, held in found.items() if held is None}
        self._order(missing)
        with self._changed:
            while missing.keys() & self._waiting.keys() and (left := end - self._clock()) > 0:
                self._changed.wait(left)
            for id, folder in missing.items():  # while judging waits
                found[id] = self._kept.get_old(id) or cheap_head(id, folder)
        return [head for head in found.values() if head is not None]

    def _order(self, runs: Mapping[str, Path]) -> None:
        with self._changed:
            self._waiting |= {id: folder for id, folder in runs.items() if id not in self._waiting}
            if self._waiting and not self._works:
                self._works = True
                threading.Thread(target=self._work, name="trimtab serve: judging", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._works = False
                    return
                id, folder = next(iter(self._waiting.items()))
            before = stamp(folder)
            try:
                made = judged.head_of(folder, id)
            except (TrimtabError, OSError) as error:
                made = cheap_head(id, folder) | {"error": str(error)}
            except Exception as error:  # one run must not keep the others from being listed
                made = cheap_head(id, folder) | {"error": f"{type(error).__name__}: {error}"}
            self._kept.put(id, before, made)
            with self._changed:
                self._waiting.pop(id, None)
                self._changed.notify_all()


def cheap_head(id: str, folder: Path) -> Made:
    """What a run's small files and its last lines say, without a verdict."""
    row, facts = newest(folder, LAST_LINES_BYTES), read_object(folder / RUN_FILE)
    seconds = row.get("time/total")
    last = {
        "reward": row.get("reward/mean"),
        "score": row.get("eval/pass@1"),
        "seconds_a_step": seconds,
        "peak_gib": None,
    }
    kind = facts.get("state") if isinstance(facts.get("state"), str) else "running"
    state = {"kind": kind, "text": ""}
    return {
        "id": id,
        "name": run_name(folder),
        "state": state,
        "stage": facts.get("stage", "rl"),
        "facts": {"step": row.get(STEP), "steps": facts.get("steps"), "seed": facts.get("seed")},
        "level": "unknown",
        "findings": 0,
        "last": last,
        "at": row.get("time/at"),
        "partial": True,
    }


def newest(folder: Path, most_bytes: int) -> Made:
    """The newest value of each metric in the last lines."""
    tail = LineTail(folder / METRICS_FILE)
    tail.to_end()
    merged: Made = {}
    for line in tail.lines_before(most_bytes):
        merged |= parse_line(line) or {}
    return merged
