"""The command line: one thin file a command. Nothing heavy is imported before a command runs."""

from __future__ import annotations

import typer

from trimtab.cli import demo, doctor, evaluate, export, plan, sft, train, tune

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Reinforcement learning for language models that tunes itself: say what to learn, Trimtab decides how to run it.",
)
app.command("train")(train.train)
app.command("sft")(sft.sft)
app.command("plan")(plan.plan)
app.command("tune")(tune.tune)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
