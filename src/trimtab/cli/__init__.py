"""The command line: one thin file a command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from trimtab.base.package import VERSION
from trimtab.base.signals import take_signals
from trimtab.cli import (
    convert,
    demo,
    doctor,
    evaluate,
    export,
    plan,
    report,
    reward_model,
    serve,
    sft,
    train,
    tune,
    watch,
)

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Reinforcement learning for language models that tunes itself: say what to learn, Trimtab decides how to run it.",
)


def _tell_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trimtab {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What stands before a command."""


def main() -> None:
    """The whole process: a stop signal that is repeated while it ends changes nothing any more."""
    with take_signals(until_exit=True):
        app(prog_name="trimtab")


app.command("train")(train.train)
app.command("sft")(sft.sft)
app.command("reward-model")(reward_model.reward_model)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("convert")(convert.convert)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("watch")(watch.watch)
app.command("report")(report.report)
app.command("serve")(serve.serve)
