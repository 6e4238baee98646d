"""`trimtab report RUN [RUN ...]`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.options import AsJson
from trimtab.cli.output import console_file, loading, print_json, user_errors


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders: one, or up to 8 to compare.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="File to write. Without it: RUN/report.html, of several runs trimtab-report.html here."
        ),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Leave out host, command and folders; of paths the last part stays.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Write runs as one HTML file: verdict, charts, samples, timeline, memory. It opens anywhere, without a network."""
    with user_errors(as_json):
        with loading(as_json, "reading the run" if len(runs) == 1 else "reading the runs"):
            from trimtab.observe.web.report import write_report

            written = write_report(runs, out, private)
        size = f"{written.size / 1e6:.1f} MB"
        print(f"report: {written.path} ({size})", file=console_file(as_json), flush=True)
        if as_json:
            print_json(written.as_json())
