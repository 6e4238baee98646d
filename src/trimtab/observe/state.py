"""What a run does at this moment, from its files: starting, running, quiet, failed, stopped or finished, in words.

A run says how it ended (run.json), and while it runs that it lives (now.json). One that says neither was killed, or is of an
earlier version: then its last row of metrics is its last sign.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from trimtab.observe.format import duration
from trimtab.record.jsonl import finite

Kind = Literal["starting", "running", "quiet", "failed", "stopped", "finished"]
QUIET_AFTER_S = 60.0
"""Seconds without a sign of a run that gives one every second."""
LONGEST_STEPS = 3
"""Without now.json: a run is quiet after so many times its longest step, and QUIET_AFTER_S."""


@dataclass(frozen=True)
class StateNow:
    """`text` says it all; the rest is for whoever shows it in another way."""

    kind: Kind
    text: str
    phase: str | None = None
    since: float | None = None
    """Unix seconds at which the phase, or the silence, began."""
    done: float | None = None
    total: float | None = None
    unit: str | None = None
    left_s: float | None = None
    error: str | None = None
    resume: str | None = None
    step: int = 0
    """Last step that is done."""
    steps: int | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def live(self) -> bool:
        return self.kind in ("starting", "running", "quiet")


@dataclass(frozen=True)
class Signs:
    """What the files of a run say of it."""

    run: Mapping[str, Any]
    now: Mapping[str, Any]
    final: bool
    """It has its last folder."""
    step: int
    steps: int | None
    step_seconds: tuple[float, ...] = ()
    last_row_at: float | None = None
    """When metrics were last written."""


def state_of(signs: Signs, at: float) -> StateNow:
    """`at`: Unix seconds of now."""
    said = signs.run.get("state")
    of = f" of {signs.steps}" if signs.steps else ""
    done: dict[str, Any] = {"step": signs.step, "steps": signs.steps}
    resume = _text(signs.run.get("resume"))
    if said == "failed":
        error = _error(signs.run)
        return StateNow("failed", f"failed at step {signs.step}{of}: {error}", error=error, resume=resume, **done)
    if said == "stopped":
        return StateNow("stopped", f"stopped at step {signs.step}{of}", resume=resume, **done)
    if said == "finished" or signs.final:
        return StateNow("finished", f"finished after {signs.step} step{'s' * (signs.step != 1)}", **done)
    return _live(signs, at, of, resume)


def _live(signs: Signs, at: float, of: str, resume: str | None) -> StateNow:
    """A run that does not say that it has ended."""
    now = signs.now
    sign = max((time for time in (finite(now.get("at")), signs.last_row_at) if time is not None), default=None)
    facts: dict[str, Any] = {"step": signs.step, "steps": signs.steps, "resume": resume}
    silent = None if sign is None else max(0.0, at - sign)
    if _gone(now) and (silent or 0.0) > 5:
        text = f"its process is gone since step {signs.step}{of}, without a word"
        return StateNow("failed", text, error="the process ended without a word: killed, or out of memory", **facts)
    longest = max(signs.step_seconds, default=0.0)
    limit = QUIET_AFTER_S if now else QUIET_AFTER_S + LONGEST_STEPS * longest
    if silent is not None and silent > limit:
        most = f"; a step took {duration(longest)} at most so far" if longest else ""
        return StateNow("quiet", f"no sign for {duration(silent)}{most}", _text(now.get("phase")), sign, **facts)
    phase, since = _text(now.get("phase")), finite(now.get("since"))
    counted, total, unit = finite(now.get("done")), finite(now.get("total")), _text(now.get("unit"))
    doing: dict[str, Any] = {"phase": phase, "since": since, "done": counted, "total": total, "unit": unit}
    lasts = f" for {duration(max(0.0, at - since))}" if phase and since is not None else ""
    if signs.run.get("state") == "starting" or not signs.step:
        return StateNow("starting", f"no step yet; {phase or 'starting'}{lasts}", **doing, **facts)
    words = f"step {now.get('step') or signs.step}{of}"
    if phase:
        words += f": {phase}{lasts}"
    if counted is not None and total:
        words += f", {counted:,.0f} of {total:,.0f} {unit or ''}".rstrip()
    recent = (signs.step_seconds[1:] or signs.step_seconds)[-20:]
    left = (signs.steps - signs.step) * sum(recent) / len(recent) if recent and signs.steps else None
    return StateNow("running", words, **doing, left_s=left, **facts)


def _gone(now: Mapping[str, Any]) -> bool:
    """The process is not there any more, as far as this machine can tell."""
    pid = now.get("pid")
    if now.get("host") != socket.gethostname() or type(pid) is not int or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


def _error(run: Mapping[str, Any]) -> str:
    error = run.get("error")
    if isinstance(error, Mapping):
        return str(error.get("text") or error.get("type") or "no reason is known")
    return str(error or "no reason is known")


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
