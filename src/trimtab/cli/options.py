"""Arguments and options that several commands have, each with one help text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="YAML file.")]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue from the newest complete checkpoint; start anew if there is none.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Show every choice that Trimtab made, also the usual ones.")]
ProfileSteps = Annotated[
    str | None, typer.Option("--profile-steps", help="Steps to profile, such as 3:5; writes RUN/profile.")
]
ProfileRanks = Annotated[
    str | None, typer.Option("--profile-ranks", help="With several devices: ranks to profile, such as 0,1. Default: 0.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
