"""`trimtab demo`"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import loading, print_json, user_errors


def demo(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Overrides of its keys, such as run.engine=vllm."),
    ] = None,
    folder: Annotated[Path | None, typer.Option("--dir", help="Folder to create for it; it must not exist.")] = None,
    difficulty: Annotated[int, typer.Option(help="How many digits to sort.")] = 8,
    warm_steps: Annotated[int, typer.Option(help="Supervised steps before reinforcement learning.")] = 60,
    steps: Annotated[int, typer.Option(help="GRPO steps.")] = 150,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
) -> None:
    """Train a small transformer to sort, from scratch, in a few minutes on a CPU. The last line is one JSON object."""
    import sys

    with user_errors(as_json=True):
        with loading(as_json=False):
            from trimtab.demo import run_demo

        target = folder or Path("runs") / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
        result = run_demo(
            target.absolute(), difficulty=difficulty, warm_steps=warm_steps, steps=steps, seed=seed, file=sys.stdout,
            overrides=overrides or (),
        )  # fmt: skip
        print_json(result)
