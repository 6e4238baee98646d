"""What to tell of a run that has ended: where it stands, its learning curve, its report, what the doctor finds."""

from __future__ import annotations

from pathlib import Path

from trimtab.base.errors import TrimtabError
from trimtab.observe.console import Console
from trimtab.observe.curve import CURVE_FILE, plot_curve
from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import read_record
from trimtab.observe.web.report import write_report
from trimtab.record.checkpoint import RunState, newest_checkpoint
from trimtab.record.reader import RunReader

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


def look_back(folder: Path, console: Console) -> Path | None:
    """The learning curve of a run that has ended, its report, and whether the doctor finds something. None of them can fail the
    run. Returns the report, if there is one."""
    draw_curve(folder, console)
    report = draw_report(folder, console)
    if found := doctor_words(folder):
        console.note(found)
    return report


def draw_report(folder: Path, console: Console, changes: bool = True) -> Path | None:
    """Write RUN/report.html, unless observe.report says no. `changes`: with what single changes would take."""
    try:
        observe = RunReader(folder).settings().get("observe")
        if isinstance(observe, dict) and observe.get("report") is False:
            return None
        path = write_report([folder], changes=changes).path
    except Exception as error:  # the model is trained and exported: no fault of a report may take the run's end away
        console.warn(f"cannot write the report: {error}")
        return None
    console.note(f"report: {path}")
    return path


def report_of_broken_run(folder: Path, console: Console) -> None:
    """The report of a run that has failed or was stopped, if it has come as far as a step. For an ExitStack: after run.json says
    how it ended."""
    try:
        reader = RunReader(folder)
        reader.update()
        ended = reader.run().get("state") in ("failed", "stopped") and len(reader.metrics) > 0
    except Exception:  # what ended the run is told, and matters more
        return
    if ended:
        draw_report(folder, console, changes=False)


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
