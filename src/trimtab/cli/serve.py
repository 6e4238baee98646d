"""`trimtab serve RUNS_DIR`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import user_errors


def serve(
    runs_dir: Annotated[Path, typer.Argument(metavar="RUNS_DIR", help="Folder of run folders, or a run folder.")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any that is free.")] = 6070,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Beyond this machine a token is needed, in the address.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", help="A name that browsers may use for it, such as a proxy's; repeat it."),
    ] = None,
) -> None:
    """Show runs in a browser, live: verdict, curves, samples, timeline, memory, comparison. Needs trimtab[serve]."""
    with user_errors(as_json=False):
        from trimtab.observe.web.server.command import serve as serve_runs

        serve_runs(runs_dir, host, port, allow_host or ())
