"""`trimtab watch RUN`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import console_file, user_errors


def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, or a folder of runs.")],
    stay: Annotated[bool, typer.Option("--stay", help="Stay open when the run has ended.")] = False,
) -> None:
    """Watch a run in the terminal: verdict, curves, phases, memory, samples and log. A folder of runs is a table."""
    with user_errors(as_json=False):
        from trimtab.base.signals import Terminated
        from trimtab.observe.watch.start import watch as show

        try:
            show(run, stay, console_file(as_json=False))
        except Terminated:
            raise
        except KeyboardInterrupt:
            return  # Ctrl-C is how one leaves; the run goes on
