"""What to tell of a run that has ended: where it stands, its learning curve, what the doctor finds."""

from __future__ import annotations

from pathlib import Path

from trimtab.base.errors import TrimtabError
from trimtab.observe.console import Console
from trimtab.observe.curve import CURVE_FILE, plot_curve
from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import read_record
from trimtab.record.checkpoint import RunState, newest_checkpoint

MAX_FINDINGS_NAMED = 3


def where_it_stands(folder: Path, state: RunState, steps: int) -> str:
    """The message after a run has stopped: how far it got, and how to continue."""
    checkpoint = newest_checkpoint(folder)
    kept = (
        f"resume it to continue from {checkpoint.name}"
        if checkpoint
        else "it has no checkpoint yet, so resuming starts it over"
    )
    found = doctor_words(folder)
    return f"{folder} stopped after step {state.step} of {steps}; {kept}{f'. {found}' if found else ''}"


def look_back(folder: Path, console: Console) -> None:
    """The learning curve of a run that has ended, and whether the doctor finds something. Neither can fail the run."""
    draw_curve(folder, console)
    if found := doctor_words(folder):
        console.note(found)


def draw_curve(folder: Path, console: Console) -> None:
    try:
        plot_curve(folder, folder / CURVE_FILE)
    except Exception as error:  # the model is trained and exported: no fault of a picture may take the run's end away
        console.note(f"cannot draw {CURVE_FILE}: {error}")
    else:
        console.note(f"learning curve: {folder / CURVE_FILE}")


def doctor_words(folder: Path) -> str | None:
    """What the doctor finds in a run, in one line that says how to see the rest; None: nothing."""
    try:
        found = examine(read_record(folder)).findings
    except TrimtabError:  # a folder that was moved away, say: told by whoever needs it
        return None
    if not found:
        return None
    titles = "; ".join(finding.title for finding in found[:MAX_FINDINGS_NAMED])
    more = f"; and {len(found) - MAX_FINDINGS_NAMED} more" if len(found) > MAX_FINDINGS_NAMED else ""
    return f"The doctor finds: {titles}{more}. Run `trimtab doctor {folder}`"
