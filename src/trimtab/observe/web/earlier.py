"""What the doctor would have found at earlier steps of a run: the same rules, on the rows until then."""

from __future__ import annotations

from typing import Any

from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import Record
from trimtab.observe.look import RunLook
from trimtab.observe.web.findings import findings_of

MAX_LOOKS_BACK, MAX_ROWS_LOOKED_AT = 20, 20_000
"""Of a report. Judging takes time in proportion to the rows, so long runs are looked back at less often."""


def findings_at(look: RunLook, step: int) -> list[dict[str, Any]]:
    """Findings after a step. What is known of the end of the run counts for nothing then."""
    record = look.record
    return findings_of(examine(Record(record.settings, record.metrics.until(step))).findings)


def looks_back(look: RunLook) -> list[dict[str, Any]]:
    """`{"step", "findings"}` at steps in equal distances, the earliest first; the last step is what the page shows anyway."""
    steps = look.record.steps
    count = min(MAX_LOOKS_BACK, len(steps) - 1, 2 * MAX_ROWS_LOOKED_AT // max(1, len(steps)))
    chosen = [steps[(at + 1) * len(steps) // (count + 1) - 1] for at in range(count)]
    return [{"step": step, "findings": findings_at(look, step)} for step in dict.fromkeys(chosen)]
